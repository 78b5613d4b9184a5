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

from swa_backend.kernels.jit import Tuning, device_function, kernel
from swa_backend.kernels.paging import divisor, quotient

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig
    from swa_backend.platform import CacheRole

NONE: tl.constexpr = tl.constexpr(-1)
LAST_SLOT: tl.constexpr = tl.constexpr(2**31 - 1)
ANY_PAGE = 2**31 - 1  # where the number of pages is not known, int32 alone bounds a slot


@device_function
def kept_slots(
    local, inside, complete, table, columns, page_entries, magic, shift, num_pages,
):  # fmt: skip
    """Slots of request-local entries, and which are kept; a dropped one's slot means nothing.

    ``complete`` is the number of entries that the token may see, 0 for a token that sees none.
    """
    keep = inside & (local >= 0) & (local < complete)
    number = tl.where(keep, local, 0)
    column = quotient(number, magic, shift)
    keep = keep & (column < columns)
    # A dropped lane's address stays inside the row: masked loads may still touch it.
    page = tl.load(table + tl.where(keep, column, 0), mask=keep, other=NONE)
    slot = page.to(tl.int64) * page_entries + (number - column * page_entries)
    keep = keep & (page >= 0) & (page < num_pages) & (slot <= LAST_SLOT)
    return slot.to(tl.int32), keep


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
        "shift": "i64",
        "ratio": "i32",
        "num_pages": "i32",
    },
    tuning={
        "": Tuning(1, 1, tiles={"BLOCK": 512}),
        "interpret": Tuning(1, 1, tiles={"BLOCK": 128}),
    },
    keys=_keys,
)
def map_rows(
    topk, token_to_req, positions, block_table, is_valid, out_slots, out_lens,
    topk_stride, table_stride, out_stride, width, requests, columns, page_entries, magic, shift, ratio, num_pages,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_req + token)
    served = (tl.load(is_valid + token) != 0) & (request >= 0) & (request < requests)
    if WIDE:
        position = tl.load(positions.to(tl.pointer_type(tl.int64)) + token)
    else:
        position = tl.load(positions + token).to(tl.int64)
    complete = tl.where(served, (position + 1) // ratio, 0)
    table = block_table + tl.where(served, request, 0).to(tl.int64) * table_stride
    lane = tl.arange(0, BLOCK)
    out = out_slots + token * out_stride
    count = tl.zeros_like(request)
    first = tl.zeros_like(width)
    while first < width:
        at = first + lane
        inside = at < width
        local = tl.load(topk + token * topk_stride + tl.where(inside, at, 0), mask=inside, other=NONE)
        slot, keep = kept_slots(local, inside, complete, table, columns, page_entries, magic, shift, num_pages)
        kept = keep.to(tl.int32)
        place = count + tl.cumsum(kept, 0) - 1
        tl.store(out + tl.where(keep, place, 0), slot, mask=keep)
        count += tl.sum(kept, 0)
        first += BLOCK
    at = count // BLOCK * BLOCK
    while at < width:
        place = at + lane
        empty = (place >= count) & (place < width)
        tl.store(out + tl.where(empty, place, 0), NONE, mask=empty)
        at += BLOCK
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
    map_rows.on(topk.device, WIDE=wide).launch(
        (topk.shape[0], 1, 1),
        topk, token_to_req, positions.view(torch.int32) if wide else positions, block_table, is_valid, out_slots,
        out_lens, topk.stride(0), block_table.stride(0), out_slots.stride(0), topk.shape[1], *block_table.shape,
        entries_per_page, *divisor(entries_per_page), ratio, ANY_PAGE if num_pages is None else num_pages,
    )  # fmt: skip
