"""``swa-backend replay``: a request trace through scheduler, paged caches and attention, checked on the way."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.commands.options import JsonOption, PlatformOption
from swa_backend.commands.output import progress_bar, show, write_json
from swa_backend.registry import get_backend

EXIT_MISMATCH = 1


class _Attention(StrEnum):
    ALL = "all"
    NONE = "none"


class _Verify(StrEnum):
    SAMPLED = "sampled"
    ALL = "all"
    NONE = "none"


class _Data(StrEnum):
    EXACT = "exact"
    ARBITRARY = "arbitrary"


def replay(
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake JSONL or Azure CSV, told apart by content. Default: packaged sample.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Packaged model, or a Hugging Face config.json.")
    ] = "V4-Flash",
    platform: PlatformOption = None,
    max_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Stop reading after this many requests. Default: 12 of the sample, else all."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="TYPES", help="Layer types to run, separated by commas. Default: one of each type."),
    ] = None,
    attention: Annotated[_Attention, typer.Option(help="none: schedule, write and build only.")] = _Attention.ALL,
    verify: Annotated[_Verify, typer.Option(help="Which tokens to compare with the oracle.")] = _Verify.SAMPLED,
    seed: Annotated[int, typer.Option(min=0, help="Seed of contents, top-k choices and draft acceptance.")] = 0,
    data: Annotated[
        _Data, typer.Option(help="exact: values that the cache layout holds exactly; arbitrary: any values.")
    ] = _Data.EXACT,
    drafts: Annotated[int, typer.Option(min=0, help="Draft tokens of a decoding request and step.")] = 0,
    skip_bad_rows: Annotated[bool, typer.Option(help="Leave malformed trace rows out and count them.")] = False,
    json: JsonOption = False,
) -> None:
    """Replay a request trace and check what attention gives. Exit status 1 if anything is wrong."""
    get_backend(platform)
    from swa_backend.replay import ReplayOptions, run_replay

    options = ReplayOptions(
        trace=trace,
        model=model,
        platform=platform,
        max_requests=max_requests,
        layers=None if layers is None else tuple(layer.strip() for layer in layers.split(",")),
        attention=attention.value,
        verify=verify.value,
        seed=seed,
        data=data.value,
        drafts=drafts,
        skip_bad_rows=skip_bad_rows,
    )
    with progress_bar("replay") as progress:
        report = run_replay(options, progress=progress)
    if json:
        write_json(report.to_dict())
    else:
        table = Table(show_header=False)
        for name, *values in report.rows():
            table.add_row(escape(name), *(escape(str(value)) for value in values))
        show(table)
    if report.mismatches:
        raise typer.Exit(EXIT_MISMATCH)
