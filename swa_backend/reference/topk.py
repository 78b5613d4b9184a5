"""Top-k mapping in plain PyTorch: request-local compressed positions to slots of the compressed cache."""

from __future__ import annotations

import torch

_CHUNK_ELEMENTS = 1 << 20  # bounds the int64 temporaries
_INT32_MAX = 2**31 - 1


def map_topk(
    topk: torch.Tensor,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    entries_per_page: int,
    is_valid: torch.Tensor,
    ratio: int,
    num_pages: int | None,
    out_slots: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    """Map each row of ``topk``, pack what survives to the left in its order, and count it.

    An entry is dropped if it is negative or not complete at its token (``>= (position + 1) // ratio``), if its row or
    column lies outside the table, or if its page is negative or at or past ``num_pages``. A token that is not valid,
    or whose request is not in the table, keeps nothing.

    Args:
        topk: [T, K] int32, -1 = none, any order.
        token_to_req: [T] int32.
        positions: [T] int32 or int64, absolute positions of the tokens.
        block_table: [R, C] int32 pages of the compressed cache's group, any row stride.
        entries_per_page: entries in one page.
        is_valid: [T] bool.
        ratio: tokens per entry.
        num_pages: pages of the cache; None if unknown, then only int32 bounds a slot.
        out_slots: [T, K] int32, written; -1 past ``out_lens``.
        out_lens: [T] int32, written.
    """
    out_slots.fill_(-1)
    out_lens.zero_()
    tokens, width = topk.shape
    if tokens == 0 or width == 0 or block_table.numel() == 0:
        return
    step = max(1, _CHUNK_ELEMENTS // width)
    for first in range(0, tokens, step):
        chunk = slice(first, first + step)
        slots, keep = _slots(
            topk[chunk].long(),
            token_to_req[chunk].long(),
            positions[chunk].long(),
            block_table,
            entries_per_page,
            is_valid[chunk],
            ratio,
            _INT32_MAX if num_pages is None else num_pages,
        )
        # Dropped entries all land in one column past the end, which is cut off again.
        target = torch.where(keep, keep.cumsum(dim=1) - 1, width)
        packed = slots.new_full((slots.shape[0], width + 1), -1)
        packed.scatter_(1, target, torch.where(keep, slots, -1))
        out_slots[chunk] = packed[:, :width]
        out_lens[chunk] = keep.sum(dim=1)


def _slots(
    entries: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    entries_per_page: int,
    is_valid: torch.Tensor,
    ratio: int,
    num_pages: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot, whether it is kept) of each entry, [t, K] int64 and bool; a dropped one's slot means nothing."""
    rows, columns = block_table.shape
    served = is_valid & (requests >= 0) & (requests < rows)
    complete = torch.div(positions + 1, ratio, rounding_mode="floor")
    column = torch.div(entries, entries_per_page, rounding_mode="floor")
    keep = served[:, None] & (entries >= 0) & (entries < complete[:, None]) & (column < columns)
    page = block_table[requests.clamp(0, rows - 1)[:, None], column.clamp(0, columns - 1)].long()
    slots = page * entries_per_page + torch.remainder(entries, entries_per_page)
    return slots, keep & (page >= 0) & (page < num_pages) & (slots <= _INT32_MAX)
