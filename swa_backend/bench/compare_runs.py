"""Two saved runs of the benches beside each other: what became slower or faster, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swa_backend.bench.report import MACHINE, OURS, Report, Row, contenders, ratio

METRICS = ("gpu", "gpu_cold", "host")


@dataclass(frozen=True, slots=True)
class Change:
    """One contender's time in one case, in microseconds a call.

    Attributes:
        what, case, who: bench, case and contender.
        metric: ``gpu``, ``gpu_cold`` or ``host``.
        before, after: the time in the first and the second run.
        peer_before, peer_after: the peer's time over it in each run; None without a peer. Both contenders of a run
            share its clocks, so these can be compared where plain times cannot.
    """

    what: str
    case: str
    who: str
    metric: str
    before: float
    after: float
    peer_before: float | None
    peer_after: float | None

    @property
    def factor(self) -> float:
        """Time after over time before: above 1 it became slower."""
        return self.after / self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and what they have not.

    Attributes:
        changes: every time that both runs have.
        only_before, only_after: cases of one run alone, as ``bench: case``.
        differences: what else differs, such as the GPU or the version of torch.
    """

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differences: tuple[str, ...]

    def slower(self, factor: float) -> tuple[Change, ...]:
        """Changes of ours above a factor."""
        return tuple(change for change in self.changes if change.who == OURS and change.factor > factor)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "changes": [{**asdict(one), "factor": one.factor} for one in self.changes]}


def compare_runs(before: Sequence[Report], after: Sequence[Report]) -> Comparison:
    """Match the cases of two runs by bench and name."""
    first, second = _cases(before), _cases(after)
    changes = [change for key, row in first.items() if key in second for change in _changes(*key, row, second[key])]
    return Comparison(
        tuple(changes),
        tuple(": ".join(key) for key in first if key not in second),
        tuple(": ".join(key) for key in second if key not in first),
        tuple(_differences(before, after)),
    )


def _cases(reports: Sequence[Report]) -> dict[tuple[str, str], Row]:
    return {(report["what"], row["case"]): row for report in reports for row in report["cases"]}


def _changes(what: str, case: str, first: Row, second: Row) -> list[Change]:
    later = dict(contenders(second))
    return [
        Change(
            what, case, who, metric, times[metric], later[who][metric],
            None if who == "peer" else ratio(first, metric, who), None if who == "peer" else ratio(second, metric, who),
        )
        for who, times in contenders(first)
        for metric in METRICS
        if times.get(metric) and later.get(who, {}).get(metric)
    ]  # fmt: skip


def _differences(before: Sequence[Report], after: Sequence[Report]) -> list[str]:
    found = []
    for name in MACHINE:
        first, second = ({str(report.get(name, "?")) for report in reports} for reports in (before, after))
        if first != second:
            found.append(f"{name}: {', '.join(sorted(first))} -> {', '.join(sorted(second))}")
    return found
