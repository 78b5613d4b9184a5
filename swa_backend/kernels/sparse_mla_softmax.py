"""The online softmax of the portable attention kernel: tiles of keys in, a result or a partial one out."""
# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: N803, N806, RUF005

from __future__ import annotations

import triton.language as tl

from swa_backend.cache_layout import HEAD_DIM
from swa_backend.kernels.jit import device_function
from swa_backend.kernels.sparse_mla_keys import (
    CHUNK,
    CHUNKS,
    decode_chunk,
    joined,
    load_chunk,
    load_scales,
    places,
    tensor_scale,
    tile_slots,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
DIM: tl.constexpr = tl.constexpr(HEAD_DIM)
MASK_DIM: tl.constexpr = tl.constexpr(16)  # the least that matrix units take
TINY: tl.constexpr = tl.constexpr(1e-30)


@device_function
def attend(
    queries, real, window, second, first, tiles, last, factor, once,
    LAYOUT: tl.constexpr, FNUZ: tl.constexpr, SECOND: tl.constexpr, SECOND_FNUZ: tl.constexpr, ALIGNED: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, HW_FP8: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """(peak [HEADS], total [HEADS], acc) of the tiles ``first`` to ``last - 1``, the first ``tiles`` of the window's.

    ``peak`` is the largest logit in base 2, ``total`` the sum of weights (0 only without any entry, perhaps NaN), both
    float32; ``acc`` the weighted sums of keys as a tuple of PARTS [HEADS, 512 / PARTS].
    """
    BOTH: tl.constexpr = SECOND == LAYOUT and SECOND_FNUZ == FNUZ and SECOND != "fp8_per_tensor"
    q = query_parts(queries, real, ALIGNED, PARTS)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    seen = tl.zeros([KEYS], tl.int32)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.zeros([HEADS, DIM // PARTS], tl.float32),)
    if BOTH:
        peak, total, seen, acc = attend_tiles(
            q, peak, total, seen, acc, window, second, first, tiles, last, factor, once,
            LAYOUT, FNUZ, True, ALIGNED, HEADS, KEYS, HW_FP8, PARTS, STAGES, SPREAD,
        )  # fmt: skip
    else:
        peak, total, seen, acc = attend_tiles(
            q, peak, total, seen, acc, window, window, tl.minimum(first, tiles), tiles, tl.minimum(last, tiles), factor,
            once,
            LAYOUT, FNUZ, False, ALIGNED, HEADS, KEYS, HW_FP8, PARTS, STAGES, SPREAD,
        )  # fmt: skip
        if SECOND != "none":
            peak, total, seen, acc = attend_tiles(
                q, peak, total, seen, acc, second, second, tl.maximum(first - tiles, 0), tiles,
                tl.maximum(last - tiles, 0), factor, once,
                SECOND, SECOND_FNUZ, False, ALIGNED, HEADS, KEYS, HW_FP8, PARTS, STAGES, SPREAD,
            )  # fmt: skip
    # Without an entry nothing is seen, whatever a query that is not finite made of the missing keys.
    total = tl.where(tl.max(seen, 0) > 0, total, 0.0)
    return peak, total, acc


@device_function
def query_parts(start, real, ALIGNED: tl.constexpr, PARTS: tl.constexpr):
    """The queries [HEADS, 512] bf16 that begin at ``start`` [HEADS], as a tuple of PARTS."""
    chunks = ()
    lane = tl.arange(0, CHUNK)
    for c in tl.static_range(CHUNKS):
        at = start[:, None] + (lane + c * CHUNK)[None, :]
        if ALIGNED:
            at = tl.multiple_of(at, [1, 16])
        chunks = chunks + (tl.load(at, mask=real[:, None], other=0.0),)
    return joined(chunks, PARTS)


@device_function
def either(choice, a, b):
    """Pointer ``b`` if ``choice`` else ``a``, by way of integers: a compiler may take a choice for one buffer."""
    return tl.where(choice, b.to(tl.int64), a.to(tl.int64)).to(a.dtype)


@device_function
def cache_of_tile(tile, tiles, window, second, BOTH: tl.constexpr):
    """(number of the tile within its cache's row, that cache)."""
    if BOTH:
        is_second = tile >= tiles
        number = tl.where(is_second, tile - tiles, tile)
        cache = (
            either(is_second, window[0], second[0]), tl.where(is_second, second[1], window[1]),
            tl.where(is_second, second[2], window[2]), either(is_second, window[3], second[3]), window[4],
            tl.where(is_second, second[5], window[5]), window[6], tl.where(is_second, second[7], window[7]), window[8],
            tl.where(is_second, second[9], window[9]), tl.where(is_second, second[10], window[10]),
            tl.where(is_second, second[11], window[11]), tl.where(is_second, second[12], window[12]),
        )  # fmt: skip
    else:
        number = tile
        cache = window
    return number, cache


@device_function
def spread_logits(
    q, keys, ones, bias, once, HEADS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Logits [HEADS, KEYS] whose keys are spread over the warpgroups.

    Of a product that leads to another one, Triton gives each warpgroup of its own rows only, and with 64 rows two of
    them compute the same. It does not look past the end of a block; so each product gets one, entered always.
    """
    logits = tl.zeros([HEADS, KEYS], tl.float32)
    if once > 0:
        logits = tl.dot(ones, tl.trans(bias), logits)
    for c in tl.static_range(PARTS):
        if once > -1 - c:
            logits = tl.dot(q[c], tl.trans(keys[c]), logits)
    return logits


@device_function
def soften(logits, peak, total, factor, value_scale, LAYOUT: tl.constexpr):
    """One step of the online softmax: (peak, total, decay of what was summed before, weights bf16)."""
    logits = logits * factor
    higher = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    decay = tl.exp2(peak - base)
    weights = tl.exp2(logits - base[:, None])
    total = total * decay + tl.sum(weights, 1)
    if LAYOUT == "fp8_per_tensor":
        weights *= value_scale
    return higher, total, decay, weights.to(tl.bfloat16)


@device_function
def attend_tiles(
    q, peak, total, seen, acc, window, second, first, tiles, last, factor, once,
    LAYOUT: tl.constexpr, FNUZ: tl.constexpr, BOTH: tl.constexpr, ALIGNED: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, HW_FP8: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Take in the tiles ``first`` to ``last - 1`` of one cache, or (BOTH) of two alike, the first ``tiles`` of one.

    A cache is (row, length, width, pages, scale and so on, as the kernel has them). ``seen`` [KEYS] int32 is not 0
    where any tile had an entry. ``once`` is 1, which the compiler does not know.
    """
    value_scale = tensor_scale(window[4], LAYOUT)
    factor = factor * value_scale
    factor = tl.where(factor == 0.0, TINY, factor)
    # What a missing key adds to its logits. It is added by the matrix units, as one more dimension of queries and
    # keys: to choose among finished logits costs each thread a look at every column's entry.
    nothing = tl.where(factor < 0.0, float("inf"), float("-inf"))
    ones = tl.full([HEADS, MASK_DIM], 1.0, tl.bfloat16)
    is_mask = (tl.arange(0, MASK_DIM) == 0)[None, :]
    if STAGES == 1:
        number, cache = cache_of_tile(first, tiles, window, second, BOTH)
        slot, live = tile_slots(cache[0], number * KEYS, cache[1], cache[2], cache[10], KEYS)
    for tile in tl.range(first, last, num_stages=STAGES):
        number, cache = cache_of_tile(tile, tiles, window, second, BOTH)
        if STAGES > 1:
            slot, live = tile_slots(cache[0], number * KEYS, cache[1], cache[2], cache[10], KEYS)
        counts = live
        data, scales = places(cache[3], slot, cache[5], cache[6], cache[7], cache[8], cache[9], cache[11], cache[12])
        words = load_scales(scales, counts, LAYOUT, ALIGNED)
        codes = ()
        for c in tl.static_range(CHUNKS):
            codes = codes + (load_chunk(data, counts, c, LAYOUT, ALIGNED),)
        if STAGES == 1:
            # Slots of the next tile come while this one is computed.
            number, cache = cache_of_tile(tile + 1, tiles, window, second, BOTH)
            slot, live = tile_slots(cache[0], number * KEYS, cache[1], cache[2], cache[10], KEYS)
        chunks = ()
        for c in tl.static_range(CHUNKS):
            chunks = chunks + (decode_chunk(codes[c], words, c, LAYOUT, FNUZ, HW_FP8, KEYS),)
        keys = joined(chunks, PARTS)
        seen = seen | counts.to(tl.int32)
        bias = tl.where(is_mask & (counts == 0)[:, None], nothing, 0.0).to(tl.bfloat16)
        if SPREAD:
            logits = spread_logits(q, keys, ones, bias, once, HEADS, KEYS, PARTS)
            # Whatever the loop leaves, the compiler hands over; else it would compute it once for each user.
            weights = tl.zeros([HEADS, KEYS], tl.bfloat16)
            decay = tl.zeros([HEADS], tl.float32)
            turn = once - once
            while turn < once:
                peak, total, decay, weights = soften(logits, peak, total, factor, value_scale, LAYOUT)
                turn += 1
        else:
            logits = tl.dot(ones, tl.trans(bias))
            for c in tl.static_range(PARTS):
                logits = tl.dot(q[c], tl.trans(keys[c]), logits)
            peak, total, decay, weights = soften(logits, peak, total, factor, value_scale, LAYOUT)
        scaled = ()
        for c in tl.static_range(PARTS):
            scaled = scaled + (acc[c] * decay[:, None],)
        added = ()
        for c in tl.static_range(PARTS):
            added = added + (tl.dot(weights, keys[c], scaled[c]),)
        acc = added
    return peak, total, seen, acc


@device_function
def write_result(
    to, lse, sink, real, has_lse, peak, total, acc,
    ALIGNED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Divide and store what `attend` returned; ``to``, ``lse`` and ``sink`` are pointers [HEADS]."""
    lane = tl.arange(0, DIM // PARTS)
    empty = total == 0.0
    base = tl.where(peak == float("-inf"), 0.0, peak)
    divisor = total + tl.exp2(tl.load(sink) * LOG2_E - base)
    for c in tl.static_range(PARTS):
        result = tl.where(empty[:, None], 0.0, acc[c] / divisor[:, None]).to(tl.bfloat16)
        at = to[:, None] + (lane + c * (DIM // PARTS))[None, :]
        if ALIGNED:
            at = tl.multiple_of(at, [1, 16])
        tl.store(at, result, mask=real[:, None])
    if has_lse != 0:
        tl.store(lse, tl.where(empty, float("-inf"), (base + tl.log2(total)) * LN_2), mask=real)


@device_function
def write_partial(
    sums, peaks, number, filled, peak, total, acc,
    HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store what `attend` returned as partial result ``number``; sums only of a program that had tiles."""
    own = tl.arange(0, HEADS)
    lane = tl.arange(0, DIM // PARTS)
    tl.store(peaks + number * (2 * HEADS) + own, peak)
    tl.store(peaks + number * (2 * HEADS) + HEADS + own, total)
    start = sums + number * (HEADS * DIM) + own * DIM
    if filled:
        for c in tl.static_range(PARTS):
            at = start[:, None] + (lane + c * (DIM // PARTS))[None, :]
            tl.store(tl.multiple_of(at, [1, 16]), acc[c])
