"""The metadata builder of the AMD platform."""

from __future__ import annotations

from typing import ClassVar

from swa_backend.builder import DeepseekSparseSWAMetadataBuilder


class ROCmDeepseekSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """One Triton launch a step, with the ragged copies of the rows that aiter and the portable kernel read."""

    wants_ragged_rows: ClassVar[bool] = True
