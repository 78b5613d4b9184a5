"""Device memory that the calls of aiter's kernels share: allocated from the configuration, so that no step does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swa_backend._math import cdiv, ceil_to
from swa_backend.buffers import ROW_BLOCK
from swa_backend.config import MAX_HEADS_PER_RANK
from swa_backend.layer_types import LayerType

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

MOST_TOKENS = 4096
"""Tokens of one call. aiter's kernels address queries and outputs with 32 bits."""


@dataclass(frozen=True, slots=True)
class Room:
    """Buffers of one device; layers run one after the other, so all of them use the same."""

    indices: torch.Tensor  # [entries] int32, compressed rows without gaps
    indptr: torch.Tensor  # [MOST_TOKENS + 1] int32
    scan: torch.Tensor  # [MOST_TOKENS] int64
    launch_words: torch.Tensor  # [2] int64
    sink: torch.Tensor  # [128] float32

    @classmethod
    def allocate(cls, entries: int, device: torch.device) -> Room:
        """Room for this many entries of compressed rows."""

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            indices=zeros(max(entries, 1), torch.int32),
            indptr=zeros(MOST_TOKENS + 1, torch.int32),
            scan=zeros(MOST_TOKENS, torch.int64),
            launch_words=torch.tensor([1, 0], dtype=torch.int64, device=device),
            sink=zeros(MAX_HEADS_PER_RANK, torch.float32),
        )


class Rooms:
    """The room of each device. It only grows, and what was outgrown is kept: a captured graph may still use it."""

    def __init__(self) -> None:
        self._rooms: dict[torch.device, list[Room]] = {}

    def on(self, device: torch.device, entries: int = 0) -> Room:
        """The room of a device, with space for ``entries`` at least."""
        rooms = self._rooms.setdefault(device, [])
        if not rooms or rooms[-1].indices.numel() < entries:
            rooms.append(Room.allocate(entries, device))
        return rooms[-1]


def entries_of(config: BackendConfig) -> int:
    """Entries in the compressed rows of one call."""
    kinds = config.model.present_layer_types
    picked = config.model.index_topk if any(kind.indexed for kind in kinds) else 0
    complete = ceil_to(cdiv(config.scheduler.max_model_len, LayerType.C128A.ratio), ROW_BLOCK)
    widest = max(picked, complete if LayerType.C128A in kinds else 0)
    return min(config.scheduler.max_num_batched_tokens, MOST_TOKENS) * widest
