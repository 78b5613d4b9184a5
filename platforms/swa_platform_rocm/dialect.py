"""Which fp8 dialect a cache holds on an AMD chip."""

from __future__ import annotations

from swa_backend.cache_layout import Dialect
from swa_backend.errors import PlatformError
from swa_backend.platform import CacheRole, Target
from swa_platform_rocm.chips import arch_of

_FNUZ_ARCH = "gfx942"


def cache_dialect(role: CacheRole, target: Target | None) -> Dialect:
    """Fnuz for the sliding-window cache on gfx942, whose matrix units take that dialect; OCP for every other cache.

    Without a target the device of this machine is asked.

    Raises:
        PlatformError: there is neither a target nor a device.
    """
    if role is not CacheRole.SWA:
        return Dialect.OCP
    arch = arch_of(target)
    if arch is None:
        raise PlatformError(
            "target",
            found="neither a target nor a device",
            legal="a chip, which decides the fp8 dialect of the window cache",
            fix="Name one, get_backend('rocm', target='hip:gfx950') for example, or run where a GPU is visible.",
        )
    return Dialect.FNUZ if arch == _FNUZ_ARCH else Dialect.OCP
