"""From a chip that is named on the command line to the platform that can be built for it."""

from __future__ import annotations

from swa_backend.backend import Backend
from swa_backend.errors import PlatformError
from swa_backend.platform import Target
from swa_backend.registry import get_backend, registry


def backend_for(text: str, platform: str | None) -> Backend:
    """The named platform for a target, or the first registered one that serves it.

    Raises:
        PlatformError: the text is no target, or no platform serves it.
    """
    target = Target.parse(text)
    if platform is not None:
        return get_backend(platform, target)
    reasons = []
    for found in registry().all():
        if found.platform is None:
            continue
        against = tuple(found.platform.check_target(target))
        if not against:
            return get_backend(found.platform.name, target)
        reasons.append(f"{found.platform.name}: {'; '.join(against)}")
    raise PlatformError(
        "target",
        found=f"{text!r}, which no platform serves ({' | '.join(reasons)})",
        legal="a chip that a registered platform can be built for",
        fix="Name another target, such as 'cuda:90' or 'hip:gfx942'.",
    )
