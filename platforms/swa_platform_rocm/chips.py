"""Which AMD chip is asked about, a target's or that of a device of this machine, and which chips are served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from swa_backend.platform import Target

TESTED = ("gfx942", "gfx950")
"""Chips as whose code every test run compiles and executes the kernels."""
_COMPILED = re.compile(r"gfx(90a|942|950|11[0-9a-f]{2}|12[0-9a-f]{2})")


def device_arch(device: torch.device | None = None) -> str | None:
    """Architecture of a GPU without its feature flags, the current one's for None; None without a GPU.

    Asks the driver. A GPU of another vendor answers with its product name, which is no architecture of ours.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    name: str = torch.cuda.get_device_properties(index).gcnArchName
    return name.split(":", 1)[0]


def arch_of(target: Target | None, device: torch.device | None = None) -> str | None:
    """Architecture of the target, else of the device; None where neither says."""
    return target.arch if target is not None else device_arch(device)


def reasons_against(arch: str) -> tuple[str, ...]:
    """Why a chip is not served at all; empty when it is."""
    if re.fullmatch(r"gfx[0-9a-f]{3,5}", arch) is None:
        return (f"the architecture {arch!r} is not written as 'gfx' and its number, such as 'gfx942'",)
    if _COMPILED.fullmatch(arch) is None:
        return (f"{arch} has no matrix units that Triton's bf16 products run on: gfx90a, gfx942, gfx950, gfx11, gfx12",)
    return ()


def remark_on(arch: str) -> str | None:
    """What to say of a chip that is served; None for those that every test run executes."""
    if arch in TESTED:
        return None
    return f"{arch}: kernels are compiled for it, but no test executes them; {' and '.join(TESTED)} are tested"
