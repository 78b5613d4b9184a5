"""Run one row of the platform matrix: what it ran is printed and saved, and so is, plainly, what it could not run.

Exit status: 0 every step passed; 1 one failed; 3 the row, or a step of it, could not run here.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ci.environment import NoEnvironmentError, describe_gpu, differences, installed, make_environment, why_not
from ci.matrix import PLATFORMS, ROOT, ROWS, RUNS, Row, Run
from ci.results import FAILED, NOT_RUN, PASSED, Counts, RowResult, StepResult, report, verdict

EXIT = {PASSED: 0, FAILED: 1, NOT_RUN: 3}
RESULTS = ROOT / ".ci" / "results"


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a row, as arguments of this Python."""

    title: str
    arguments: tuple[str, ...]

    @property
    def is_pytest(self) -> bool:
        return self.arguments[:2] == ("-m", "pytest")


def steps_of(row: Row, options: argparse.Namespace) -> list[Step]:
    """The commands of a row, in the order in which they are reported."""
    targets = [target for target in row.targets if not options.target or target in options.target]
    return [step for name in row.runs for step in _steps_of_run(RUNS[name], targets, options)]


def _steps_of_run(run: Run, targets: list[str], options: argparse.Namespace) -> list[Step]:
    short, short_command = (run.short, run.short_command) if options.short else ((), ())
    commands = []
    if run.pytest:
        commands.append((run.name, ("-m", "pytest", *run.pytest, *short, *options.pytest)))
    if run.command:
        title = "resources" if run.pytest else run.name
        commands.append((title, (*run.command, *short_command)))
    steps = []
    for title, arguments in commands:
        if any("{target}" in argument for argument in arguments):
            steps += [
                Step(f"{title} {target}", tuple(argument.replace("{target}", target) for argument in arguments))
                for target in targets
            ]
        else:
            steps.append(Step(title, arguments))
    return steps


def run(step: Step) -> StepResult:
    """Run a step and keep its output."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "tests.xml"
        arguments = [*step.arguments, *([f"--junitxml={junit}"] if step.is_pytest else [])]
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        tests = Counts.read(junit) if step.is_pytest else None
    status, why = PASSED, ""
    if done.returncode:
        status, why = FAILED, f"exit code {done.returncode}"
    elif step.is_pytest and (tests is None or not tests.passed):
        status, why = NOT_RUN, "every test was skipped" if tests else "pytest told of no test"
    command = ("python", *step.arguments)
    return StepResult(step.title, command, status, why, done.returncode, time.monotonic() - start, tests, done.stdout)


def run_row(row: Row, options: argparse.Namespace) -> RowResult:
    """Run a row in this environment."""
    found = installed()
    gpu = describe_gpu()
    differs = differences(row, found)
    reasons = why_not(row)
    if differs and not reasons and not options.here:
        reasons += [f"{one}; --venv FOLDER makes an environment for it, --here runs it as it is" for one in differs]
    found = {**found, **({"GPU": gpu[0]} if gpu else {}), "machine": os.uname().machine}
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    steps: list[StepResult] = []
    if not reasons:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for result in pool.map(run, steps_of(row, options)):
                print(
                    f"--- {result.title}\n$ {shlex.join(result.command)}\n{result.output}--- {result.line()}\n",
                    flush=True,
                )
                steps.append(result)
    status = verdict(steps)
    return RowResult(
        row.name,
        status,
        tuple(reasons),
        options.short,
        tuple(differs) if steps else (),
        found,
        commit(),
        date,
        tuple(steps),
    )


def commit() -> str:
    """The commit of the sources, with a ``+`` if they had changes; "unknown" outside a repository."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes.stdout else "")


def in_environment(row: Row, options: argparse.Namespace, arguments: list[str]) -> int:
    """Run a row in an environment of its own, with the arguments that are left."""
    try:
        python = make_environment(row, options.venv, options.index)
    except NoEnvironmentError as error:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return finish(
            RowResult(row.name, NOT_RUN, (str(error),), options.short, (), installed(), commit(), date, ()), options.out
        )
    return subprocess.run([python, ROOT / "ci" / "run_row", *arguments], check=False).returncode


def finish(result: RowResult, out: Path) -> int:
    """Save and print a row's result; its exit status."""
    result.write(out)
    passed = sum(step.status == PASSED for step in result.steps)
    for reason in result.why:
        print(f"row {result.row}: {result.status}: {reason}")
    for one in result.differs:
        print(f"row {result.row}: not as the matrix says: {one}")
    if result.steps:
        print(
            f"row {result.row}: {result.status}: {passed} of {len(result.steps)} steps passed, {result.seconds:.0f} s"
        )
    elif not result.why:
        print(f"row {result.row}: {result.status}: no step of it was asked for")
    return EXIT[result.status]


def show_list(platforms: list[str], as_json: bool) -> None:
    """The rows of some platforms; as JSON only those that a workflow runs, with what it must know."""
    rows = [row for row in ROWS.values() if not platforms or row.platform in platforms]
    if as_json:
        print(json.dumps([asdict(row) for row in rows if row.runner]))
        return
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row.versions.items()) or "any versions"
        place = " ".join(filter(None, (row.platform, row.gpu, ", ".join(row.arch))))
        print(f"{row.name:22} {'+'.join(row.runs)}: {row.about}\n{'':22} on {place}; {versions}")
        if row.targets:
            print(f"{'':22} for {', '.join(row.targets)}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/run_row", description=(__doc__ or "").strip(), epilog="Arguments after -- are pytest's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("row", choices=ROWS, nargs="?", metavar="ROW", help="see --list")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--json", action="store_true", help="--list as JSON, for the workflows")
    parser.add_argument("--platform", action="append", choices=PLATFORMS, default=[], help="--list: only these rows")
    parser.add_argument("--report", action="store_true", help="print the saved results of all rows and stop")
    parser.add_argument("--short", action="store_true", help="the part of the row that every CI run takes")
    parser.add_argument("--target", action="append", help="only this target of the row; may be given again")
    parser.add_argument("--here", action="store_true", help="run with the versions installed here, whatever they are")
    parser.add_argument("--venv", type=Path, metavar="FOLDER", help="make an environment with the row's versions there")
    parser.add_argument("--index", metavar="URL", help="--venv: where torch's wheels come from; empty: pip's own index")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results go (.ci/results)")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.pytest = tuple(arguments[cut + 1 :])
    return options


def main() -> int:
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.report:
        print(report(options.out), end="")
        return 0
    if options.list or options.row is None:
        show_list(options.platform, options.json)
        return 0
    row = ROWS[options.row]
    if options.venv is not None:
        return in_environment(row, options, _without(arguments, "--venv", "--index"))
    return finish(run_row(row, options), options.out)


def _without(arguments: list[str], *names: str) -> list[str]:
    """Arguments without some options and their values."""
    left, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument.partition("=")[0] not in names:
            left.append(argument)
    return left
