"""What a platform's probe may look at, and the looking that all vendors share.

A probe runs while `swa_backend` is imported, so it must stay cheap, must not initialise a driver and must not import a
vendor package. Everything it needs comes from a `Machine`; tests hand in a made-up one.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def load_library(name: str) -> Any | None:
    """The shared library of this name, or None where the loader cannot find or open it."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as a probe sees it.

    Attributes:
        env: environment variables.
        torch_version: version of the installed torch.
        torch_build: what torch was built for, as in the module ``torch.version``: toolkit name -> version or None.
        glob: paths that match a shell pattern.
        load_library: opens a shared library by name, None when it is missing.
    """

    env: Mapping[str, str]
    torch_version: str
    torch_build: Mapping[str, str | None]
    glob: Callable[[str], Sequence[str]] = glob.glob
    load_library: Callable[[str], Any | None] = load_library

    @classmethod
    def here(cls) -> Machine:
        """The machine that this process runs on."""
        import torch

        build = {
            name: value
            for name, value in vars(torch.version).items()
            if isinstance(value, str | None) and not name.startswith("_") and name != "git_version"
        }
        return cls(env=os.environ, torch_version=torch.__version__, torch_build=build)

    def built_for(self, toolkit: str) -> str | None:
        """Version of the toolkit that torch was built for, or None if it was built for another or for none."""
        return self.torch_build.get(toolkit) or None

    def nodes(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Device nodes that match any of the patterns, sorted within each pattern."""
        return tuple(path for pattern in patterns for path in sorted(self.glob(pattern)))

    def hidden_by(self, variables: Iterable[str]) -> tuple[str, ...]:
        """The visibility variables among ``variables`` that hide every device, each written with its value."""
        return tuple(f"{name}={self.env[name]!r}" for name in variables if hides_devices(self.env.get(name)))


def hides_devices(value: str | None) -> bool:
    """Whether the value of a visibility variable leaves no device.

    Runtimes read the list up to its first invalid entry: an empty or negative first entry hides all devices, whatever
    follows. An unset variable hides none.
    """
    if value is None:
        return False
    first = value.split(",", 1)[0].strip()
    return not first or first.startswith("-") or first.lower() == "nodevfiles"
