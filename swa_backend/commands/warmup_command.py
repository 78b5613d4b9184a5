"""``swa-backend warmup``: compile the kernels of a model ahead, for this machine's GPU or for chips elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.commands.models import read_model
from swa_backend.commands.options import JsonOption, PlatformOption
from swa_backend.commands.output import progress_bar, show, write_json
from swa_backend.commands.targets import backend_for
from swa_backend.config import BackendConfig, SchedulerConfig, SpeculativeConfig
from swa_backend.errors import ConfigError
from swa_backend.registry import get_backend


@dataclass(frozen=True, slots=True)
class _Report:
    """What was compiled for one chip."""

    platform: str
    target: str | None
    seconds: float
    kernels: tuple[str, ...]


def warmup(
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Packaged model, or a Hugging Face config.json.")
    ] = "V4-Flash",
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="VENDOR:ARCH", help="Chip to compile for, not needed here; may be given several times."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Triton cache to fill for the targets. Default: Triton's own."),
    ] = None,
    mounted_at: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the cache will be on the machines that use it.")
    ] = None,
    platform: PlatformOption = None,
    drafts: Annotated[int, typer.Option(metavar="N", min=0, help="Draft tokens of a decoding request and step.")] = 0,
    dspark: Annotated[bool, typer.Option("--dspark", help="Draft blocks are non-causal.")] = False,
    cache_layout: Annotated[str, typer.Option(metavar="NAME", help="Page layout of the window caches.")] = "fp8_ds_mla",
    compressed_layout: Annotated[
        str | None, typer.Option(metavar="NAME", help="Page layout of the compressed caches. Default: the model's.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compile every kernel that a model needs. Several targets fill one cache, which the chips then find."""
    config = _config(model, drafts, dspark, cache_layout, compressed_layout)
    if not target and (cache is not None or mounted_at is not None):
        raise ConfigError(
            "cache",
            found="a folder without a target",
            legal="--cache and --mounted-at together with --target",
            fix="Name the chips with --target, or set TRITON_CACHE_DIR for this machine's own kernels.",
        )
    options: dict[str, Any] = {"cache": cache, "mounted_at": mounted_at} if target else {}
    # All are chosen before the first is compiled: a mistyped target is no reason to wait.
    backends = [backend_for(one, platform) for one in target] if target else [get_backend(platform)]
    reports = []
    for backend in backends:
        begin = time.perf_counter()
        names: Sequence[str] = ()
        if backend.platform.load_warmup:
            with progress_bar(f"warm-up {backend.target or backend.name}") as progress:
                names = backend.warmup(config, progress=progress, **options)
        target_name = None if backend.target is None else str(backend.target)
        reports.append(_Report(backend.name, target_name, round(time.perf_counter() - begin, 3), tuple(names)))
    if json:
        folder = None if cache is None else str(cache)
        write_json({"model": config.model.name, "cache": folder, "targets": [asdict(report) for report in reports]})
        return
    table = Table(title=f"Kernels of {escape(config.model.name)}", title_justify="left")
    for heading in ("platform", "target", "kernels", "seconds"):
        table.add_column(heading)
    for report in reports:
        chip = report.target or "this machine"
        table.add_row(escape(report.platform), escape(chip), str(len(report.kernels)), f"{report.seconds:.1f}")
    show(table)


def _config(model: str, drafts: int, dspark: bool, cache_layout: str, compressed_layout: str | None) -> BackendConfig:
    found = read_model(model)
    drafts = drafts or (found.dspark_block_size or 1 if dspark else 0)
    return BackendConfig(
        model=found,
        scheduler=SchedulerConfig(found.max_position_embeddings, 256, 8192),  # no key depends on these
        speculative=SpeculativeConfig(drafts, dspark=dspark) if drafts else None,
        cache_layout=cache_layout,
        compressed_layout=compressed_layout,  # type: ignore[arg-type]  # None takes the model's
    )
