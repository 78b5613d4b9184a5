"""Entry point of the command line: runs a command and turns what goes wrong into a message and an exit status.

Exit status: 0 fine; 1 the command ran and found something wrong; 2 it was asked for something that is not possible;
130 interrupted; 141 the reader of its output went away.

The commands themselves (`swa_backend.commands`) need typer and rich, which the core of the library does not.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from swa_backend._process import EXIT_INTERRUPTED, INTERRUPTED, raise_on_interrupt
from swa_backend.errors import SwaBackendError

PROGRAM = "swa-backend"
EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141
_EXTRA = ("typer", "click", "rich", "numpy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; ``argv`` defaults to the process's own arguments."""
    if not _prepare_streams():
        return _fail("standard output is closed. Give it a reader, or send it to /dev/null.")
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except SwaBackendError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        silence(sys.stdout)
        return EXIT_BROKEN_PIPE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        return _fail(
            f"the command line needs {error.name}, which is not installed. Run: pip install 'swa-backend[cli]'"
        )
    except OSError as error:
        if error.filename is not None:
            return _fail(f"{error.filename}: {error.strerror}. Name a file that can be used.")
        silence(sys.stdout)  # what is left of the output cannot be written either
        return _fail(f"cannot read or write: {error.strerror or error}. Check where the output goes.")


def _prepare_streams() -> bool:
    """Streams that can print anything: other encodings get escapes, a closed stderr nothing; False without stdout."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return sys.stdout is not None


def _run(argv: list[str]) -> int:
    from swa_backend.commands import run

    raise_on_interrupt()
    status = run(argv)
    sys.stdout.flush()
    return _interrupted() if status == EXIT_INTERRUPTED else status


def _interrupted() -> int:
    """Say that Ctrl-C ended the command: nothing that it prints at its end was printed."""
    try:
        sys.stderr.write(INTERRUPTED)
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)
    return EXIT_INTERRUPTED


def _fail(message: str) -> int:
    complain(message)
    return EXIT_USAGE


def complain(message: str) -> None:
    """Print an error the one way this program does."""
    try:
        print(f"{PROGRAM}: error: {message}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads it, or its disk is full
        silence(sys.stderr)


def silence(stream: object) -> None:
    """Point a stream whose reader is gone at nothing, so that the interpreter's last flush does not fail."""
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
