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


def entry_bounds(
    positions: torch.Tensor, is_valid: torch.Tensor, ratio: int, width: int, out_lens: torch.Tensor
) -> None:
    """The most entries that rows of distinct picks can have.

    Args:
        positions: [n] int32 or int64 position of each token.
        is_valid: [n] bool; another token has no entry.
        ratio: tokens per entry.
        width: of the rows.
        out_lens: [n] int32, written.
    """
    complete = torch.div(positions.long() + 1, ratio, rounding_mode="floor")
    out_lens.copy_(complete.clamp(0, width).where(is_valid, 0))


def mark_columns(
    block_table: torch.Tensor, seq_lens: torch.Tensor, ratio: int, entries_per_page: int, columns: torch.Tensor
) -> None:
    """Write down for each page of these requests in which column of its table it stands.

    Where a page stands in several columns any of them is right; other pages keep what they have.

    Args:
        block_table: [R, C] int32 pages of a compressed cache.
        seq_lens: [R] int32 tokens of each request.
        ratio: tokens of an entry.
        entries_per_page: entries of a page.
        columns: [pages] int32, changed.
    """
    live = -(-(seq_lens // ratio) // entries_per_page)
    at = torch.arange(block_table.shape[1], device=block_table.device).expand_as(block_table)
    inside = (at < live[:, None]) & (block_table >= 0) & (block_table < columns.shape[0])
    columns[block_table[inside].long()] = at[inside].to(columns.dtype)


def entries_of_slots(
    rows: torch.Tensor,
    lens: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    columns: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,
) -> None:
    """Turn slots of a compressed cache back to entries of each token's request.

    Args:
        rows: [n, w] int32 slots, any row stride.
        lens: [n] int32; anything outside [0, w] is clamped.
        token_to_req: [n] int32 request of each token.
        block_table: [R, C] int32.
        columns: [pages] int32 from `mark_columns`, a first guess: the table itself decides.
        entries_per_page: entries of a page.
        out: [n, w] int32, written in full: -1 for no entry, for a slot outside the cache, and for one whose page the
            request does not have.
    """
    width = rows.shape[1]
    live = torch.arange(width, device=rows.device) < lens.clamp(0, width)[:, None]
    live = live & (rows >= 0) & (rows < columns.shape[0] * entries_per_page)
    page = torch.div(rows, entries_per_page, rounding_mode="floor")
    table = block_table[token_to_req.long()]
    same = page[:, :, None] == table[:, None, :]
    entry = same.int().argmax(dim=2) * entries_per_page + rows % entries_per_page
    out.copy_(entry.where(live & same.any(dim=2), -1))
