"""Compressed entries of a layout that the library only reads: here the engine makes the bytes.

An entry of 512 values is 256 bytes of e2m1 codes (the even-numbered value in the low nibble), then 32 e4m3 scales, one
for each 16 values. Like every content it is eight chunks from a table, which here holds codes and scales.
"""

from __future__ import annotations

import numpy as np
import torch

from swa_backend.cache import CompressedCache
from swa_backend.layer_types import LayerType
from swa_backend.replay.content import CHUNK, TABLE_ROWS, chunk_numbers
from swa_backend.replay.hashing import mix_int

CODE_BYTES = CHUNK // 2
CHUNK_SCALES = CHUNK // 16
_SCALES = (0x20, 0x39)  # e4m3 codes of the scales: 2^-3 to 1.125


def packed_table(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [4096, 32] and scales [4096, 4] of the chunks, uint8 on the CPU."""
    generator = torch.Generator().manual_seed(mix_int(seed, 5) >> 1)
    codes = torch.randint(0, 256, (TABLE_ROWS, CODE_BYTES), generator=generator)
    scales = torch.randint(*_SCALES, (TABLE_ROWS, CHUNK_SCALES), generator=generator)
    return codes.to(torch.uint8), scales.to(torch.uint8)


class PackedEntries:
    """Writes the entries of one replay."""

    def __init__(self, seed: int, device: torch.device) -> None:
        codes, scales = packed_table(seed)
        self._codes, self._scales = codes.to(device), scales.to(device)

    def write(self, keys: np.ndarray, layer: LayerType, cache: CompressedCache, slots: torch.Tensor) -> None:
        """Store the entries with content keys [n] at ``slots`` [n] int64 of a 288-byte cache; -1 stores nothing."""
        numbers = torch.from_numpy(chunk_numbers(keys, layer, entry=True).astype(np.int64)).to(slots.device)
        rows = torch.cat([self._codes[numbers].flatten(1), self._scales[numbers].flatten(1)], dim=1)
        real = slots >= 0
        pages = cache.pages
        size = pages.layout.bytes_per_token
        entries = pages.data.as_strided((pages.num_pages, pages.entries, size), (pages.page_stride, size, 1))
        entries[slots[real] // pages.entries, slots[real] % pages.entries] = rows[real]
