"""How this interpreter was started."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath
from types import FrameType

_SCRIPTS = ("swa-backend", "swa-backend.exe", "swa-backend-script.py")
_PACKAGE = "swa_backend"
EXIT_INTERRUPTED = 130
INTERRUPTED = "swa-backend: interrupted\n"


def is_own_command() -> bool:
    """Whether the process is our own command line: the script ``swa-backend`` or ``python -m swa_backend``.

    The script imports `swa_backend` before any code of ours could catch an error, so the package has to know that the
    error will be reported by the command instead of raising it. Getting this wrong is harmless: the error then shows
    up as a traceback, or on the first `get_backend()`.
    """
    argv = getattr(sys, "argv", [])
    if not argv:
        return False
    if argv[0] == "-m":
        # While the interpreter still looks for the module, it is the word before the remaining arguments.
        module = sys.orig_argv[-len(argv)]
        return module == _PACKAGE or (module.startswith("-") and module.endswith(f"m{_PACKAGE}"))
    return PurePath(argv[0]).name in _SCRIPTS


def let_threads_sleep() -> None:
    """Have torch's CPU threads sleep while they wait for each other, unless the user chose otherwise.

    By default they spin, which makes a step several times slower as soon as anything else runs on the machine. OpenMP
    reads the variable when torch is loaded, and for the whole process: only our own command asks for it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def end_on_interrupt() -> None:
    """Have Ctrl-C end our own command with one line while its imports run, where an exception would be a traceback.

    Loading torch takes seconds, and some packages turn an exception inside their import into another one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody has decided otherwise
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Undo `end_on_interrupt`: what runs now cleans up after itself."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, INTERRUPTED.encode())
    finally:
        os._exit(EXIT_INTERRUPTED)
