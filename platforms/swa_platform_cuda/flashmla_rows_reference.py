"""Index rows as FlashMLA takes them, in plain PyTorch."""

from __future__ import annotations

import torch


def tidy_rows(
    rows: torch.Tensor,
    lens: torch.Tensor,
    is_valid: torch.Tensor,
    num_slots: int,
    out_rows: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    """Copy rows so that every entry that does not count is -1.

    Args:
        rows: [n, w] int32 slots, any row stride.
        lens: [n] int32, how many leading entries count; anything outside [0, w] is clamped.
        is_valid: [n] bool; a row of another token has no entry.
        num_slots: an entry that is negative, or at or past it, is none.
        out_rows: [n, >= w] int32, written in full.
        out_lens: [n] int32, written: the clamped length, 0 for a token that is not valid.
    """
    width = rows.shape[1]
    out_lens.copy_(lens.clamp(0, width).where(is_valid, 0))
    live = torch.arange(width, device=rows.device) < out_lens[:, None]
    out_rows.fill_(-1)
    out_rows[:, :width] = rows.where(live & (rows >= 0) & (rows < num_slots), -1)
