"""The metadata builder of the CPU platform."""

from __future__ import annotations

from swa_backend.builder import DeepseekSparseSWAMetadataBuilder


class CPUDeepseekSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """Builds on the CPU; the reference attention reads dense rows, so no ragged copies are kept."""
