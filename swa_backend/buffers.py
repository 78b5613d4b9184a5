"""The builder's device memory: allocated once, so that every view handed out keeps its address."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swa_backend._math import cdiv, ceil_to
from swa_backend.config import BackendConfig
from swa_backend.groups import CompressedGroup
from swa_backend.layer_types import LayerType
from swa_backend.step import RaggedRows

ROW_BLOCK = 64  # row widths are padded to whole blocks of keys


@dataclass(frozen=True)
class StepBuffers:
    """Per-step values that do not depend on the cache group."""

    token_to_req: torch.Tensor  # [max_tokens] int32
    left_visible: torch.Tensor | None  # [max_tokens] int32, only with bidirectional images
    right_visible: torch.Tensor | None
    prefill_gather_lens: torch.Tensor  # [max_num_seqs] int32
    no_replay: torch.Tensor  # [max_num_seqs] int32 zeros

    @classmethod
    def allocate(cls, config: BackendConfig, device: torch.device) -> StepBuffers:
        tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        images = config.max_image_tokens > 0
        return cls(
            token_to_req=_zeros(device, tokens),
            left_visible=_zeros(device, tokens) if images else None,
            right_visible=_zeros(device, tokens) if images else None,
            prefill_gather_lens=_zeros(device, seqs),
            no_replay=_zeros(device, seqs),
        )


@dataclass(frozen=True)
class SwaGroupBuffers:
    """Rows of one sliding-window group. ``ragged`` ones exist where the platform wants them."""

    is_valid_token: torch.Tensor  # [max_tokens] bool
    decode_indices: torch.Tensor  # [max_tokens, window] int32
    noncausal_indices: torch.Tensor | None  # [max_tokens, non-causal width] int32, only with a non-causal draft
    decode_lens: torch.Tensor  # [max_tokens] int32
    prefill_indices: torch.Tensor  # [max_tokens, window + max_image_tokens] int32
    prefill_lens: torch.Tensor  # [max_tokens] int32
    decode_ragged: RaggedRows | None
    prefill_ragged: RaggedRows | None

    @classmethod
    def allocate(cls, config: BackendConfig, device: torch.device, *, ragged: bool) -> SwaGroupBuffers:
        tokens = config.scheduler.max_num_batched_tokens
        window, noncausal, prefill = config.model.window_size, config.non_causal_width, config.prefill_width
        return cls(
            is_valid_token=torch.zeros(tokens, dtype=torch.bool, device=device),
            decode_indices=_no_entries(device, tokens, window),
            noncausal_indices=_no_entries(device, tokens, noncausal) if noncausal else None,
            decode_lens=_zeros(device, tokens),
            prefill_indices=_no_entries(device, tokens, prefill),
            prefill_lens=_zeros(device, tokens),
            decode_ragged=_ragged(device, tokens, max(window, noncausal)) if ragged else None,
            prefill_ragged=_ragged(device, tokens, prefill) if ragged else None,
        )


@dataclass(frozen=True)
class CompressedGroupBuffers:
    """Rows of one compressed group."""

    slot_mapping: torch.Tensor  # [max_tokens] int64
    rows: torch.Tensor | None  # [max_tokens, width] int32, groups whose every complete entry is visible
    lens: torch.Tensor | None  # [max_tokens] int32

    @classmethod
    def allocate(cls, group: CompressedGroup, config: BackendConfig, device: torch.device) -> CompressedGroupBuffers:
        tokens = config.scheduler.max_num_batched_tokens
        whole = group.ratio == LayerType.C128A.ratio
        width = ceil_to(cdiv(config.scheduler.max_model_len, group.ratio), ROW_BLOCK)
        return cls(
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            rows=_no_entries(device, tokens, width) if whole else None,
            lens=_zeros(device, tokens) if whole else None,
        )


def _zeros(device: torch.device, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def _no_entries(device: torch.device, rows: int, width: int) -> torch.Tensor:
    return torch.full((rows, width), -1, dtype=torch.int32, device=device)


def _ragged(device: torch.device, rows: int, width: int) -> RaggedRows:
    return RaggedRows(indices=_zeros(device, rows * width), indptr=_zeros(device, rows + 1))
