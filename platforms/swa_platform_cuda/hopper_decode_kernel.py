"""Decode on Hopper: attention of each token's heads over paged fp8 keys, one cache or two. Gluon, sm90.

A *tile* is a token and up to 64 of its heads. Its keys come in *blocks* of 64, first those of the window, then those of
the second cache; values are the keys themselves. There is one program a multiprocessor, and it works on tile after
tile. With one cache a program takes every n-th tile; with two it takes what `swa_platform_cuda.hopper_work` gave it,
where the first and the last tile may be shared with a neighbour, and pieces of those go to
`swa_platform_cuda.hopper_combine`.

Three roles, feed with eight warps, the others with four. Block by block from left to right, tile by tile from top to
bottom::

    feed (hopper_keys)          attend                         follow
    -------------------         ---------------------------    ---------------------------
    copy the query  --query_full-->
                    <-query_free---  (last scores of the tile)
    read fp8 rows
    decode to bf16  --key_full---->  scores = query . keys
    and their bias               softmax so far
                                 weights (bf16)
                                 and rescaling  --weights_full-->  right = right * rescaling
                                                                       + weights . keys[:, 256:]
                                 left = left * rescaling
                                    + weights . keys[:, :256]
                    <-key_free----                 <-weights_free--
                    <-key_free---------------------------------------
                                 1 / denominator --inverse_full-->  store the right half
                                 store left half, lse  <-inverse_free--

Barriers. Those of a pair belong to a stage, which a block (a tile, for ``inverse``) takes in turns, so that whoever is
ahead is so by at most two:

==================  =======================================================  ==========================================
barrier             arrivals of a phase                                      what it says
==================  =======================================================  ==========================================
key_full[2]         1: feed                                                  the stage holds a block and its bias
key_free[2]         2: attend, follow                                        both have multiplied their half of it
weights_full[2]     1: attend                                                weights and rescaling of a block are there
weights_free[2]     1: follow                                                ... and have been used
inverse_full[2]     1: attend                                                the tile's denominators are there
inverse_free[2]     1: follow                                                ... and have been read
query_full          256: each feeding thread, once its copies have landed    the tile's query is there
query_free          1: attend                                                its last scores are done
==================  =======================================================  ==========================================

A tile without blocks (a padded token) takes no stage and no query; its result is 0, its lse -inf.

Shared memory, 214 of 227 KiB: two stages of keys 128, query 64, two stages of weights 16, and what is small. Keys,
query and weights lie in the 128-byte swizzle that the tensor cores read. Accumulators of 64 x 256 take 128 registers
a thread; attend has 208 of them, follow 160 and feed 72: with other shares the compiler drops the shares altogether,
or spills more. With sixteen warps it compiles for 128 registers a thread, in which a product 256 columns wide has no
room: results are added up in two products of 128 columns.

Scores are in base 2. A block's bias is 0 for a key, -inf for an absent one, and NaN for one with a NaN code, which
makes the token's every score NaN; the decoded values of such keys are finite, so that no other token is touched.
"""
# mypy: ignore-errors
# ruff: noqa: N803, SIM113

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from swa_backend.kernels.jit import Tuning
from swa_platform_cuda.gluon_kernel import gluon_kernel
from swa_platform_cuda.hopper_keys import Cache, Queries, blocks_of, feed
from swa_platform_cuda.hopper_work import head_tiles

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
HEADS = gl.constexpr(64)  # of a tile
DIM = gl.constexpr(512)
HALF = gl.constexpr(256)
NO_END = gl.constexpr(1 << 24)
MINUS_INF = gl.constexpr(float("-inf"))

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, RESULT, 2))
OF_HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
OF_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
OF_RESULT = gl.constexpr(gl.SliceLayout(1, RESULT))
# Accumulators rearranged inside each warp so that a thread stores 16 bytes.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)


@aggregate
class Shared:
    """What the roles of a program hand to each other."""

    keys: gl.shared_memory_descriptor  # [2, 64, 512] bf16
    query: gl.shared_memory_descriptor  # [64, 512] bf16
    weights: gl.shared_memory_descriptor  # [2, 64, 64] bf16
    rescale: gl.shared_memory_descriptor  # [2, 64] float32: what the sums so far are multiplied by
    inverse: gl.shared_memory_descriptor  # [2, 64] float32: 1 / the denominator
    bias: gl.shared_memory_descriptor  # [2, 64] float32
    key_full: gl.shared_memory_descriptor
    key_free: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor
    weights_free: gl.shared_memory_descriptor
    inverse_full: gl.shared_memory_descriptor
    inverse_free: gl.shared_memory_descriptor
    query_full: gl.shared_memory_descriptor
    query_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self,
        keys,
        query,
        weights,
        rescale,
        inverse,
        bias,
        key_full,
        key_free,
        weights_full,
        weights_free,
        inverse_full,
        inverse_free,
        query_full,
        query_free,
    ):
        self.keys = keys
        self.query = query
        self.weights = weights
        self.rescale = rescale
        self.inverse = inverse
        self.bias = bias
        self.key_full = key_full
        self.key_free = key_free
        self.weights_full = weights_full
        self.weights_free = weights_free
        self.inverse_full = inverse_full
        self.inverse_free = inverse_free
        self.query_full = query_full
        self.query_free = query_free


@aggregate
class Work:
    """Which tiles, and which blocks of them, are this program's."""

    tiles_of_step: gl.tensor
    is_valid: gl.tensor  # address of token 0's byte
    cuts: gl.tensor  # address of the cuts, see `swa_platform_cuda.hopper_work`

    @gluon.constexpr_function
    def __init__(self, tiles_of_step, is_valid, cuts):
        self.tiles_of_step = tiles_of_step
        self.is_valid = is_valid
        self.cuts = cuts

    @gluon.jit
    def tiles(self, CUT: gl.constexpr):
        """(first tile, one past the last, step)."""
        if CUT:
            own = self.cuts + 2 * gl.program_id(0)
            first = gl.load(own)
            end = gl.load(own + 2) + (gl.load(own + 3) > 0).to(gl.int32)
            step = 1
        else:
            first = gl.program_id(0)
            end = self.tiles_of_step
            step = gl.num_programs(0)
        return first, end, step

    @gluon.jit
    def ends(self, tile, CUT: gl.constexpr):
        """(first block of a tile that is this program's, one past the last or `NO_END`)."""
        first = tile * 0
        end = first + NO_END
        if CUT:
            own = self.cuts + 2 * gl.program_id(0)
            first = gl.where(tile == gl.load(own), gl.load(own + 1), 0)
            end = gl.where(tile == gl.load(own + 2), gl.load(own + 3), NO_END)
        return first, end

    @gluon.jit
    def piece(self, tile, blocks, CUT: gl.constexpr):
        """(first block, one past the last) of a tile of so many blocks that are this program's."""
        first, end = self.ends(tile, CUT)
        return first, gl.minimum(end, blocks)


@aggregate
class Results:
    """Where results go: whole ones to ``out`` and ``lse``, pieces to the buffers of `hopper_combine`."""

    out: gl.tensor  # address of token 0
    token_stride: gl.tensor  # elements; heads are contiguous
    lse: gl.tensor
    lse_stride: gl.tensor
    wants_lse: gl.tensor
    sink: gl.tensor
    heads: gl.tensor
    piece_out: gl.tensor  # [2 programs, 64, 512] float32
    piece_lse: gl.tensor  # [2 programs, 64] float32, in base 2

    @gluon.constexpr_function
    def __init__(self, out, token_stride, lse, lse_stride, wants_lse, sink, heads, piece_out, piece_lse):
        self.out = out
        self.token_stride = token_stride
        self.lse = lse
        self.lse_stride = lse_stride
        self.wants_lse = wants_lse
        self.sink = sink
        self.heads = heads
        self.piece_out = piece_out
        self.piece_lse = piece_lse


@gluon.jit
def _store_half(results, tile, acc, factor, COLUMN: gl.constexpr, TILES: gl.constexpr):
    first = (tile % TILES) * HEADS
    start = results.out + (tile // TILES).to(gl.int64) * results.token_stride + first * DIM + COLUMN
    values = gl.convert_layout((acc * gl.expand_dims(factor, 1)).to(gl.bfloat16), STORED)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, STORED))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, STORED))
    at = start + (gl.expand_dims(head * DIM, 1) + gl.expand_dims(dim, 0))
    gl.store(gl.multiple_of(at, [1, 16]), values, mask=gl.expand_dims(head < results.heads - first, 1))


@gluon.jit
def _store_piece(results, tile, begins, acc, factor, COLUMN: gl.constexpr, TILES: gl.constexpr):
    """A piece of a tile: program p keeps the one of a tile that an earlier program began at 2 p, else at 2 p + 1."""
    number = 2 * gl.program_id(0) + begins.to(gl.int32)
    start = results.piece_out + number.to(gl.int64) * (HEADS * DIM) + COLUMN
    head = gl.arange(0, HEADS, layout=OF_RESULT)
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, RESULT))
    at = start + (gl.expand_dims(head * DIM, 1) + gl.expand_dims(dim, 0))
    gl.store(gl.multiple_of(at, [1, 16]), acc * gl.expand_dims(factor, 1))


@gluon.jit
def _store_left(results, tile, acc, inverse, lse, TILES: gl.constexpr):
    _store_half(results, tile, acc, inverse, 0, TILES)
    if results.wants_lse != 0:
        first = (tile % TILES) * HEADS
        head = gl.arange(0, HEADS, layout=OF_HEADS)
        own = results.lse + (tile // TILES).to(gl.int64) * results.lse_stride + first
        gl.store(own + head, lse * LN_2, mask=head < results.heads - first)


@gluon.jit
def _scores(shared, turn):
    """Start multiplying the query with the keys of a stage."""
    keys = shared.keys.index(turn & 1).permute((1, 0))
    none = gl.zeros([HEADS, 64], gl.float32, layout=SCORES)
    return warpgroup_mma(shared.query, keys, none, use_acc=False, is_async=True)


@gluon.jit
def _add_values(shared, rounded, acc, turn):
    """Start adding the left half of a stage's values, weighted."""
    values = shared.keys.index(turn & 1).slice(0, HALF, dim=1)
    return warpgroup_mma(gl.convert_layout(rounded, WEIGHTS), values, acc, is_async=True)


@gluon.jit
def _softmax(shared, scores, peak, total, acc, turn, scale):
    """Take a block into the softmax so far and hand its weights to `follow`: (peak, total, acc, weights in bf16)."""
    stage = turn & 1
    scores = scores * scale + gl.expand_dims(shared.bias.index(stage).load(OF_KEYS), 0)
    higher = gl.maximum(peak, gl.max(scores, 1))
    base = gl.where(higher == MINUS_INF, 0.0, higher)
    rescale = gl.exp2(peak - base)
    weights = gl.exp2(scores - gl.expand_dims(base, 1))
    rounded = weights.to(gl.bfloat16)
    mbarrier.wait(shared.weights_free.index(stage), ((turn >> 1) & 1) ^ 1)
    shared.weights.index(stage).store(rounded)
    shared.rescale.index(stage).store(rescale)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(shared.weights_full.index(stage), count=1)
    total = total * rescale + gl.sum(weights, 1)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, OF_RESULT), 1)
    return higher, total, acc, rounded


@gluon.jit
def attend(shared, results, window, second, work, scale, TILES: gl.constexpr, TWO: gl.constexpr, CUT: gl.constexpr):
    """Scores, softmax, and the left half of the values.

    The scores of a block are on their way through the tensor cores right behind the values of the one before.
    """
    head = gl.arange(0, HEADS, layout=OF_HEADS)
    turn = 0
    served = 0
    number = 0
    first_tile, end_tile, step = work.tiles(CUT)
    for tile in range(first_tile, end_tile, step):
        first, end = work.piece(tile, blocks_of(window, second, work.is_valid, tile // TILES, TWO), CUT)
        peak = gl.full([HEADS], MINUS_INF, gl.float32, layout=OF_HEADS)
        total = gl.full([HEADS], 0.0, gl.float32, layout=OF_HEADS)
        acc = gl.zeros([HEADS, HALF], gl.float32, layout=RESULT)
        if first < end:
            mbarrier.wait(shared.query_full, served & 1)
            fence_async_shared()
            mbarrier.wait(shared.key_full.index(turn & 1), (turn >> 1) & 1)
            scores = warpgroup_mma_wait(0, deps=[_scores(shared, turn)])
            for _ in range(first + 1, end):
                peak, total, acc, rounded = _softmax(shared, scores, peak, total, acc, turn, scale)
                adding = _add_values(shared, rounded, acc, turn)
                turn += 1
                mbarrier.wait(shared.key_full.index(turn & 1), (turn >> 1) & 1)
                scoring = _scores(shared, turn)
                acc = warpgroup_mma_wait(1, deps=[adding])
                gl.thread_barrier()
                mbarrier.arrive(shared.key_free.index((turn & 1) ^ 1), count=1)
                scores = warpgroup_mma_wait(0, deps=[scoring])
            gl.thread_barrier()
            mbarrier.arrive(shared.query_free, count=1)
            peak, total, acc, rounded = _softmax(shared, scores, peak, total, acc, turn, scale)
            acc = warpgroup_mma_wait(0, deps=[_add_values(shared, rounded, acc, turn)])
            gl.thread_barrier()
            mbarrier.arrive(shared.key_free.index(turn & 1), count=1)
            turn += 1
            served += 1

        first, end = work.ends(tile, CUT)
        mask = head < results.heads - (tile % TILES) * HEADS
        sink = gl.load(results.sink + (tile % TILES) * HEADS + head, mask=mask, other=0.0) * LOG2_E
        sinks = gl.exp2(sink - peak)
        if CUT:
            sinks = gl.where((first > 0) | (end < NO_END), 0.0, sinks)
        inverse = gl.where(total == 0, 0.0, 1.0 / (total + sinks))
        slot = number & 1
        mbarrier.wait(shared.inverse_free.index(slot), ((number >> 1) & 1) ^ 1)
        shared.inverse.index(slot).store(inverse)
        gl.thread_barrier()
        mbarrier.arrive(shared.inverse_full.index(slot), count=1)
        lse = gl.where(total == 0, MINUS_INF, peak + gl.log2(total))
        inverse = gl.convert_layout(inverse, OF_RESULT)
        if CUT:
            if (first > 0) | (end < NO_END):
                _store_piece(results, tile, first == 0, acc, inverse, 0, TILES)
                own = results.piece_lse + (2 * gl.program_id(0) + (first == 0).to(gl.int32)) * HEADS
                gl.store(own + head, lse)
            else:
                _store_left(results, tile, acc, inverse, lse, TILES)
        else:
            _store_left(results, tile, acc, inverse, lse, TILES)
        number += 1


@gluon.jit
def follow(shared, results, window, second, work, TILES: gl.constexpr, TWO: gl.constexpr, CUT: gl.constexpr):
    """The right half of the values."""
    turn = 0
    number = 0
    first_tile, end_tile, step = work.tiles(CUT)
    for tile in range(first_tile, end_tile, step):
        first, end = work.piece(tile, blocks_of(window, second, work.is_valid, tile // TILES, TWO), CUT)
        acc = gl.zeros([HEADS, HALF], gl.float32, layout=RESULT)
        for _ in range(first, end):
            stage = turn & 1
            phase = (turn >> 1) & 1
            mbarrier.wait(shared.key_full.index(stage), phase)
            mbarrier.wait(shared.weights_full.index(stage), phase)
            acc = acc * gl.expand_dims(shared.rescale.index(stage).load(OF_RESULT), 1)
            acc = warpgroup_mma(shared.weights.index(stage), shared.keys.index(stage).slice(HALF, HALF, dim=1), acc)
            gl.thread_barrier()
            mbarrier.arrive(shared.weights_free.index(stage), count=1)
            mbarrier.arrive(shared.key_free.index(stage), count=1)
            turn += 1
        slot = number & 1
        mbarrier.wait(shared.inverse_full.index(slot), (number >> 1) & 1)
        inverse = shared.inverse.index(slot).load(OF_RESULT)
        gl.thread_barrier()
        mbarrier.arrive(shared.inverse_free.index(slot), count=1)
        if CUT:
            first, end = work.ends(tile, CUT)
            if (first > 0) | (end < NO_END):
                _store_piece(results, tile, first == 0, acc, inverse, HALF, TILES)
            else:
                _store_half(results, tile, acc, inverse, HALF, TILES)
        else:
            _store_half(results, tile, acc, inverse, HALF, TILES)
        number += 1


def _keys(config, dialects):
    two_caches = any(layer.compressed for layer in config.model.present_layer_types)
    for two in (False, True)[: 1 + two_caches]:
        yield {"TILES": head_tiles(config.num_heads), "TWO": two, "CUT": two}


_CACHE_TYPES = {
    "pages": "*u8",  # of an fp8_ds_mla cache, aligned to 16 bytes
    "rows": "*i32",  # [tokens, width] slots
    "lens": "*i32",  # [tokens]
    "page_stride": "i32",  # bytes, a multiple of 16
    "entries": "i32",  # of a page
    "magic": "u32",  # see `swa_backend.kernels.paging.divisor`
    "shift": "i32",
    "slots": "i32",  # entries of all pages
    "row_stride": "i32",
    "width": "i32",
}


@gluon_kernel(
    types={
        "q": "*bf16",  # [tokens, heads, 512], aligned to 16 bytes
        "out": "*bf16",  # like q
        "lse": "*fp32",  # [tokens, heads]
        "sink": "*fp32",  # [heads]
        "is_valid": "*u8",  # [tokens]
        **_CACHE_TYPES,
        **{f"more_{name}": kind for name, kind in _CACHE_TYPES.items()},
        "cuts": "*i32",  # [programs + 1, 2]
        "piece_out": "*fp32",  # [2 programs, 64, 512]
        "piece_lse": "*fp32",  # [2 programs, 64]
        "q_stride": "i64",  # elements from token to token
        "out_stride": "i64",
        "lse_stride": "i64",
        "scale": "fp32",  # of the logits, in base 2
        "wants_lse": "i32",
        "tokens": "i32",
        "heads": "i32",
    },
    tuning={"cuda:90": Tuning(4, 1, spilled_bytes=128)},
    keys=_keys,
)
def hopper_decode(
    q, out, lse, sink, is_valid,
    pages, rows, lens, page_stride, entries, magic, shift, slots, row_stride, width,
    more_pages, more_rows, more_lens, more_page_stride, more_entries, more_magic, more_shift, more_slots,
    more_row_stride, more_width,
    cuts, piece_out, piece_lse, q_stride, out_stride, lse_stride, scale, wants_lse, tokens, heads,
    TILES: gl.constexpr, TWO: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    window = Cache(pages, page_stride, entries, magic, shift, slots, rows, row_stride, lens, width)
    second = Cache(
        more_pages, more_page_stride, more_entries, more_magic, more_shift, more_slots, more_rows, more_row_stride,
        more_lens, more_width,
    )  # fmt: skip
    work = Work(tokens * TILES, is_valid, cuts)
    queries = Queries(q, q_stride, heads)
    results = Results(out, out_stride, lse, lse_stride, wants_lse, sink, heads, piece_out, piece_lse)
    shared = Shared(
        gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [HEADS, DIM], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, 64], TILE),
        gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 64], FLAT),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for i in gl.static_range(2):
        mbarrier.init(shared.key_full.index(i), count=1)
        mbarrier.init(shared.key_free.index(i), count=2)
        mbarrier.init(shared.weights_full.index(i), count=1)
        mbarrier.init(shared.weights_free.index(i), count=1)
        mbarrier.init(shared.inverse_full.index(i), count=1)
        mbarrier.init(shared.inverse_free.index(i), count=1)
    mbarrier.init(shared.query_full, count=256)
    mbarrier.init(shared.query_free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (shared, results, window, second, work, scale, TILES, TWO, CUT)),
            (follow, (shared, results, window, second, work, TILES, TWO, CUT)),
            (feed, (shared, queries, window, second, work, TILES, TWO, CUT)),
        ],
        [4, 8],
        [160, 72],
    )
