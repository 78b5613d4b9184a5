"""Run one row of the platform matrix: what it ran is printed, and so is, plainly, what it could not run."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MATRIX = tomllib.loads((ROOT / "ci" / "matrix.toml").read_text())
ROWS: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in MATRIX["row"]}
NOT_RUN = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a row."""

    title: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def why_not(needs: str | None) -> str | None:
    """Why a row cannot run on this machine; None: it can."""
    if needs == "simulator":
        from tests.tools.simulator import why_not as why_not_simulated

        return why_not_simulated()
    if needs == "gpu":
        import torch

        return None if torch.cuda.is_available() else "no GPU that torch can use"
    return None


def steps_of(row: Mapping[str, Any], options: argparse.Namespace) -> list[Step]:
    """The commands of a row, in the order in which they are reported."""
    pytest = [sys.executable, "-m", "pytest", *row["tests"], *(row.get("short", ()) if options.short else ())]
    pytest += options.pytest
    targets = [t for t in row.get("targets", ()) if not options.target or t in options.target]
    if row.get("needs") == "simulator":
        return [Step(f"{row['name']} {target}", [*pytest, f"--target={target}"]) for target in targets]
    if row["name"] == "compile":
        table = [sys.executable, "-m", "ci.resource_table"]
        short = ["--short"] if options.short else []
        return [Step("compile", pytest), *(Step(f"resources {t}", [*table, t, *short]) for t in targets)]
    steps = [Step(row["name"], pytest)]
    if not options.short:
        steps += [Step(f"{row['name']}, Triton {v}", pytest, with_triton(v)) for v in row.get("triton", ()) if other(v)]
    return steps


def other(version: str) -> bool:
    """Whether another version of Triton is installed than this."""
    from importlib.metadata import version as installed

    return installed("triton") != version


def with_triton(version: str) -> dict[str, str]:
    """Environment in which another version of Triton is imported; installs it into a folder of its own, once."""
    folder = Path(tempfile.gettempdir()) / "swa_backend_ci" / f"triton-{version}"
    if not (folder / "triton").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}"]
        subprocess.run([*command, f"triton=={version}"], check=True)
    return {"PYTHONPATH": str(folder)}


def run(step: Step) -> tuple[int, str]:
    """Exit code of a step, and its output with a line before and after."""
    start = time.monotonic()
    done = subprocess.run(
        step.command,
        cwd=ROOT,
        env={**os.environ, **step.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    settings = "".join(f"{name}={value} " for name, value in step.environment.items())
    verdict = "passed" if done.returncode == 0 else f"FAILED (exit code {done.returncode})"
    head = f"--- {step.title}\n$ {settings}{shlex.join(['python', *step.command[1:]])}\n"
    return done.returncode, f"{head}{done.stdout}--- {step.title}: {verdict}, {time.monotonic() - start:.0f} s\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="ci/run_row", description=__doc__, epilog="Arguments after -- are pytest's.")
    parser.add_argument("row", choices=ROWS, nargs="?")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--short", action="store_true", help="the part of the row that every CI run takes")
    parser.add_argument("--target", action="append", help="only this target of the row; may be given again")
    parser.add_argument("--require", action="store_true", help=f"exit with {NOT_RUN} where the row cannot run")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.pytest = arguments[cut + 1 :]
    if options.list or options.row is None:
        for name, row in ROWS.items():
            print(f"{name:10} {row['about']}", *(f"{'':10}   {target}" for target in row.get("targets", ())), sep="\n")
        return 0
    row = ROWS[options.row]
    if problem := why_not(row.get("needs")):
        print(f"row {options.row}: NOT RUN: {problem}")
        return NOT_RUN if options.require else 0
    steps = steps_of(row, options)
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for code, output in pool.map(run, steps):
            print(output, flush=True)
            failed += code != 0
    print(f"row {options.row}: {len(steps) - failed} of {len(steps)} steps passed")
    return 1 if failed or not steps else 0
