"""The platform matrix: its rows say what they ran and what they could not, and a spilling kernel fails a row."""
# ruff: noqa: N803

import sys

import pytest
import torch

from ci import rows

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from ci import resource_table  # noqa: E402
from swa_backend.kernels import jit  # noqa: E402
from swa_backend.kernels.offline import CHIPS  # noqa: E402
from swa_backend.platform import Target  # noqa: E402
from tests.tools.simulator.driver import SIMULATED  # noqa: E402


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ci/run_row", *arguments])
        code = rows.main()
        return code, capsys.readouterr().out

    return call


def test_list_names_every_row_and_target(call):
    code, text = call("--list")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines() if line[0] != " "] == [
        "cpu",
        "interpret",
        "compile",
        "simulate",
        "rocm",
        "device",
    ]
    assert "hip:gfx950" in text


def test_targets_of_the_matrix_are_known():
    assert set(rows.ROWS["compile"]["targets"]) <= CHIPS.keys()
    assert set(rows.ROWS["simulate"]["targets"]) <= set(SIMULATED)


def test_a_row_that_cannot_run_says_so(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rows, "run", lambda step: pytest.fail("ran"))
    assert call("device") == (0, "row device: NOT RUN: no GPU that torch can use\n")
    assert call("device", "--require")[0] == rows.NOT_RUN


@pytest.fixture
def ran(monkeypatch):
    """The steps that a row asks for, instead of running them; the second one fails."""
    steps = []

    def run(step):
        steps.append(step)
        return int(len(steps) == 2), step.title

    monkeypatch.setattr(rows, "run", run)
    monkeypatch.setattr(rows.os, "cpu_count", lambda: 1)
    return steps


def test_one_failed_step_fails_the_row(call, ran):
    code, text = call("simulate", "--short", "--", "-x")
    assert code == 1
    assert text.splitlines()[-1] == "row simulate: 1 of 2 steps passed"
    assert [step.command[-4:] for step in ran] == [
        ["-m", "simulate", "-x", f"--target={target}"] for target in rows.ROWS["simulate"]["targets"]
    ]


def test_one_target_alone(call, ran):
    call("compile", "--target", "cuda:90")
    assert [step.title for step in ran] == ["compile", "resources cuda:90"]
    assert "--short" not in ran[1].command


def test_other_versions_of_triton_have_a_step_of_their_own(call, ran, monkeypatch):
    monkeypatch.setattr(rows, "other", lambda version: version == "3.9.0")
    monkeypatch.setattr(rows, "with_triton", lambda version: {"PYTHONPATH": version})
    call("interpret")
    assert [dict(step.environment) for step in ran] == [{}, {"PYTHONPATH": "3.9.0"}]
    ran.clear()
    call("interpret", "--short")
    assert len(ran) == 1


def test_a_step_reports_what_it_ran():
    program = "import os; print(os.environ['X']); exit(3)"
    code, text = rows.run(rows.Step("three", [sys.executable, "-c", program], {"X": "7"}))
    assert code == 3
    assert text.startswith("--- three\n$ X=7 python -c ")
    assert "\n7\n--- three: FAILED (exit code 3)" in text


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
