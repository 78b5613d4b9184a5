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
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Mooncake JSONL or Azure CSV, told apart by content; azure or mooncake name the packaged samples.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Packaged model, or a Hugging Face config.json.")
    ] = "V4-Flash",
    platform: PlatformOption = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Stop reading after this many requests. Default: 12 without --trace, else all."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="TYPES", help="Layer types to run, such as swaonly,c4a. Default: one of each type."),
    ] = None,
    attention: Annotated[_Attention, typer.Option(help="none: schedule, write and build only.")] = _Attention.ALL,
    verify: Annotated[_Verify, typer.Option(help="Which tokens to compare with the oracle.")] = _Verify.SAMPLED,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of contents, top-k choices and draft acceptance.")
    ] = 0,
    data: Annotated[
        _Data, typer.Option(help="exact: values that the cache layout holds exactly; arbitrary: any values.")
    ] = _Data.EXACT,
    drafts: Annotated[int, typer.Option(metavar="N", min=0, help="Draft tokens of a decoding request and step.")] = 0,
    acceptance: Annotated[
        float, typer.Option(metavar="P", help="Probability that a draft is right if all before it were.")
    ] = 0.7,
    max_batched_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a step.")] = 2048,
    max_seqs: Annotated[int, typer.Option(metavar="N", min=1, help="Requests of a step.")] = 64,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of the longest request. Default: as the trace needs.")
    ] = None,
    page_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a window page, a multiple of 32.")
    ] = 64,
    pages: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Pages of each cache. Default: 2048, more if a request needs them."),
    ] = None,
    cache_layout: Annotated[str, typer.Option(metavar="NAME", help="Page layout of the window caches.")] = "fp8_ds_mla",
    compressed_layout: Annotated[
        str | None, typer.Option(metavar="NAME", help="Page layout of the compressed caches. Default: the model's.")
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave malformed trace rows out and count them.")
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Check the values of every step too, and count what breaks a rule.")
    ] = False,
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
        acceptance=acceptance,
        max_batched_tokens=max_batched_tokens,
        max_seqs=max_seqs,
        max_model_len=max_model_len,
        page_tokens=page_tokens,
        pages=pages,
        cache_layout=cache_layout,
        compressed_layout=compressed_layout,
        skip_bad_rows=skip_bad_rows,
        validate=validate,
    )
    with progress_bar("replay") as progress:
        report = run_replay(options, progress=progress)
    if json:
        write_json(report.to_dict())
    else:
        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, *values in report.rows():
            table.add_row(escape(name), *(escape(str(value)) for value in values))
        show(table)
    if report.mismatches:
        raise typer.Exit(EXIT_MISMATCH)
