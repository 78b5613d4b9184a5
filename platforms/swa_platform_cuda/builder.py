"""The metadata builder of the NVIDIA platform."""

from __future__ import annotations

from typing import Any

from swa_backend.builder import DeepseekSparseSWAMetadataBuilder


class CUDADeepseekSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """One Triton launch a step; kernels for NVIDIA read dense rows, so no ragged copies are kept.

    Steps get tile plans only where FlashMLA was chosen; what its calls need is allocated here.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        from swa_platform_cuda.flashmla_provider import FlashMLAAttention

        self._takes_plans = isinstance(self.provider, FlashMLAAttention)
        if isinstance(self.provider, FlashMLAAttention):
            self.provider.reserve(self.config, self.device)
