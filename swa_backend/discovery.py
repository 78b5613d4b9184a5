"""Finding the installed platforms: entry points, what stands behind them, and the error that lists them all.

A platform package announces itself with an entry point of the group ``swa_backend.platforms``, named like the
platform. A package that cannot be loaded never breaks the others; it is kept with its reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from swa_backend.errors import PlatformError
from swa_backend.platform import ENTRY_POINT_GROUP, Platform, Probe

PLATFORM_VARIABLE = "SWA_BACKEND_PLATFORM"
_OWN_DISTRIBUTION = "swa-backend"


class StillImportingError(PlatformError):
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
            except StillImportingError as error:
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


def _load(point: EntryPoint) -> Registration:
    try:
        platform = point.load()
    except (Exception, SystemExit) as error:
        if _is_importing(point.module):
            raise StillImportingError(point.name, point.module) from error
        return _refuse(point, f"loading {point.value} failed: {_one_line(error)}")
    if not isinstance(platform, Platform):
        return _refuse(point, f"{point.value} is a {type(platform).__name__}, not a swa_backend.Platform")
    if platform.name != point.name:
        return _refuse(
            point, f"its entry point is named {point.name!r}, its platform {platform.name!r}; they must be the same"
        )
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
