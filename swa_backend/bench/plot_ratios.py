"""A picture of ratios: one bar a case and metric, on a logarithmic axis around 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swa_backend.bench.compare_runs import METRICS, Comparison
from swa_backend.bench.report import OURS, PEER, Report, contenders, ratio
from swa_backend.errors import ConfigError
from swa_backend.figures import BLUE, GREY, ORANGE, SKY, new_figure, save

LABELS: Mapping[str, str] = {"gpu": "GPU, cache warm", "gpu_cold": "GPU, cache cold", "host": "host"}
TICKS = (0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50)
COLOURS: Mapping[str, str] = {"gpu": BLUE, "gpu_cold": SKY, "host": ORANGE}


@dataclass(frozen=True, slots=True)
class Bars:
    """Ratios of one case by metric; above 1 is better."""

    group: str
    label: str
    ratios: Mapping[str, float]


def bars_of_reports(reports: Sequence[Report]) -> list[Bars]:
    """The peer's time over each contender's, for every case that has a peer."""
    found = []
    for report in reports:
        for row in report["cases"]:
            for who, _ in contenders(row):
                ratios = {metric: value for metric in METRICS if (value := ratio(row, metric, who)) is not None}
                if who != PEER and ratios:
                    label = row["case"] if who == OURS else f"{row['case']} ({who})"
                    found.append(Bars(report["what"], label, ratios))
    return found


def bars_of_comparison(comparison: Comparison) -> list[Bars]:
    """Time before over time after, for every contender but the peer."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for change in comparison.changes:
        if change.who != PEER:
            label = change.case if change.who == OURS else f"{change.case} ({change.who})"
            rows.setdefault((change.what, label), {})[change.metric] = 1 / change.factor
    return [Bars(what, label, ratios) for (what, label), ratios in rows.items()]


def plot_ratios(bars: Sequence[Bars], path: Path, title: str, meaning: str) -> None:
    """Draw the bars, first one on top.

    Args:
        bars: what to draw.
        path: file to write.
        title: above the picture.
        meaning: under the axis: what a ratio is.

    Raises:
        ConfigError: there is nothing to draw.
    """
    if not bars:
        raise ConfigError(
            "plot",
            found="no case with two times to compare",
            legal="a run with a peer, or two runs with cases in common",
            fix="Run the bench with --peer, or compare runs of the same bench.",
        )
    metrics = [metric for metric in METRICS if any(metric in one.ratios for one in bars)]
    thickness = 0.8 / len(metrics)
    figure = new_figure(9, 1.6 + len(bars) * max(0.26, 0.17 * len(metrics)))
    axes = figure.add_subplot()
    for i, metric in enumerate(metrics):
        drawn = [(row, one.ratios[metric]) for row, one in enumerate(bars) if metric in one.ratios]
        places = [row + (i - (len(metrics) - 1) / 2) * thickness for row, _ in drawn]
        axes.barh(
            places, [value - 1 for _, value in drawn], height=0.9 * thickness, left=1, color=COLOURS[metric],
            label=LABELS[metric],
        )  # fmt: skip
        for place, (_, value) in zip(places, drawn, strict=True):
            side = "left" if value >= 1 else "right"
            axes.annotate(
                f"{value:.2f}", (value, place), (3 if value >= 1 else -3, 0), textcoords="offset points", ha=side,
                va="center", fontsize=6.5,
            )  # fmt: skip
    values = [value for one in bars for value in one.ratios.values()]
    low, high = min(*values, 1 / 1.15), max(*values, 1.15)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.25, high * 1.25)
    ticks = [tick for tick in TICKS if low / 1.25 <= tick <= high * 1.25]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1, color="black", linewidth=1)
    groups = [one.group for one in bars]
    axes.set_yticks(range(len(bars)), [f"{one.group}: {one.label}" for one in bars], fontsize=8)
    for row in range(1, len(bars)):
        if groups[row] != groups[row - 1]:
            axes.axhline(row - 0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(axis="x", color=GREY, alpha=0.25)
    axes.set_xlabel(meaning)
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside lower right", ncols=len(metrics), fontsize=8, frameon=False)
    save(figure, path)
