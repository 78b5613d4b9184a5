"""Compressed rows as aiter takes them, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from swa_platform_rocm.aiter_room import Room


def ragged_rows(rows: torch.Tensor, lens: torch.Tensor, is_valid: torch.Tensor, num_slots: int, room: Room) -> None:
    """Pack rows without gaps.

    Args:
        rows: [n, w] int32 slots, any row stride.
        lens: [n] int32, how many leading entries count; anything outside [0, w] is clamped.
        is_valid: [n] bool; a row of another token has no entry.
        num_slots: an entry that is negative, or at or past it, is none.
        room: where to write: row i's entries, in their order, to ``indices[indptr[i]:indptr[i + 1]]``. What lies
            behind the last of them means nothing.
    """
    width = rows.shape[1]
    lens = lens.clamp(0, width).where(is_valid, 0)
    keep = torch.arange(width, device=rows.device) < lens[:, None]
    keep &= (rows >= 0) & (rows < num_slots)
    entries = rows[keep]
    room.indices[: entries.numel()] = entries
    room.indptr[0] = 0
    room.indptr[1 : rows.shape[0] + 1] = keep.sum(dim=1).cumsum(0)
