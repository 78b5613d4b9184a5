"""Which FlashMLA this machine has: candidates in order, each recognised by what it offers, or refused with reasons.

No index carries FlashMLA. It comes as a library file named by ``SWA_BACKEND_FLASHMLA_LIBRARY``, as the package
``flash_mla``, inside vLLM's wheel, or inside ``sgl_kernel``. Nothing of these is imported before the chip is known to
have kernels and the file beside the candidate is known to hold them; of vLLM only the one library is ever loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

from swa_platform_cuda.flashmla_build import DECODE_HEADS, FlashMLABuild, OperatorPlan, Operators, Package
from swa_platform_cuda.flashmla_contents import ARCHS, SM90, SM100, Contents

LIBRARY_VARIABLE = "SWA_BACKEND_FLASHMLA_LIBRARY"
HOW_TO_GET_IT = (
    "no package index carries FlashMLA: install its package flash_mla, vLLM or sgl_kernel, or name a library file in "
    f"{LIBRARY_VARIABLE}"
)
_DECODE, _PREFILL = "sparse_decode_fwd", "sparse_prefill_fwd"
_DECODE_ARGUMENTS = (
    "q", "kv", "indices", "topk_length", "attn_sink", "tile_scheduler_metadata", "num_splits", "extra_kv",
    "extra_indices", "extra_topk_length", "d_v", "sm_scale",
)  # fmt: skip
_PREFILL_ARGUMENTS = ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length")
_PACKAGE_ARGUMENTS = (
    "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
)  # fmt: skip


@dataclass(frozen=True)
class Finder:
    """What discovery may look at; tests hand in a made-up one.

    Attributes:
        env: environment variables.
        find_spec: finds a top-level module without importing it.
        import_module: imports one.
        load_library: loads a library that registers operators.
        operators: overloads by ``namespace::name`` of every registered operator of this name.
        capability: compute capability of a device as digits ("90"), None where there is no device.
    """

    env: Mapping[str, str]
    find_spec: Callable[[str], ModuleSpec | None]
    import_module: Callable[[str], Any]
    load_library: Callable[[str], None]
    operators: Callable[[str], Mapping[str, Any]]
    capability: Callable[[torch.device | None], str | None]

    @classmethod
    def here(cls) -> Finder:
        """This process."""
        return cls(
            os.environ,
            importlib.util.find_spec,
            importlib.import_module,
            torch.ops.load_library,
            _registered,
            _capability,
        )


def _capability(device: torch.device | None) -> str | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}"


def _registered(name: str) -> dict[str, Any]:
    found = [full for full in torch._C._dispatch_get_all_op_names() if full.endswith(f"::{name}")]
    return {full: getattr(getattr(torch.ops, full.split("::")[0]), name).default for full in found}


@dataclass(frozen=True, slots=True)
class Found:
    """The first candidate without a reason against it, or None; and the reasons against those before it."""

    build: FlashMLABuild | None
    reasons: tuple[str, ...]


def find_flashmla(arch: str | None, finder: Finder) -> Found:
    """Look for a build that serves a chip.

    Args:
        arch: compute capability as digits; None when there is neither a device nor a target.
        finder: what may be looked at.
    """
    if arch is None:
        return Found(None, ("no device whose compute capability could be read, and no target was named",))
    if arch not in ARCHS:
        return Found(None, (f"FlashMLA has kernels for sm90, sm100 and sm103, not for sm{arch}",))
    reasons: list[str] = []
    for candidate in (_library, _flash_mla, _vllm, _sgl_kernel):
        found = candidate(arch, finder)
        if isinstance(found, FlashMLABuild):
            return Found(found, tuple(reasons))
        reasons.extend(found)
    return Found(None, (*reasons, HOW_TO_GET_IT))


def _library(arch: str, finder: Finder) -> FlashMLABuild | list[str]:
    name = finder.env.get(LIBRARY_VARIABLE, "").strip()
    if not name:
        return [f"{LIBRARY_VARIABLE} is not set"]
    return _from_file(f"{LIBRARY_VARIABLE}={name}", Path(name), arch, finder)


def _vllm(arch: str, finder: Finder) -> FlashMLABuild | list[str]:
    folders = _folders("vllm", finder)
    if folders is None:
        return ["vllm: not installed"]
    files = sorted(path for folder in folders for path in folder.glob("_flashmla_C*.so"))
    if not files:
        return ["vllm: this installation has no _flashmla_C library"]
    return _from_file("the build inside vllm", files[0], arch, finder)


def _flash_mla(arch: str, finder: Finder) -> FlashMLABuild | list[str]:
    return _from_package("flash_mla", "flash_mla", ("cuda*.so", "*flash_mla*.so"), arch, finder)


def _sgl_kernel(arch: str, finder: Finder) -> FlashMLABuild | list[str]:
    return _from_package("sgl_kernel", "sgl_kernel.flash_mla", ("flashmla_ops*.so",), arch, finder)


def _folders(package: str, finder: Finder) -> list[Path] | None:
    """Folders of a package that is installed, found without importing it."""
    try:
        spec = finder.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return [Path(folder) for folder in spec.submodule_search_locations or ()]


def _look_into(origin: str, path: Path, arch: str, namespaces: Iterable[str] = ()) -> Contents | list[str]:
    try:
        contents = Contents.of(path, namespaces)
    except (OSError, ValueError) as error:
        return [f"{origin}: {path.name} cannot be read ({error})"]
    reasons = contents.reasons(arch)
    return [f"{origin}: {reason}" for reason in reasons] if reasons else contents


def _from_file(origin: str, path: Path, arch: str, finder: Finder) -> FlashMLABuild | list[str]:
    """A library whose operators torch can call."""
    contents = _look_into(origin, path, arch)
    if isinstance(contents, list):
        return contents
    before = finder.operators(_DECODE)
    try:
        finder.load_library(str(path))
    except Exception as error:
        # An engine may have loaded the same library already; its operators are then there under their names.
        if not before:
            return [f"{origin}: cannot be loaded ({type(error).__name__}: {_first_line(error)})"]
    after = finder.operators(_DECODE)
    new = after.keys() - before.keys() or Contents.of(path, {one.split("::")[0] for one in after}).namespaces
    names = sorted(one.split("::")[0] for one in new)
    if not names:
        return [f"{origin}: it registers no operator {_DECODE}"]
    decode = after[f"{names[0]}::{_DECODE}"]
    prefill = finder.operators(_PREFILL).get(f"{names[0]}::{_PREFILL}")
    reasons = _lacking(origin, _DECODE, decode, _DECODE_ARGUMENTS) + (
        [f"{origin}: it registers no operator {_PREFILL}"]
        if prefill is None
        else _lacking(origin, _PREFILL, prefill, _PREFILL_ARGUMENTS)
    )
    if reasons or prefill is None:
        return reasons
    offered, prefill_offered = _argument_names(decode), _argument_names(prefill)
    takes_out = "out_" in offered and "out_" in prefill_offered
    invariant = "enable_batch_invariant" in offered
    operators = Operators(decode, prefill, takes_out, invariant)
    return _build(origin, contents, operators, OperatorPlan, takes_out, invariant)


def _argument_names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def _lacking(origin: str, name: str, operator: Any, wanted: Sequence[str]) -> list[str]:
    """Operators are called by position: the known arguments must be the leading ones."""
    found = _argument_names(operator)
    if found[: len(wanted)] == list(wanted):
        return []
    missing = [argument for argument in wanted if argument not in found]
    what = f"takes no {', '.join(missing)}" if missing else f"takes its arguments in another order ({', '.join(found)})"
    return [f"{origin}: its operator {name} {what}"]


def _from_package(
    package: str, module_name: str, patterns: Sequence[str], arch: str, finder: Finder
) -> FlashMLABuild | list[str]:
    """A Python package with FlashMLA's own function names."""
    folders = _folders(package, finder)
    if folders is None:
        return [f"{package}: not installed"]
    files = [path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not files:
        return [f"{package}: no compiled library ({' or '.join(patterns)}) in the package"]
    contents = _look_into(package, files[0], arch)
    if isinstance(contents, list):
        return contents
    try:
        module = finder.import_module(module_name)
    except Exception as error:  # a broken package may raise anything
        return [f"{package}: cannot be imported ({type(error).__name__}: {_first_line(error)})"]
    functions = {name: getattr(module, name, None) for name in _PACKAGE_FUNCTIONS}
    reasons = [f"{package}: it has no function {name}" for name, one in functions.items() if not callable(one)]
    if reasons:
        return reasons
    metadata, decode, prefill = functions.values()
    needed = [
        name
        for name, one in inspect.signature(metadata).parameters.items()  # type: ignore[arg-type]
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        reasons.append(
            f"{package}: an old build, whose get_mla_metadata wants {', '.join(needed)}: its plans are made from "
            "cache lengths, not from the lengths of sparse rows"
        )
    offered = inspect.signature(decode).parameters  # type: ignore[arg-type]
    missing = [name for name in _PACKAGE_ARGUMENTS if name not in offered]
    if missing:
        reasons.append(f"{package}: its flash_mla_with_kvcache takes no {', '.join(missing)}")
    prefill_offered = inspect.signature(prefill).parameters  # type: ignore[arg-type]
    missing = [name for name in ("attn_sink", "topk_length") if name not in prefill_offered]
    if missing:
        reasons.append(f"{package}: its flash_mla_sparse_fwd takes no {', '.join(missing)}")
    if reasons:
        return reasons
    takes_out = "out" in offered and "out" in prefill_offered
    invariant = "enable_batch_invariant" in offered
    kernels = Package(decode, prefill, metadata, takes_out, invariant)  # type: ignore[arg-type]
    return _build(f"the package {package}", contents, kernels, kernels.new_plan, takes_out, invariant)


_PACKAGE_FUNCTIONS = ("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd")


def _build(
    origin: str,
    contents: Contents,
    kernels: Operators | Package,
    new_plan: Callable[[], Any],
    takes_out: bool,
    invariant: bool,
) -> FlashMLABuild:
    small = (8, 16, 32, *DECODE_HEADS) if contents.small_prefill_heads else DECODE_HEADS
    return FlashMLABuild(
        origin=origin,
        pairs={arch: contents.pairs(arch) for arch in ARCHS},
        prefill_heads={arch: small if arch in SM90 else DECODE_HEADS for arch in ARCHS},
        takes_out=takes_out,
        batch_invariant=frozenset(SM100) if invariant else frozenset(),
        new_plan=new_plan,
        decode=kernels.decode,
        prefill=kernels.prefill,
    )


def _first_line(error: BaseException) -> str:
    """Of the error that torch wraps, if it does: that one names the library that is missing."""
    return str(error.__cause__ or error).strip().split("\n", 1)[0]
