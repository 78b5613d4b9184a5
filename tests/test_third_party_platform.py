"""A third party adds hardware by publishing a package with the entry point and nothing else.

Packages are built as wheels, unpacked to a folder on the path, and used from a process of their own; the README's
worked example is installed by pip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-attention"
version = "1.5"

[project.entry-points."swa_backend.platforms"]
{points}

[tool.setuptools]
py-modules = [{modules}]
"""

ACME = '''
"""A platform that runs on the CPU and counts what its attention is asked for."""

import os

from swa_backend import AttentionCall, AttentionProvider, NoTileScheduler, Platform, Probe

calls = []


def probe():
    usable = os.environ.get("ACME_DEVICE") == "1"
    return Probe(usable=usable, preferred=usable, reasons=(f"ACME_DEVICE is {os.environ.get('ACME_DEVICE')!r}",))


def load_builder():
    from swa_backend import DeepseekSparseSWAMetadataBuilder

    class AcmeBuilder(DeepseekSparseSWAMetadataBuilder):
        pass

    return AcmeBuilder


def load_operations():
    from swa_backend.reference.operations import ReferenceOperations

    return ReferenceOperations()


class AcmeAttention(AttentionProvider):
    name = "acme-kernels"

    def supports(self, shape):
        return () if shape.num_heads <= 64 else ("more than 64 heads",)

    def decode(self, call: AttentionCall):
        calls.append("decode")
        call.out.fill_(3.0)

    def prefill(self, call: AttentionCall):
        calls.append("prefill")


PLATFORM = Platform(
    name="acme",
    device_type="cpu",
    probe=probe,
    load_builder=load_builder,
    load_operations=load_operations,
    load_scheduler=lambda target: NoTileScheduler(),
    load_providers=lambda target: (AcmeAttention(),),
    auto_rank={rank},
)
'''

BROKEN = {
    "broken_import": "import a_module_that_nobody_has\n",
    "broken_type": "PLATFORM = 'acme'\n",
    "broken_version": (
        "from dataclasses import replace\nimport acme\n"
        "PLATFORM = replace(acme.PLATFORM, name='broken_version', interface_version=2)\n"
    ),
    "broken_exit": "import sys\nsys.exit('goodbye')\n",
}


def install(folder: Path, modules: dict[str, str], points: dict[str, str]) -> Path:
    """Build a distribution and install it; returns the folder to put on the path."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    lines = "\n".join(f'{name} = "{value}"' for name, value in points.items())
    names = ", ".join(f'"{name}"' for name in modules)
    (source / "pyproject.toml").write_text(PROJECT.format(points=lines, modules=names))
    for name, text in modules.items():
        (source / f"{name}.py").write_text(text)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:  # what an installer does with a wheel of plain modules
        archive.extractall(site)
    return site


@pytest.fixture(scope="module")
def acme(tmp_path_factory) -> Path:
    """Takes part in automatic choice."""
    modules = {"acme": ACME.replace("{rank}", "1")}
    return install(tmp_path_factory.mktemp("acme"), modules, {"acme": "acme:PLATFORM"})


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    """A working platform that keeps out of automatic choice, and one of every way to be broken."""
    modules = {"acme": ACME.replace("{rank}", "None"), **BROKEN}
    points = {"acme": "acme:PLATFORM", "cpu": "acme:PLATFORM", "broken_absent": "acme:NO_SUCH_NAME"}
    points |= {name: f"{name}:PLATFORM" for name in BROKEN}
    return install(tmp_path_factory.mktemp("broken"), modules, points)


def python(site: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if name not in ("SWA_BACKEND_PLATFORM", "ACME_DEVICE")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**base, "PYTHONPATH": str(site), **env},
        capture_output=True,
        text=True,
        check=False,
    )


NAME = "import swa_backend; print(swa_backend.get_backend().name)"


@pytest.mark.parametrize(
    ("env", "chosen"),
    [
        ({"SWA_BACKEND_PLATFORM": "acme", "ACME_DEVICE": "1"}, "acme"),
        ({"ACME_DEVICE": "1"}, "acme"),
        ({}, "cpu"),
        ({"SWA_BACKEND_PLATFORM": "cpu", "ACME_DEVICE": "1"}, "cpu"),
    ],
)
def test_it_is_found_and_chosen_by_name_or_automatically(acme, env, chosen):
    done = python(acme, NAME, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", **env)
    assert done.stdout.strip() == chosen, done.stderr


def test_it_stays_out_of_automatic_choice_unless_it_says_so(broken):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ACME_DEVICE": "1"}
    assert python(broken, NAME, **hidden).stdout.strip() == "cpu"
    assert python(broken, NAME, SWA_BACKEND_PLATFORM="acme", **hidden).stdout.strip() == "acme"


def test_unusable_here(acme):
    done = python(acme, "import swa_backend", SWA_BACKEND_PLATFORM="acme")
    assert done.returncode == 1
    assert "acme (acme-attention 1.5): not usable here; ACME_DEVICE is None" in done.stderr


def test_its_builder_and_kernels_are_used(acme):
    code = """
import torch, acme
from swa_backend import *
backend = get_backend()
model = ModelConfig.packaged("V4-Flash")
config = BackendConfig(model, SchedulerConfig(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64))
cache = DeepseekV4SWACache(512, model.window_size, torch.uint8, "layer", None)
cache.bind_kv_cache(cache.allocate(8, "cpu"))
builder = backend.get_builder_cls()(cache.get_kv_cache_spec(config), ["layer"], config, "cpu", num_pages=8)
assert type(builder).__name__ == "AcmeBuilder", type(builder)
assert builder.provider.name == "acme-kernels"
starts, lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([5, 70], dtype=torch.int32)
batch = CommonAttentionMetadata(
    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, seq_lens_cpu_upper_bound=lens, num_reqs=2,
    num_actual_tokens=2, max_query_len=1, max_seq_len=70,
    block_table_tensor=torch.tensor([[1, 0], [2, 3]], dtype=torch.int32), slot_mapping=torch.tensor([68, 197]),
)
metadata = builder.build(0, batch)
assert metadata.decode_swa_lens.tolist() == [5, 70]
assert metadata.decode_swa_indices[0, 0, :6].tolist() == [64, 65, 66, 67, 68, -1]
q = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
out = attend(q, metadata, cache, torch.zeros(64)).out
assert acme.calls == ["decode"] and (out == 3).all()
print("fine")
"""
    done = python(acme, code, SWA_BACKEND_PLATFORM="acme", ACME_DEVICE="1")
    assert done.stdout == "fine\n", done.stderr


def test_broken_packages_break_nothing_and_are_explained(broken):
    code = """
import swa_backend
from swa_backend.doctor import examine
for one in examine().platforms:
    print(one.name, one.origin, one.reasons[0], sep=" | ")
for name in ("broken_import", "broken_absent"):
    try:
        swa_backend.get_backend(name)
    except swa_backend.PlatformError as error:
        assert "which cannot be loaded" in str(error), error
        assert "a_module_that_nobody_has" in str(error), error
    else:
        raise SystemExit("loaded")
"""
    done = python(broken, code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("cpu | swa-backend ")
    assert lines[-1].startswith("cpu | acme-attention 1.5 | cannot be loaded: swa-backend ")
    for name, reason in {
        "broken_import": "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
        "broken_type": "is a str, not a swa_backend.Platform",
        "broken_version": "interface_version: found 2; legal: 1",
        "broken_exit": "SystemExit: goodbye",
        "broken_absent": "AttributeError",
    }.items():
        (line,) = (line for line in lines if line.startswith(f"{name} | acme-attention 1.5 | "))
        assert reason in line


@pytest.fixture(scope="module")
def worked_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's two files, installed by pip; the folder to put on the path."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    section = text.split("\n## Adding a platform\n")[1].split("\n## ")[0]
    (project,) = re.findall(r"^```toml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (module,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    source, site = tmp_path_factory.mktemp("worked"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(project)
    (source / "swa_platform_acme.py").write_text(module)
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]  # setuptools is among the test extras
    command = [sys.executable, "-m", "pip", "install", *offline, f"--target={site}", str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return site


def command(site: Path, *arguments: str, **env: str) -> dict[str, object]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("SWA_BACKEND_")}
    done = subprocess.run(
        [sys.executable, "-m", "swa_backend", *arguments, "--json"],
        env={**base, "PYTHONPATH": str(site), **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_the_worked_example_is_chosen_and_runs_a_trace(worked_example: Path, tmp_path: Path) -> None:
    chosen = command(worked_example, "doctor", SWA_BACKEND_PLATFORM="acme")
    assert (chosen["chosen"], chosen["why"]) == ("acme", "named by SWA_BACKEND_PLATFORM")
    (acme,) = (one for one in chosen["platforms"] if one["name"] == "acme")
    assert (acme["origin"], acme["usable"]) == ("swa-platform-acme 1.0", True)
    (backend,) = (one for one in chosen["backends"] if one["platform"] == "acme")
    (provider,) = backend["providers"]
    assert provider["models"]["V4-Flash"] == []
    assert provider["models"]["V4-Pro"] == ["num_heads is 128; it takes up to 64"]

    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:44:50.0,150,4\n")
    report = command(worked_example, "replay", "--trace", str(trace), "--pages", "8", SWA_BACKEND_PLATFORM="acme")
    assert (report["platform"], report["provider"]) == ("acme", "acme")
    assert (report["mismatches"], report["tokens_verified"] > 0) == (0, True)


def test_the_worked_example_stays_out_of_automatic_choice(worked_example: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert command(worked_example, "doctor", **hidden)["chosen"] == "cpu"
