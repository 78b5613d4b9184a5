"""Which platform this process uses, and `get_backend`.

Nothing here knows any platform by name: what a machine offers is answered by each platform's probe.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from swa_backend._process import end_on_interrupt, is_own_command, let_threads_sleep
from swa_backend.backend import Backend
from swa_backend.discovery import PLATFORM_VARIABLE, Registry, StillImportingError, run_probe
from swa_backend.errors import PlatformError
from swa_backend.platform import Platform, Probe, Target

AUTO = "auto"

logger = logging.getLogger("swa_backend")


@dataclass(frozen=True, slots=True)
class Choice:
    """The platform of this process, and why it is that one."""

    platform: Platform
    why: str


def choose(registry: Registry, requested: str | None) -> Choice:
    """Pick the platform of a process.

    Args:
        registry: the installed platforms.
        requested: value of ``SWA_BACKEND_PLATFORM``: a platform name; ``auto``, empty or None to choose here.

    A bundled platform whose probe prefers this machine wins, smallest ``auto_rank`` first; then a third-party one in
    the same way; then, in the same order, one that is merely usable. Platforms without ``auto_rank`` take no part.

    Raises:
        PlatformError: the platform asked for is not registered or not usable here, or automatic choice finds none.
    """
    name = (requested or AUTO).strip().lower() or AUTO
    if name != AUTO:
        return Choice(registry.require_usable(name, PLATFORM_VARIABLE), f"named by {PLATFORM_VARIABLE}")
    seen: list[tuple[Platform, Probe]] = []
    for platform in registry.automatic():
        probe = run_probe(platform)
        seen.append((platform, probe))
        if probe.usable and probe.preferred:
            break
    else:
        usable = [platform for platform, probe in seen if probe.usable]
        if not usable:
            raise registry.error(PLATFORM_VARIABLE, f"{AUTO!r}, and no platform that takes part in it is usable here")
        platform = usable[0]
    whys = (f"{one.name}: {', '.join(probe.reasons)}" for one, probe in seen)
    return Choice(platform, f"chosen automatically ({'; '.join(whys)})")


class _Process:
    """The registry and the choice of this process."""

    def __init__(self) -> None:
        self.registry: Registry | None = None
        self.requested: str | None = None
        self.choice: Choice | None = None
        self.failure: PlatformError | None = None
        self.backends: dict[tuple[str, Target | None], Backend] = {}


_process = _Process()


def registry() -> Registry:
    """The platforms installed for this process."""
    if _process.registry is None:
        _process.registry = Registry()
    return _process.registry


def choose_at_import(env: Mapping[str, str] = os.environ) -> None:
    """Make the one choice of this process; `swa_backend` calls it at the end of its own import.

    Raises:
        PlatformError: ``SWA_BACKEND_PLATFORM`` names something that is not registered or not usable here. In our own
            command line the error is kept for the command to report.
    """
    if is_own_command():
        end_on_interrupt()
        let_threads_sleep()  # the probes are what loads torch
    _process.requested = env.get(PLATFORM_VARIABLE)
    _process.choice = _process.failure = None
    try:
        _choose()
    except StillImportingError:
        pass  # the first get_backend() chooses, when that import is through
    except PlatformError as error:
        named = (_process.requested or AUTO).strip().lower() not in ("", AUTO)
        if named and not is_own_command():
            raise
        _process.failure = error


def _choose() -> Choice:
    choice = choose(registry(), _process.requested)
    _process.choice = choice
    logger.info("platform %s: %s", choice.platform.name, choice.why)
    return choice


def chosen() -> Choice:
    """The platform chosen at import.

    Raises:
        PlatformError: none could be chosen.
    """
    if _process.failure is not None:
        raise _process.failure
    return _process.choice or _choose()


def get_backend(name: str | None = None, target: Target | str | None = None) -> Backend:
    """The descriptor of a platform; the same object for the same arguments.

    Args:
        name: a registered platform; None for the one chosen at import.
        target: a chip to build for instead of the device of this machine, such as ``"cuda:90"``. The machine is then
            not probed.

    Raises:
        PlatformError: the platform is not registered, not usable here (without ``target``), or cannot serve ``target``.
    """
    wanted = Target.parse(target) if isinstance(target, str) else target
    if name is not None and not isinstance(name, str):
        raise PlatformError(
            "platform", found=type(name).__name__, legal="a name, or None for the chosen one", fix="Pass a string."
        )
    key = chosen().platform.name if name is None else name.strip().lower()
    if (key, wanted) not in _process.backends:
        _process.backends.setdefault((key, wanted), _make_backend(key, wanted, probed=name is None))
    return _process.backends[key, wanted]


def _make_backend(name: str, target: Target | None, probed: bool) -> Backend:
    if target is None:
        return Backend(registry().require(name) if probed else registry().require_usable(name))
    platform = registry().require(name)
    reasons = tuple(platform.check_target(target))
    if reasons:
        raise PlatformError(
            "target",
            found=f"{str(target)!r}, which the platform {name!r} cannot serve: {'; '.join(reasons)}",
            legal=f"a target of the platform {name!r}",
            fix="Name another target, or the platform that serves this one.",
        )
    return Backend(platform, target)
