"""Sparse attention over paged caches in plain PyTorch: the CPU platform's engine and the meaning of every kernel.

The softmax runs online over blocks of `_KEYS` entries, and each block of each token is one matrix of a batched product
of fixed size. So a token's result depends neither on its neighbours nor on how wide their rows are.
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

_TOKENS = 128  # tokens whose shared keys are dequantised once
_SPAN = 1024  # entries of a row looked at together
_TILE = 16  # tokens in one batched product
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
    for first in range(0, q.shape[0], _TOKENS):
        tokens = slice(first, min(first + _TOKENS, q.shape[0]))
        softmax = _OnlineSoftmax(q[tokens], scale)
        for segment in segments:
            for slots in _live_slots(segment, tokens):
                for block, table, index in _key_tables(segment.view, slots):
                    softmax.add(block, table, index)
        softmax.finish(attn_sink, out[tokens], None if lse is None else lse[tokens])


def _live_slots(segment: Segment, tokens: slice) -> Iterator[torch.Tensor]:
    """Slots of the tokens as [n, a multiple of _KEYS] int32, -1 where no entry counts, in spans of the row."""
    rows = segment.rows[tokens]
    width = rows.shape[1]
    lens = segment.lens[tokens].clamp(0, width)
    live = int(lens.max())
    for first in range(0, live, _SPAN):
        last = min(first + _SPAN, width, live)
        part = rows[:, first:last]
        column = torch.arange(first, last, device=rows.device)
        counts = (column < lens[:, None]) & (part >= 0) & (part < segment.view.num_slots)
        slots = part.new_full((part.shape[0], ceil_to(last - first, _KEYS)), -1)
        slots[:, : last - first] = torch.where(counts, part, -1)
        yield slots


def _key_tables(view: PageView, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(slots [n, w], keys [u, 512] float32, index of each slot's key [n, w]); the slot -1 has a key of zeros.

    Neighbouring prefill tokens share nearly all their keys, so each is dequantised once; rows that share too little
    are served block by block.
    """
    unique, index = torch.unique(slots, return_inverse=True)
    if unique.numel() <= _TABLE_ROWS or slots.shape[1] <= _KEYS:
        yield slots, dequantise_slots(view, unique.long()), index
        return
    for block in torch.split(slots, _KEYS, dim=1):
        yield from _key_tables(view, block)


class _OnlineSoftmax:
    """Running maximum, sum and weighted sum of the keys of n tokens."""

    def __init__(self, q: torch.Tensor, scale: float) -> None:
        tokens, self._heads, dim = q.shape
        heads = ceil_to(self._heads, _HEADS)
        self._scale = scale
        self._q = q.new_zeros((tokens, heads, dim), dtype=torch.float32)
        self._q[:, : self._heads] = q
        self._peak = self._q.new_full((tokens, heads), -torch.inf)
        self._sum = self._q.new_zeros((tokens, heads))
        self._acc = self._q.new_zeros((tokens, heads, dim))
        self._seen = torch.zeros(tokens, dtype=torch.bool, device=q.device)
        self._keys = self._q.new_empty((_TILE * _KEYS, dim))
        self._scores = self._q.new_empty((_TILE, heads, _KEYS))

    def add(self, slots: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> None:
        """Take in the entries [n, a multiple of _KEYS] whose slot is not negative."""
        counts = slots >= 0
        self._seen |= counts.any(dim=1)
        tokens, width = slots.shape
        for first in range(0, tokens, _TILE):
            tile = slice(first, min(first + _TILE, tokens))
            for left in range(0, width, _KEYS):
                block = slice(left, left + _KEYS)
                # A block that holds nothing would change nothing, bit for bit.
                if counts[tile, block].any():
                    self._add_block(tile, counts[tile, block], table, index[tile, block])

    def _add_block(self, tile: slice, counts: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> None:
        tokens = counts.shape[0]
        keys = self._keys[: tokens * _KEYS]
        torch.index_select(table, 0, index.flatten(), out=keys)
        keys = keys.view(tokens, _KEYS, -1)
        scores = self._scores[:tokens]
        torch.baddbmm(scores, self._q[tile], keys.mT, beta=0, alpha=self._scale, out=scores)
        if not counts.all():
            # Also takes out what a NaN or an infinity in q made of the zero keys.
            scores.masked_fill_(~counts[:, None], -torch.inf)
        peak = torch.maximum(self._peak[tile], scores.amax(dim=-1))
        base = peak.masked_fill(peak == -torch.inf, 0.0)
        decay = (self._peak[tile] - base).exp_()
        weights = scores.sub_(base[..., None]).exp_()
        self._sum[tile] = self._sum[tile] * decay + weights.sum(dim=-1)
        self._acc[tile].mul_(decay[..., None]).baddbmm_(weights, keys)
        self._peak[tile] = peak

    def finish(self, attn_sink: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Write the rows; tokens that saw no entry get 0 and -inf."""
        empty = ~self._seen[:, None]
        peak, total = self._peak[:, : self._heads], self._sum[:, : self._heads]
        base = peak.masked_fill(peak == -torch.inf, 0.0)
        # An infinite denominator is right for a sink of +inf, and for one too large for exp: 0.
        denominator = total + (attn_sink - base).exp_()
        result = self._acc[:, : self._heads].div_(denominator[..., None])
        out.copy_(result.masked_fill_(empty[..., None], 0.0))
        if lse is not None:
            lse.copy_(total.log().add_(base).masked_fill_(empty, -torch.inf))
