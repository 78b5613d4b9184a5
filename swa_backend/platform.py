"""What a platform package supplies, and what its probe reports.

A platform is one frozen `Platform` object behind an entry point of the group ``swa_backend.platforms``. Importing
the module that holds it must be cheap and must import no vendor package: everything heavy sits behind a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from swa_backend._checks import show
from swa_backend.cache_layout import Dialect
from swa_backend.errors import PlatformError

if TYPE_CHECKING:
    import torch

    from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
    from swa_backend.layer_types import LayerType
    from swa_backend.operations import Operations
    from swa_backend.provider import AttentionProvider

ENTRY_POINT_GROUP = "swa_backend.platforms"
INTERFACE_VERSION = 1


class CacheRole(StrEnum):
    """Which of a layer's two caches is meant; on some chips they hold different fp8 dialects."""

    SWA = "swa"
    COMPRESSED = "compressed"


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a platform can be used on this machine, and why.

    Attributes:
        usable: True if the platform can run here.
        preferred: True if automatic selection should take it here (a device of its own is present).
        reasons: one sentence per observation, also when usable.
    """

    usable: bool
    preferred: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A chip to build for: ``vendor`` as the compiler names it and ``arch``, written ``cuda:90`` or ``hip:gfx942``."""

    vendor: str
    arch: str

    def __str__(self) -> str:
        return f"{self.vendor}:{self.arch}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``vendor:arch``.

        Raises:
            PlatformError: the text has another form.
        """
        vendor, colon, arch = text.partition(":")
        if not (vendor and colon and arch):
            raise PlatformError(
                "target", found=repr(text), legal="'vendor:arch'", fix="Write, for example, 'cuda:90' or 'hip:gfx942'."
            )
        return cls(vendor, arch)


class TileScheduler(Protocol):
    """Makes the plan holders that decode kernels fill on their first call of a step."""

    def fresh_plans(self, layer_types: Sequence[LayerType]) -> Mapping[LayerType, Any]:
        """A new, empty plan (or None where the platform's kernels take none) for each given layer type."""


class NoTileScheduler:
    """For kernels that take no plan."""

    def fresh_plans(self, layer_types: Sequence[LayerType]) -> Mapping[LayerType, Any]:
        return dict.fromkeys(layer_types)


def _no_targets(_: Target) -> tuple[str, ...]:
    return ("this platform takes no target",)


@dataclass(frozen=True)
class Platform:
    """One kind of machine. Checks itself at construction.

    Attributes:
        name: lower-case name, as in ``SWA_BACKEND_PLATFORM``.
        device_type: torch device type of its tensors.
        probe: looks at the machine without initialising a driver and without importing a vendor package.
        load_builder: imports and returns the metadata builder class.
        load_operations: imports and returns the index and cache operations.
        load_scheduler: the tile scheduler for a target (None: the device of this machine).
        load_providers: attention providers for a target, in order of preference; new ones for each builder, so that
            no two builders share scratch memory.
        cache_dialect: the fp8 dialect of a cache by its role and target.
        auto_rank: position in automatic selection, smaller first; None keeps the platform out of it.
        check_target: reasons why a target cannot be served; empty when it can.
        load_warmup: imports and returns ``warmup(backend, config, **options)``; None when nothing is compiled.
        interface_version: version of this interface that the platform was written for.
    """

    name: str
    device_type: str
    probe: Callable[[], Probe]
    load_builder: Callable[[], type[DeepseekSparseSWAMetadataBuilder]]
    load_operations: Callable[[], Operations]
    load_scheduler: Callable[[Target | None], TileScheduler]
    load_providers: Callable[[Target | None], Sequence[AttentionProvider]]
    cache_dialect: Callable[[CacheRole, Target | None], Dialect] = lambda role, target: Dialect.OCP
    auto_rank: int | None = None
    check_target: Callable[[Target], tuple[str, ...]] = _no_targets
    load_warmup: Callable[[], Callable[..., Any]] | None = None
    interface_version: int = INTERFACE_VERSION

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name and self.name == self.name.lower() and self.name != "auto"):
            raise PlatformError(
                "name", found=repr(self.name), legal="a lower-case word other than 'auto'", fix="Rename the platform."
            )
        if self.interface_version != INTERFACE_VERSION:
            raise PlatformError(
                f"platform {self.name}: interface_version",
                found=self.interface_version,
                legal=INTERFACE_VERSION,
                fix="Install a release of the platform package made for this version of swa_backend.",
            )
        for field in ("probe", "load_builder", "load_operations", "load_scheduler", "load_providers", "cache_dialect"):
            if not callable(getattr(self, field)):
                raise PlatformError(
                    f"platform {self.name}: {field}",
                    found=type(getattr(self, field)).__name__,
                    legal="a callable",
                    fix="Pass a function that imports what it needs when it is called.",
                )


def require_device(device: torch.device | str, platform: Platform) -> torch.device:
    """The device as torch has it; refused if it is none, or of another type than the platform's.

    Raises:
        PlatformError: no such device, or the device types differ.
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlatformError(
            "device",
            found=show(device),
            legal=f"a {platform.device_type!r} device",
            fix="Pass a torch.device or its name, such as 'cuda:0'.",
        ) from error
    if found.type != platform.device_type:
        raise PlatformError(
            "device",
            found=str(found),
            legal=f"a {platform.device_type!r} device for the platform {platform.name!r}",
            fix="Pass a device of that type, or load the platform that serves this device with get_backend(name).",
        )
    return found
