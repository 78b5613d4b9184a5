"""Window attention of a run of tokens over keys that stay in shared memory: for chips that have room for a window.

A program takes TOKENS neighbouring tokens and HEADS heads of each, and goes through the runs of tokens whose rows join
(`swa_backend.kernels.window_plan`). All keys of a run are loaded and decoded once, into as many rows as a window has
plus a few, and then serve ROWS rows (a head of a token) at a time, with one pass over all of them: the softmax needs no
second look, and the output is written 64 values at a time.

The key of place p is in row p mod (MAIN + EXTRA), whatever run it is in, so that a row's keys are added in the same
order whatever tokens stand beside it. See `swa_backend.kernels.sparse_mla_window` for keys that are not finite.
"""
# mypy: disable-error-code="no-untyped-def, assignment, misc, var-annotated"
# ruff: noqa: N803, N806, RUF005

from __future__ import annotations

import triton.language as tl

from swa_backend.kernels.jit import Tuning, device_function, kernel
from swa_backend.kernels.sparse_mla_keys import CHUNK, CHUNKS, joined, load_chunk, load_scales, places, tensor_scale
from swa_backend.kernels.sparse_mla_window import (
    AHEAD as CHUNKS_AHEAD,
)
from swa_backend.kernels.sparse_mla_window import (
    LN_2,
    LOG2_E,
    WINDOW_TYPES,
    bias_of,
    finite_chunk,
    run_of,
    slots_at,
    window_keys,
)


@device_function
def finite_keys(
    slot, live, pages, page_stride, data_stride, scale_start, scale_stride, entries, magic, shift,
    LAYOUT: tl.constexpr, FNUZ: tl.constexpr, ALIGNED: tl.constexpr, KEYS: tl.constexpr, HW_FP8: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """(PARTS x [KEYS, 512 / PARTS] bf16, bias [KEYS] float32) of some slots."""
    data, scales = places(pages, slot, page_stride, data_stride, scale_start, scale_stride, entries, magic, shift)
    words = load_scales(scales, live, LAYOUT, ALIGNED)
    wild = tl.zeros([KEYS], tl.int32)
    codes = ()
    keys = ()
    for c in tl.static_range(CHUNKS + CHUNKS_AHEAD):
        if c < CHUNKS:
            codes = codes + (load_chunk(data, live, c, LAYOUT, ALIGNED),)
        if c >= CHUNKS_AHEAD:
            codes_c = codes[c - CHUNKS_AHEAD]
            key, wild = finite_chunk(codes_c, words, wild, c - CHUNKS_AHEAD, LAYOUT, FNUZ, HW_FP8, KEYS)
            keys = keys + (key,)
    return joined(keys, PARTS), bias_of(live, wild)


@device_function
def places_of(row, low, RING: tl.constexpr):
    """Places of ring rows in a run whose first place is ``low``."""
    ahead = (row - low) % RING
    return low + tl.where(ahead < 0, ahead + RING, ahead)


@device_function
def holds_special(place, bias, low, high):
    """Whether the bias of a place from ``low`` to ``high - 1`` is not 0."""
    inside = (place >= low) & (place < high)
    return tl.max((inside & (bias != 0.0)).to(tl.int32), 0) > 0


@device_function
def ring_rows_seen(begins, length, FIRST: tl.constexpr, COUNT: tl.constexpr, RING: tl.constexpr):
    """[ROWS, COUNT]: which of the ring rows ``FIRST ..`` are among ``length`` ones from ``begins`` on."""
    ahead = (FIRST + tl.arange(0, COUNT))[None, :] - begins[:, None]
    return tl.where(ahead < 0, ahead + RING, ahead) < length[:, None]


@kernel(
    types=WINDOW_TYPES,
    tuning={
        "cuda:90": Tuning(
            8, 1, tiles={"TOKENS": 64, "ROWS": 128, "MAIN": 128, "EXTRA": 64, "AHEAD": 0, "HW_FP8": 1, "PARTS": 4},
            spilled_bytes=1024,
        ),
        "interpret": Tuning(
            4, 1, tiles={"TOKENS": 16, "ROWS": 64, "MAIN": 128, "EXTRA": 16, "AHEAD": 0, "HW_FP8": 0, "PARTS": 1}
        ),
    },
    keys=window_keys,
)
def sparse_mla_window_held(
    q, out, lse, rows, lens, first, joins, sink,
    q_row, q_head, out_row, out_head, rows_stride, width, tokens, has_lse, heads, factor,
    pages, scale, page_stride, data_stride, scale_start, scale_stride, entries, num_slots, magic, shift,
    LAYOUT: tl.constexpr, FNUZ: tl.constexpr, ALIGNED: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, MAIN: tl.constexpr, EXTRA: tl.constexpr, AHEAD: tl.constexpr,
    HW_FP8: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(ROWS % HEADS == 0)
    RING: tl.constexpr = MAIN + EXTRA
    WIDTH: tl.constexpr = CHUNKS * CHUNK // PARTS
    start = (tl.program_id(0) // tl.cdiv(heads, HEADS)) * TOKENS
    stop = tl.minimum(start + TOKENS, tokens)
    row = tl.arange(0, ROWS)
    head = (tl.program_id(0) % tl.cdiv(heads, HEADS)) * HEADS + row % HEADS
    at_head = tl.where(head < heads, head, 0)
    in_group = row // HEADS
    # Within the rows of a group 32 bits are enough, and half as many registers.
    q_token = q_row.to(tl.int32)
    q_next = q_head.to(tl.int32)
    out_token = out_row.to(tl.int32)
    out_next = out_head.to(tl.int32)
    sinks = tl.load(sink + at_head) * LOG2_E
    lane = tl.arange(0, WIDTH)
    value_scale = tensor_scale(scale, LAYOUT)
    begin = start
    while begin < stop:
        past = run_of(begin, stop, first, lens, joins, width, RING, TOKENS)
        run_low = tl.load(first + begin)
        run_high = tl.load(first + past - 1) + tl.maximum(tl.minimum(tl.load(lens + past - 1), width), 0)
        place = places_of(tl.arange(0, MAIN), run_low, RING)
        extra_place = places_of(MAIN + tl.arange(0, EXTRA), run_low, RING)
        slot, live = slots_at(place, begin, past - 1, first, lens, rows, rows_stride, width, num_slots)
        keys, bias = finite_keys(
            slot, live, pages, page_stride, data_stride, scale_start, scale_stride, entries, magic, shift,
            LAYOUT, FNUZ, ALIGNED, MAIN, HW_FP8, PARTS,
        )  # fmt: skip
        slot, live = slots_at(extra_place, begin, past - 1, first, lens, rows, rows_stride, width, num_slots)
        extra_keys, extra_bias = finite_keys(
            slot, live, pages, page_stride, data_stride, scale_start, scale_stride, entries, magic, shift,
            LAYOUT, FNUZ, ALIGNED, EXTRA, HW_FP8, PARTS,
        )  # fmt: skip
        # Whether some place of the run has no key, or one that is not finite.
        special = holds_special(place, bias, run_low, run_high) | holds_special(
            extra_place, extra_bias, run_low, run_high
        )
        group = begin
        while group < past:
            real = (group + in_group < past) & (head < heads)
            token = tl.where(group + in_group < past, group + in_group, begin)
            low = tl.load(first + token)
            length = tl.maximum(tl.minimum(tl.load(lens + token), width), 0)
            from_row = q + group.to(tl.int64) * q_row + tl.where(real, in_group * q_token + at_head * q_next, 0)
            logits = tl.zeros([ROWS, MAIN], tl.float32)
            extra = tl.zeros([ROWS, EXTRA], tl.float32)
            queries = ()
            for c in tl.static_range(PARTS + AHEAD):
                if c < PARTS:
                    at = from_row[:, None] + (lane + c * WIDTH)[None, :]
                    if ALIGNED:
                        at = tl.multiple_of(at, [1, 16])
                    queries = queries + (tl.load(at, mask=real[:, None], other=0.0),)
                if c >= AHEAD:
                    logits = tl.dot(queries[c - AHEAD], tl.trans(keys[c - AHEAD]), logits)
                    extra = tl.dot(queries[c - AHEAD], tl.trans(extra_keys[c - AHEAD]), extra)
            logits *= factor * value_scale
            extra *= factor * value_scale
            if special:
                logits += bias[None, :]
                extra += extra_bias[None, :]
            # Reckoned from the row's own first place, which changes in the loop: what does not would be kept in
            # registers that the loop has not got.
            begins = low % RING
            logits = tl.where(ring_rows_seen(begins, length, 0, MAIN, RING), logits, float("-inf"))
            extra = tl.where(ring_rows_seen(begins, length, MAIN, EXTRA, RING), extra, float("-inf"))
            peak = tl.maximum(tl.max(logits, 1), tl.max(extra, 1))
            base = tl.where(peak == float("-inf"), 0.0, peak)
            weights = tl.exp2(logits - base[:, None])
            extra_weights = tl.exp2(extra - base[:, None])
            total = tl.sum(weights, 1) + tl.sum(extra_weights, 1)
            # A sum of weights is 0 only without any entry; it may be NaN.
            empty = total == 0.0
            share = tl.where(empty, 0.0, value_scale / (total + tl.exp2(sinks - base)))
            weights = weights.to(tl.bfloat16)
            extra_weights = extra_weights.to(tl.bfloat16)
            to_row = out + group.to(tl.int64) * out_row + tl.where(real, in_group * out_token + at_head * out_next, 0)
            for c in tl.static_range(PARTS):
                result = tl.dot(weights, keys[c])
                result = tl.dot(extra_weights, extra_keys[c], result)
                into = to_row[:, None] + (lane + c * WIDTH)[None, :]
                if ALIGNED:
                    into = tl.multiple_of(into, [1, 16])
                tl.store(into, (result * share[:, None]).to(tl.bfloat16), mask=real[:, None])
            if has_lse != 0:
                found = tl.where(empty, float("-inf"), (base + tl.log2(total)) * LN_2)
                tl.store(lse + token.to(tl.int64) * heads + at_head, found, mask=real)
            group += ROWS // HEADS
        begin = past
