"""Top-k mapping: request-local compressed positions to slots; twin of `swa_backend.reference.topk`.

A program takes one token: it decides entry by entry, counts those kept before each, and stores them next to each
other. The rest of the row becomes -1.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend.cache_layout import SLOT_LIMIT
from swa_backend.kernels.jit import Tuning, device_function, kernel
from swa_backend.kernels.paging import divisor, quotient, table_rows

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig
    from swa_backend.platform import CacheRole

NONE: tl.constexpr = tl.constexpr(-1)
LAST: tl.constexpr = tl.constexpr(2**31 - 1)


def page_numbers(entries_per_page: int, num_pages: int | None) -> tuple[int, int, int, int]:
    """The run-time arguments page_entries, magic, shift and num_pages of `pages_of`."""
    last = SLOT_LIMIT // entries_per_page + 1  # one past the last page that has a slot which fits int32
    return entries_per_page, *divisor(entries_per_page), last if num_pages is None else min(num_pages, last)


@device_function
def visible_entries(position, ratio, columns, page_entries):
    """How many entries a token can see at most: those complete at its position, as far as its table reaches."""
    reach = tl.minimum(columns.to(tl.int64) * page_entries, LAST).to(tl.int32)
    return tl.maximum(tl.minimum((position + 1) // ratio, reach), 0)


@device_function
def load_block(row, first, width, BLOCK: tl.constexpr):
    """Entries from ``first`` on of a row of ``width``, -1 past its end."""
    at = first + tl.arange(0, BLOCK)
    if first + BLOCK <= width:
        values = tl.load(row + at)
    else:
        inside = at < width
        # A dead lane's address stays inside the row: masked loads may still touch it.
        values = tl.load(row + tl.where(inside, at, 0), mask=inside, other=NONE)
    return values


@device_function
def pages_of(local, visible, table, magic, shift, num_pages):
    """Page and column of request-local entries, and which have a page, out of the first ``visible`` ones."""
    keep = local.to(tl.uint32) < visible.to(tl.uint32)
    column = quotient(local, magic, shift)
    page = tl.load(table + tl.where(keep, column, 0), mask=keep, other=NONE)
    return page, column, keep & (page.to(tl.uint32) < num_pages.to(tl.uint32))


@device_function
def store_packed(out, values, keep, count, filled, width, BLOCK: tl.constexpr):
    """Store the kept of BLOCK values behind the first ``count`` entries of a row of ``width``.

    Returns (count, filled): the new count, and how far the row is written; what lies between is -1.
    """
    lane = tl.arange(0, BLOCK)
    # One sum for two: how many are kept, and the sum of their lanes. That is least when they are the first ones.
    both = tl.sum(tl.where(keep, lane * (2 * BLOCK) + 1, 0), 0)
    number = both % (2 * BLOCK)
    if (both // (2 * BLOCK)) * 2 == number * (number - 1):  # an indexer puts what it found first: nothing moves
        values = tl.where(keep, values, NONE)
        at = count + lane
        if count + BLOCK <= width:
            tl.store(out + at, values)
        else:
            fits = at < width
            tl.store(out + tl.where(fits, at, 0), values, mask=fits)
        filled = tl.maximum(filled, count + BLOCK)
    else:
        at = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(out + tl.where(keep, at, 0), values, mask=keep)
        filled = tl.maximum(filled, count + number)
    return count + number, filled


@device_function
def store_none(out, filled, width, BLOCK: tl.constexpr):
    """Fill a row with -1 from entry ``filled`` on."""
    while filled < width:
        at = filled + tl.arange(0, BLOCK)
        fits = at < width
        tl.store(out + tl.where(fits, at, 0), NONE, mask=fits)
        filled += BLOCK


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    if any(layer.indexed for layer in config.model.present_layer_types):
        yield {"WIDE": False}
        yield {"WIDE": True}


@kernel(
    types={
        "topk": "*i32",  # [tokens, width]
        "token_to_req": "*i32",  # [tokens]
        "positions": "*i32",  # [tokens]; int64 if WIDE
        "block_table": "*i32",  # [requests, columns]
        "is_valid": "*u8",  # [tokens]
        "out_slots": "*i32",  # [tokens, width]
        "out_lens": "*i32",  # [tokens]
        "topk_stride": "i64",
        "table_stride": "i64",
        "out_stride": "i64",
        "width": "i32",
        "requests": "i32",
        "columns": "i32",
        "page_entries": "i32",
        "magic": "i64",  # of page_entries
        "shift": "i32",
        "num_pages": "u32",
        "ratio": "i32",
    },
    tuning={
        "": Tuning(1, 1, tiles={"BLOCK": 256}),
        "interpret": Tuning(1, 1, tiles={"BLOCK": 128}),
    },
    keys=_keys,
)
def map_rows(
    topk, token_to_req, positions, block_table, is_valid, out_slots, out_lens,
    topk_stride, table_stride, out_stride, width, requests, columns, page_entries, magic, shift, num_pages, ratio,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_req + token)
    served = (tl.load(is_valid + token) != 0) & (request >= 0) & (request < requests)
    if WIDE:
        position = tl.load(positions.to(tl.pointer_type(tl.int64)) + token)
        position = tl.minimum(tl.maximum(position, -1), LAST - 1).to(tl.int32)
    else:
        position = tl.minimum(tl.load(positions + token), LAST - 1)
    visible = tl.where(served, visible_entries(position, ratio, columns, page_entries), 0)
    table = block_table + tl.where(served, request, 0).to(tl.int64) * table_stride
    row = topk + token * topk_stride
    out = out_slots + token * out_stride
    count = tl.zeros_like(request)
    filled = count
    first = count
    while first < width:
        local = load_block(row, first, width, BLOCK)
        page, column, keep = pages_of(local, visible, table, magic, shift, num_pages)
        slot = page * page_entries + (local - column * page_entries)
        keep = keep & (slot >= 0)  # a page of unknown caches may reach past int32: its slots wrap around
        count, filled = store_packed(out, slot, keep, count, filled, width, BLOCK)
        first += BLOCK
    store_none(out, filled, width, BLOCK)
    tl.store(out_lens + token, count)


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

    Arguments as in `swa_backend.reference.topk.map_topk`, all on one device; ``token_to_req``, ``positions``,
    ``is_valid`` and ``out_lens`` are contiguous.
    """
    wide = positions.dtype == torch.int64
    table, table_stride = table_rows(block_table, token_to_req)
    map_rows.on(topk.device, WIDE=wide).launch(
        (topk.shape[0], 1, 1),
        topk, token_to_req, positions.view(torch.int32) if wide else positions, table, is_valid, out_slots, out_lens,
        topk.stride(0), table_stride, out_slots.stride(0), topk.shape[1], *block_table.shape,
        *page_numbers(entries_per_page, num_pages), ratio,
    )  # fmt: skip
