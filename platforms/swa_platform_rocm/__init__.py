"""The AMD platform."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from swa_backend.errors import PlatformError
from swa_backend.platform import Platform, Target, TileScheduler
from swa_platform_rocm.dialect import cache_dialect
from swa_platform_rocm.probe import check_target, probe

if TYPE_CHECKING:
    from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
    from swa_backend.operations import Operations
    from swa_backend.provider import AttentionProvider


def _part(name: str) -> Any:
    """A module of this package; those that hold kernels are not in every release."""
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise PlatformError(
            f"platform rocm: {name}",
            found="not part of this release",
            legal="a release with kernels for AMD devices",
            fix="Install one, or name another platform with SWA_BACKEND_PLATFORM or get_backend(name).",
        ) from error


def _load_builder() -> type[DeepseekSparseSWAMetadataBuilder]:
    cls: type[DeepseekSparseSWAMetadataBuilder] = _part("builder").ROCmDeepseekSparseSWAMetadataBuilder
    return cls


def _load_operations() -> Operations:
    operations: Operations = _part("operations").load_operations()
    return operations


def _load_scheduler(target: Target | None) -> TileScheduler:
    scheduler: TileScheduler = _part("scheduler").load_scheduler(target)
    return scheduler


def _load_providers(target: Target | None) -> Sequence[AttentionProvider]:
    providers: Sequence[AttentionProvider] = _part("providers").load_providers(target)
    return providers


PLATFORM = Platform(
    name="rocm",
    device_type="cuda",  # torch uses this name for AMD devices too
    probe=probe,
    load_builder=_load_builder,
    load_operations=_load_operations,
    load_scheduler=_load_scheduler,
    load_providers=_load_providers,
    cache_dialect=cache_dialect,
    auto_rank=20,
    check_target=check_target,
)
