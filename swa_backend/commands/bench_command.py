"""``swa-backend bench``: time the kernels of this machine's GPU beside a peer's in one run; compare saved runs."""

from __future__ import annotations

import json as jsons
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.backend import Backend
from swa_backend.bench.compare_runs import Comparison, compare_runs
from swa_backend.bench.plot_ratios import bars_of_comparison, bars_of_reports, plot_ratios
from swa_backend.bench.report import OURS, PEER, Report, as_file, contenders, describe, ratio, read_reports
from swa_backend.commands.options import JsonOption, PlatformOption
from swa_backend.commands.output import progress_bar, show, write_json
from swa_backend.errors import ConfigError, PlatformError
from swa_backend.figures import check_picture
from swa_backend.registry import get_backend

EXIT_SLOWER = 1

# Every bench: its name, which is that of its module in `swa_backend.bench` too, and what it times. A module has
# ``run(backend, device, peer_folder) -> report``.
BENCHES: Mapping[str, str] = {
    "metadata": "the build of a step",
    "cache": "write, gather, index rows",
    "attention": "a layer of each type",
    "step": "a whole V4-Flash decode step",
    "providers": "the platform's attention providers, as captured graphs",
}
_RATIO = "the peer's time over ours (right of 1: ours is faster)"
_CHANGE = "time before over time after (right of 1: faster than before)"

bench = typer.Typer(no_args_is_help=True, help="Time kernels on a GPU, beside a peer's; compare saved runs.")

_Peer = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder with the peer's peer.py, to time beside ours.")
]
_Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON report there as well.")]
_Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ratios to a .png, .svg or .pdf.")]


def _command(names: Sequence[str]) -> Callable[..., None]:
    def command(
        peer: _Peer = None,
        platform: PlatformOption = None,
        output: _Output = None,
        plot: _Plot = None,
        json: JsonOption = False,
    ) -> None:
        backend = _gpu_backend(platform)
        _check_files(peer, output, plot)
        _present(_run(names, backend, peer, output), plot, json)

    return command


for _name, _about in BENCHES.items():
    _help = f"Time {_about}: host and GPU time a call in microseconds, launches, ratios to a peer."
    bench.command(_name, help=_help)(_command((_name,)))
bench.command("all", help="Time everything above, one report.")(_command(tuple(BENCHES)))


@bench.command("show")
def show_run(
    run: Annotated[Path, typer.Argument(metavar="FILE", help="What a bench wrote with --output.")],
    plot: _Plot = None,
    json: JsonOption = False,
) -> None:
    """Print a saved run again, or draw its ratios; needs no GPU."""
    if plot is not None:
        check_picture(plot)
    _present(read_reports(run), plot, json)


@bench.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The first run.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The second run.")],
    fail_above: Annotated[
        float | None,
        typer.Option(metavar="FACTOR", min=0.0, help="Exit with 1 if a time of ours grew by more, such as 1.1."),
    ] = None,
    plot: _Plot = None,
    json: JsonOption = False,
) -> None:
    """Compare two saved runs case by case; needs no GPU."""
    if plot is not None:
        check_picture(plot)
    comparison = compare_runs(read_reports(before), read_reports(after))
    if not comparison.changes:
        raise ConfigError(
            str(after),
            found=f"no case in common with {before}",
            legal="two runs of the same bench",
            fix="Compare runs that timed the same cases.",
        )
    if plot is not None:
        plot_ratios(bars_of_comparison(comparison), plot, f"{before} -> {after}", _CHANGE)
    slower = comparison.slower(fail_above) if fail_above is not None else ()
    if json:
        write_json({**comparison.to_dict(), "slower": len(slower)})
    else:
        notes = [f"The runs differ in more than the library: {one}" for one in comparison.differences]
        notes += [f"Only in {before}: {one}" for one in comparison.only_before]
        notes += [f"Only in {after}: {one}" for one in comparison.only_after]
        notes += [f"Slower than allowed: {one.what}: {one.case}, {one.metric} x {one.factor:.2f}" for one in slower]
        show(_changes(comparison), *(escape(note) for note in notes))
    if slower:
        raise typer.Exit(EXIT_SLOWER)


def _gpu_backend(platform: str | None) -> Backend:
    backend = get_backend(platform)
    if backend.platform.device_type != "cuda":
        raise PlatformError(
            "platform",
            found=f"{backend.name}, whose tensors are on the device {backend.platform.device_type!r}",
            legal="a platform with a GPU",
            fix="Run this on a machine with an NVIDIA or AMD GPU and the torch that is built for it "
            "(`swa-backend doctor` says what is missing); `bench show` and `bench compare` read saved runs anywhere.",
        )
    return backend


def _check_files(peer: Path | None, output: Path | None, plot: Path | None) -> None:
    """Refuse before anything is timed what could not be written after."""
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(
            "output", found=repr(str(output)), legal="a file in a folder that exists", fix="Make the folder first."
        )
    if plot is not None:
        check_picture(plot)
        if peer is None:
            raise ConfigError(
                "plot", found="no peer", legal="--plot with --peer", fix="Name the peer whose ratio is to be drawn."
            )


def _run(names: Sequence[str], backend: Backend, peer: Path | None, output: Path | None) -> list[Report]:
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    reports: list[Report] = []
    with progress_bar("bench") as progress:
        for number, name in enumerate(names):
            progress(number, len(names), f"bench {name}")
            reports.append(import_module(f"swa_backend.bench.{name}").run(backend, device, peer))
            if output is not None:  # after each, so that one that breaks takes none with it
                output.write_text(jsons.dumps(as_file(reports), indent=1) + "\n")
    return reports


def _present(reports: Sequence[Report], plot: Path | None, json: bool) -> None:
    if json:
        write_json(as_file(reports))
    else:
        show(*map(_table, reports))
    if plot is not None:
        plot_ratios(bars_of_reports(reports), plot, "\n".join(map(describe, reports)), _RATIO)


def _table(report: Report) -> Table:
    table = Table(
        title=escape(describe(report)),
        title_justify="left",
        caption="microseconds a call, median (90th percentile); ratio = peer / it: host, GPU, GPU with cold caches",
        caption_justify="left",
    )
    for heading in ("case", "whose"):
        table.add_column(heading, overflow="fold")
    for heading in ("host", "GPU", "cold", "launches", "ratio"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in report["cases"]:
        for who, times in contenders(row):
            numbers = (_with_p90(times.get(name), times.get(f"{name}_p90")) for name in ("host", "gpu", "gpu_cold"))
            ratios = (ratio(row, name, who) for name in ("host", "gpu", "gpu_cold") if who != PEER)
            table.add_row(
                escape(row["case"]) if who == OURS else "", escape(who), *numbers, _number(times.get("launches"), 0),
                " ".join(_number(one, 2) for one in ratios if one is not None),
            )  # fmt: skip
    return table


def _changes(comparison: Comparison) -> Table:
    table = Table(caption="microseconds a call; factor = after / before; peer / it in each run", caption_justify="left")
    for heading in ("bench: case", "whose", "time"):
        table.add_column(heading, overflow="fold")
    for heading in ("before", "after", "factor", "peer / it"):
        table.add_column(heading, justify="right", overflow="fold")
    for one in comparison.changes:
        style = "bold red" if one.factor > 1.05 else "green" if one.factor < 0.95 else None
        table.add_row(
            escape(f"{one.what}: {one.case}"), escape(one.who), one.metric, _number(one.before, 1),
            _number(one.after, 1), _number(one.factor, 2),
            " -> ".join(_number(ratio, 2) for ratio in (one.peer_before, one.peer_after) if ratio is not None),
            style=style,
        )  # fmt: skip
    return table


def _with_p90(value: float | None, p90: float | None) -> str:
    return _number(value, 1) + ("" if value is None or p90 is None else f" ({p90:.1f})")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
