"""Which fp8 dialect a cache holds on an AMD chip."""

from __future__ import annotations

from swa_backend.cache_layout import Dialect
from swa_backend.platform import CacheRole, Target

_FNUZ_ARCH = "gfx942"


def cache_dialect(role: CacheRole, target: Target | None) -> Dialect:
    """Fnuz for the sliding-window cache on gfx942, whose matrix units take that dialect; OCP for every other cache.

    Without a target the device of this machine is asked.
    """
    if role is not CacheRole.SWA:
        return Dialect.OCP
    arch = target.arch if target is not None else _device_arch()
    return Dialect.FNUZ if arch == _FNUZ_ARCH else Dialect.OCP


def _device_arch() -> str:
    """Architecture of the current device, without its feature flags."""
    import torch

    name: str = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
    return name.split(":", 1)[0]
