"""The right attention output of single tokens: float64, from content keys alone, without pages or index rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from swa_backend.cache_layout import PageLayout
from swa_backend.layer_types import LayerType
from swa_backend.replay.content import (
    CHUNK,
    HEAD_DIM,
    NUM_CHUNKS,
    DataMode,
    chunk_numbers,
    chunk_table,
    query_numbers,
    query_table,
)
from swa_backend.replay.oracle_codec import stored_rows, unpacked_rows
from swa_backend.replay.packed_entries import packed_table

MAX_ROW_ERROR = 4e-3
MAX_EXAMPLES = 5


@dataclass(slots=True)
class Verdict:
    """What comparing showed.

    Attributes:
        tokens: tokens compared, each once whatever the number of layers.
        rows: (token, layer, head) rows compared.
        worst_error: largest relative row error.
        mismatches: (token, layer) pairs with a row that is wrong.
        examples: the first few of them in words.
    """

    tokens: int = 0
    rows: int = 0
    worst_error: float = 0.0
    mismatches: int = 0
    examples: list[str] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        self.mismatches += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)


class Oracle:
    """Knows every content key's values as the caches return them.

    Args:
        mode, seed: as the content's.
        swa_layout, compressed_layout: layouts of the caches; they only decide what a written value becomes.
        num_heads: query heads.
        sinks: [num_heads] float32 for each layer type.
        scale: factor of the logits.
        device: where it computes; it needs float64.
    """

    def __init__(
        self,
        mode: DataMode,
        seed: int,
        swa_layout: PageLayout,
        compressed_layout: PageLayout,
        num_heads: int,
        sinks: dict[LayerType, torch.Tensor],
        scale: float = HEAD_DIM**-0.5,
        device: torch.device | str = "cpu",
    ) -> None:
        written = chunk_table(mode, seed).double().numpy()
        # Place c of the written row repeats the chunk table, so column block c holds what chunk c turns into.
        rows = np.tile(written, (1, NUM_CHUNKS))
        stored = {False: rows, True: rows}
        if mode is not DataMode.EXACT:
            stored[False] = stored_rows(rows, swa_layout)
        if not compressed_layout.writable:  # its bytes come from the engine, in either mode
            codes, scales = (table.numpy() for table in packed_table(seed))
            stored[True] = np.tile(unpacked_rows(codes, scales), (1, NUM_CHUNKS))
        elif mode is not DataMode.EXACT:
            stored[True] = stored_rows(rows, compressed_layout)
        # Row n * NUM_CHUNKS + c is chunk c of a key row that picks the table's row n there.
        self._device = torch.device(device)
        self._tables = {
            entry: torch.from_numpy(table).view(-1, CHUNK).to(self._device) for entry, table in stored.items()
        }
        self._queries = query_table(seed).double().to(self._device)
        self._num_heads = num_heads
        self._sinks = {layer: sink.to(self._device).double() for layer, sink in sinks.items()}
        self._scale = scale

    def keys_of(self, keys: np.ndarray, layer: LayerType, *, entry: bool) -> torch.Tensor:
        """Cached rows [n, 512] float64 of content keys [n]."""
        return self._rows(self._numbers(keys, layer, entry=entry), entry=entry)

    def attend(
        self,
        tokens: np.ndarray,
        layer: LayerType,
        windows: Sequence[np.ndarray],
        entries: Sequence[np.ndarray],
    ) -> np.ndarray:
        """Outputs [n, num_heads, 512] float64 of n tokens.

        Args:
            tokens: [n] their content keys.
            layer: their layer type.
            windows: for each the content keys of the tokens in its window.
            entries: for each the keys of the compressed entries that it sees.
        """
        # One upload for all tokens: a device that is busy makes each of them wait.
        window_numbers = self._numbers(np.concatenate(windows), layer, entry=False)
        entry_numbers = self._numbers(np.concatenate(entries), layer, entry=True)
        queries = torch.from_numpy(query_numbers(tokens, layer, self._num_heads)).to(self._device)
        sink = self._sinks[layer]
        results = torch.empty(len(tokens), self._num_heads, HEAD_DIM, dtype=torch.float64, device=self._device)
        at = first = 0
        for token, (window, more) in enumerate(zip(windows, entries, strict=True)):
            own, seen = window_numbers[at : at + len(window)], entry_numbers[first : first + len(more)]
            at, first = at + len(window), first + len(more)
            k = torch.cat([self._rows(own, entry=False), self._rows(seen, entry=True)])
            logits = (self._queries[queries[token]] @ k.T).mul_(self._scale)
            peak = torch.maximum(logits.amax(dim=1), sink)
            weights = logits.sub_(peak[:, None]).exp_()
            total = weights.sum(dim=1) + (sink - peak).exp()
            torch.div(weights @ k, total[:, None], out=results[token])
        found: np.ndarray = results.cpu().numpy()
        return found

    def _numbers(self, keys: np.ndarray, layer: LayerType, *, entry: bool) -> torch.Tensor:
        """Rows [n, 8] int32 of the table, on the device, that make up content keys [n]."""
        numbers = chunk_numbers(keys, layer, entry=entry) * NUM_CHUNKS + np.arange(NUM_CHUNKS, dtype=np.int32)
        return torch.from_numpy(numbers).to(self._device)

    def _rows(self, numbers: torch.Tensor, *, entry: bool) -> torch.Tensor:
        return self._tables[entry].index_select(0, numbers.reshape(-1)).view(len(numbers), HEAD_DIM)


def compare(out: np.ndarray, right: np.ndarray, what: str, verdict: Verdict) -> None:
    """Compare one token's output [num_heads, 512] with the right one and note what is found.

    A row is wrong if its relative error is above 4e-3, or if it is zero (or not) where the right one is not (or is).
    """
    size = np.linalg.norm(right, axis=1)
    error = np.linalg.norm(out - right, axis=1) / np.where(size > 0, size, 1)
    zero_differs = (np.abs(out).max(axis=1) == 0) != (size == 0)
    bad = ~(error <= MAX_ROW_ERROR) | zero_differs  # a NaN is wrong as well
    verdict.rows += len(out)
    worst = float(np.nanmax(error)) if not np.isnan(error).all() else np.inf
    verdict.worst_error = max(verdict.worst_error, np.inf if np.isnan(error).any() else worst)
    if bad.any():
        head = int(np.argmax(bad))
        verdict.wrong(f"{what}: {int(bad.sum())} of {len(out)} heads; head {head} has relative error {error[head]:.2e}")
