"""The metadata builder of the AMD platform."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.reference.provider import ReferenceAttention


class GraphSupport(StrEnum):
    """What of a decode step a captured graph may hold."""

    BUILD = "build"
    DECODE = "decode"


class DeepseekV4ROCMAiterSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """One Triton launch a step, with the ragged copies of the rows that aiter reads.

    The ragged rows come out of that launch: entries packed without gaps, and their `indptr`, which the rows of padded
    tokens repeat. Their memory is that of the widest step, causal or not, for ``max_num_batched_tokens`` rows, so an
    update between draft steps (`update_draft_decode_metadata`) derives them again in place.
    """

    wants_ragged_rows: ClassVar[bool] = True

    @property
    def graph_support(self) -> GraphSupport:
        """``decode``: build (`capture_build`), draft update and attention of a step of decodes.

        ``build``: without the attention, where the builder chose the reference, which reads lengths on the host.
        Steps with prefills are never captured.
        """
        return GraphSupport.BUILD if isinstance(self.provider, ReferenceAttention) else GraphSupport.DECODE
