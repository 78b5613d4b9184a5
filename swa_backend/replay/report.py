"""What a replay found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds a step: percentiles over the steps of a replay."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> StepTimes | None:
        """Percentiles of ``seconds``; None without a step."""
        if not seconds:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(seconds, [50, 90, 99]))
        return cls(p50, p90, p99, max(seconds))

    def __str__(self) -> str:
        values = {"p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max}
        return " / ".join(f"{name} {value * 1e3:.2f}" for name, value in values.items()) + " ms"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Outcome of a replay.

    Attributes:
        trace, trace_format, model, platform, provider, layers, data, seed: what ran.
        requests: requests finished.
        skipped_rows: trace rows that were passed over.
        steps: batches.
        tokens: tokens computed, drafts and those computed again included.
        prompt_tokens, output_tokens: of the trace.
        rejected_drafts: computed drafts that turned out wrong.
        preemptions: times a request lost its pages and started again.
        reused_tokens: prompt tokens that a known prefix spared.
        build: time of a metadata build; host time, which on a GPU is when the launch returns.
        attention: time of a step's top-k mapping and attention, all layers; None where attention did not run.
        pages: pages of each cache group.
        peak_pages: most of them in use at once.
        tokens_verified: tokens whose outputs were compared with the oracle, each once whatever the layers.
        output_mismatches: (token, layer) pairs with a wrong output.
        worst_error: largest relative error of a row of an output; None if nothing was compared, infinite for a NaN.
        rows_checked: index rows checked.
        row_mismatches: index rows, or values beside them, that were wrong.
        examples: the first mismatches, and the first broken value rules of each kind, in words.
        problems: what kind of value rule was broken how often; None without validation.
        seconds: time of the whole replay, checks included.
    """

    trace: str
    trace_format: str
    model: str
    platform: str
    provider: str
    layers: tuple[str, ...]
    data: str
    seed: int
    requests: int
    skipped_rows: int
    steps: int
    tokens: int
    prompt_tokens: int
    output_tokens: int
    rejected_drafts: int
    preemptions: int
    reused_tokens: int
    build: StepTimes | None
    attention: StepTimes | None
    pages: Mapping[str, int]
    peak_pages: Mapping[str, int]
    tokens_verified: int
    output_mismatches: int
    worst_error: float | None
    rows_checked: int
    row_mismatches: int
    seconds: float
    examples: tuple[str, ...] = field(default=())
    problems: Mapping[str, int] | None = None

    @property
    def mismatches(self) -> int:
        """Everything that was wrong; 0 is a pass."""
        return self.output_mismatches + self.row_mismatches + sum((self.problems or {}).values())

    @property
    def prefix_reuse(self) -> float:
        """Share of the trace's prompt tokens that a known prefix spared."""
        return self.reused_tokens / self.prompt_tokens

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it; times are in seconds, an infinite error is None."""
        values = asdict(self)
        if self.worst_error is not None and not math.isfinite(self.worst_error):
            values["worst_error"] = None
        return {**values, "mismatches": self.mismatches, "prefix_reuse": self.prefix_reuse}

    def rows(self) -> list[tuple[str, str]]:
        """The report as (label, text)."""
        table = [
            ("trace", f"{self.trace} ({self.trace_format})"),
            ("model", f"{self.model}, one layer of each type: {', '.join(self.layers)}"),
            ("platform", f"{self.platform}, attention by {self.provider}"),
            ("requests", f"{self.requests} finished, {self.skipped_rows} bad rows skipped"),
            ("steps", f"{self.steps}"),
            ("tokens", f"{self.tokens} computed; {self.prompt_tokens} prompt, {self.output_tokens} output"),
            ("drafts rejected", f"{self.rejected_drafts}"),
            ("preemptions", f"{self.preemptions}"),
            ("prefix reuse", f"{self.reused_tokens} tokens, {self.prefix_reuse:.1%} of the prompts"),
            ("build a step", f"{self.build}"),
            ("attention a step", "not run" if self.attention is None else f"{self.attention}"),
            (
                "pages in use (peak)",
                ", ".join(f"{name} {peak} of {self.pages[name]}" for name, peak in self.peak_pages.items()),
            ),
            ("index rows checked", f"{self.rows_checked}, {self.row_mismatches} wrong"),
            ("tokens verified", f"{self.tokens_verified}, {self.output_mismatches} outputs wrong ({self.data} data)"),
            ("worst error", "-" if self.worst_error is None else f"{self.worst_error:.2e}"),
            ("value rules broken", self._problems()),
            ("mismatches", f"{self.mismatches}"),
            *(("example", text) for text in self.examples),
            ("time", f"{self.seconds:.1f} s"),
        ]
        return table

    def _problems(self) -> str:
        if self.problems is None:
            return "not checked (--validate)"
        return ", ".join(f"{count} {kind}" for kind, count in self.problems.items()) or "0"
