"""The embedded platform: plain PyTorch on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swa_backend.platform import NoTileScheduler, Platform, Probe, Target, TileScheduler

if TYPE_CHECKING:
    from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
    from swa_backend.operations import Operations
    from swa_backend.provider import AttentionProvider


def probe() -> Probe:
    """Usable everywhere, preferred nowhere: automatic choice takes it when no platform finds a device of its own."""
    return Probe(usable=True, preferred=False, reasons=("plain PyTorch runs on any machine",))


def _load_builder() -> type[DeepseekSparseSWAMetadataBuilder]:
    from swa_platform_cpu.builder import CPUDeepseekSparseSWAMetadataBuilder

    return CPUDeepseekSparseSWAMetadataBuilder


def _load_operations() -> Operations:
    from swa_backend.reference.operations import ReferenceOperations

    return ReferenceOperations()


def _load_scheduler(target: Target | None) -> TileScheduler:
    return NoTileScheduler()


def _load_providers(target: Target | None) -> Sequence[AttentionProvider]:
    from swa_backend.reference.provider import ReferenceAttention

    return (ReferenceAttention(),)


PLATFORM = Platform(
    name="cpu",
    device_type="cpu",
    probe=probe,
    load_builder=_load_builder,
    load_operations=_load_operations,
    load_scheduler=_load_scheduler,
    load_providers=_load_providers,
    auto_rank=100,
)
