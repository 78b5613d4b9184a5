"""Index rows as FlashMLA takes them; twin of `swa_platform_cuda.flashmla_rows_reference`.

Its kernels know one kind of missing entry, -1, and read whole blocks of 64 entries: any other entry that is not in the
cache would be an address outside it.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend._math import cdiv
from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.kernels.paging import divisor, quotient

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig
    from swa_backend.platform import CacheRole

NONE: tl.constexpr = tl.constexpr(-1)
LAST: tl.constexpr = tl.constexpr(2**31 - 1)


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    yield {}


@kernel(
    types={
        "rows": "*i32",  # [tokens, width]
        "lens": "*i32",  # [tokens]
        "is_valid": "*u8",  # [tokens]
        "out_rows": "*i32",  # [tokens, out_width]
        "out_lens": "*i32",  # [tokens]
        "row_stride": "i64",
        "out_stride": "i64",
        "width": "i32",
        "out_width": "i32",
        "num_slots": "i32",
    },
    tuning={"": Tuning(1, 1, tiles={"BLOCK": 256})},
    keys=_keys,
)
def flashmla_tidy(
    rows, lens, is_valid, out_rows, out_lens, row_stride, out_stride, width, out_width, num_slots, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lens + token), 0), width)
    length = tl.where(tl.load(is_valid + token) != 0, length, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < length
    slot = tl.load(rows + token * row_stride + tl.where(live, at, 0), mask=live, other=NONE)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, NONE)
    inside = at < out_width
    tl.store(out_rows + token * out_stride + tl.where(inside, at, 0), slot, mask=inside)
    tl.store(out_lens + token, length, mask=tl.program_id(1) == 0)


def tidy_rows(
    rows: torch.Tensor,
    lens: torch.Tensor,
    is_valid: torch.Tensor,
    num_slots: int,
    out_rows: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    """Copy rows so that every entry that does not count is -1; see the twin."""
    if not rows.shape[0]:
        return
    launcher = flashmla_tidy.on(rows.device)
    launcher.launch(
        (rows.shape[0], cdiv(out_rows.shape[1], launcher.tiles["BLOCK"]), 1),
        rows, lens, is_valid, out_rows, out_lens, rows.stride(0), out_rows.stride(0), rows.shape[1], out_rows.shape[1],
        num_slots,
    )  # fmt: skip


def _position_keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    yield {"WIDE": False}
    yield {"WIDE": True}


@kernel(
    types={
        "positions": "*i32",  # [tokens]; int64 if WIDE
        "is_valid": "*u8",  # [tokens]
        "out_lens": "*i32",  # [tokens]
        "tokens": "i32",
        "ratio": "i32",
        "width": "i32",
    },
    tuning={"": Tuning(1, 1, tiles={"BLOCK": 128})},
    keys=_position_keys,
)
def flashmla_bounds(positions, is_valid, out_lens, tokens, ratio, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    token = tl.where(inside, token, 0)
    if WIDE:
        position = tl.load(positions.to(tl.pointer_type(tl.int64)) + token, mask=inside, other=0)
    else:
        position = tl.load(positions + token, mask=inside, other=0).to(tl.int64)
    position = tl.minimum(tl.maximum(position, -1), LAST - 1)
    length = tl.minimum((position + 1) // ratio, width).to(tl.int32)
    length = tl.where(tl.load(is_valid + token, mask=inside, other=0) != 0, length, 0)
    tl.store(out_lens + token, length, mask=inside)


def entry_bounds(
    positions: torch.Tensor, is_valid: torch.Tensor, ratio: int, width: int, out_lens: torch.Tensor
) -> None:
    """The most entries that rows of distinct picks can have; see the twin."""
    tokens = positions.shape[0]
    if not tokens:
        return
    wide = positions.dtype == torch.int64
    launcher = flashmla_bounds.on(positions.device, WIDE=wide)
    launcher.launch(
        (cdiv(tokens, launcher.tiles["BLOCK"]), 1, 1),
        positions.view(torch.int32) if wide else positions, is_valid, out_lens, tokens, ratio, width,
    )  # fmt: skip


@kernel(
    types={
        "block_table": "*i32",  # [requests, columns]
        "seq_lens": "*i32",  # [requests]
        "column_of_page": "*i32",  # [pages]
        "table_stride": "i64",
        "columns": "i32",
        "ratio": "i32",
        "page_entries": "i32",
        "num_pages": "i32",
    },
    tuning={"": Tuning(1, 1, tiles={"BLOCK": 256})},
    keys=_keys,
)
def flashmla_mark_columns(
    block_table, seq_lens, column_of_page, table_stride, columns, ratio, page_entries, num_pages, BLOCK: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    complete = tl.load(seq_lens + request) // ratio
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (at < columns) & (at < (complete + page_entries - 1) // page_entries)
    page = tl.load(block_table + request * table_stride + tl.where(live, at, 0), mask=live, other=NONE)
    live = live & (page >= 0) & (page < num_pages)
    tl.store(column_of_page + tl.where(live, page, 0), at, mask=live)


def mark_columns(
    block_table: torch.Tensor, seq_lens: torch.Tensor, ratio: int, entries_per_page: int, columns: torch.Tensor
) -> None:
    """Write down for each page of these requests in which column of its table it stands; see the twin."""
    requests, width = block_table.shape
    launcher = flashmla_mark_columns.on(columns.device)
    launcher.launch(
        (requests, cdiv(width, launcher.tiles["BLOCK"]), 1),
        block_table, seq_lens, columns, block_table.stride(0), width, ratio, entries_per_page, columns.shape[0],
    )  # fmt: skip


@kernel(
    types={
        "rows": "*i32",  # [tokens, width]
        "lens": "*i32",  # [tokens]
        "token_to_req": "*i32",  # [tokens]
        "block_table": "*i32",  # [requests, columns]
        "column_of_page": "*i32",  # [pages]
        "out": "*i32",  # [tokens, width]
        "row_stride": "i64",
        "table_stride": "i64",
        "out_stride": "i64",
        "width": "i32",
        "columns": "i32",
        "page_entries": "i32",
        "magic": "i64",  # of page_entries
        "shift": "i32",
        "num_pages": "i32",
    },
    tuning={"": Tuning(1, 1, tiles={"BLOCK": 256})},
    keys=_keys,
)
def flashmla_entries(
    rows, lens, token_to_req, block_table, column_of_page, out, row_stride, table_stride, out_stride, width, columns,
    page_entries, magic, shift, num_pages, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lens + token), width)
    table = block_table + tl.load(token_to_req + token).to(tl.int64) * table_stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < length
    slot = tl.load(rows + token * row_stride + tl.where(live, at, 0), mask=live, other=NONE)
    live = live & (slot >= 0)
    slot = tl.where(live, slot, 0)
    page = quotient(slot, magic, shift)
    live = live & (page < num_pages)
    inner = slot - page * page_entries
    page = tl.where(live, page, 0)
    column = tl.load(column_of_page + page, mask=live, other=0)
    known = live & (column >= 0) & (column < columns)
    known = known & (tl.load(table + tl.where(known, column, 0), mask=known, other=NONE) == page)
    # A page may stand in another column of another request's table, or in none of this one's.
    missing = live & (known == 0)
    left = tl.sum(missing.to(tl.int32), axis=0)
    first = tl.zeros_like(width)
    while (left > 0) & (first < columns):
        hit = missing & (page == tl.load(table + first))
        column = tl.where(hit, first, column)
        known = known | hit
        missing = missing & (hit == 0)
        left = tl.sum(missing.to(tl.int32), axis=0)
        first += 1
    entry = tl.where(known, column * page_entries + inner, NONE)
    inside = at < width
    tl.store(out + token * out_stride + tl.where(inside, at, 0), entry, mask=inside)


def entries_of_slots(
    rows: torch.Tensor,
    lens: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    columns: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,
) -> None:
    """Turn slots of a compressed cache back to entries of each token's request; see the twin."""
    launcher = flashmla_entries.on(rows.device)
    launcher.launch(
        (rows.shape[0], cdiv(rows.shape[1], launcher.tiles["BLOCK"]), 1),
        rows, lens, token_to_req, block_table, columns, out, rows.stride(0), block_table.stride(0), out.stride(0),
        rows.shape[1], block_table.shape[1], entries_per_page, *divisor(entries_per_page), columns.shape[0],
    )  # fmt: skip
