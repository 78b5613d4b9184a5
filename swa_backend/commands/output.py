"""Results go to standard output, progress to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from swa_backend.cli import EXIT_BROKEN_PIPE, silence


class _Reporter:
    """The callback ``progress(done, total, text)`` of a long-running call, shown as a bar."""

    def __init__(self, bar: Progress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None)

    def __call__(self, done: int, total: int | None, text: str = "") -> None:
        self._bar.update(self._task, completed=done, total=total, description=text or None)


@contextmanager
def progress_bar(title: str) -> Iterator[_Reporter]:
    """A progress bar on standard error while the block runs."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield _Reporter(bar, title)


def write(text: str) -> None:
    """Write to standard output; when its reader is gone, end the command quietly with the status that says so."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
        raise typer.Exit(EXIT_BROKEN_PIPE) from None


def write_json(data: Any) -> None:
    """One JSON document, indented."""
    write(json.dumps(data, indent=2) + "\n")


def show(*parts: RenderableType) -> None:
    """Print tables and texts the way the terminal can show them."""
    console = Console()
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    write(captured.get())
