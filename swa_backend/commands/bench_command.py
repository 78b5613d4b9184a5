"""``swa-backend bench``: time the kernels of this machine's GPU, beside a peer's in the same run."""

from __future__ import annotations

import json as jsons
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.commands.options import JsonOption, PlatformOption
from swa_backend.commands.output import show, write_json
from swa_backend.errors import PlatformError
from swa_backend.registry import get_backend


class _What(StrEnum):
    METADATA = "metadata"
    CACHE = "cache"
    ATTENTION = "attention"


def bench(
    what: Annotated[
        _What,
        typer.Argument(
            help="metadata: the build of a step. cache: write, gather, index rows. attention: a layer of each type."
        ),
    ],
    peer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with the peer's peer.py, to time beside ours.")
    ] = None,
    platform: PlatformOption = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON report there as well.")] = None,
    json: JsonOption = False,
) -> None:
    """Time kernels on a GPU: host and GPU time a call, launches, and the ratio to a peer. Microseconds."""
    backend = get_backend(platform)
    if backend.platform.device_type != "cuda":
        raise PlatformError(
            "platform",
            found=backend.name,
            legal="a platform with a GPU",
            fix="Run this on a machine with a GPU, and install the torch that is built for it.",
        )
    import torch

    from swa_backend.bench import attention, cache, metadata

    run = {_What.METADATA: metadata.run, _What.CACHE: cache.run, _What.ATTENTION: attention.run}[what]
    report = run(backend, torch.device("cuda", torch.cuda.current_device()), peer)
    if output is not None:
        output.write_text(jsons.dumps(report, indent=1) + "\n")
    if json:
        write_json(report)
    else:
        show(_table(report))


def _table(report: dict[str, Any]) -> Table:
    title = f"{report['what']} on {report['gpu']}, torch {report['torch']}, Triton {report['triton']}, {report['date']}"
    table = Table(title=escape(title), title_justify="left")
    for heading in ("case", "whose", "host", "host p90", "GPU", "launches", "peer's host / ours", "peer's GPU / ours"):
        table.add_column(heading)
    for row in report["cases"]:
        for who in ("ours", "peer"):
            if who not in row:
                continue
            numbers = (f"{row[who][name]:.1f}" for name in ("host", "host_p90", "gpu", "launches"))
            known = [row.get(name) if who == "ours" else None for name in ("host_ratio", "gpu_ratio")]
            ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in known)
            table.add_row(escape(row["case"]), who, *numbers, *ratios)
    return table
