"""Whether the Hopper kernels may be used here: their language is experimental, so only what was tested is trusted."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swa_backend.kernels.jit import Launcher

ARCH = "90"
MODULES = ("hopper_decode", "hopper_window_prefill")
"""Modules of this package that bring the kernels written in Gluon, and those around them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a compiled decode kernel took when it was tested; more than this has not been.

    Attributes:
        registers: of a thread, the average over the roles.
        spilled_bytes: memory of a thread's own.
        shared_bytes: shared memory of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


TESTED: Mapping[str, Limits] = {"3.6.0": Limits(168, 128, 224 * 1024)}
"""By Triton's version."""


@dataclass(frozen=True)
class Toolchain:
    """What of the compiler is looked at; tests hand in a made-up one.

    Attributes:
        triton_version: of the installed Triton, None without one.
        import_kernels: imports the Gluon modules.
    """

    triton_version: Callable[[], str | None]
    import_kernels: Callable[[], None]

    @classmethod
    def here(cls) -> Toolchain:
        """This process."""
        return cls(_triton_version, import_kernels)

    def reasons(self) -> tuple[str, ...]:
        """Why the kernels cannot be compiled here; empty when they can."""
        version = self.triton_version()
        if version is None:
            return ("Triton is not installed",)
        if version.partition("+")[0] not in TESTED:
            return (f"it is written in Triton's experimental Gluon, tested with {', '.join(TESTED)}, not {version}",)
        try:
            self.import_kernels()
        except Exception as error:  # an experimental module may raise anything
            return (f"its Gluon kernels cannot be imported: {type(error).__name__}: {error}",)
        return ()


def _triton_version() -> str | None:
    try:
        import triton
    except Exception:  # a broken package may raise anything
        return None
    return str(triton.__version__)


def import_kernels() -> None:
    """Import every Gluon module, which declares its kernels."""
    for name in MODULES:
        importlib.import_module(f"swa_platform_cuda.{name}")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a loaded kernel takes of its GPU, and what that has."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    shared_limit: int


def taken_by(launcher: Launcher) -> Taken:
    """Compile (or find in Triton's cache) and load a key; what it takes."""
    import torch

    launcher.compile()
    compiled: Any = launcher.compiled
    properties = torch.cuda.get_device_properties(launcher.index)
    limit = getattr(properties, "shared_memory_per_block_optin", 227 * 1024)
    return Taken(compiled.n_regs, 4 * compiled.n_spills, compiled.metadata.shared, limit)


def resource_reasons(names: Iterable[str], taken: Callable[[str], Taken], version: str) -> tuple[str, ...]:
    """Why compiled kernels are not what was tested; empty when they are.

    Args:
        names: of the keys.
        taken: what one takes; whatever it raises is a reason.
        version: of Triton, one of `TESTED`.
    """
    limits = TESTED[version.partition("+")[0]]
    reasons = []
    for name in names:
        try:
            found = taken(name)
        except Exception as error:  # a compiler may raise anything
            reasons.append(f"{name} does not compile: {type(error).__name__}: {error}")
            continue
        for what, value, most in (
            ("registers a thread", found.registers, limits.registers),
            ("bytes a thread spilled", found.spilled_bytes, limits.spilled_bytes),
            ("bytes of shared memory", found.shared_bytes, min(limits.shared_bytes, found.shared_limit)),
        ):
            if value > most:
                reasons.append(f"{name} takes {value} {what}; at most {most} were tested")
    return tuple(reasons)
