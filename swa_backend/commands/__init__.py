"""The commands behind ``swa-backend``; everything here may use typer and rich."""

from __future__ import annotations

from typing import Annotated

import typer
import typer.main

from swa_backend.cli import PROGRAM
from swa_backend.commands.bench_command import bench
from swa_backend.commands.doctor_command import doctor
from swa_backend.commands.fuzz_command import fuzz
from swa_backend.commands.inspect_command import inspect
from swa_backend.commands.output import write
from swa_backend.commands.plan_memory_command import plan
from swa_backend.commands.replay_command import replay
from swa_backend.commands.warmup_command import warmup

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("replay")(replay)
app.command("doctor")(doctor)
app.command("warmup")(warmup)
app.add_typer(bench, name="bench")
app.command("inspect")(inspect)
app.command("plan-memory")(plan)
app.command("fuzz")(fuzz)


def _print_version(wanted: bool) -> None:
    if wanted:
        from swa_backend import __version__

        write(f"{PROGRAM} {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """DeepSeek-V4 sparse sliding-window attention for serving engines."""


def run(argv: list[str]) -> int:
    """Run the command that ``argv`` names and return its exit status; errors of the library pass through."""
    command = typer.main.get_command(app)
    try:
        command.main(args=argv, prog_name=PROGRAM)
    except SystemExit as finished:
        return finished.code if isinstance(finished.code, int) else int(finished.code is not None)
    return 0
