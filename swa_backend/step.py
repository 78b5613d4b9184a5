"""One step's metadata build as data: what goes in, and the persistent buffers that it fills.

The builder fills in a `BuildStep` on the host and hands it to the platform's operations once. The plain PyTorch
operations and the Triton launch take the same object, so that one can stand for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows without their gaps: entries of row i are ``indices[indptr[i]:indptr[i + 1]]``."""

    indices: torch.Tensor  # [rows * width] int32, persistent; only the first indptr[-1] mean anything
    indptr: torch.Tensor  # [capacity + 1] int32, persistent; entries past the live rows repeat the last one


@dataclass(frozen=True, slots=True)
class SwaGroupStep:
    """One sliding-window cache group of a step."""

    block_table: torch.Tensor  # [R, C] int32, any row stride
    slot_mapping: torch.Tensor  # [T] int64
    page_tokens: int
    num_pages: int  # page numbers at or past it give -1; at most 2^31 slots, so that a slot fits int32
    is_valid_token: torch.Tensor  # [T] bool, out
    decode_indices: torch.Tensor  # [Td, decode_width] int32, out
    decode_lens: torch.Tensor  # [max_tokens] int32, out; zero past Td when Td > 0
    prefill_indices: torch.Tensor | None  # [Tp, prefill_width] int32, out
    prefill_lens: torch.Tensor | None  # [Tp] int32, out
    decode_ragged: RaggedRows | None = None
    prefill_ragged: RaggedRows | None = None


@dataclass(frozen=True, slots=True)
class CompressedGroupStep:
    """One compressed cache group of a step."""

    block_table: torch.Tensor  # [R, C] int32
    slot_mapping: torch.Tensor  # [T] int64, the tokens' own slots; negative = not written
    ratio: int
    entries_per_page: int
    num_pages: int
    compressed_slot_mapping: torch.Tensor  # [T] int64, out
    rows: torch.Tensor | None  # [T, width] int32, out; groups whose every complete entry is visible (c128a)
    lens: torch.Tensor | None  # [T] int32, out


@dataclass(frozen=True, slots=True)
class BuildStep:
    """Inputs shared by all groups of a step, its outputs, and the groups."""

    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    replay_start: torch.Tensor | None  # [R] int32, None = zeros
    spans: torch.Tensor | None  # [num_spans, 3] int32 (request, first, last position), by request and position
    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    window: int
    max_image_tokens: int
    causal: bool
    token_to_req: torch.Tensor  # [T] int32, out
    left_visible: torch.Tensor | None  # [T] int32, out, None without spans
    right_visible: torch.Tensor | None  # [T] int32, out
    prefill_gather_lens: torch.Tensor | None  # [num_prefills] int32, out
    swa: tuple[SwaGroupStep, ...]
    compressed: tuple[CompressedGroupStep, ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens
