"""Which AMD chip is asked about: a target's, else that of a device of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from swa_backend.platform import Target

SUPPORTED = ("gfx942", "gfx950")
"""Chips whose code is compiled and executed, in simulation, by every test run."""


def device_arch(device: torch.device | None = None) -> str | None:
    """Architecture of a GPU without its feature flags, the current one's for None; None without a GPU.

    Asks the driver. A GPU of another vendor answers with its product name, which is no architecture of ours.
    """
    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    name: str = torch.cuda.get_device_properties(index).gcnArchName
    return name.split(":", 1)[0]


def arch_of(target: Target | None, device: torch.device | None = None) -> str | None:
    """Architecture of the target, else of the device; None where neither says."""
    return target.arch if target is not None else device_arch(device)
