"""What importing the library does not do (X4)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
import torch
before = set(sys.modules)
import swa_backend
new = set(sys.modules) - before
vendor = [name for name in ("aiter", "flash_mla", "pynvml", "amdsmi", "vllm", "sgl_kernel") if name in sys.modules]
assert not vendor, vendor
brought = [name for name in ("triton", "typer", "rich", "numpy") if name in new]
assert not brought, brought
parts = ("swa_backend.kernels", "swa_backend.reference", "swa_backend.replay", "swa_backend.commands")
heavy = [name for name in new if name.startswith(parts)]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
swa_backend.get_backend()
assert not torch.cuda.is_initialized()

child = os.fork()
if child == 0:
    try:
        assert not torch.cuda._is_in_bad_fork()
        if torch.cuda.is_available():
            torch.ones(1, device="cuda").item()
        assert swa_backend.get_backend().name
        assert torch.ones(2).sum().item() == 2
    except BaseException:
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("fine")
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_x4_import_initialises_nothing_and_a_forked_child_works():
    done = python(CODE, SWA_BACKEND_PLATFORM="auto")
    assert done.stdout == "fine\n", done.stderr


def test_importing_prints_nothing():
    done = python("import swa_backend", SWA_BACKEND_PLATFORM="auto")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("name", ["nope", "cuda", "rocm"])
def test_a_platform_that_cannot_be_had_stops_the_import_and_leaves_it_repeatable(name):
    code = """
import os
try:
    import swa_backend
except Exception as error:
    assert type(error).__name__ == "PlatformError", error
    assert all(name in str(error) for name in ("cpu", "cuda", "rocm")), error
else:
    raise SystemExit("it was imported")
os.environ["SWA_BACKEND_PLATFORM"] = "cpu"
import swa_backend
print(swa_backend.get_backend().name)
"""
    done = python(code, SWA_BACKEND_PLATFORM=name, CUDA_VISIBLE_DEVICES="")
    assert done.stdout == "cpu\n", done.stderr


def test_the_variable_is_read_once():
    code = """
import os, swa_backend
os.environ["SWA_BACKEND_PLATFORM"] = "nope"
print(swa_backend.get_backend().name)
"""
    assert python(code, SWA_BACKEND_PLATFORM="cpu").stdout == "cpu\n"


def test_every_public_name_can_be_imported():
    done = python("import swa_backend\nfor name in swa_backend.__all__: getattr(swa_backend, name)\nprint('fine')")
    assert done.stdout == "fine\n", done.stderr
