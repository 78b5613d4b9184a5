"""Pictures: matplotlib behind three functions; nothing needs a display, and a missing extra is told plainly."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from swa_backend.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 150

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
BLUE, ORANGE, GREEN, PURPLE, BLACK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000"
SKY, GREY = "#56B4E9", "#808080"


def check_picture(path: Path) -> None:
    """Refuse what could not be drawn or written, before the work that is to be drawn.

    Raises:
        ConfigError: matplotlib is missing, the suffix is not one of `SUFFIXES`, or the folder does not exist.
    """
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "plot",
            found=f"no usable matplotlib ({error})",
            legal="an installation with the extra 'plot'",
            fix="Run: pip install 'swa-backend[plot]'",
        ) from error
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            "plot", found=repr(str(path)), legal=f"a file name that ends in {', '.join(SUFFIXES)}", fix="Rename it."
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            "plot", found=repr(str(path)), legal="a file in a folder that exists", fix="Make the folder first."
        )


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches; no window, no global state."""
    return import_module("matplotlib.figure").Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that its suffix names."""
    figure.savefig(path, dpi=DPI, format=path.suffix.lower().lstrip("."))
