"""Window attention of neighbouring tokens together: each key of their windows is loaded and decoded once for all.

A program takes a few neighbouring tokens and as many heads of each as make ROWS rows. It goes through the *runs* of
tokens whose rows join (`swa_backend.kernels.window_plan`), and for each run through the keys of all its windows, a tile
at a time. Each row takes part only in its own run, and sees only the places of its own window.

Places outside a row's window get the weight 0, and 0 times NaN is NaN: a key that is not finite is put in as zeros, and
its logit is NaN for the rows that see it. Tiles begin at places that are multiples of their size, so that a row's keys
are added in the same order whatever tokens stand beside it.
"""
# mypy: disable-error-code="no-untyped-def, assignment, misc, var-annotated"
# ruff: noqa: N803, N806, RUF005

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import triton.language as tl

from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.kernels.jit import Tuning, device_function, kernel
from swa_backend.kernels.sparse_mla_keys import (
    CHUNK,
    CHUNKS,
    decode_chunk,
    load_chunk,
    load_scales,
    places,
    tensor_scale,
)
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.cache_layout import PageLayout
    from swa_backend.config import BackendConfig

AHEAD: tl.constexpr = tl.constexpr(1)  # chunks that are loaded before the first is decoded
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NONE: tl.constexpr = tl.constexpr(-1)


@device_function
def run_of(begin, stop, first, lens, joins, width, reach, BLOCK: tl.constexpr):
    """One past the last token of the run that token ``begin`` starts: its tokens join, and share a place with it.

    Args:
        reach: places that a run may span.
    """
    token = begin + tl.arange(0, BLOCK)
    inside = token < stop
    token = tl.where(inside, token, begin)
    own = tl.load(first + token)
    end = own + tl.maximum(tl.minimum(tl.load(lens + token), width), 0)
    begin_place = tl.load(first + begin)
    begin_end = begin_place + tl.maximum(tl.minimum(tl.load(lens + begin), width), 0)
    apart = (tl.load(joins + token) == 0) | (own > begin_end) | (end - begin_place > reach)
    past = tl.where(inside & (apart == 0), stop, token)
    past = tl.where(token > begin, past, stop)
    return tl.min(past, 0)


@device_function
def slots_at(place, begin, last, first, lens, rows, rows_stride, width, num_slots):
    """(slot [N], live [N]) of places that the run of tokens ``begin`` to ``last`` sees; dead lanes have slot 0."""
    low = tl.load(first + begin)
    middle = low + tl.maximum(tl.minimum(tl.load(lens + begin), width), 0)
    last_low = tl.load(first + last)
    high = last_low + tl.maximum(tl.minimum(tl.load(lens + last), width), 0)
    inside = (place >= low) & (place < high)
    early = place < middle
    token = tl.where(early, begin, last)
    column = place - tl.where(early, low, last_low)
    at = tl.where(inside, token.to(tl.int64) * rows_stride + column, 0)
    slot = tl.load(rows + at, mask=inside, other=NONE)
    live = inside & (slot >= 0) & (slot < num_slots)
    return tl.where(live, slot, 0), live


@device_function
def finite_chunk(
    codes, words, wild, C: tl.constexpr, LAYOUT: tl.constexpr, FNUZ: tl.constexpr, HW_FP8: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """(values, wild): chunk C of keys [KEYS, 64] bf16 with 0 for what is not finite; ``wild`` [KEYS] 1 where it was."""
    values = decode_chunk(codes, words, C, LAYOUT, FNUZ, HW_FP8, KEYS)
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    wild = wild | (tl.min(finite.to(tl.int32), 1) == 0).to(tl.int32)
    return tl.where(finite, values, 0.0).to(tl.bfloat16), wild


@device_function
def bias_of(live, wild):
    """What is added to the logits of a key: -inf if there is none, NaN if it is not finite, else 0."""
    return tl.where(live, tl.where(wild > 0, float("nan"), 0.0), float("-inf"))


MOST_HEADS = 64  # of a program


def head_tile(heads: int) -> int:
    """Heads of a token that a program takes, at most."""
    return min(1 << (heads - 1).bit_length(), MOST_HEADS)


def window_key(layout: PageLayout, heads: int, *, aligned: bool) -> dict[str, object]:
    """The compile key for a cache and a number of heads."""
    return {
        "LAYOUT": layout.name,
        "FNUZ": layout.dialect is Dialect.FNUZ,
        "ALIGNED": aligned,
        "HEADS": head_tile(heads),
    }


def window_keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    """What a configuration can need of the window kernels."""
    layout = get_layout(config.cache_layout, dialects[CacheRole.SWA])
    for aligned in (True, False):
        yield window_key(layout, config.num_heads, aligned=aligned)


WINDOW_TYPES = {
    "q": "*bf16",  # [tokens, heads, 512]
    "out": "*bf16",  # [tokens, heads, 512]
    "lse": "*fp32",  # [tokens, heads], contiguous; not written unless has_lse
    "rows": "*i32",  # [tokens, width] slots
    "lens": "*i32",  # [tokens]
    "first": "*i32",  # [tokens] place of each row's first entry
    "joins": "*i32",  # [tokens] 1: the row joins the one before
    "sink": "*fp32",  # [heads]
    "q_row": "i64",  # strides in values
    "q_head": "i64",
    "out_row": "i64",
    "out_head": "i64",
    "rows_stride": "i64",
    "width": "i32",
    "tokens": "i32",
    "has_lse": "i32",
    "heads": "i32",
    "factor": "fp32",  # of the logits, times log2(e)
    "pages": "*u8",
    "scale": "*u8",
    "page_stride": "i64",
    "data_stride": "i64",
    "scale_start": "i64",
    "scale_stride": "i64",
    "entries": "i32",
    "num_slots": "i32",
    "magic": "i64",  # of entries
    "shift": "i32",
}


@device_function
def query_chunks(start, real, ALIGNED: tl.constexpr):
    """The queries that begin at ``start`` [ROWS], a tuple of 8 x [ROWS, 64]."""
    found = ()
    for c in tl.static_range(CHUNKS):
        at = start[:, None] + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        if ALIGNED:
            at = tl.multiple_of(at, [1, 16])
        found = found + (tl.load(at, mask=real[:, None], other=0.0),)
    return found


@kernel(
    types=WINDOW_TYPES,
    tuning={
        "cuda": Tuning(8, 1, tiles={"ROWS": 16, "KEYS": 16, "HW_FP8": 0, "RELOAD": 1}, spilled_bytes=192),
        "cuda:90": Tuning(8, 1, tiles={"ROWS": 64, "KEYS": 32, "HW_FP8": 1, "RELOAD": 1}, spilled_bytes=320),
        "": Tuning(4, 1, tiles={"ROWS": 32, "KEYS": 16, "HW_FP8": 0, "RELOAD": 1}, spilled_bytes=16),
        "interpret": Tuning(4, 1, tiles={"ROWS": 32, "KEYS": 64, "HW_FP8": 0, "RELOAD": 0}),
    },
    keys=window_keys,
)
def sparse_mla_window(
    q, out, lse, rows, lens, first, joins, sink,
    q_row, q_head, out_row, out_head, rows_stride, width, tokens, has_lse, heads, factor,
    pages, scale, page_stride, data_stride, scale_start, scale_stride, entries, num_slots, magic, shift,
    LAYOUT: tl.constexpr, FNUZ: tl.constexpr, ALIGNED: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HW_FP8: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    HEIGHT: tl.constexpr = HEADS if HEADS < ROWS else ROWS
    TOKENS: tl.constexpr = ROWS // HEIGHT
    start = (tl.program_id(0) // tl.cdiv(heads, HEIGHT)) * TOKENS
    stop = tl.minimum(start + TOKENS, tokens)
    row = tl.arange(0, ROWS)
    token = start + row // HEIGHT
    head = (tl.program_id(0) % tl.cdiv(heads, HEIGHT)) * HEIGHT + row % HEIGHT
    real = (token < stop) & (head < heads)
    token = tl.where(token < stop, token, start)
    at_head = tl.where(head < heads, head, 0)
    low = tl.load(first + token)
    high = low + tl.maximum(tl.minimum(tl.load(lens + token), width), 0)
    wide_token = token.to(tl.int64)
    from_row = q + wide_token * q_row + at_head * q_head
    if RELOAD == 0:
        queries = query_chunks(from_row, real, ALIGNED)
    value_scale = tensor_scale(scale, LAYOUT)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = ()
    for _ in tl.static_range(CHUNKS):
        acc = acc + (tl.zeros([ROWS, CHUNK], tl.float32),)

    begin = start
    while begin < stop:
        past = run_of(begin, stop, first, lens, joins, width, 1 << 30, TOKENS)
        last = past - 1
        run_low = tl.load(first + begin)
        run_high = tl.load(first + last) + tl.maximum(tl.minimum(tl.load(lens + last), width), 0)
        own = (token >= begin) & (token < past)
        tile = run_low & ~(KEYS - 1)
        run_high = tl.where(run_high > run_low, run_high, tile)
        while tile < run_high:
            place = tile + tl.arange(0, KEYS)
            slot, live = slots_at(place, begin, last, first, lens, rows, rows_stride, width, num_slots)
            data, scales = places(
                pages, slot, page_stride, data_stride, scale_start, scale_stride, entries, magic, shift
            )
            words = load_scales(scales, live, LAYOUT, ALIGNED)
            wild = tl.zeros([KEYS], tl.int32)
            codes = ()
            keys = ()
            for c in tl.static_range(CHUNKS + AHEAD):
                if c < CHUNKS:
                    codes = codes + (load_chunk(data, live, c, LAYOUT, ALIGNED),)
                if c >= AHEAD:
                    key, wild = finite_chunk(codes[c - AHEAD], words, wild, c - AHEAD, LAYOUT, FNUZ, HW_FP8, KEYS)
                    keys = keys + (key,)
            if RELOAD:
                queries = query_chunks(from_row, real, ALIGNED)
            logits = tl.dot(queries[0], tl.trans(keys[0]))
            for c in tl.static_range(1, CHUNKS):
                logits = tl.dot(queries[c], tl.trans(keys[c]), logits)
            bias = bias_of(live, wild)
            sees = own[:, None] & (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
            logits = tl.where(sees, logits * (factor * value_scale) + bias[None, :], float("-inf"))
            higher = tl.maximum(peak, tl.max(logits, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            decay = tl.exp2(peak - base)
            weights = tl.exp2(logits - base[:, None])
            total = total * decay + tl.sum(weights, 1)
            peak = higher
            if LAYOUT == "fp8_per_tensor":
                weights *= value_scale
            weights = weights.to(tl.bfloat16)
            added = ()
            for c in tl.static_range(CHUNKS):
                added = added + (tl.dot(weights, keys[c], acc[c] * decay[:, None]),)
            acc = added
            tile += KEYS
        begin = past

    # A sum of weights is 0 only without any entry; it may be NaN.
    empty = total == 0.0
    base = tl.where(peak == float("-inf"), 0.0, peak)
    divisor = total + tl.exp2(tl.load(sink + at_head) * LOG2_E - base)
    to = out + wide_token * out_row + at_head * out_head
    for c in tl.static_range(CHUNKS):
        result = tl.where(empty[:, None], 0.0, acc[c] / divisor[:, None]).to(tl.bfloat16)
        at = to[:, None] + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        if ALIGNED:
            at = tl.multiple_of(at, [1, 16])
        tl.store(at, result, mask=real[:, None])
    if has_lse != 0:
        found = tl.where(empty, float("-inf"), (base + tl.log2(total)) * LN_2)
        tl.store(lse + wide_token * heads + at_head, found, mask=real)
