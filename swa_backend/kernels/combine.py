"""Combined prefill rows; twin of `swa_backend.reference.combine`. A program takes one token."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import triton.language as tl

from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.kernels.paging import table_rows
from swa_backend.kernels.topk import (
    load_block,
    page_numbers,
    pages_of,
    store_none,
    store_packed,
    visible_entries,
)

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.combine import CombineStep
    from swa_backend.config import BackendConfig
    from swa_backend.platform import CacheRole

NONE: tl.constexpr = tl.constexpr(-1)


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    layers = config.model.present_layer_types
    kinds = ["none"]
    kinds += ["listed"] if any(layer.indexed for layer in layers) else []
    kinds += ["every"] if any(layer.compressed and not layer.indexed for layer in layers) else []
    for kind in kinds:
        for images in (False, True) if config.max_image_tokens else (False,):
            yield {"COMPRESSED": kind, "IMAGES": images}


@kernel(
    types={
        "window_rows": "*i32",  # [tokens, >= its lens]
        "window_lens": "*i32",  # [tokens]
        "topk": "*i32",  # [tokens, width], if COMPRESSED is "listed"
        "token_to_req": "*i32",  # [tokens]
        "is_valid": "*u8",  # [tokens]
        "query_start_loc": "*i32",  # [requests of the batch + 1]
        "seq_lens": "*i32",  # [requests of the batch]
        "gather_lens": "*i32",  # [prefills]
        "right_visible": "*i32",  # [tokens], if IMAGES
        "block_table": "*i32",  # [requests of the batch, columns] of the compressed cache
        "out_rows": "*i32",  # [tokens, out_width]
        "out_lens": "*i32",  # [tokens]
        "window_stride": "i64",
        "topk_stride": "i64",
        "table_stride": "i64",
        "out_stride": "i64",
        "width": "i32",
        "out_width": "i32",
        "first_token": "i32",
        "num_decodes": "i32",
        "chunk_first": "i32",  # requests of the chunk, counted from the first prefill
        "chunk_end": "i32",
        "chunk_compressed": "i32",  # workspace rows of a request before its window
        "chunk_width": "i32",  # workspace rows of a request
        "columns": "i32",
        "page_entries": "i32",
        "magic": "i64",  # of page_entries
        "shift": "i32",
        "num_pages": "u32",
        "ratio": "i32",
    },
    tuning={
        "": Tuning(1, 1, tiles={"BLOCK": 256, "WINDOW": 128}),
        "interpret": Tuning(1, 1, tiles={"BLOCK": 128, "WINDOW": 64}),
    },
    keys=_keys,
)
def combine(
    window_rows, window_lens, topk, token_to_req, is_valid, query_start_loc, seq_lens, gather_lens, right_visible,
    block_table, out_rows, out_lens, window_stride, topk_stride, table_stride, out_stride, width, out_width,
    first_token, num_decodes, chunk_first, chunk_end, chunk_compressed, chunk_width, columns, page_entries, magic,
    shift, num_pages, ratio,
    COMPRESSED: tl.constexpr, IMAGES: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_req + token)
    number = request - num_decodes
    served = (tl.load(is_valid + token) != 0) & (number >= chunk_first) & (number < chunk_end)
    # Another token's numbers are those of the chunk's first request: every address stays inside.
    request = tl.where(served, request, num_decodes + chunk_first)
    number = tl.where(served, number, chunk_first)
    base = (number - chunk_first) * chunk_width
    seq_len = tl.load(seq_lens + request)
    position = seq_len - (tl.load(query_start_loc + request + 1) - (first_token + tl.program_id(0)))
    end = position + 1
    if IMAGES:
        end = tl.minimum(end + tl.load(right_visible + token), seq_len)
    window_len = tl.where(served, tl.load(window_lens + token), 0)
    gathered = seq_len - tl.load(gather_lens + number)
    out = out_rows + token * out_stride

    start = base + chunk_compressed + end - window_len - gathered
    first = tl.zeros_like(width)
    while first < window_len:
        slot = load_block(window_rows + token * window_stride, first, window_len, WINDOW)
        at = first + tl.arange(0, WINDOW)
        fits = at < window_len
        tl.store(out + tl.where(fits, at, 0), tl.where(slot >= 0, start + at, NONE), mask=fits)
        first += WINDOW

    count = window_len
    filled = window_len
    if COMPRESSED != "none":
        visible = tl.minimum(visible_entries(position, ratio, columns, page_entries), chunk_compressed)
        visible = tl.where(served, visible, 0)
        table = block_table + request.to(tl.int64) * table_stride
        entries = width
        if COMPRESSED == "every":
            entries = visible
        first = tl.zeros_like(width)
        while first < entries:
            local = first + tl.arange(0, BLOCK)
            if COMPRESSED == "listed":
                local = load_block(topk + token * topk_stride, first, width, BLOCK)
            _page, _column, keep = pages_of(local, visible, table, magic, shift, num_pages)
            count, filled = store_packed(out, base + local, keep, count, filled, out_width, BLOCK)
            first += BLOCK
    store_none(out, filled, out_width, BLOCK)
    tl.store(out_lens + token, count)


def combine_rows(step: CombineStep) -> None:
    """Fill ``out_rows`` and ``out_lens``; see `swa_backend.reference.combine.combine_rows`."""
    compressed, chunk = step.compressed, step.chunk
    unread = step.window_lens
    kind, topk, table, table_stride, columns = "none", None, unread, 0, 0
    pages, ratio, width = page_numbers(1, 0), 1, 0
    if compressed is not None:
        topk, columns = compressed.topk, compressed.block_table.shape[1]
        table, table_stride = table_rows(compressed.block_table, unread)
        pages, ratio = page_numbers(compressed.entries_per_page, compressed.num_pages), compressed.ratio
        kind, width = ("every", 0) if topk is None else ("listed", topk.shape[1])
    launcher = combine.on(step.out_rows.device, COMPRESSED=kind, IMAGES=step.right_visible is not None)
    launcher.launch(
        (step.out_rows.shape[0], 1, 1),
        step.window_rows, step.window_lens, unread if topk is None else topk, step.token_to_req, step.is_valid,
        step.query_start_loc, step.seq_lens, step.gather_lens,
        unread if step.right_visible is None else step.right_visible, table,
        step.out_rows, step.out_lens, step.window_rows.stride(0), 0 if topk is None else topk.stride(0),
        table_stride, step.out_rows.stride(0), width, step.out_rows.shape[1],
        step.first_token, step.num_decodes, chunk.first, chunk.end, chunk.compressed, chunk.width,
        columns, *pages, ratio,
    )  # fmt: skip
