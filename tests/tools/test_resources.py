"""The resource table tells a kernel that spills from one that does not, on both vendors."""
# ruff: noqa: N803

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from swa_backend.kernels.offline import compile_only  # noqa: E402
from tests.tools.resources import Resources, resources_of  # noqa: E402

pytestmark = pytest.mark.compiled


@triton.jit
def scale_by_sum(values, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(values + i)
    tl.store(values + i, v * tl.sum(v, 0))


def _compile(target, n, **options):
    with compile_only(target) as driver:
        scale_by_sum[(1,)](torch.empty(n), n, **options)
    return resources_of(driver.compiled[0])


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_a_small_kernel(target):
    found = _compile(target, 1024)
    assert 8 <= found.registers <= 128
    assert (found.scalar_registers > 0) == target.startswith("hip")
    assert found.shared_bytes > 0
    assert found.problems(target[: target.index(":")]) == ()


@pytest.mark.parametrize(
    ("target", "values_of_a_thread", "options"),
    [("cuda:80", 128, {"maxnreg": 64}), ("cuda:90", 128, {"maxnreg": 64}), ("hip:gfx942", 128, {"waves_per_eu": 8})],
)
def test_a_kernel_that_spills(target, values_of_a_thread, options):
    """Every thread has to keep more values than it is allowed registers."""
    lanes = 64 if target.startswith("hip") else 32
    found = _compile(target, values_of_a_thread * lanes, num_warps=1, **options)
    assert found.thread_bytes > 0
    (problem,) = found.problems(target[: target.index(":")])
    assert problem.startswith("spills:")


def test_too_many_registers():
    assert Resources(256, 0, 0, 0, 0).problems("cuda") == ("256 registers a thread, at most 255",)
    assert Resources(256, 0, 0, 0, 0).problems("hip") == ()


def test_spills_that_a_tuning_allows():
    assert Resources(168, 0, 0, 64, 0).problems("cuda", 64) == ()
    assert Resources(168, 0, 0, 72, 0).problems("cuda", 64) == ("spills: 0 registers, 72 bytes a thread, at most 64",)
    assert Resources(168, 0, 0, 8, 0).problems("cuda") == ("spills: 0 registers, 8 bytes a thread",)
