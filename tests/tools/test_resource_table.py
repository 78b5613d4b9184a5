"""The table of what kernels take of a chip: a spilling kernel, or none at all, fails it."""
# ruff: noqa: N803

import sys

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from ci import resource_table  # noqa: E402
from swa_backend.kernels import jit  # noqa: E402
from swa_backend.platform import Target  # noqa: E402


def _scale(values, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(values + i)
    tl.store(values + i, v * tl.sum(v, 0))


@pytest.fixture
def only(monkeypatch):
    """Make a kernel of the given size and tuning the only one there is."""

    def only(n, **tuning):
        monkeypatch.setattr(jit, "_registry", {})
        tunings = {"cuda": jit.Tuning(1, **tuning)}
        found = jit.Kernel(_scale, {"values": "*fp32"}, tunings, lambda config, dialects: [{"N": n}])
        monkeypatch.setattr(resource_table, "load_kernels", lambda: (found,))

    return only


@pytest.fixture
def table(monkeypatch, capsys, tmp_path):
    def table(target):
        monkeypatch.setattr(sys, "argv", ["resource_table", target, "--json", str(tmp_path / "table.json")])
        return resource_table.main(), capsys.readouterr().out

    return table


@pytest.mark.compiled
def test_a_kernel_that_fits_passes(only, table):
    only(1024)
    code, text = table("cuda:90")
    assert code == 0
    assert "cuda:90: 1 kernels, 1 keys compiled, 0 with problems" in text


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("n", "options", "problem"),
    [
        (4096, {"maxnreg": 64}, "PROBLEM spills:"),
        (1024, {"num_warps": 64}, "PROBLEM OutOfResources"),
        (24, {}, "PROBLEM CompilationError"),
    ],
)
def test_a_kernel_with_a_problem_fails_the_table(only, table, n, options, problem):
    only(n, options=options)
    code, text = table("cuda:90")
    assert code == 1
    assert problem in text
    assert "1 with problems" in text


@pytest.mark.compiled
def test_no_kernel_at_all_fails_the_table(only, table):
    only(1024)
    code, text = table("hip:gfx942")  # the kernel has no tuning for it
    assert code == 1
    assert "no kernel was found" in text


@pytest.mark.compiled
def test_keys_of_the_library_are_found_for_both_vendors():
    kernels = {kernel.name: kernel for kernel in resource_table.load_kernels()}
    keys = {t: resource_table.keys_of(kernels["write_pages"], Target.parse(t)) for t in ("cuda:90", "hip:gfx942")}
    fnuz = {target: {key["FNUZ"] for key in found} for target, found in keys.items()}
    assert fnuz == {"cuda:90": {False}, "hip:gfx942": {False, True}}
