"""The AMD platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from swa_backend.platform import NoTileScheduler, Platform, Target, TileScheduler
from swa_platform_rocm.dialect import cache_dialect
from swa_platform_rocm.probe import check_target, probe

if TYPE_CHECKING:
    from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
    from swa_backend.operations import Operations
    from swa_backend.provider import AttentionProvider


def _load_builder() -> type[DeepseekSparseSWAMetadataBuilder]:
    from swa_platform_rocm.builder import DeepseekV4ROCMAiterSparseSWAMetadataBuilder

    return DeepseekV4ROCMAiterSparseSWAMetadataBuilder


def _load_operations() -> Operations:
    from swa_backend.kernels.loading import load_operations

    return load_operations("rocm")


def _load_warmup() -> Callable[..., Any]:
    from swa_backend.kernels.loading import load_warmup

    warmup = load_warmup("rocm")
    import swa_platform_rocm.aiter_rows  # noqa: F401  # its kernel takes part

    return warmup


def _load_scheduler(target: Target | None) -> TileScheduler:
    return NoTileScheduler()


def _load_providers(target: Target | None) -> Sequence[AttentionProvider]:
    from swa_backend.portable.provider import TritonAttention
    from swa_backend.reference.provider import ReferenceAttention
    from swa_platform_rocm.aiter_provider import AiterAttention

    others = (TritonAttention(target), ReferenceAttention())
    return (AiterAttention(target, others), *others)


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
    load_warmup=_load_warmup,
)
