"""``swa-backend inspect``: what the library makes of one step, and which keys each token sees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swa_backend.commands.options import JsonOption, PlatformOption
from swa_backend.commands.output import show, write_json
from swa_backend.errors import ConfigError
from swa_backend.figures import check_picture
from swa_backend.layer_types import LayerType
from swa_backend.model_config import ModelConfig
from swa_backend.registry import get_backend

EXIT_PROBLEM = 1
DEFAULT_EXAMPLE = "mixed"


def inspect(
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="A batch as JSON, or an example: decode, draft, image, missing-page, mixed (the default).",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A trace as in replay; azure and mooncake name the samples.")
    ] = None,
    step: Annotated[int, typer.Option(metavar="N", min=1, help="Step of the trace's replay, from 1 on.")] = 1,
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Of the trace: packaged model, or a config.json.")
    ] = "V4-Flash",
    max_requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of the trace: stop reading after so many requests.")
    ] = None,
    drafts: Annotated[int, typer.Option(metavar="N", min=0, help="Of the trace: draft tokens of a request.")] = 0,
    max_batched_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Of the trace: tokens of a step.")] = 2048,
    max_seqs: Annotated[int, typer.Option(metavar="N", min=1, help="Of the trace: requests of a step.")] = 64,
    page_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Of the trace: tokens of a window page.")] = 64,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the trace: as in replay.")] = 0,
    rows: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens that the table of rows shows; 0: all of them.")
    ] = 24,
    layer: Annotated[
        LayerType | None, typer.Option(help="Layer type to draw. Default: the first compressed one of the model.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw which keys each token sees to a .png, .svg or .pdf.")
    ] = None,
    platform: PlatformOption = None,
    json: JsonOption = False,
) -> None:
    """Show the split, rows, pages, chunk plan and plans of one step.

    Exit status 1 if a row is wrong or validation would refuse the step.
    """
    backend = get_backend(platform)
    if plot is not None:
        check_picture(plot)
    if batch is not None and trace is not None:
        raise ConfigError(
            "batch", found="--batch and --trace together", legal="one of them", fix="Leave one of the two out."
        )
    from swa_backend.inspect import inspect_step, read_batch
    from swa_backend.inspect.picture import draw_step

    if trace is None:
        given = read_batch(batch or DEFAULT_EXAMPLE)
    else:
        from swa_backend.inspect.trace_step import step_of_trace
        from swa_backend.replay import ReplayOptions

        options = ReplayOptions(
            trace=trace,
            model=model,
            max_requests=max_requests,
            drafts=drafts,
            max_batched_tokens=max_batched_tokens,
            max_seqs=max_seqs,
            page_tokens=page_tokens,
            seed=seed,
        )
        given = step_of_trace(options, step)
    report = inspect_step(given, backend)
    if plot is not None:
        draw_step(report, plot, _layer_to_draw(report.step.config.model, layer))
    if json:
        write_json(report.to_dict())
    else:
        from swa_backend.commands.inspect_tables import tables

        show(*tables(report, rows))
    if report.problems or report.validation is not None:
        raise typer.Exit(EXIT_PROBLEM)


def _layer_to_draw(model: ModelConfig, wanted: LayerType | None) -> LayerType:
    present = model.present_layer_types
    if wanted is None:
        return next((kind for kind in present if kind.compressed), present[0])
    if wanted not in present:
        raise ConfigError(
            "layer",
            found=repr(wanted.value),
            legal=f"{', '.join(present)} (the layer types of {model.name})",
            fix="Name a layer type of this model.",
        )
    return wanted
