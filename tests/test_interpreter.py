"""Triton's interpreter is right with the repairs, and each repair is still needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from tests.tools import interpreter_checks, interpreter_repairs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy about NaN operands

# Faults that Triton itself has repaired since.
GONE = {
    "3.9": {
        "minimum_and_maximum_skip_nan",
        "clamp_of_nan_is_a_bound",
        "int1_wraps",
        "shifts_keep_the_type_of_their_operands",
    }
}


@pytest.fixture(autouse=True)
def _interpreted(request):
    if request.config.getoption("--kernels") != "interpret":
        pytest.skip("runs under --kernels interpret")


@pytest.mark.parametrize("name", interpreter_checks.CHECKS)
def test_repaired(name):
    assert interpreter_checks.CHECKS[name]()


def test_every_repair_is_needed():
    """Without repairs every check fails, so that none of them could pass by chance."""
    version = ".".join(triton.__version__.split(".")[:2])
    if version not in ("3.6", "3.9"):
        pytest.skip(f"not known for Triton {version}")
    unrepaired = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", interpreter_checks.__name__],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(unrepaired.stdout.split()) == interpreter_checks.CHECKS.keys() - GONE.get(version, set())


def test_repairing_twice_changes_nothing():
    before = interpreter_repairs.interpreter.InterpreterBuilder.binary_op
    interpreter_repairs.apply()
    assert interpreter_repairs.interpreter.InterpreterBuilder.binary_op is before
