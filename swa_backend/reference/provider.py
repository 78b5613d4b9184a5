"""The plain PyTorch reference as an attention provider, for any device that torch has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swa_backend.provider import AttentionCall, AttentionProvider, AttentionShape, head_reasons
from swa_backend.reference.attention import Segment, sparse_attention


class ReferenceAttention(AttentionProvider):
    """Exact in float32, for every cache layout, one or two caches. Slow on a GPU: it is there to compare with."""

    name = "reference"

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        """Every reason why the shape cannot be served; empty when it can."""
        return tuple(head_reasons(shape))

    def decode(self, call: AttentionCall) -> None:
        """Write the rows of the decode tokens, padded ones included."""
        metadata = call.metadata
        _attend(call, 0, metadata.num_decode_tokens, metadata.decode_swa_indices, metadata.decode_swa_lens)

    def prefill(self, call: AttentionCall) -> None:
        """Write the rows of the prefill tokens, padded ones included."""
        metadata = call.metadata
        if metadata.prefill_swa_indices is None or metadata.prefill_swa_lens is None:
            return
        first = metadata.num_decode_tokens
        _attend(
            call,
            first,
            first + metadata.num_prefill_tokens,
            metadata.prefill_swa_indices,
            metadata.prefill_swa_lens,
        )


def _attend(call: AttentionCall, first: int, last: int, rows: torch.Tensor, lens: torch.Tensor) -> None:
    """Attention of the tokens ``first .. last - 1``; ``rows`` [last - first, 1, width] and ``lens`` are theirs."""
    if first == last:
        return
    tokens = slice(first, last)
    segments = [Segment(call.pages, rows.squeeze(1), lens)]
    if call.compressed is not None:
        second = call.compressed
        # A padded token sees nothing, whatever the engine left in its compressed row.
        second_lens = second.lens[tokens].masked_fill(~call.metadata.is_valid_token[tokens], 0)
        segments.append(Segment(second.pages, second.rows[tokens], second_lens))
    lse = None if call.lse is None else call.lse[tokens]
    sparse_attention(call.q[tokens], segments, call.attn_sink, call.scale, call.out[tokens], lse)
