"""One index row per prefill token over a gathered workspace: its window entries, then its compressed entries.

A provider that reads a chunk's keys from the bf16 workspace (`swa_backend.chunk_plan`) needs the rows of the workspace
that each token sees, not slots of the two caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swa_backend._math import ceil_to
from swa_backend.chunk_plan import PrefillChunk

ALIGNED_ENTRIES = 4
"""int32 entries of 16 bytes."""


def combined_stride(entries: int) -> int:
    """Entries from one combined row to the next, so that every row of ``entries`` entries is 16-byte aligned."""
    return ceil_to(entries, ALIGNED_ENTRIES)


@dataclass(frozen=True, slots=True)
class CompressedRows:
    """The compressed part of the rows.

    Attributes:
        topk: [n, K] int32 request-local positions or -1, in any order; None = every complete entry.
        block_table: [R, C] int32 pages of the compressed cache's own group, any row stride.
        entries_per_page: entries in one page.
        num_pages: pages of that cache.
        ratio: tokens per entry.
    """

    topk: torch.Tensor | None
    block_table: torch.Tensor
    entries_per_page: int
    num_pages: int
    ratio: int


@dataclass(frozen=True, slots=True)
class CombineStep:
    """Rows of the n tokens of one prefill chunk. All tensors on one device, vectors contiguous, rows any stride.

    Attributes:
        chunk: the chunk: its requests, where their window begins in the workspace, and how wide it is.
        num_decodes: requests of the batch before its first prefill.
        first_token: number of the chunk's first token in the batch.
        window_rows: [n, width] int32 paged slots (the chunk's part of ``prefill_swa_indices``), -1 = none.
        window_lens: [n] int32.
        token_to_req: [n] int32 request of each token in the batch.
        is_valid: [n] bool.
        query_start_loc: [R + 1] int32, whole batch.
        seq_lens: [R] int32, whole batch.
        gather_lens: [num_prefills] int32 window tokens that the workspace holds of each prefill.
        right_visible: [n] int32, None without image spans.
        compressed: None for layers without a compressed cache.
        out_rows: [n, S] int32, written in full; S >= width + K.
        out_lens: [n] int32, written.
    """

    chunk: PrefillChunk
    num_decodes: int
    first_token: int
    window_rows: torch.Tensor
    window_lens: torch.Tensor
    token_to_req: torch.Tensor
    is_valid: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    gather_lens: torch.Tensor
    right_visible: torch.Tensor | None
    compressed: CompressedRows | None
    out_rows: torch.Tensor
    out_lens: torch.Tensor
