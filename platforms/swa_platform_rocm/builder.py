"""The metadata builder of the AMD platform."""

from __future__ import annotations

import logging
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar

import torch

from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.errors import PlatformError
from swa_backend.platform import require_device
from swa_backend.reference.provider import ReferenceAttention
from swa_platform_rocm.chips import arch_of, reasons_against, remark_on

logger = logging.getLogger("swa_backend")


class GraphSupport(StrEnum):
    """What of a decode step a captured graph may hold."""

    BUILD = "build"
    DECODE = "decode"


class DeepseekV4ROCMAiterSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """One Triton launch a step, with the ragged copies of the rows that aiter reads.

    The ragged rows come out of that launch: entries packed without gaps, and their `indptr`, which the rows of padded
    tokens repeat. Their memory is that of the widest step, causal or not, for ``max_num_batched_tokens`` rows, so an
    update between draft steps (`update_draft_decode_metadata`) derives them again in place.

    Arguments as those of the class that it derives from.

    Raises:
        PlatformError: the chip has no matrix units for the kernels. One that no test executes is served, with a
            warning in the log.
    """

    wants_ragged_rows: ClassVar[bool] = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: Any, config: Any, device: torch.device | str, *args: Any, **options: Any
    ) -> None:
        arch = arch_of(self.backend.target, require_device(device, self.backend.platform))
        if arch is not None:
            _check_chip(arch)
        super().__init__(kv_cache_spec, layer_names, config, device, *args, **options)

    @property
    def graph_support(self) -> GraphSupport:
        """``decode``: build (`capture_build`), draft update and attention of a step of decodes.

        ``build``: without the attention, where the builder chose the reference, which reads lengths on the host.
        Steps with prefills are never captured.
        """
        return GraphSupport.BUILD if isinstance(self.provider, ReferenceAttention) else GraphSupport.DECODE


@cache  # says it once
def _check_chip(arch: str) -> None:
    reasons = reasons_against(arch)
    if reasons:
        raise PlatformError(
            "device",
            found="; ".join(reasons),
            legal="a chip that Triton compiles bf16 matrix products for",
            fix="Run on such a GPU, or choose the cpu platform.",
        )
    remark = remark_on(arch)
    if remark is not None:
        logger.warning("%s", remark)
