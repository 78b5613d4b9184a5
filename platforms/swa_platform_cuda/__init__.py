"""The NVIDIA platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from swa_backend.platform import NoTileScheduler, Platform, Target, TileScheduler
from swa_platform_cuda.probe import check_target, probe, reasons_against

if TYPE_CHECKING:
    import torch

    from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
    from swa_backend.operations import Operations
    from swa_backend.provider import AttentionProvider


def _load_builder() -> type[DeepseekSparseSWAMetadataBuilder]:
    from swa_platform_cuda.builder import CUDADeepseekSparseSWAMetadataBuilder

    return CUDADeepseekSparseSWAMetadataBuilder


def _load_operations() -> Operations:
    from swa_backend.kernels.loading import load_operations

    return load_operations("cuda")


def _load_warmup() -> Callable[..., Any]:
    from swa_backend.kernels.loading import load_warmup

    warmup = load_warmup("cuda")
    import swa_platform_cuda.flashmla_rows  # noqa: F401  # its kernels take part
    from swa_platform_cuda.hopper_probe import Toolchain

    Toolchain.here().reasons()  # imports the Gluon kernels where they can be compiled, so that they take part
    return warmup


def _load_scheduler(target: Target | None) -> TileScheduler:
    from swa_platform_cuda.flashmla_contents import ARCHS
    from swa_platform_cuda.flashmla_plan import FlashMLATileScheduler

    if target is not None and target.arch not in ARCHS:
        return NoTileScheduler()
    return FlashMLATileScheduler()


def _load_providers(target: Target | None) -> Sequence[AttentionProvider]:
    from swa_backend.portable.provider import TritonAttention
    from swa_backend.reference.provider import ReferenceAttention
    from swa_platform_cuda.flashmla_provider import FlashMLAAttention
    from swa_platform_cuda.hopper_provider import HopperAttention

    def too_old(device: torch.device | None) -> tuple[str, ...]:
        return reasons_against(target, device)

    portable = TritonAttention(target, chip_reasons=too_old)
    # hopper after portable: as it stands now its suite has not run on a GPU, so it serves only where it is named.
    return (FlashMLAAttention(target), portable, HopperAttention(target), ReferenceAttention())


PLATFORM = Platform(
    name="cuda",
    device_type="cuda",
    probe=probe,
    load_builder=_load_builder,
    load_operations=_load_operations,
    load_scheduler=_load_scheduler,
    load_providers=_load_providers,
    auto_rank=10,
    check_target=check_target,
    load_warmup=_load_warmup,
)
