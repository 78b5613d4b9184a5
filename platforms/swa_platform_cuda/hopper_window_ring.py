"""The feeding role of `swa_platform_cuda.hopper_window_prefill_kernel`: queries, and the ring of keys. Gluon.

What is exact: every e4m3 code and every scale byte, rounded once to bf16. A slot that is absent, or not of the cache,
leaves zeros with a bias of -inf; a key that is not finite in bf16 leaves zeros in place of what is not, and a bias of
NaN.
"""
# mypy: ignore-errors
# ruff: noqa: N803

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from swa_backend.kernels import window_plan

DIM = gl.constexpr(512)
CHUNK = gl.constexpr(64)  # values that share a scale; also the width of a swizzled row
CHUNKS = gl.constexpr(8)
HEADS = gl.constexpr(64)  # of a program
TURNS = gl.constexpr(3)  # warpgroups that take tokens in turn
MAIN = gl.constexpr(128)  # ring rows that are multiplied together
EXTRA = gl.constexpr(16)  # .. and the rest of them
RING = gl.constexpr(144)
SLAB = gl.constexpr(8)  # rows loaded together
SLABS = gl.constexpr(18)
MAIN_SLABS = gl.constexpr(16)
EXTRA_SLABS = gl.constexpr(2)
LONGEST = gl.constexpr(128)  # entries of a row
SLIDES = gl.constexpr(window_plan.SLIDES)
DATA_BYTES = gl.constexpr(576)
ROPE_BYTE = gl.constexpr(448)

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 x 64
KEYS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))  # 8 x 64
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@aggregate
class Shared:
    """What the roles of a program hand to each other; barriers are explained in the kernel's module."""

    keys: gl.shared_memory_descriptor  # [1, 128, 512] bf16
    extra_keys: gl.shared_memory_descriptor  # [1, 16, 512] bf16
    bias: gl.shared_memory_descriptor  # [128] bf16: what is added to the logits of each key
    extra_bias: gl.shared_memory_descriptor  # [16] bf16
    query: gl.shared_memory_descriptor  # [1, 64, 512] bf16
    query_full: gl.shared_memory_descriptor
    query_free: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys, extra_keys, bias, extra_bias, query, query_full, query_free, keys_full, done):
        self.keys = keys
        self.extra_keys = extra_keys
        self.bias = bias
        self.extra_bias = extra_bias
        self.query = query
        self.query_full = query_full
        self.query_free = query_free
        self.keys_full = keys_full
        self.done = done


@aggregate
class Run:
    """The tokens of a program, and their rows."""

    first: gl.tensor  # token
    end: gl.tensor  # one past the last
    rows: gl.tensor  # address of token 0's row of int32 slots
    row_stride: gl.tensor  # entries
    lens: gl.tensor  # address of the int32 lengths
    first_places: gl.tensor  # address of the place of each row's first entry, int32
    joins: gl.tensor  # address of how rows follow each other, int32

    @gluon.constexpr_function
    def __init__(self, first, end, rows, row_stride, lens, first_places, joins):
        self.first = first
        self.end = end
        self.rows = rows
        self.row_stride = row_stride
        self.lens = lens
        self.first_places = first_places
        self.joins = joins

    @gluon.jit
    def length(self, token):
        """Entries of a token's row."""
        return gl.maximum(gl.minimum(gl.load(self.lens + token), LONGEST), 0)

    @gluon.jit
    def place(self, token, length):
        """Ring row of a token's own key, the newest of its row."""
        return (gl.load(self.first_places + token) + length - 1) % RING


@aggregate
class Cache:
    """A paged cache of 584-byte entries, aligned to 16 bytes."""

    pages: gl.tensor  # address
    page_stride: gl.tensor  # bytes
    scale_start: gl.tensor  # byte of a page
    entries: gl.tensor  # of a page
    slots: gl.tensor  # entries of all pages

    @gluon.constexpr_function
    def __init__(self, pages, page_stride, scale_start, entries, slots):
        self.pages = pages
        self.page_stride = page_stride
        self.scale_start = scale_start
        self.entries = entries
        self.slots = slots

    @gluon.jit
    def find(self, slot):
        """(data row, scale row, live) of each slot; a slot outside the cache is not live and points to page 0."""
        live = (slot >= 0) & (slot < self.slots)
        real = gl.where(live, slot, 0)
        page = real // self.entries
        entry = real - page * self.entries
        start = self.pages + page.to(gl.int64) * self.page_stride
        return start + entry * DATA_BYTES, start + self.scale_start + entry * 8, live


@gluon.jit
def _copy_query(shared, turn, source, heads):
    """Start the copy of one token's query; heads past the last one are not copied, and nobody reads them.

    The column loop is kept a loop by a count that the compiler does not know (the grid is flat in z), and the heads by
    a term that is 0: unrolled, and worked out before the roles begin, this would take registers that there are not.
    """
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY)) + (heads >> 16), 1)
    dim = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, QUERY)), 0)
    chunks = shared.query.index(0)._reinterpret(gl.bfloat16, [CHUNKS, HEADS, CHUNK], TILE)
    for c in range(gl.num_programs(2) * CHUNKS):
        pointers = gl.multiple_of(source + c * CHUNK + (head * DIM + dim), [1, 16])
        async_copy.async_copy_global_to_shared(chunks.index(c), pointers, mask=head < heads)
    async_copy.mbarrier_arrive(shared.query_full.index(turn), increment_count=False)


@gluon.jit
def _prefetch(data, wanted):
    """Ask for the data row at each thread's address to be in the L2 cache."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], 576;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [data, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _slots_of(row, run, token, place, length):
    """Slots that ring rows hold for a token in ``place``: the ring from its oldest key to the end of the slab ahead.

    Places up to the token's own are entries of its row, later ones the newest entries of later tokens of the program.
    """
    in_slab = place & (SLAB - 1)
    back = place - in_slab + (2 * SLAB - 1) - row  # places from this one to the last of the slab ahead
    back = gl.where(back < 0, back + RING, back)
    back = gl.where(back >= RING, back - RING, back)
    ahead = 2 * SLAB - 1 - in_slab - back
    later = token + gl.maximum(ahead, 0)
    is_later = (ahead > 0) & (later < run.end)
    later = gl.where(is_later, later, token)
    later_length = gl.maximum(gl.minimum(gl.load(run.lens + later), LONGEST), 0)
    column = gl.where(ahead > 0, later_length, length + ahead) - 1
    at = later.to(gl.int64) * run.row_stride + gl.maximum(column, 0)
    return gl.load(run.rows + at, mask=(column >= 0) & (is_later | (ahead <= 0)), other=-1)


@gluon.jit
def _prefetch_ring(run, cache, token, place, length):
    """Ask for all keys of the ring at once, so that loading them slab by slab does not wait for each."""
    for begin in gl.static_range(0, RING, MAIN):
        row = begin + gl.arange(0, 128, layout=THREADS)
        data, _, live = cache.find(_slots_of(row, run, token, place, length))
        _prefetch(data, live & (row < RING))


@gluon.jit
def _scaled(codes, scale, C: gl.constexpr):
    """Chunk C in float32: e4m3 codes times 2^(byte - 127); byte 0 is a subnormal number, 255 NaN."""
    byte = ((scale >> (8 * C)) & 255).to(gl.int32)
    bits = gl.where(byte == 0, 0x400000, byte << 23)
    factor = gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    return codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * gl.expand_dims(factor, 1)


@gluon.jit
def _store_chunk(slabs, at, values, wild):
    """Store [8, 64] as bf16 with everything that is not finite as 0; returns ``wild``, 1 where that happened."""
    rounded = values.to(gl.bfloat16)
    finite = gl.abs(rounded.to(gl.float32)) < float("inf")
    slabs.index(at).store(gl.where(finite, rounded, gl.zeros_like(rounded)))
    return wild | gl.where(finite, 0, 1)


@gluon.jit
def _store_keys(slabs, biases, number, apart, key, live):
    """Dequantise eight keys: chunk c goes to ``slabs.index(number + c * apart)``, the bias to ``number``."""
    c0, c1, c2, c3, c4, c5, c6, rope, scale = key
    wild = gl.zeros_like(c0).to(gl.int32)
    wild = _store_chunk(slabs, number, _scaled(c0, scale, 0), wild)
    wild = _store_chunk(slabs, number + apart, _scaled(c1, scale, 1), wild)
    wild = _store_chunk(slabs, number + 2 * apart, _scaled(c2, scale, 2), wild)
    wild = _store_chunk(slabs, number + 3 * apart, _scaled(c3, scale, 3), wild)
    wild = _store_chunk(slabs, number + 4 * apart, _scaled(c4, scale, 4), wild)
    wild = _store_chunk(slabs, number + 5 * apart, _scaled(c5, scale, 5), wild)
    wild = _store_chunk(slabs, number + 6 * apart, _scaled(c6, scale, 6), wild)
    wild = _store_chunk(slabs, number + 7 * apart, rope.to(gl.float32), wild)
    bias = gl.where(live, gl.where(gl.max(wild, 1) > 0, float("nan"), 0.0), float("-inf"))
    biases.index(number).store(bias.to(gl.bfloat16))


@gluon.jit
def _load_slab(shared, run, cache, token, place, length, number):
    """Load the eight ring rows of slab ``number``, as a token in ``place`` and those after it need them."""
    row = number * SLAB + gl.arange(0, SLAB, layout=gl.SliceLayout(1, KEYS))
    data, scales, live = cache.find(_slots_of(row, run, token, place, length))
    dim = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, KEYS)), 0)
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
    key = (c0, c1, c2, c3, c4, c5, c6, rope, scale)
    if number < MAIN_SLABS:
        slabs = shared.keys.index(0)._reinterpret(gl.bfloat16, [CHUNKS * MAIN_SLABS, SLAB, CHUNK], TILE)
        biases = shared.bias._reinterpret(gl.bfloat16, [MAIN_SLABS, SLAB], FLAT)
        _store_keys(slabs, biases, number, MAIN_SLABS, key, live)
    else:
        extra_slabs = shared.extra_keys.index(0)._reinterpret(gl.bfloat16, [CHUNKS * EXTRA_SLABS, SLAB, CHUNK], TILE)
        extra_biases = shared.extra_bias._reinterpret(gl.bfloat16, [EXTRA_SLABS, SLAB], FLAT)
        _store_keys(extra_slabs, extra_biases, number - MAIN_SLABS, EXTRA_SLABS, key, live)


@gluon.jit
def _wait_done(shared, step):
    """Until the token of a step of this program is done; its warpgroup's next one must not have been let go yet."""
    if step >= 0:
        mbarrier.wait(shared.done.index(step % TURNS), (step // TURNS) & 1)


@gluon.jit
def feed(shared, run, cache, q, q_token_stride, heads):
    """The feeding role: after a token's query, what keys the next one needs; before the first, all of its own."""
    for token in range(run.first - 1, run.end):
        step = token - run.first
        if step >= 0:
            here = q + token.to(gl.int64) * q_token_stride
            if step > 0:
                mbarrier.wait(shared.query_free, (step - 1) & 1)
            _copy_query(shared, step % TURNS, here, heads)
            _wait_done(shared, step - TURNS)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(shared.keys_full.index(step % TURNS), count=1)
        loaded = gl.maximum(token, run.first)
        length = run.length(loaded)
        following = gl.minimum(token + 1, run.end - 1)
        following_length = run.length(following)
        begins = (following_length > 0) & (gl.load(run.joins + following) != SLIDES) & (following > token)
        begins = begins | (step < 0)
        if begins:
            loaded = following
            length = following_length
        place = run.place(loaded, length)
        # The slab ahead takes the place of keys that are seen up to two tokens before a slab begins: once the token
        # after that one is let go, they are done.
        number = (place // SLAB + 1) % SLABS
        count = gl.where(((place & (SLAB - 1)) == 1) & (length > 0), 1, 0)
        if begins:
            _wait_done(shared, step)
            _wait_done(shared, step - 1)
            _wait_done(shared, step - 2)
            _prefetch_ring(run, cache, loaded, place, length)
            number = 0
            count = SLABS
        for slab in range(number, number + count):
            _load_slab(shared, run, cache, loaded, place, length, slab)
