"""Sparse attention over paged caches in plain PyTorch: the CPU platform's engine and the meaning of every kernel.

Tokens go in chunks that share their dequantised keys, and a chunk in tiles. The softmax of a tile runs online over
blocks of `_KEYS` entries, and each block of each token is one matrix of a batched product of fixed size. So a token's
result depends neither on its neighbours nor on how wide their rows are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swa_backend._math import ceil_to
from swa_backend.reference.codec import dequantise_slots

if TYPE_CHECKING:
    from swa_backend.pages import PageView

_TOKENS = 128  # most tokens of a chunk
_ENTRIES = _TOKENS * 1024  # entries of a chunk, in all its rows; wide rows make it shorter
_TILE = 16  # tokens in one batched product; their state stays in the processor's cache
_KEYS = 128  # entries in one batched product
_HEADS = 8  # heads are padded to a multiple: with other numbers a product alone is split otherwise than one in a batch
_TABLE_ROWS = _TOKENS * _KEYS  # most keys held dequantised: 32 MiB


@dataclass(frozen=True, slots=True)
class Segment:
    """The entries that tokens see in one cache.

    Attributes:
        view: the cache's pages.
        rows: [n, w] int32 slots; one that is negative or at or past ``view.num_slots`` is no entry.
        lens: [n] int32, how many leading entries of each row count; anything outside [0, w] is clamped.
    """

    view: PageView
    rows: torch.Tensor
    lens: torch.Tensor


def sparse_attention(
    q: torch.Tensor,
    segments: Sequence[Segment],
    attn_sink: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend each token to the concatenation of its entries in all segments; keys are the values too.

    With ``s_j = scale * q . k_j``, ``out = sum_j exp(s_j) k_j / (sum_j exp(s_j) + exp(sink))`` and
    ``lse = log sum_j exp(s_j)`` (natural, without the sink). An entry that occurs twice counts twice. A token without
    entries gets 0 and -inf, whatever the sink. Everything is computed in float32 and rounded once.

    Args:
        q: [n, h, 512] bf16.
        segments: the caches, with n rows each.
        attn_sink: [h] float32; -inf leaves the plain softmax.
        scale: factor of the logits.
        out: [n, h, 512] bf16, written; float32 keeps what would be rounded.
        lse: [n, h] float32, written unless None.
    """
    live = [_cut(segment) for segment in segments]
    width = sum(segment.rows.shape[1] for segment in live)
    chunk = max(_TILE, min(_TOKENS, _ENTRIES // max(width, 1) // _TILE * _TILE))
    softmax = _OnlineSoftmax(q, attn_sink, scale)
    buffer = q.new_empty((_TILE * _KEYS, q.shape[2]), dtype=torch.float32)
    for first in range(0, q.shape[0], chunk):
        last = min(first + chunk, q.shape[0])
        keys = [_Keys(segment, slice(first, last), buffer) for segment in live]
        for start in range(first, last, _TILE):
            tile = slice(start, min(start + _TILE, last))
            softmax.begin(q[tile])
            for one in keys:
                for counts, block in one.blocks(tile.start - first, tile.stop - first):
                    softmax.add(counts, block)
            softmax.finish(out[tile], None if lse is None else lse[tile])


def _cut(segment: Segment) -> Segment:
    """The segment without the columns that no row counts, and without lengths that its rows do not have."""
    lens = segment.lens.clamp(0, segment.rows.shape[1])
    return Segment(segment.view, segment.rows[:, : int(lens.max()) if lens.numel() else 0], lens)


class _Keys:
    """The keys that a chunk of tokens sees in one cache.

    Neighbouring prefill tokens share nearly all their keys, so each is dequantised once, to a table; where the tokens
    share too little for that, block by block.
    """

    def __init__(self, segment: Segment, tokens: slice, buffer: torch.Tensor) -> None:
        self._view = segment.view
        self._buffer = buffer  # [_TILE * _KEYS, 512] float32
        rows, lens = segment.rows[tokens], segment.lens[tokens]
        width = rows.shape[1]
        column = torch.arange(width, device=rows.device)
        counts = (column < lens[:, None]) & (rows >= 0) & (rows < segment.view.num_slots)
        # -1, where no entry counts, reads as a key of zeros.
        self._slots = rows.new_full((rows.shape[0], ceil_to(width, _KEYS)), -1)
        self._slots[:, :width] = torch.where(counts, rows, -1)
        unique, index = torch.unique(self._slots, return_inverse=True)
        self._table = dequantise_slots(self._view, unique) if unique.numel() <= _TABLE_ROWS else None
        self._index = index

    def blocks(self, first: int, last: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(which entries count [n, _KEYS], keys [n, _KEYS, 512] float32) of the chunk's tokens ``first .. last - 1``.

        A block that holds nothing would change nothing, bit for bit, and is left out.
        """
        for left in range(0, self._slots.shape[1], _KEYS):
            block = slice(left, left + _KEYS)
            slots = self._slots[first:last, block]
            counts = slots >= 0
            if not counts.any():
                continue
            if self._table is None:
                yield counts, dequantise_slots(self._view, slots)
            else:
                keys = self._buffer[: slots.numel()]
                torch.index_select(self._table, 0, self._index[first:last, block].flatten(), out=keys)
                yield counts, keys.view(*slots.shape, -1)


class _OnlineSoftmax:
    """Running maximum, sum and weighted sum of the keys of a tile of tokens, in buffers that all tiles share."""

    def __init__(self, q: torch.Tensor, attn_sink: torch.Tensor, scale: float) -> None:
        heads, dim = q.shape[1:]
        self._heads = heads
        self._sink = attn_sink
        self._scale = scale
        padded = ceil_to(heads, _HEADS)
        self._q_buffer = q.new_zeros((_TILE, padded, dim), dtype=torch.float32)
        self._acc_buffer = torch.empty_like(self._q_buffer)
        self._scores_buffer = self._q_buffer.new_empty((_TILE, padded, _KEYS))

    def begin(self, q: torch.Tensor) -> None:
        """Start with the queries [n, h, 512] of up to `_TILE` tokens, and no entry."""
        tokens = q.shape[0]
        self._q, self._acc = self._q_buffer[:tokens], self._acc_buffer[:tokens]
        self._q[:, : self._heads] = q
        self._acc.zero_()
        self._scores = self._scores_buffer[:tokens]
        self._peak = self._q.new_full(self._q.shape[:2], -torch.inf)
        self._sum = torch.zeros_like(self._peak)
        self._seen = torch.zeros(tokens, dtype=torch.bool, device=q.device)

    def add(self, counts: torch.Tensor, keys: torch.Tensor) -> None:
        """Take in the entries that count, of [n, _KEYS], with their keys [n, _KEYS, 512]."""
        self._seen |= counts.any(dim=1)
        scores = self._scores
        torch.baddbmm(scores, self._q, keys.mT, beta=0, alpha=self._scale, out=scores)
        if not counts.all():
            # Also takes out what a NaN or an infinity in q made of the zero keys.
            scores.masked_fill_(~counts[:, None], -torch.inf)
        peak = torch.maximum(self._peak, scores.amax(dim=-1))
        base = peak.masked_fill(peak == -torch.inf, 0.0)
        decay = (self._peak - base).exp_()
        weights = scores.sub_(base[..., None]).exp_()
        self._sum.mul_(decay).add_(weights.sum(dim=-1))
        self._acc.mul_(decay[..., None]).baddbmm_(weights, keys)
        self._peak = peak

    def finish(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Write the rows; tokens that saw no entry get 0 and -inf."""
        empty = ~self._seen[:, None]
        peak, total = self._peak[:, : self._heads], self._sum[:, : self._heads]
        base = peak.masked_fill(peak == -torch.inf, 0.0)
        # An infinite denominator is right for a sink of +inf, and for one too large for exp: 0.
        denominator = total + (self._sink - base).exp_()
        result = self._acc[:, : self._heads].div_(denominator[..., None])
        out.copy_(result.masked_fill_(empty[..., None], 0.0))
        if lse is not None:
            lse.copy_(total.log().add_(base).masked_fill_(empty, -torch.inf))
