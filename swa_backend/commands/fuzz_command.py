"""``swa-backend fuzz``: random histories of a whole engine, every step checked; failing ones are shrunk and saved."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.commands.options import JsonOption, PlatformOption
from swa_backend.commands.output import progress_bar, show, write_json
from swa_backend.errors import ConfigError
from swa_backend.registry import get_backend

if TYPE_CHECKING:
    import torch

    from swa_backend.backend import Backend
    from swa_backend.fuzz import FuzzReport, Mode

EXIT_MISMATCH = 1


class _Mode(StrEnum):
    EAGER = "eager"
    CAPTURED = "captured"


class _Profile(StrEnum):
    ANY = "any"
    CHIP = "chip"


def fuzz(
    case: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Run this saved case alone instead of random histories.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop once N steps were checked. Default: 2000.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(metavar="S", min=0, help="Stop after S seconds.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the first history.")] = 0,
    mode: Annotated[
        _Mode, typer.Option(help="captured: on a GPU, decode steps are replayed from a graph.")
    ] = _Mode.EAGER,
    profile: Annotated[
        _Profile | None,
        typer.Option(help="any: every setting; chip: those that vendors' kernels take. Default: any on a CPU."),
    ] = None,
    attention: Annotated[bool, typer.Option("--attention/--no-attention", help="Run attention too.")] = True,
    save: Annotated[Path, typer.Option(metavar="FOLDER", help="Where shrunk cases that fail are saved.")] = Path(
        "fuzz-failures"
    ),
    platform: PlatformOption = None,
    json: JsonOption = False,
) -> None:
    """Check random histories of a whole engine. Exit status 1 if a step is wrong."""
    backend = get_backend(platform)
    import torch

    from swa_backend.fuzz import Mode, Profile, run_fuzz

    torch.set_num_threads(1)  # everything here is small; threads would only wait for each other
    on_gpu = backend.platform.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(backend.platform.device_type)
    chosen = Profile(profile.value) if profile is not None else Profile.CHIP if on_gpu else Profile.ANY
    if save.exists() and not save.is_dir():
        raise ConfigError("--save", found=f"{str(save)!r}, no folder", legal="a folder", fix="Name another one.")
    if case is not None:
        _run_one(case, backend, device, Mode(mode.value), attention, json)
        return
    if steps is None and seconds is None:
        steps = 2000
    with progress_bar("fuzz") as progress:
        report = run_fuzz(
            backend,
            device,
            seed=seed,
            steps=steps,
            seconds=seconds,
            mode=Mode(mode.value),
            profile=chosen,
            attention=attention,
            save=save,
            progress=progress,
        )
    if json:
        write_json(report.to_dict())
    else:
        show(_table(report))
    if report.failures:
        raise typer.Exit(EXIT_MISMATCH)


def _run_one(case: Path, backend: Backend, device: torch.device, mode: Mode, attention: bool, json: bool) -> None:
    """Run a saved case and say whether it still fails."""
    from swa_backend.fuzz import CaseFailedError, load_case, run_case

    loaded = load_case(case)
    text = None
    try:
        run_case(loaded, backend, device, mode, attention=attention)
    except CaseFailedError as failure:
        text = str(failure)
    if json:
        write_json({"case": str(case), "seed": loaded.seed, "failure": text})
    else:
        show(escape(f"{case}: {'every step is right' if text is None else text}"))
    if text is not None:
        raise typer.Exit(EXIT_MISMATCH)


def _table(report: FuzzReport) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("platform", f"{report.platform}, {report.mode}"),
        ("histories", f"{report.histories} from seed {report.first_seed} on"),
        ("steps", f"{report.steps}, {report.captured_steps} of them in the shape of a graph"),
        ("tokens", f"{report.tokens}"),
        ("index rows checked", f"{report.index_rows}"),
        ("outputs compared", f"{report.outputs}"),
        ("events", ", ".join(f"{name} {count}" for name, count in report.events.items())),
        ("failures", f"{len(report.failures)}"),
        *((f"seed {one.seed}", f"{one.text}; saved as {one.path}") for one in report.failures),
        ("time", f"{report.seconds:.1f} s"),
    ]
    for name, text in rows:
        table.add_row(escape(name), escape(text))
    return table
