"""``swa-backend plan-memory``: bytes a token, and the tokens that fit."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.commands.models import read_model
from swa_backend.commands.options import JsonOption
from swa_backend.commands.output import show, write_json
from swa_backend.config import BackendConfig, SchedulerConfig, SpeculativeConfig
from swa_backend.plan_memory import MemoryPlan, parse_size, plan_memory


def plan(
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Packaged model, or a Hugging Face config.json.")
    ] = "V4-Flash",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="GPU memory for the caches, such as 80GiB.")] = "80GiB",
    page_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a window page, a multiple of 32.")
    ] = 64,
    compressed_page_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that a page of a compressed cache stands for.")
    ] = 256,
    cache_layout: Annotated[str, typer.Option(metavar="NAME", help="Page layout of the window caches.")] = "fp8_ds_mla",
    compressed_layout: Annotated[
        str | None, typer.Option(metavar="NAME", help="Page layout of the compressed caches. Default: the model's.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of the longest context. Default: the model's.")
    ] = None,
    max_batched_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a step, for the prefill workspace.")
    ] = 8192,
    prefill_chunk_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Longest contexts that the prefill workspace holds.")
    ] = 4,
    drafts: Annotated[int, typer.Option(metavar="N", min=0, help="Draft tokens of a decoding request and step.")] = 0,
    draft_layers: Annotated[
        bool, typer.Option("--draft-layers", help="Count the draft layers that the model lists too.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what a model's caches take of a GPU's memory, by layer type, and how many tokens fit."""
    found = read_model(model)
    config = BackendConfig(
        found,
        SchedulerConfig(max_model_len or found.max_position_embeddings, 256, max_batched_tokens),
        speculative=SpeculativeConfig(drafts) if drafts else None,
        page_tokens=page_tokens,
        cache_layout=cache_layout,
        compressed_layout=compressed_layout,  # type: ignore[arg-type]  # None takes the model's
        prefill_chunk_size=prefill_chunk_size,
    )
    report = plan_memory(config, parse_size(memory), compressed_page_tokens, draft_layers=draft_layers)
    if json:
        write_json(report.to_dict())
    else:
        show(
            _caches(report),
            _fits(report),
            f"Beside the caches: a prefill workspace of at most {report.workspace:,} bytes.",
        )


def _caches(report: MemoryPlan) -> Table:
    layouts = {one.cache: one.layout for one in report.caches}
    title = f"Caches of {report.model}: {', '.join(f'{cache} {layout}' for cache, layout in layouts.items())}"
    table = Table(title=escape(title), title_justify="left", show_footer=True, caption_justify="left")
    for heading, footer in (
        ("layers", "all"),
        ("cache", ""),
        ("page", ""),
        ("bytes a token", ""),
        ("caches", str(sum(one.caches for one in report.caches))),
        ("all of them", _number(report.bytes_per_token())),
    ):
        text = heading in ("layers", "cache", "page")
        table.add_column(heading, footer, justify="left" if text else "right", overflow="fold")
    for one in report.caches:
        holds = f"{one.page_tokens} tokens" + (f", {one.entries} entries" if one.entries != one.page_tokens else "")
        table.add_row(
            f"{one.layers} {one.layer_type}", one.cache, f"{holds}: {one.page_bytes:,} B",
            _number(one.bytes_per_token), str(one.caches), _number(one.caches * one.bytes_per_token),
        )  # fmt: skip
    if any(one.caches < one.layers for one in report.caches):
        table.caption = "Layers that share compressed entries read one cache."
    return table


def _fits(report: MemoryPlan) -> Table:
    table = Table(title=f"What fits in {report.memory:,} bytes", title_justify="left")
    table.add_column("pages", overflow="fold")
    for heading in ("context", "bytes a request", "requests", "tokens"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_row("all kept", "any", "", "", f"{report.kept_tokens:,}")
    for fit in report.fits:
        numbers = (fit.context, fit.bytes_per_request, fit.requests, fit.tokens)
        table.add_row("window's given back", *(f"{number:,}" for number in numbers))
    return table


def _number(value: Fraction) -> str:
    return f"{float(value):,.2f}".rstrip("0").rstrip(".")
