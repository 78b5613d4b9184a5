"""Window-only prefill on Hopper: a ring of dequantised keys slides over the tokens. Gluon, sm90.

A program has a run of consecutive tokens and a block of 64 heads. Neighbouring tokens see nearly the same keys, so it
keeps them in shared memory as bf16 and dequantises one new key a token, where a decode kernel dequantises 128.

Ring: 144 rows of 512 values. The key that is *in place* p (position p of its request) lies in row
p mod 144. A token in place p sees the places p - length + 1 .. p, at most 128 of them. ::

    place   p-135        p-127                                      p              p+8
              |  free slab  |  seen by the token in place p         |  slab ahead  |
    ring  ----+-------------+---------------------------------------+--------------+----   144 rows, cyclic
                                                                      ^ loaded while the slab of p is worked on

The eight rows of the next slab are loaded while the eight tokens of this one are served, so that no token waits for
its own key. Scores are computed for all 144 rows, and those of rows outside the token's window are replaced by -inf.
Their weights are exactly 0, which leaves nothing of a key only if it is finite: keys with a NaN or an infinity are
stored as zeros, and their bias is NaN, so that the rows that do see them become NaN and no other.

Four roles, one warpgroup each; token t of the run goes from left to right::

    feed                      score                         values, twice (columns 0..255, 256..511)
    ----------------------    -------------------------     ----------------------------------------
    query t     --query_full-->  scores = query . keys
                <-query_free---
    slab ahead  --keys_full--->  softmax, lse
                                 weights, 1 / sum  --weights_full-->  out = weights . keys / sum
                <---------------- value_done[t mod 2] ------------- store out

Barriers, all of them with one phase a token (``value_done``: two tokens):

==============  ==============================================  ==================================================
barrier         arrivals of a phase                             what it says
==============  ==============================================  ==================================================
query_full      128: each feeding thread, its copies landed     the query of token t is in shared memory
query_free      1: score                                        ... and has been multiplied: the next may overwrite it
keys_full       1: feed                                         every ring row that token t sees holds its key
weights_full    1: score                                        the weights of token t are in shared memory
value_done[2]   2: both halves of the values                    weights of token t, and rows only it sees, are free
==============  ==============================================  ==================================================

``value_done`` is a pair because whoever waits for token t - 2 may find t - 1 done too, and one parity bit tells only
two phases apart.

Layouts: keys, query and weights are in the 128-byte swizzle that the tensor cores read (the weights of the last 16
rows in the 32-byte one: they are 32 bytes wide). Scores are accumulators of 64 x 128 and 64 x 16, values of 64 x 256.
The output is rearranged inside each warp so that a thread stores 16 bytes.

Where a row does not slide (it is of another request, an entry is missing in it alone, the row before is empty), the
whole ring is loaded anew. The plan tells: `swa_backend.kernels.window_plan`.

Every row comes out the same whatever run it is in: its place decides where its keys lie and in which order they are
added, and that does not change with the batch.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from swa_backend.cache_layout import Dialect
from swa_backend.kernels import window_plan
from swa_backend.kernels.jit import Tuning
from swa_backend.platform import CacheRole
from swa_platform_cuda.gluon_kernel import gluon_kernel

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

DIM = gl.constexpr(512)
HALF = gl.constexpr(256)
QUARTER = gl.constexpr(128)
CHUNK = gl.constexpr(64)  # values that share a scale; also the width of a swizzled row
CHUNKS = gl.constexpr(8)
HEADS_OF_A_PROGRAM = 64
HEADS = gl.constexpr(HEADS_OF_A_PROGRAM)
MAIN = gl.constexpr(128)  # ring rows that are multiplied together
EXTRA = gl.constexpr(16)  # .. and the rest of them
RING = gl.constexpr(144)
LONGEST_ROW = 128
LONGEST = gl.constexpr(LONGEST_ROW)
SLIDES = gl.constexpr(window_plan.SLIDES)
SLAB = gl.constexpr(8)  # rows loaded together
DATA_BYTES = gl.constexpr(576)
ROPE_BYTE = gl.constexpr(448)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
MINUS_INF = gl.constexpr(float("-inf"))

TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16))
NARROW_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(32, 16))
FLAT_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCORE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
EXTRA_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
VALUE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
QUERY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 x 64
SLAB_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))  # 8 x 64
THREADS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# 64 x 128 accumulators to sixteen bytes a thread, in two exchanges between the four lanes of a row: one alone is done
# by shuffles, both at once would take shared memory, of which there is none left.
EXCHANGED_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 16], [0, 32], [0, 64]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
OUT_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)


@gluon.jit
def _copy_query(query, query_full, source, heads):
    """Start the copy of one token's query; heads past the last one are not copied, and nobody reads them."""
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY_LAYOUT)) + (heads >> 16), 1)
    dim = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, QUERY_LAYOUT)), 0)
    chunks = query._reinterpret(gl.bfloat16, [CHUNKS, HEADS, CHUNK], TILE_LAYOUT)
    # The grid is flat in z, which the compiler does not know: unrolled, this would take registers that there are not.
    for c in range(gl.num_programs(2) * CHUNKS):
        pointers = gl.multiple_of(source + c * CHUNK + (head * DIM + dim), [1, 16])
        async_copy.async_copy_global_to_shared(chunks.index(c), pointers, mask=head < heads)
    async_copy.mbarrier_arrive(query_full, increment_count=False)


@gluon.jit
def _prefetch_query(source, heads, wanted):
    """Ask for a token's query to be in the L2 cache: half a head a thread."""
    number = gl.arange(0, 128, layout=THREADS_LAYOUT)
    live = ((number < 2 * heads) & wanted).to(gl.int32)
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], 512;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [source + number * HALF, live],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _key_pointers(pages, page_stride, scale_start, entries, num_slots, slot):
    """(data row, scale row, live) of each slot; a slot outside the cache is not live and points to page 0."""
    live = (slot >= 0) & (slot < num_slots)
    real = gl.where(live, slot, 0)
    page = real // entries
    entry = real - page * entries
    start = pages + page.to(gl.int64) * page_stride
    return start + entry * DATA_BYTES, start + scale_start + entry * 8, live


@gluon.jit
def _load_keys(data, scales, live):
    """What is stored of each key: seven chunks of codes, one of bf16, and eight scale bytes as one number."""
    dim = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SLAB_LAYOUT)), 0)
    rows = gl.expand_dims(data, 1)
    mask = gl.expand_dims(live, 1)
    scale = gl.load(scales.to(gl.pointer_type(gl.uint64)), mask=live, other=0)
    c0 = gl.load(gl.multiple_of(rows + dim, [1, 16]), mask=mask, other=0)
    c1 = gl.load(gl.multiple_of(rows + (dim + 64), [1, 16]), mask=mask, other=0)
    c2 = gl.load(gl.multiple_of(rows + (dim + 128), [1, 16]), mask=mask, other=0)
    c3 = gl.load(gl.multiple_of(rows + (dim + 192), [1, 16]), mask=mask, other=0)
    c4 = gl.load(gl.multiple_of(rows + (dim + 256), [1, 16]), mask=mask, other=0)
    c5 = gl.load(gl.multiple_of(rows + (dim + 320), [1, 16]), mask=mask, other=0)
    c6 = gl.load(gl.multiple_of(rows + (dim + 384), [1, 16]), mask=mask, other=0)
    tail = gl.expand_dims((data + ROPE_BYTE).to(gl.pointer_type(gl.bfloat16)), 1) + dim
    rope = gl.load(gl.multiple_of(tail, [1, 16]), mask=mask, other=0.0)
    return c0, c1, c2, c3, c4, c5, c6, rope, scale


@gluon.jit
def _scaled(codes, scale, C: gl.constexpr):
    """Chunk C in float32: e4m3 codes times 2^(byte - 127); byte 0 is a subnormal number, 255 NaN."""
    byte = ((scale >> (8 * C)) & 255).to(gl.int32)
    bits = gl.where(byte == 0, 0x400000, byte << 23)
    factor = gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    return codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * gl.expand_dims(factor, 1)


@gluon.jit
def _store_chunk(slabs, at, values, wild):
    """Store [rows, 64] as bf16 with everything that is not finite as 0; returns ``wild``, 1 where that happened."""
    rounded = values.to(gl.bfloat16)
    finite = gl.abs(rounded.to(gl.float32)) < float("inf")
    slabs.index(at).store(gl.where(finite, rounded, gl.zeros_like(rounded)))
    return wild | gl.where(finite, 0, 1)


@gluon.jit
def _store_keys(slabs, biases, first, apart, bias_at, key, live):
    """Dequantise keys into the ring: chunk c goes to ``slabs.index(first + c * apart)``, the bias to ``bias_at``."""
    c0, c1, c2, c3, c4, c5, c6, rope, scale = key
    wild = gl.zeros_like(c0).to(gl.int32)
    wild = _store_chunk(slabs, first, _scaled(c0, scale, 0), wild)
    wild = _store_chunk(slabs, first + apart, _scaled(c1, scale, 1), wild)
    wild = _store_chunk(slabs, first + 2 * apart, _scaled(c2, scale, 2), wild)
    wild = _store_chunk(slabs, first + 3 * apart, _scaled(c3, scale, 3), wild)
    wild = _store_chunk(slabs, first + 4 * apart, _scaled(c4, scale, 4), wild)
    wild = _store_chunk(slabs, first + 5 * apart, _scaled(c5, scale, 5), wild)
    wild = _store_chunk(slabs, first + 6 * apart, _scaled(c6, scale, 6), wild)
    wild = _store_chunk(slabs, first + 7 * apart, rope.to(gl.float32), wild)
    bias = gl.where(gl.max(wild, 1) > 0, float("nan"), 0.0)
    biases.index(bias_at).store(gl.where(live, bias, MINUS_INF).to(gl.bfloat16))


@gluon.jit
def _row_length(lens, token):
    return gl.maximum(gl.minimum(gl.load(lens + token), LONGEST), 0)


@gluon.jit
def _newest_slots(later, end, rows, lens, row_stride):
    """The last slot of the rows of some tokens, -1 of those that are empty or not of this run of the program."""
    inside = later < end
    later = gl.where(inside, later, 0)
    length = gl.maximum(gl.minimum(gl.load(lens + later, mask=inside, other=0), LONGEST), 0)
    at = later.to(gl.int64) * row_stride + gl.maximum(length - 1, 0)
    return gl.load(rows + at, mask=length > 0, other=-1)


@gluon.jit
def _slots_of(row, rows, lens, row_stride, token, end, place, length):
    """Slots that ring rows hold where ``token``, in ``place``, begins a run: the ring up to the slab ahead of it.

    Places up to the token's own are entries of its row, later ones the newest entries of later tokens.
    """
    in_slab = place & (SLAB - 1)
    back = place - in_slab + (2 * SLAB - 1) - row  # places from this one to the last of the slab ahead
    back = gl.where(back < 0, back + RING, back)
    back = gl.where(back >= RING, back - RING, back)
    ahead = 2 * SLAB - 1 - in_slab - back
    from_later = _newest_slots(token + gl.maximum(ahead, 0), gl.where(ahead > 0, end, 0), rows, lens, row_stride)
    column = length - 1 + gl.minimum(ahead, 0)
    in_row = (ahead <= 0) & (column >= 0)
    from_row = gl.load(rows + token.to(gl.int64) * row_stride + gl.maximum(column, 0), mask=in_row, other=-1)
    return gl.where(ahead > 0, from_later, from_row)


@gluon.jit
def _prefetch_keys(data, live):
    """Ask for data rows to be in the L2 cache, one a thread."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], 576;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [data, live.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _prefetch_ring(
    rows, lens, pages, row_stride, page_stride, scale_start, entries, num_slots, token, end, place, length
):  # fmt: skip
    """Ask for all keys of the ring at once, so that loading them slab by slab does not wait for each."""
    for begin in gl.static_range(0, RING, MAIN):
        row = begin + gl.arange(0, 128, layout=THREADS_LAYOUT)
        slot = _slots_of(row, rows, lens, row_stride, token, end, place, length)
        data, _, live = _key_pointers(pages, page_stride, scale_start, entries, num_slots, slot)
        _prefetch_keys(data, live & (row < RING))


@gluon.jit
def _load_slab(
    keys, extra_keys, bias, extra_bias, rows, lens, pages, row_stride, page_stride, scale_start, entries, num_slots,
    token, end, place, length, number,
):  # fmt: skip
    """Load the eight ring rows of slab ``number``, as ``token`` in ``place`` and those after it need them."""
    slabs = keys._reinterpret(gl.bfloat16, [CHUNKS * MAIN // SLAB, SLAB, CHUNK], TILE_LAYOUT)
    extra_slabs = extra_keys._reinterpret(gl.bfloat16, [CHUNKS * EXTRA // SLAB, SLAB, CHUNK], TILE_LAYOUT)
    slab_bias = bias._reinterpret(gl.bfloat16, [MAIN // SLAB, SLAB], FLAT_LAYOUT)
    extra_slab_bias = extra_bias._reinterpret(gl.bfloat16, [EXTRA // SLAB, SLAB], FLAT_LAYOUT)
    row = number * SLAB + gl.arange(0, SLAB, layout=gl.SliceLayout(1, SLAB_LAYOUT))
    slot = _slots_of(row, rows, lens, row_stride, token, end, place, length)
    data, scales, live = _key_pointers(pages, page_stride, scale_start, entries, num_slots, slot)
    stored = _load_keys(data, scales, live)
    if number < MAIN // SLAB:
        _store_keys(slabs, slab_bias, number, MAIN // SLAB, number, stored, live)
    else:
        extra = number - MAIN // SLAB
        _store_keys(extra_slabs, extra_slab_bias, extra, EXTRA // SLAB, extra, stored, live)


@gluon.jit
def _feed(
    keys, extra_keys, bias, extra_bias, query, query_full, query_free, keys_full, value_done,
    q, rows, lens, first_places, joins, pages, q_token_stride, row_stride, page_stride, scale_start, entries,
    num_slots, heads, first, end,
    PREFETCH: gl.constexpr,
):  # fmt: skip
    """Copies queries, loads and dequantises keys: after a token's query what the next one needs."""
    for token in range(first - 1, end):
        step = token - first
        if step >= 0:
            here = q + token.to(gl.int64) * q_token_stride
            if step > 0:
                mbarrier.wait(query_free, (step - 1) & 1)
            _copy_query(query, query_full, here, heads)
            if PREFETCH:
                _prefetch_query(here + q_token_stride, heads, token + 1 < end)
            # The slab ahead of a token takes the place of keys that the token two before it still sees.
            if step > 1:
                mbarrier.wait(value_done.index(step & 1), ((step - 2) >> 1) & 1)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(keys_full, count=1)
        loaded = gl.maximum(token, first)
        length = _row_length(lens, loaded)
        following = gl.minimum(token + 1, end - 1)
        following_length = _row_length(lens, following)
        begins = (following_length > 0) & (gl.load(joins + following) != SLIDES) & (following > token)
        begins = begins | (step < 0)
        if begins:
            loaded = following
            length = following_length
        place = (gl.load(first_places + loaded) + length - 1) % RING
        number = (place // SLAB + 1) % (RING // SLAB)
        count = gl.where(((place & (SLAB - 1)) == 0) & (length > 0), 1, 0)
        if begins:
            if step >= 0:
                mbarrier.wait(value_done.index(step & 1), (step >> 1) & 1)
            _prefetch_ring(
                rows, lens, pages, row_stride, page_stride, scale_start, entries, num_slots, loaded, end, place, length
            )  # fmt: skip
            number = 0
            count = RING // SLAB
        for slab in range(number, number + count):
            _load_slab(
                keys, extra_keys, bias, extra_bias, rows, lens, pages, row_stride, page_stride, scale_start, entries,
                num_slots, loaded, end, place, length, slab,
            )  # fmt: skip


@gluon.jit
def _seen(place, length, row):
    """Whether a token in ``place`` sees a ring row."""
    behind = place - row
    behind = gl.where(behind < 0, behind + RING, behind)
    return behind < length


@gluon.jit
def _score(
    keys, extra_keys, bias, extra_bias, query, weights, extra_weights, shares,
    query_full, query_free, keys_full, weights_full, value_done,
    lse, sink, lens, first_places, scale, lse_token_stride, heads, first, end,
    LSE: gl.constexpr,
):  # fmt: skip
    """Multiplies query and keys, and turns scores into weights."""
    BY_HEAD: gl.constexpr = gl.SliceLayout(1, SCORE_LAYOUT)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SCORE_LAYOUT)
    BY_EXTRA: gl.constexpr = gl.SliceLayout(0, EXTRA_LAYOUT)
    head = gl.arange(0, HEADS, layout=BY_HEAD)
    factor = scale * LOG2_E
    sinks = gl.load(sink + gl.minimum(head, heads - 1)) * LOG2_E
    row = gl.arange(0, MAIN, layout=BY_ROW)
    extra_row = MAIN + gl.arange(0, EXTRA, layout=BY_EXTRA)
    next_length = _row_length(lens, first)
    next_place = gl.load(first_places + first)
    for token in range(first, end):
        step = token - first
        length = next_length
        place = (next_place + length - 1) % RING
        next_length = _row_length(lens, gl.minimum(token + 1, end - 1))
        next_place = gl.load(first_places + gl.minimum(token + 1, end - 1))
        mbarrier.wait(keys_full, step & 1)
        s = gl.zeros([HEADS, MAIN], gl.float32, layout=SCORE_LAYOUT)
        e = gl.zeros([HEADS, EXTRA], gl.float32, layout=EXTRA_LAYOUT)
        mbarrier.wait(query_full, step & 1)
        fence_async_shared()
        s = warpgroup_mma(query, keys.permute((1, 0)), s, use_acc=False, is_async=True)
        e = warpgroup_mma(query, extra_keys.permute((1, 0)), e, use_acc=False, is_async=True)
        s, e = warpgroup_mma_wait(0, deps=[s, e])
        gl.thread_barrier()
        mbarrier.arrive(query_free, count=1)
        seen = gl.expand_dims(_seen(place, length, row), 0)
        extra_seen = gl.expand_dims(_seen(place, length, extra_row), 0)
        s = gl.where(seen, s * factor + gl.expand_dims(bias.load(BY_ROW).to(gl.float32), 0), MINUS_INF)
        e = gl.where(extra_seen, e * factor + gl.expand_dims(extra_bias.load(BY_EXTRA).to(gl.float32), 0), MINUS_INF)
        peak = gl.maximum(gl.max(s, 1), gl.convert_layout(gl.max(e, 1), BY_HEAD))
        peak = gl.where(peak == MINUS_INF, 0.0, peak)
        s = gl.exp2(s - gl.expand_dims(peak, 1))
        e = gl.exp2(e - gl.expand_dims(gl.convert_layout(peak, gl.SliceLayout(1, EXTRA_LAYOUT)), 1))
        total = gl.sum(s, 1) + gl.convert_layout(gl.sum(e, 1), BY_HEAD)
        share = gl.where(total == 0, 0.0, 1.0 / (total + gl.exp2(sinks - peak)))
        if LSE:
            where = lse + token.to(gl.int64) * lse_token_stride + head
            gl.store(where, (peak + gl.log2(total)) * LN_2, mask=head < heads)
        if step > 0:
            mbarrier.wait(value_done.index((step - 1) & 1), ((step - 1) >> 1) & 1)
        shares.store(share)
        weights.store(s.to(gl.bfloat16))
        extra_weights.store(e.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(weights_full, count=1)


@gluon.jit
def _store_values(start, values, heads, FULL: gl.constexpr):
    """Round 64 x 128 values and store them from ``start`` on, 16 bytes a thread."""
    rounded = gl.convert_layout(gl.convert_layout(values.to(gl.bfloat16), EXCHANGED_LAYOUT), OUT_LAYOUT)
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUT_LAYOUT)) + (heads >> 16), 1)
    dim = gl.expand_dims(gl.arange(0, QUARTER, layout=gl.SliceLayout(0, OUT_LAYOUT)), 0)
    pointers = gl.multiple_of(start + (head * DIM + dim), [1, 16])
    if FULL:
        gl.store(pointers, rounded)
    else:
        gl.store(pointers, rounded, mask=head < heads)


@gluon.jit
def _values(
    keys, extra_keys, weights, extra_weights, shares, weights_full, value_done, out, out_token_stride, heads,
    first, end,
    COLUMN: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Multiplies weights and keys: 256 columns of the output."""
    for token in range(first, end):
        step = token - first
        mbarrier.wait(weights_full, step & 1)
        share = gl.expand_dims(shares.load(gl.SliceLayout(1, VALUE_LAYOUT)), 1)
        to = out + token.to(gl.int64) * out_token_stride + COLUMN
        v = gl.zeros([HEADS, QUARTER], gl.float32, layout=VALUE_LAYOUT)
        w = gl.zeros([HEADS, QUARTER], gl.float32, layout=VALUE_LAYOUT)
        v = warpgroup_mma(weights, keys.slice(COLUMN, QUARTER, dim=1), v, use_acc=False, is_async=True)
        v = warpgroup_mma(extra_weights, extra_keys.slice(COLUMN, QUARTER, dim=1), v, is_async=True)
        w = warpgroup_mma(weights, keys.slice(COLUMN + QUARTER, QUARTER, dim=1), w, use_acc=False, is_async=True)
        w = warpgroup_mma(extra_weights, extra_keys.slice(COLUMN + QUARTER, QUARTER, dim=1), w, is_async=True)
        v, w = warpgroup_mma_wait(0, deps=[v, w])
        gl.thread_barrier()
        mbarrier.arrive(value_done.index(step & 1), count=1)
        _store_values(to, v * share, heads, FULL)
        _store_values(to + QUARTER, w * share, heads, FULL)


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    if config.cache_layout == "fp8_ds_mla" and dialects[CacheRole.SWA] is Dialect.OCP:
        for lse in (False, True):
            yield {"LSE": lse, "FULL": config.num_heads % HEADS_OF_A_PROGRAM == 0}


@gluon_kernel(
    types={
        "q": "*bf16",  # [tokens, heads, 512], the heads of a token contiguous
        "out": "*bf16",  # [tokens, heads, 512], likewise
        "lse": "*fp32",  # [tokens, heads], the heads of a token contiguous; not touched without LSE
        "sink": "*fp32",  # [heads]
        "pages": "*u8",
        "rows": "*i32",  # [tokens, >= 128] slots
        "lens": "*i32",  # [tokens]
        "first_places": "*i32",  # [tokens] place of each row's first entry
        "joins": "*i32",  # [tokens] see `swa_backend.kernels.window_plan`
        "scale": "fp32",  # of the scores
        "tokens": "i32",
        "heads": "i32",
        "span": "i32",  # tokens of a program
        "q_token_stride": "i64",  # values
        "out_token_stride": "i64",
        "lse_token_stride": "i64",
        "row_stride": "i64",
        "page_stride": "i64",  # bytes
        "scale_start": "i64",  # byte of a page at which its scale rows begin
        "entries": "i32",  # of a page
        "num_slots": "i32",
    },
    tuning={
        "cuda:90": Tuning(4, 1, {"PREFETCH": 1, "VALUE_REGISTERS": 160, "FEED_REGISTERS": 72}, spilled_bytes=96),
    },
    keys=_keys,
)
def hopper_window_prefill(
    q, out, lse, sink, pages, rows, lens, first_places, joins, scale, tokens, heads, span,
    q_token_stride, out_token_stride, lse_token_stride, row_stride,
    page_stride, scale_start, entries, num_slots,
    LSE: gl.constexpr, FULL: gl.constexpr, PREFETCH: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of ``span`` tokens a program over their windows; program (run of tokens, block of heads)."""
    keys = gl.allocate_shared_memory(gl.bfloat16, [MAIN, DIM], TILE_LAYOUT)
    extra_keys = gl.allocate_shared_memory(gl.bfloat16, [EXTRA, DIM], TILE_LAYOUT)
    query = gl.allocate_shared_memory(gl.bfloat16, [HEADS, DIM], TILE_LAYOUT)
    weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, MAIN], TILE_LAYOUT)
    extra_weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, EXTRA], NARROW_LAYOUT)
    shares = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT_LAYOUT)
    bias = gl.allocate_shared_memory(gl.bfloat16, [MAIN], FLAT_LAYOUT)
    extra_bias = gl.allocate_shared_memory(gl.bfloat16, [EXTRA], FLAT_LAYOUT)
    query_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    value_done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_full, count=128)
    mbarrier.init(query_free, count=1)
    mbarrier.init(keys_full, count=1)
    mbarrier.init(weights_full, count=1)
    mbarrier.init(value_done.index(0), count=2)
    mbarrier.init(value_done.index(1), count=2)
    fence_async_shared()
    first_head = gl.program_id(1) * HEADS
    heads_here = gl.minimum(heads - first_head, HEADS)
    first = gl.program_id(0) * span
    end = gl.minimum(first + span, tokens)
    q_here = q + first_head * DIM
    out_here = out + first_head * DIM
    lse_here = lse + first_head
    gl.warp_specialize(
        [
            (_score, (keys, extra_keys, bias, extra_bias, query, weights, extra_weights, shares, query_full, query_free,
                      keys_full, weights_full, value_done, lse_here, sink + first_head, lens, first_places, scale,
                      lse_token_stride, heads_here, first, end, LSE)),
            (_values, (keys, extra_keys, weights, extra_weights, shares, weights_full, value_done, out_here,
                       out_token_stride, heads_here, first, end, 0, FULL)),
            (_values, (keys, extra_keys, weights, extra_weights, shares, weights_full, value_done, out_here,
                       out_token_stride, heads_here, first, end, 256, FULL)),
            (_feed, (keys, extra_keys, bias, extra_bias, query, query_full, query_free, keys_full, value_done, q_here,
                     rows, lens, first_places, joins, pages, q_token_stride, row_stride, page_stride, scale_start,
                     entries, num_slots, heads_here, first, end, PREFETCH)),
        ],
        [4, 4, 4],
        [VALUE_REGISTERS, VALUE_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip
