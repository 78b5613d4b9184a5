"""Dequantise the last entries of each request into a bf16 workspace; twin of `swa_backend.reference.codec.gather_kv`.

How many rows each request has is only known on the device: programs stand in a grid of (share of a request, request)
and take tiles of its rows until there are no more.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend._math import cdiv
from swa_backend.cache_layout import HEAD_DIM, Dialect
from swa_backend.kernels.fp8 import decode_e2m1, decode_e4m3, decode_ue8m0
from swa_backend.kernels.jit import Tuning, address, kernel
from swa_backend.kernels.paging import (
    PAGE_TYPES,
    cache_layouts,
    is_aligned,
    layout_key,
    page_numbers,
    scale_of,
    table_rows,
    wide,
)
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.pages import PageView

DIM: tl.constexpr = tl.constexpr(HEAD_DIM)
NO_PAGE: tl.constexpr = tl.constexpr(-1)

MOST_PROGRAMS = 8192
"""Programs of a launch. Most of them find nothing to do when a workspace is much larger than what is gathered."""


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    for layout in cache_layouts(config, dialects, written=False):
        for everything in (True, False):
            for aligned in (True, False):
                yield {**layout_key(layout), "EVERYTHING": everything, "ALIGNED": aligned}


@kernel(
    types={
        "block_table": "*i32",  # [requests, columns]
        "seq_lens": "*i32",  # [requests]
        "gather_lens": "*i32",  # [requests]; not read if EVERYTHING
        "out": "*bf16",  # [requests, offset + height, 512]
        "table_stride": "i64",  # entries
        "out_stride": "i64",  # values from request to request
        "columns": "i32",
        "offset": "i32",  # first row to write of each request
        "height": "i32",  # rows that may be written of each request
        "pages": "*u8",
        "scale": "*u8",  # one float32 of a per-tensor layout, else not read
        **PAGE_TYPES,
    },
    tuning={
        "cuda": Tuning(1, 1, tiles={"TOKENS": 4, "HW_FP8": 1}),
        "cuda:80": Tuning(1, 1, tiles={"TOKENS": 4, "HW_FP8": 0}),
        "cuda:86": Tuning(1, 1, tiles={"TOKENS": 4, "HW_FP8": 0}),
        "": Tuning(4, 1, tiles={"TOKENS": 8, "HW_FP8": 0}),
    },
    keys=_keys,
)
def gather_pages(
    block_table, seq_lens, gather_lens, out, table_stride, out_stride, columns, offset, height, pages, scale,
    page_stride, data_stride, scale_start, scale_stride, entries, num_pages,
    VALUES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, QUANTISED: tl.constexpr, FNUZ: tl.constexpr,
    EVERYTHING: tl.constexpr, ALIGNED: tl.constexpr, TOKENS: tl.constexpr, HW_FP8: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = DIM // GROUP
    TAIL: tl.constexpr = DIM - QUANTISED
    request = tl.program_id(1).to(tl.int64)
    total = tl.load(seq_lens + request)
    length = total
    if not EVERYTHING:
        length = tl.load(gather_lens + request)
    rows = tl.minimum(length, height)
    table = block_table + request * table_stride
    group = tl.arange(0, GROUPS)
    value = (group * GROUP)[None, :, None] + tl.arange(0, GROUP)[None, None, :]

    first = tl.program_id(0) * TOKENS
    while first < rows:
        row = first + tl.arange(0, TOKENS)
        inside = row < rows
        position = total - length + row
        column = position // entries
        live = inside & (position >= 0) & (column < columns)
        # A dead lane's address stays inside: masked loads may still touch it.
        page = tl.load(table + tl.where(live, column, 0), mask=live, other=NO_PAGE)
        live = live & (page >= 0) & (page < num_pages)
        entry = tl.where(live, position - column * entries, 0).to(tl.int64)
        start = pages + tl.where(live, page, 0).to(tl.int64) * page_stride
        data = start + entry * data_stride
        to = out + request * out_stride + (offset + row).to(tl.int64) * DIM
        live3 = live[:, None, None]
        inside3 = inside[:, None, None]
        if VALUES == "bf16":
            at = wide(data.to(tl.pointer_type(tl.bfloat16))[:, None, None], value, ALIGNED)
            copied = tl.load(at, mask=live3, other=0.0)
            tl.store(wide(to[:, None, None], value, ALIGNED), copied, mask=inside3)
        else:
            if VALUES == "e2m1":
                byte = (group * (GROUP // 2))[None, :, None] + tl.arange(0, GROUP // 2)[None, None, :]
                pairs = tl.load(wide(data[:, None, None], byte, ALIGNED, 8), mask=live3, other=0).to(tl.int32)
                codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (TOKENS, GROUPS, GROUP))
                numbers = decode_e2m1(codes)
            else:
                # Codes of the bf16 tail are decoded along with the others, and not stored.
                codes = tl.load(wide(data[:, None, None], value, ALIGNED), mask=live3, other=0)
                numbers = decode_e4m3(codes, FNUZ, HW_FP8)
            if SCALES == "tensor":
                numbers *= tl.load(scale.to(tl.pointer_type(tl.float32)))
            else:
                at = wide((start + scale_start + entry * scale_stride)[:, None], group[None, :], ALIGNED, 8)
                scales = tl.load(at, mask=live[:, None], other=0)
                if SCALES == "ue8m0":
                    numbers *= decode_ue8m0(scales)[:, :, None]
                else:
                    numbers *= decode_e4m3(scales, False, HW_FP8)[:, :, None]
            numbers = tl.where(live3, numbers, 0.0)
            wanted = inside3 & (group < QUANTISED // GROUP)[None, :, None]
            tl.store(wide(to[:, None, None], value, ALIGNED), numbers.to(tl.bfloat16), mask=wanted)
            if TAIL:
                dim = tl.arange(0, TAIL)
                at = wide((data + QUANTISED).to(tl.pointer_type(tl.bfloat16))[:, None], dim[None, :], ALIGNED)
                copied = tl.load(at, mask=live[:, None], other=0.0)
                tl.store(wide((to + QUANTISED)[:, None], dim[None, :], ALIGNED), copied, mask=inside[:, None])
        first += tl.num_programs(0) * TOKENS


def gather_kv(
    pages: PageView,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    out: torch.Tensor,
    offset: int,
) -> None:
    """Dequantise the last entries of each request to a workspace; other rows of it are not touched.

    Position ``seq_lens[r] - gather_lens[r] + j`` goes to ``out[r, offset + j]``. A position whose page is negative or
    at or past ``pages.num_pages``, or that lies outside the table, gives a zero row. Rows past the workspace's end are
    not written.

    Args:
        pages: pages to read.
        block_table: [R, C] int32 page numbers, any row stride.
        seq_lens: [R] int32 entries of each request.
        gather_lens: [R] int32 entries to read of each; None = all.
        out: [R, M, 512] bf16; the rows of a request are contiguous, requests any distance apart.
        offset: first row of ``out`` to write.
    """
    requests, height, _ = out.shape
    height -= offset
    kind = (gather_pages, gather_lens is None, is_aligned(pages, out))
    bound = pages.launches.get(kind)
    if bound is None:
        key = {**layout_key(pages.layout), "EVERYTHING": kind[1], "ALIGNED": kind[2]}
        launcher = gather_pages.on(out.device, **key)
        bound = pages.launches[kind] = launcher.bind(pages.data, scale_of(pages), *page_numbers(pages))
    share = min(cdiv(height, bound.launcher.tiles["TOKENS"]), max(MOST_PROGRAMS // max(requests, 1), 1))
    lens = address(seq_lens)
    table, table_stride = table_rows(block_table, seq_lens)
    bound.launch(
        (share, requests, 1),
        address(table), lens, lens if gather_lens is None else address(gather_lens), address(out),
        table_stride, out.stride(0), block_table.shape[1], offset, height,
    )  # fmt: skip
