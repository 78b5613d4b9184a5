"""The Gluon decode kernel compiled for a Hopper GPU that is not here: what it takes is what the provider accepts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from swa_backend.kernels.offline import CHIPS, compile_only  # noqa: E402
from swa_platform_cuda.hopper_probe import TESTED, Taken, Toolchain, resource_reasons  # noqa: E402
from tests.tools.resources import CUOBJDUMP, resources_of  # noqa: E402

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(triton.__version__ not in TESTED, reason="another Triton is refused by the provider"),
]


def compiled_for(heads: int, two_caches: bool) -> Any:
    from swa_platform_cuda.hopper_decode import decode_launcher

    with compile_only("cuda:90"):
        launcher = decode_launcher(torch.device("cpu"), heads, two_caches)
        launcher.compile()
    return launcher.compiled


def test_the_kernels_can_be_imported() -> None:
    assert Toolchain.here().reasons() == ()


@pytest.mark.parametrize("two_caches", [False, True])
def test_the_compiled_kernel_is_accepted(two_caches: bool) -> None:
    found = resources_of(compiled_for(64, two_caches))
    taken = Taken(found.registers, found.thread_bytes, found.shared_bytes, CHIPS["cuda:90"].shared_bytes)
    assert resource_reasons(["the kernel"], lambda _: taken, triton.__version__) == ()


def test_the_roles_get_the_registers_that_they_ask_for(tmp_path: Path) -> None:
    """Where a role needs more than its share, the compiler ignores all shares, and the kernel is slow."""
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled_for(64, True).asm["cubin"])
    text = subprocess.run([str(CUOBJDUMP), "-sass", str(binary)], capture_output=True, text=True, check=True).stdout
    assert text.count("USETMAXREG") >= 6
