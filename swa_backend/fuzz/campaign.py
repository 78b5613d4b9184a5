"""Many histories one after the other, until enough steps were checked or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from swa_backend.backend import Backend
from swa_backend.errors import ConfigError
from swa_backend.fuzz.case import Case, Profile, random_case
from swa_backend.fuzz.runner import CaseFailedError, Mode, Tally, launcher
from swa_backend.fuzz.shrink import shrink

Progress = Callable[[int, int, str], None]
SHRINK_SECONDS = 60.0  # for one history
MAX_FAILURES = 3  # more of them hardly tell anything new


@dataclass(frozen=True, slots=True)
class Failure:
    """A history that went wrong: its seed, the shrunk case, what was found, and where it was saved."""

    seed: int
    case: Case
    text: str
    path: str | None


@dataclass(slots=True)
class FuzzReport:
    """What a campaign checked and found.

    Attributes:
        platform, mode, first_seed: what ran.
        histories, steps, tokens, index_rows, outputs: how much was checked.
        captured_steps: steps in the shape of a captured graph.
        events: how often an engine did what is rare.
        failures: histories with a wrong step.
        seconds: time of it all.
    """

    platform: str
    mode: str
    first_seed: int
    histories: int = 0
    steps: int = 0
    tokens: int = 0
    index_rows: int = 0
    outputs: int = 0
    captured_steps: int = 0
    events: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, tally: Tally) -> None:
        """Count a history."""
        self.histories += 1
        self.steps += tally.steps
        self.tokens += tally.tokens
        self.index_rows += tally.rows
        self.outputs += tally.outputs
        self.captured_steps += tally.captured
        for name, count in asdict(tally.engine).items():
            self.events[name] = self.events.get(name, 0) + count

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return asdict(self)


def run_fuzz(
    backend: Backend,
    device: torch.device,
    *,
    seed: int = 0,
    steps: int | None = None,
    seconds: float | None = None,
    mode: Mode = Mode.EAGER,
    profile: Profile = Profile.ANY,
    attention: bool = True,
    save: Path | None = None,
    progress: Progress | None = None,
) -> FuzzReport:
    """Run random histories with the seeds ``seed``, ``seed + 1``, ...

    Args:
        backend: the platform under test.
        device: where its tensors live.
        seed: of the first history.
        steps: stop once so many steps were checked.
        seconds: stop after this time, but for a few seconds of shrinking.
        mode: how decode steps of the captured shape run.
        profile: which settings the histories have.
        attention: also write caches and run attention.
        save: folder for shrunk cases that fail; None saves none.
        progress: called after each history with (steps so far, steps wanted or 0, text).

    Raises:
        ConfigError: neither ``steps`` nor ``seconds`` says when to stop.
        OSError: ``save`` cannot be written.
    """
    if steps is None and seconds is None:
        raise ConfigError(
            "steps", found=None, legal="a number of steps, or of seconds", fix="Say when to stop: steps or seconds."
        )
    run = launcher(backend, device, mode, attention=attention)
    report = FuzzReport(backend.name, str(mode), seed)
    begin = time.monotonic()
    while len(report.failures) < MAX_FAILURES:
        report.seconds = time.monotonic() - begin
        if (steps is not None and report.steps >= steps) or (seconds is not None and report.seconds >= seconds):
            break
        case = random_case(seed, profile)
        try:
            report.add(run(case))
        except CaseFailedError as failure:
            left = SHRINK_SECONDS if seconds is None else seconds - (time.monotonic() - begin)
            report.failures.append(_record(case, failure, run, save, min(max(left, 5.0), SHRINK_SECONDS)))
        if progress is not None:
            progress(report.steps, steps or 0, f"{report.histories} histories, {len(report.failures)} wrong")
        seed += 1
    report.seconds = time.monotonic() - begin
    return report


def _record(
    case: Case, failure: CaseFailedError, run: Callable[[Case], Tally], save: Path | None, seconds: float
) -> Failure:
    """Shrink and save; written in one go, so that a file that is there is whole."""
    small, last = shrink(case, run, seconds)
    text = str(last or failure)
    if last is None:
        text += " (and not again: something outside the history takes part)"
    if save is None:
        return Failure(case.seed, small, text, None)
    save.mkdir(parents=True, exist_ok=True)
    path = save / f"case-{case.seed}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(small.to_json(), encoding="utf-8")
    draft.replace(path)
    return Failure(case.seed, small, text, str(path))
