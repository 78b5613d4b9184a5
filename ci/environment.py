"""Where a row runs: what is installed here, why a row cannot run here, and an environment made for it."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ci.matrix import MATRIX, ROOT, RUNS, Row


def installed() -> dict[str, str]:
    """Versions of Python, torch and Triton in this environment; ``none`` where one is missing."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def differences(row: Row, found: Mapping[str, str]) -> list[str]:
    """Versions that are not the row's."""
    return [
        f"{name} is {found[name]}, the row is for {wanted}"
        for name, wanted in row.versions.items()
        if found[name].partition("+")[0] != wanted
    ]


def why_not(row: Row) -> list[str]:
    """Why this machine cannot run a row, whatever is installed; empty: it can."""
    reasons: list[str] = []
    needs = {RUNS[name].needs for name in row.runs}
    if "gpu" in needs:
        reasons += _gpu_reasons(row)
    elif row.arch and platform.machine() not in row.arch:
        reasons.append(f"this machine is {platform.machine()}, the row is for {', '.join(row.arch)}")
    if "simulator" in needs:
        from tests.tools.simulator import why_not as why_not_simulated

        if reason := why_not_simulated():
            reasons.append(reason)
    return reasons


def describe_gpu() -> tuple[str, str] | None:
    """(name, target) of the GPU that torch can use, None without."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.name, f"hip:{properties.gcnArchName.partition(':')[0]}"
    return properties.name, f"cuda:{properties.major}{properties.minor}"


def _gpu_reasons(row: Row) -> list[str]:
    found = describe_gpu()
    if found is None:
        return [f"no GPU that torch can use{f'; the row is for {row.gpu}' if row.gpu else ''}"]
    name, target = found
    wanted = f"{row.gpu or 'a GPU'} ({', '.join(row.arch)})"
    if (row.arch and target not in row.arch) or (row.gpu and row.gpu not in name):
        return [f"this machine's GPU is {name} ({target}), the row is for {wanted}"]
    return []


class NoEnvironmentError(Exception):
    """An environment for a row could not be made; the text says why."""


Runner = Callable[[Sequence[str]], None]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-3:])
        raise NoEnvironmentError(f"`{' '.join(command)}` failed with exit code {done.returncode}: {last}")


def make_environment(row: Row, folder: Path, index: str | None = None, run: Runner = _run) -> Path:
    """A virtual environment with the row's versions and this library; the path of its Python.

    Args:
        row: the row.
        folder: where the environment is made; one that is there is brought up to date.
        index: where torch's wheels come from, beside pip's own indices; None: as the matrix says, empty: nowhere else.
        run: runs a command.

    Raises:
        NoEnvironmentError: the row's Python is not on this machine, or something cannot be installed.
    """
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        run([_interpreter(row), "-m", "venv", str(folder)])
    if all(RUNS[name].bare for name in row.runs):
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    index = MATRIX["torch_index"].get(row.platform, "") if index is None else index
    extra = [f"--extra-index-url={index}"] if index else []
    run([*pip, *extra, *([f"torch=={row.torch}"] if row.torch else []), "-e", ".[test]"])
    if row.triton == "none":
        run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "triton"])
    elif row.triton:  # the test extra pins one; rows may take another
        run([*pip, "--no-deps", f"triton=={row.triton}"])
    return python


def _interpreter(row: Row) -> str:
    if row.python in (None, installed()["python"]):
        return sys.executable
    found = shutil.which(f"python{row.python}")
    # What is found may be a stand-in that only says that the version is not there.
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        raise NoEnvironmentError(f"no python{row.python} on this machine that runs")
    return found
