"""The library knows no vendor: it imports no vendor's package and no platform, and decides nothing by a vendor's name.

What may name vendors is data: tunings, limits and unit counts by target, layouts, help texts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "swa_backend"
FILES = sorted(LIBRARY.rglob("*.py"))

IMPORTED = {"swa_backend", "torch", "triton", "numpy", "typer", "rich", "matplotlib"}
JOINED = {"integrations": {"vllm"}, "bench": {"peer"}}
"""By folder: the engine that it joins the library to, the module that it measures beside it."""
VENDOR = re.compile(
    r"^(cuda|hip|rocm|nvidia|amd|xpu|intel)\b|^(sm[_\d\[]|gfx)|flash_?mla|flashinfer|sgl_kernel|deep_gemm|aiter|nvml|amdsmi",
    re.I,
)
LIBRARY_FILE = re.compile(r"^lib\w+\.so")

TARGETS = {"kernels/offline.py": 2}
"""Branches on a target's vendor, a file: how Triton's driver of that vendor reports a chip that is not here."""

DRIVERS = {"kernels/argument_block.py", "capture.py"}
"""Files that ask a driver's library where it is there, and do without where it is not."""


def imports(tree: ast.AST) -> Iterator[str]:
    """Top packages of every import, those in functions and by name included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "find_spec", "__import__", "importorskip"):
                yield str(node.args[0].value).partition(".")[0]


def names_a_vendor(node: ast.AST) -> bool:
    """Whether an operand is, or holds, a vendor's name, or is torch's note of the vendor it was built for."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and VENDOR.search(one.value):
            return True
        if isinstance(one, ast.Attribute) and one.attr in ("hip", "cuda", "rocm") and "version" in ast.dump(one.value):
            return True
    return False


def is_device_type(node: ast.AST) -> bool:
    """``device.type`` and the like: torch calls every GPU cuda."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("type", "device_type") or is_device_type(node.value)
    return isinstance(node, ast.Name) and node.id == "device_type"


def is_build_note(node: ast.AST) -> bool:
    """``torch.version.hip`` as it stands."""
    return isinstance(node, ast.Attribute) and names_a_vendor(node)


def branches(tree: ast.AST) -> Iterator[int]:
    """Lines on which something is decided by a vendor's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(map(names_a_vendor, operands)) and not any(map(is_device_type, operands)):
                yield node.lineno
        elif isinstance(node, ast.match_case) and names_a_vendor(node.pattern):
            yield node.pattern.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            decides = node.func.attr in ("startswith", "endswith", "fullmatch", "match", "search")
            if decides and any(map(names_a_vendor, node.args)):
                yield node.lineno
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and is_build_note(node.test):
            yield node.lineno


def libraries(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LIBRARY_FILE.match(node.value):
            yield node.value


def parsed(path: Path) -> tuple[str, ast.AST]:
    return path.relative_to(LIBRARY).as_posix(), ast.parse(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(LIBRARY).as_posix())
def test_no_module_imports_or_branches_on_a_vendor(path: Path) -> None:
    name, tree = parsed(path)
    legal = IMPORTED | JOINED.get(name.partition("/")[0], set()) | set(sys.stdlib_module_names)
    assert {one for one in imports(tree) if one not in legal} == set()
    lines = list(branches(tree))
    assert len(lines) == TARGETS.get(name, 0), f"lines {lines}"
    assert name in DRIVERS or not list(libraries(tree))


def test_the_exceptions_are_still_needed() -> None:
    for name, count in TARGETS.items():
        assert len(list(branches(parsed(LIBRARY / name)[1]))) == count
    assert all(list(libraries(parsed(LIBRARY / name)[1])) for name in DRIVERS)


@pytest.mark.parametrize(
    "source",
    [
        "if vendor == 'cuda': pass",
        "x = 1 if platform.name in ('rocm', 'cpu') else 2",
        "if torch.version.hip: pass",
        "while torch.version.cuda is not None: pass",
        "match vendor:\n    case 'nvidia': pass",
        "ok = arch.startswith('gfx9')",
        "if re.fullmatch('sm[0-9]+', arch): pass",
        "found = [one for one in providers if one.name != 'flashmla']",
    ],
)
def test_a_branch_on_a_vendor_is_found(source: str) -> None:
    assert list(branches(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "if device.type == 'cuda': pass",
        "if tensor.is_cuda: pass",
        "tuning = {'cuda': 1, 'hip:gfx942': 2}",
        "if torch.cuda.is_available(): pass",
        "raise ValueError('for example cuda:90')",
    ],
)
def test_data_and_torchs_name_for_a_gpu_are_no_branches(source: str) -> None:
    assert not list(branches(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import aiter.ops", "aiter"),
        ("def f():\n    from flash_mla import x", "flash_mla"),
        ("importlib.import_module('pynvml')", "pynvml"),
        ("from swa_platform_rocm import PLATFORM", "swa_platform_rocm"),
    ],
)
def test_an_import_is_found_wherever_it_stands(source: str, found: str) -> None:
    assert list(imports(ast.parse(source))) == [found]
