"""What a row's steps came to, as JSON and as text that a person reads."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ci.matrix import ROWS

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "NOT RUN"
TAIL = 40  # lines of a failed step that the summary shows


@dataclass(frozen=True, slots=True)
class Counts:
    """Tests of a step."""

    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    @classmethod
    def read(cls, path: Path) -> Counts | None:
        """The counts of a JUnit file; None if pytest did not get as far as writing one."""
        try:
            suites = ElementTree.parse(path).getroot().iter("testsuite")
        except (OSError, ElementTree.ParseError):
            return None
        total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in suites:
            for name in total:
                total[name] += int(suite.get(name, 0))
        failed = total["failures"] + total["errors"]
        return cls(total["tests"] - failed - total["skipped"], failed, total["skipped"])


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step. ``status`` is never "passed" where nothing ran: neither for a step whose tests were all skipped."""

    title: str
    command: Sequence[str]
    status: str
    why: str
    exit_code: int | None
    seconds: float
    tests: Counts | None = None
    output: str = field(default="", repr=False)

    def line(self) -> str:
        counts = f": {self.tests}" if self.tests else ""
        return f"{self.title}: {self.status}{counts}, {self.seconds:.0f} s{f' ({self.why})' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row's result.

    Attributes:
        row: its name.
        status: ``passed`` only if every step passed.
        why: why it did not run, one reason a line.
        short: whether only the part for every CI run was asked for.
        differs: versions that are not the row's, if it was run in spite of them.
        found: what it ran with.
        commit: of the sources, with ``+`` if they had changes.
        date: of the start, UTC.
        steps: what was run.
    """

    row: str
    status: str
    why: tuple[str, ...]
    short: bool
    differs: tuple[str, ...]
    found: Mapping[str, str]
    commit: str
    date: str
    steps: tuple[StepResult, ...]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def write(self, folder: Path) -> None:
        """``ROW.json`` and ``ROW.md``; the summary also goes where a GitHub job shows it."""
        folder.mkdir(parents=True, exist_ok=True)
        data = {**asdict(self), "specified": asdict(ROWS[self.row]), "seconds": round(self.seconds, 1)}
        (folder / f"{self.row}.json").write_text(json.dumps(data, indent=1) + "\n")
        text = self.summary()
        (folder / f"{self.row}.md").write_text(text)
        if page := os.environ.get("GITHUB_STEP_SUMMARY"):
            with open(page, "a") as file:
                file.write(text)

    def summary(self) -> str:
        """Markdown."""
        row = ROWS[self.row]
        found = ", ".join(f"{name} {version}" for name, version in self.found.items())
        part = " (the short part)" if self.short else ""
        lines = [
            f"## Row {self.row}{part}: {self.status}",
            "",
            f"{row.about}. {self.date}, commit {self.commit}; {found}.",
            *(f"\n{self.status}: {reason}" for reason in self.why),
            *(f"\nNot as the matrix says: {one}." for one in self.differs),
        ]
        if self.steps:
            lines += ["", "| step | result | tests | seconds |", "|---|---|---|---|"]
        for step in self.steps:
            result = step.status + (f": {step.why}" if step.why else "")
            lines.append(f"| {step.title} | {result} | {step.tests or ''} | {step.seconds:.0f} |")
        for step in self.steps:
            if step.status != PASSED:
                tail = step.output.strip().splitlines()[-TAIL:]
                lines += ["", f"{step.title}: `{shlex.join(step.command)}`", "", "```", *tail, "```"]
        return "\n".join(lines) + "\n"


def verdict(steps: Iterable[StepResult]) -> str:
    """A row's status by its steps: one that failed fails it, one that did not run keeps it from passing."""
    found = {step.status for step in steps}
    return FAILED if FAILED in found else PASSED if found == {PASSED} else NOT_RUN


def report(folder: Path) -> str:
    """A table of every row of the matrix and what was last saved of it in a folder."""
    lines = ["| row | runs | on | Python, torch, Triton | last result |", "|---|---|---|---|---|"]
    for name, row in ROWS.items():
        place = " ".join(filter(None, (row.platform, row.gpu, ", ".join(row.arch))))
        versions = ", ".join(row.versions.values()) or "any"
        path = folder / f"{name}.json"
        result = _result(json.loads(path.read_text())) if path.exists() else "none"
        lines.append(f"| {name} | {', '.join(row.runs)} | {place} | {versions} | {result} |")
    return "\n".join(lines) + "\n"


def _result(data: Mapping[str, Any]) -> str:
    """A saved result in one line."""
    why = f": {'; '.join(data['why'])}" if data["why"] else ""
    part = " (short part)" if data["short"] else ""
    counts = [step["tests"] for step in data["steps"] if step["tests"]]
    tests = ", ".join(f"{sum(one[key] for one in counts)} {key}" for key in ("passed", "failed", "skipped"))
    differs = f", although {'; '.join(data['differs'])}" if data["differs"] else ""
    return f"{data['status']}{part}{why}{f': {tests}' if counts else ''}{differs}, {data['date'][:10]}"
