"""Which platforms are installed, which one this process uses, and `get_backend`.

A platform package announces itself with an entry point of the group ``swa_backend.platforms``, named like the
platform. Nothing here knows any platform by name: what a machine offers is answered by each platform's probe. A
package that cannot be loaded never breaks the others; it is kept with its reason.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from swa_backend._process import is_own_command
from swa_backend.backend import Backend
from swa_backend.errors import PlatformError
from swa_backend.platform import ENTRY_POINT_GROUP, Platform, Probe, Target

PLATFORM_VARIABLE = "SWA_BACKEND_PLATFORM"
AUTO = "auto"
_OWN_DISTRIBUTION = "swa-backend"

logger = logging.getLogger("swa_backend")


class _StillImportingError(PlatformError):
    """A platform package is in the middle of its own import, which is what brought `swa_backend` in."""

    def __init__(self, name: str, module: str) -> None:
        super().__init__(
            f"platform {name}",
            found=f"the module {module!r} is in the middle of its own import",
            legal="a platform package that is imported completely",
            fix="Ask for a backend once that import is through.",
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """One entry point: where it comes from, and the platform behind it or the problem that keeps it out.

    Exactly one of ``platform`` and ``problem`` is set.
    """

    name: str
    origin: str
    bundled: bool
    platform: Platform | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The platform of this process, and why it is that one."""

    platform: Platform
    why: str


class Registry:
    """Platforms by name, loaded when they are first asked for.

    Args:
        points: entry points to read; by default those of every installed distribution.
    """

    def __init__(self, points: Iterable[EntryPoint] | None = None) -> None:
        found = list(entry_points(group=ENTRY_POINT_GROUP) if points is None else points)
        # Our own packages come first, so that nobody can take one of their names.
        found.sort(key=lambda point: (not _is_bundled(point), _origin(point), point.name))
        self._points: dict[str, EntryPoint] = {}
        self._duplicates: list[Registration] = []
        self._loaded: dict[str, Registration] = {}
        for point in found:
            first = self._points.setdefault(point.name, point)
            if first is not point:
                self._duplicates.append(_refuse(point, f"{_origin(first)} already registers the name {point.name!r}"))

    def all(self) -> tuple[Registration, ...]:
        """Every registration, bundled ones first and those refused for their name last; loads all platforms."""
        found: list[Registration] = []
        for name, point in self._points.items():
            try:
                found.append(self._get(name))
            except _StillImportingError as error:
                found.append(_refuse(point, str(error.found)))
        return (*found, *self._duplicates)

    def automatic(self) -> Iterator[Platform]:
        """Platforms that take part in automatic choice, in its order: ours by ``auto_rank``, then the others' by it.

        Third-party packages are loaded only when all of ours have been passed over.
        """
        for bundled in (True, False):
            names = [name for name, point in self._points.items() if _is_bundled(point) == bundled]
            platforms = [platform for name in names if (platform := self._get(name).platform) is not None]
            ranked = [(platform.auto_rank, platform.name, platform) for platform in platforms]
            yield from (platform for *_, platform in sorted(entry for entry in ranked if entry[0] is not None))

    def _get(self, name: str) -> Registration:
        if name not in self._loaded:
            self._loaded[name] = _load(self._points[name])
        return self._loaded[name]

    def require(self, name: str, field: str = "platform") -> Platform:
        """The platform of this name, usable here or not.

        Raises:
            PlatformError: it is not registered, or its package cannot be loaded; ``field`` is named as the culprit.
        """
        if name not in self._points:
            raise self.error(field, f"{name!r}, which no installed package registers")
        found = self._get(name)
        if found.platform is None:
            raise self.error(field, f"{name!r}, which cannot be loaded")
        return found.platform

    def require_usable(self, name: str, field: str = "platform") -> Platform:
        """The platform of this name, if its probe says that it can run here.

        Raises:
            PlatformError: as `require`, or the platform cannot be used on this machine.
        """
        platform = self.require(name, field)
        if not run_probe(platform).usable:
            raise self.error(field, f"{name!r}, which cannot be used here")
        return platform

    def describe(self) -> str:
        """Every registration with its reasons, one a line."""
        return "".join(f"\n  {found.name} ({found.origin}): {_verdict(found)}" for found in self.all()) or "\n  (none)"

    def error(self, field: str, found: str) -> PlatformError:
        """The error for a platform that was asked for by name and cannot be had."""
        return PlatformError(
            field,
            found=found,
            legal="a registered platform that is usable here",
            fix=f"Name another, or leave {PLATFORM_VARIABLE} unset. Registered are:{self.describe()}",
        )


def run_probe(platform: Platform) -> Probe:
    """Ask a platform whether it can run here; a probe that fails answers no, with the failure as its reason."""
    try:
        probe = platform.probe()
    except Exception as error:
        return Probe(usable=False, preferred=False, reasons=(f"its probe failed: {_one_line(error)}",))
    if not isinstance(probe, Probe):
        return Probe(usable=False, preferred=False, reasons=(f"its probe returned a {type(probe).__name__}",))
    return probe


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
    _process.requested = env.get(PLATFORM_VARIABLE)
    _process.choice = _process.failure = None
    try:
        _choose()
    except _StillImportingError:
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


def _load(point: EntryPoint) -> Registration:
    try:
        platform = point.load()
    except (Exception, SystemExit) as error:
        if _is_importing(point.module):
            raise _StillImportingError(point.name, point.module) from error
        return _refuse(point, f"loading {point.value} failed: {_one_line(error)}")
    if not isinstance(platform, Platform):
        return _refuse(point, f"{point.value} is a {type(platform).__name__}, not a swa_backend.Platform")
    if platform.name != point.name:
        return _refuse(point, f"its entry point is named {point.name!r}, its platform {platform.name!r}; they must be the same")
    if not isinstance(platform.auto_rank, int | None):
        return _refuse(point, f"its auto_rank is a {type(platform.auto_rank).__name__}, not an int or None")
    return Registration(point.name, _origin(point), _is_bundled(point), platform=platform)


def _refuse(point: EntryPoint, problem: str) -> Registration:
    return Registration(point.name, _origin(point), _is_bundled(point), problem=problem)


def _is_importing(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _verdict(found: Registration) -> str:
    if found.platform is None:
        return f"cannot be loaded; {found.problem}"
    probe = run_probe(found.platform)
    return "; ".join(("usable" if probe.usable else "not usable here", *probe.reasons))


def _is_bundled(point: EntryPoint) -> bool:
    return point.dist is not None and re.sub(r"[-_.]+", "-", point.dist.name).lower() == _OWN_DISTRIBUTION


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
