"""Tensors of a replay as functions of content keys: k, queries, compressed entries, top-k choices.

A row of 512 values is eight chunks of 64, each picked from a table of 4096 by 12 bits of the key. That costs one
lookup a chunk, and two different keys practically never give the same row. 64 divides into the groups of every page
layout, so a group of values that shares a scale never straddles chunks.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import torch

from swa_backend.layer_types import LayerType
from swa_backend.replay.hashing import mix, mix_int, salt

HEAD_DIM = 512
CHUNK = 64
NUM_CHUNKS = HEAD_DIM // CHUNK
TABLE_ROWS = 4096

_CHUNK_SHIFTS = np.array([0, 12, 24, 36], dtype=np.uint64)
_ROW_MASK = np.uint64(TABLE_ROWS - 1)


class DataMode(StrEnum):
    """What kind of numbers the keys are."""

    EXACT = "exact"  # every page layout holds them without loss
    ARBITRARY = "arbitrary"  # written with loss


def chunk_table(mode: DataMode, seed: int) -> torch.Tensor:
    """The [4096, 64] bf16 table of key chunks on the CPU.

    Exact values are whole numbers of at most four bits times a power of two: four significant bits and a spread of
    one to eight within a group fit every layout's value format under its write rule.
    """
    generator = torch.Generator().manual_seed(mix_int(seed, 1) >> 1)
    if mode is DataMode.EXACT:
        whole = torch.randint(-8, 9, (TABLE_ROWS, CHUNK), generator=generator)
        exponent = torch.randint(-4, -1, (TABLE_ROWS, 1), generator=generator)
        return (whole * torch.exp2(exponent.float())).to(torch.bfloat16)
    values = torch.randn(TABLE_ROWS, CHUNK, generator=generator)
    size = torch.exp2(torch.rand(TABLE_ROWS, 1, generator=generator) * 4 - 3)
    outlier = 1 + 15 * (torch.rand(TABLE_ROWS, CHUNK, generator=generator) < 1 / 256)
    return (values * size * outlier).to(torch.bfloat16)


def query_table(seed: int) -> torch.Tensor:
    """The [4096, 512] bf16 table of query rows on the CPU."""
    generator = torch.Generator().manual_seed(mix_int(seed, 2) >> 1)
    values = torch.randn(TABLE_ROWS, HEAD_DIM, generator=generator)
    size = 0.25 + 1.5 * torch.rand(TABLE_ROWS, 1, generator=generator)
    return (values * size).to(torch.bfloat16)


def chunk_numbers(keys: np.ndarray, layer: LayerType, *, entry: bool) -> np.ndarray:
    """Table rows [n, 8] int32 that make the key rows of content keys [n] in a layer's window or compressed cache."""
    low = mix(keys ^ salt("k", layer.value, int(entry)))
    bits = np.stack([low, mix(low)], axis=1)[:, :, None] >> _CHUNK_SHIFTS
    return (bits & _ROW_MASK).astype(np.int32).reshape(len(keys), NUM_CHUNKS)


def query_numbers(keys: np.ndarray, layer: LayerType, num_heads: int) -> np.ndarray:
    """Table rows [n, num_heads] int32 that are the queries of tokens with content keys [n]; heads differ."""
    first = (mix(keys ^ salt("q", layer.value)) & _ROW_MASK).astype(np.int32)
    return (first[:, None] + 37 * np.arange(num_heads, dtype=np.int32)) & (TABLE_ROWS - 1)


class Content:
    """Makes the tensors on one device."""

    def __init__(self, mode: DataMode, seed: int, num_heads: int, device: torch.device) -> None:
        self.mode = mode
        self.seed = seed
        self.num_heads = num_heads
        self.device = device
        self._chunks = chunk_table(mode, seed).to(device)
        self._queries = query_table(seed).to(device)

    def rows(self, keys: np.ndarray, layer: LayerType, *, entry: bool = False) -> torch.Tensor:
        """Key rows [n, 512] bf16 of tokens, or of compressed entries, with content keys [n]."""
        numbers = torch.from_numpy(chunk_numbers(keys, layer, entry=entry).reshape(-1)).to(self.device)
        return self._chunks.index_select(0, numbers).view(len(keys), HEAD_DIM)

    def queries(self, keys: np.ndarray, layer: LayerType) -> torch.Tensor:
        """Query rows [n, num_heads, 512] bf16 of tokens with content keys [n]."""
        numbers = torch.from_numpy(query_numbers(keys, layer, self.num_heads).reshape(-1)).to(self.device)
        return self._queries.index_select(0, numbers).view(len(keys), self.num_heads, HEAD_DIM)

    def attn_sink(self, layer: LayerType) -> torch.Tensor:
        """Sinks [num_heads] float32 of a layer, between -2 and 2."""
        generator = torch.Generator().manual_seed(mix_int(self.seed, 3, layer.ratio, int(layer.indexed)) >> 1)
        return (torch.rand(self.num_heads, generator=generator) * 4 - 2).to(self.device)


class TopkChooser:
    """What an indexer might pick: distinct complete entries in no order, all of them where they are fewer than topk.

    Places of a row walk through one scrambled order of ``0..topk-1`` from a start of the token's own. Where more
    entries than ``topk`` are complete, they are cut into ``topk`` strata of ``step`` entries, one pick from each.
    """

    def __init__(self, layer: LayerType, topk: int, seed: int, device: torch.device) -> None:
        self.topk = topk
        self._salt = salt("topk", layer.value)
        generator = torch.Generator().manual_seed(mix_int(seed, 4, layer.ratio) >> 1)
        order = torch.randperm(topk, generator=generator, dtype=torch.int32)
        noise = torch.randint(0, 1024, (topk,), generator=generator, dtype=torch.int32)
        # Row i of a window view is the scrambled order from place i on, wrapped around.
        self._order = torch.cat([order, order]).to(device).unfold(0, topk, 1)
        self._noise = torch.cat([noise, noise]).to(device).unfold(0, topk, 1)

    def choose(self, keys: np.ndarray, complete: np.ndarray) -> torch.Tensor:
        """Picks [n, topk] int32 for tokens with content keys [n] that see ``complete`` [n] entries; -1 is no pick."""
        bits = mix(keys ^ self._salt)
        step = np.maximum(complete // self.topk, 1)
        rest = np.maximum(complete - step * self.topk, 0).astype(np.uint64)  # entries past the last stratum
        shift = (bits >> np.uint64(40)) % (rest + np.uint64(1))
        parts = [bits % np.uint64(self.topk), bits >> np.uint64(20) & np.uint64(1023), step, shift, complete]
        columns = np.stack([part.astype(np.int32) for part in parts])
        start, jitter, steps, shifts, limit = torch.from_numpy(columns).to(self._order.device)[:, :, None]
        picks = self._order[start[:, 0]]
        if int(step.max(initial=1)) > 1:
            inside = self._noise[start[:, 0]].bitwise_xor_(jitter).mul_(steps).bitwise_right_shift_(10)
            picks = picks.mul_(steps).add_(inside)
        picks.add_(shifts)
        return picks.masked_fill_(picks >= limit, -1)
