"""Sparse multi-query attention over paged caches in place: decode and prefill, one cache or two, any layout.

A program takes one token, a tile of its heads and a share of its keys. Keys come a tile at a time, are decoded to bf16
and serve as values too; the softmax runs online in float32. A program that has all keys of its heads writes the
result, otherwise it leaves a partial one for `swa_backend.kernels.sparse_mla_reduce`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import triton.language as tl

from swa_backend.cache_layout import Dialect, PageLayout, get_layout
from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.kernels.sparse_mla_softmax import attend, write_partial, write_result
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

FEW_HEADS, MANY_HEADS = 16, 64

CACHE_TYPES = {
    "pages": "*u8",
    "scale": "*u8",  # one float32 of a per-tensor layout, else not read
    "page_stride": "i64",  # bytes from page to page
    "data_stride": "i64",  # bytes from entry to entry
    "scale_start": "i64",  # byte of a page at which its first scale row begins
    "scale_stride": "i64",
    "entries": "i32",  # of a page
    "num_slots": "i32",
    "magic": "i64",  # of entries, see `paging.divisor`
    "shift": "i32",
}


def sparse_mla_key(layout: PageLayout, second: PageLayout | None, heads: int, *, aligned: bool) -> dict[str, object]:
    """The compile key for a pair of caches and a number of heads."""
    return {
        "LAYOUT": layout.name,
        "FNUZ": layout.dialect is Dialect.FNUZ,
        "SECOND": "none" if second is None else second.name,
        "SECOND_FNUZ": second is not None and second.dialect is Dialect.FNUZ,
        "ALIGNED": aligned,
        "HEADS": head_key(heads, aligned=aligned),
    }


def head_key(heads: int, *, aligned: bool) -> int:
    """Heads that a program takes where the chip has room for as many. Keys read byte by byte take the room of most."""
    return FEW_HEADS if heads <= FEW_HEADS or not aligned else MANY_HEADS


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    window = get_layout(config.cache_layout, dialects[CacheRole.SWA])
    seconds: list[PageLayout | None] = [None]
    if any(layer.compressed for layer in config.model.present_layer_types):
        seconds.append(get_layout(config.compressed_layout, dialects[CacheRole.COMPRESSED]))
    for second in seconds:
        for aligned in (True, False):
            yield sparse_mla_key(window, second, config.num_heads, aligned=aligned)


def _tuning(
    warps: int, heads: int, keys: int, *, parts: int, hw_fp8: bool = False, stages: int = 1, spread: bool = False
) -> Tuning:
    tiles = {"MOST_HEADS": heads, "KEYS": keys, "HW_FP8": hw_fp8, "PARTS": parts, "STAGES": stages, "SPREAD": spread}
    return Tuning(warps, 1, tiles={name: int(value) for name, value in tiles.items()})


# cuda:90 is measured, the others are what compiles without a spill.
TUNING = {
    "cuda:90": _tuning(8, 64, 128, parts=4, hw_fp8=True, stages=2, spread=True),
    "cuda": _tuning(8, 16, 32, parts=4, hw_fp8=True, stages=2),
    "cuda:80": _tuning(8, 16, 32, parts=4, stages=2),
    "cuda:86": _tuning(8, 16, 32, parts=4, stages=2),
    "interpret": _tuning(4, 64, 128, parts=1),
    "": _tuning(4, 16, 16, parts=8),
}


@kernel(
    types={
        "q": "*bf16",  # [tokens, heads, 512]
        "out": "*bf16",  # [tokens, heads, 512]
        "lse": "*fp32",  # [tokens, heads], contiguous; not written unless has_lse
        "rows": "*i32",  # window rows: [tokens, width], or ragged entries one row after the other
        "lens": "*i32",  # [tokens], or ragged: [tokens + 1] where each row begins
        "second_rows": "*i32",  # [tokens, second_width]
        "second_lens": "*i32",  # [tokens]
        "valid": "*u8",  # [tokens]; a token that is not valid sees nothing
        "sink": "*fp32",  # [heads]
        "q_row": "i64",  # strides in values
        "q_head": "i64",
        "out_row": "i64",
        "out_head": "i64",
        "rows_stride": "i64",
        "second_rows_stride": "i64",
        "width": "i32",
        "second_width": "i32",
        "ragged": "i32",  # 1: rows are ragged
        "has_lse": "i32",
        "heads": "i32",
        "splits": "i32",  # programs that share a row
        "share": "i32",  # tiles of a split; 0: the row's tiles are shared evenly
        "factor": "fp32",  # of the logits, times log2(e)
        "sums": "*fp32",  # [programs, HEADS, 512] partial results
        "peaks": "*fp32",  # [programs, 2, HEADS]
        **CACHE_TYPES,
        **{f"second_{name}": kind for name, kind in CACHE_TYPES.items()},
    },
    tuning=TUNING,
    keys=_keys,
)
def sparse_mla(
    q, out, lse, rows, lens, second_rows, second_lens, valid, sink,
    q_row, q_head, out_row, out_head, rows_stride, second_rows_stride, width, second_width, ragged, has_lse, heads,
    splits, share, factor, sums, peaks,
    pages, scale, page_stride, data_stride, scale_start, scale_stride, entries, num_slots, magic, shift,
    second_pages, second_scale, second_page_stride, second_data_stride, second_scale_start, second_scale_stride,
    second_entries, second_num_slots, second_magic, second_shift,
    LAYOUT: tl.constexpr, FNUZ: tl.constexpr, SECOND: tl.constexpr, SECOND_FNUZ: tl.constexpr, ALIGNED: tl.constexpr,
    HEADS: tl.constexpr, MOST_HEADS: tl.constexpr, KEYS: tl.constexpr, HW_FP8: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = min(HEADS, MOST_HEADS)
    WIDE: tl.constexpr = SPREAD and TILE >= 64
    # Keys that are read byte by byte take more registers, and so do two loops; loads ahead take shared memory.
    ALIKE: tl.constexpr = SECOND == "none" or (SECOND == LAYOUT and SECOND_FNUZ == FNUZ)
    MOST_KEYS: tl.constexpr = 128 if not SPREAD or (WIDE and ALIKE and LAYOUT == "fp8_ds_mla") else 64
    OWN_KEYS: tl.constexpr = min(KEYS, MOST_KEYS if ALIGNED else 16)
    # A few heads' queries stay in registers, which leaves none for the next tile's codes.
    LOADS: tl.constexpr = 2 if SPREAD and TILE < 64 else STAGES
    head_tiles = tl.cdiv(heads, TILE)
    split = tl.program_id(1)
    token = (tl.program_id(0) // head_tiles).to(tl.int64)
    head = (tl.program_id(0) % head_tiles) * TILE + tl.arange(0, TILE)
    real = head < heads
    head = tl.where(real, head, 0)

    sees = tl.load(valid + token) != 0
    length = tl.load(lens + token)
    start = token * rows_stride
    if ragged != 0:
        start = length.to(tl.int64)
        length = tl.load(lens + token + 1) - length
    row = rows + start
    length = tl.where(sees, tl.minimum(tl.maximum(length, 0), width), 0)
    tiles = tl.cdiv(length, OWN_KEYS)
    all_tiles = tiles
    second_row = row
    second_length = length
    if SECOND != "none":
        second_length = tl.minimum(tl.load(second_lens + token), second_width)
        second_length = tl.where(sees, tl.maximum(second_length, 0), 0)
        second_row = second_rows + token * second_rows_stride
        all_tiles += tl.cdiv(second_length, OWN_KEYS)
    each = tl.where(share != 0, share * (KEYS // OWN_KEYS), tl.cdiv(all_tiles, splits))
    first = tl.minimum(split * each, all_tiles)
    last = tl.minimum(first + each, all_tiles)

    window = (
        row, length, width, pages, scale, page_stride, data_stride, scale_start, scale_stride, entries, num_slots,
        magic, shift,
    )  # fmt: skip
    second = (
        second_row, second_length, second_width, second_pages, second_scale, second_page_stride, second_data_stride,
        second_scale_start, second_scale_stride, second_entries, second_num_slots, second_magic, second_shift,
    )  # fmt: skip
    peak, total, acc = attend(
        q + token * q_row + head * q_head, real, window, second, first, tiles, last, factor, tl.minimum(heads, 1),
        LAYOUT, FNUZ, SECOND, SECOND_FNUZ, ALIGNED, TILE, OWN_KEYS, HW_FP8, PARTS, LOADS, WIDE,
    )  # fmt: skip
    if splits == 1:
        to = out + token * out_row + head * out_head
        write_result(to, lse + token * heads + head, sink + head, real, has_lse, peak, total, acc, ALIGNED, PARTS)
    else:
        number = tl.program_id(0).to(tl.int64) * splits + split
        write_partial(sums, peaks, number, first < last, peak, total, acc, TILE, PARTS)
