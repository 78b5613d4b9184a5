"""The metadata builder of the NVIDIA platform."""

from __future__ import annotations

from swa_backend.builder import DeepseekSparseSWAMetadataBuilder


class CUDADeepseekSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """One Triton launch a step; kernels for NVIDIA read dense rows, so no ragged copies are kept."""
