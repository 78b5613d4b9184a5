"""The keys of a Hopper decode: found through a token's row, read from fp8 pages, left in shared memory as bf16. Gluon.

Eight warps take a block of 64 entries at a time. Four threads share a row of the block; each of them reads 16 bytes
of every group of 64 values, so that eight rows are 8 x 64 contiguous bytes a load. When a block has been handed over,
the next one is read into registers, while its slots, and with two caches its lines of the L2 cache, were asked for a
block or two before.

What is exact: every e4m3 code and every scale byte, rounded once to bf16. An entry that is absent, or not of this
cache, is stored as zeros with a bias of -inf; one that holds a NaN code gets a bias of NaN, see `_note_nan` and
`_has_nan_scale`.
"""
# mypy: ignore-errors
# ruff: noqa: N803

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

BLOCK = gl.constexpr(64)  # entries
GROUPS = gl.constexpr(7)  # of 64 e4m3 values that share a scale
ROW_BYTES = gl.constexpr(576)
SCALE_BYTES = gl.constexpr(8)

# Four codes, or two bf16, a word: four threads a row, and 16 or 32 bytes of each group a thread.
CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
VALUES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, CODES))
QUARTERS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))  # four threads a row, for the prefetch
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # 16 heads x 64 values
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
KEY_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32))  # the keys' layout, seen as words of two bf16

# Sign, exponent and fraction of e4m3 keep their order in bf16: shifted into place, a code reads 2^120 times too small,
# subnormal codes as subnormal numbers. Twice a power of two makes it right; one alone would not reach every scale.
_EXPAND = """{{
    .reg .b32 a, b, s, t, c;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    and.b32 s, a, 0x00800080;
    and.b32 t, b, 0x00800080;
    mul.lo.u32 s, s, 240;
    mul.lo.u32 t, t, 240;
    mad.lo.u32 a, a, 16, s;
    mad.lo.u32 b, b, 16, t;
    mov.b32 c, 0x7b807b80;
    mul.bf16x2 a, a, c;
    mul.bf16x2 b, b, c;
    prmt.b32 s, $3, 0, {selector};
    shl.b32 s, s, 7;
    mov.b32 c, 0x00400040;
    max.u16x2 s, s, c;
    mul.bf16x2 $0, a, s;
    mul.bf16x2 $1, b, s;
}}"""
E0 = gl.constexpr(_EXPAND.format(selector="0x4040"))
E1 = gl.constexpr(_EXPAND.format(selector="0x4141"))
E2 = gl.constexpr(_EXPAND.format(selector="0x4242"))
E3 = gl.constexpr(_EXPAND.format(selector="0x4343"))
EXPAND = gl.constexpr((E0, E1, E2, E3))

PREFETCH = gl.constexpr("""{
    .reg .pred p;
    setp.ge.s32 p, $2, 0;
    @p prefetch.global.L2 [$1];
    @p prefetch.global.L2 [$1+128];
    mov.u32 $0, 0;
}""")


@aggregate
class Cache:
    """A paged cache, and the rows of it that the tokens see."""

    pages: gl.tensor  # address of the first page
    page_stride: gl.tensor  # bytes
    entries: gl.tensor  # of a page
    magic: gl.tensor  # with `shift`: divides by `entries`
    shift: gl.tensor
    slots: gl.tensor  # entries of all pages
    rows: gl.tensor  # address of token 0's row of int32 slots
    row_stride: gl.tensor  # entries
    lens: gl.tensor  # address of the int32 lengths
    width: gl.tensor  # of a row

    @gluon.constexpr_function
    def __init__(self, pages, page_stride, entries, magic, shift, slots, rows, row_stride, lens, width):
        self.pages = pages
        self.page_stride = page_stride
        self.entries = entries
        self.magic = magic
        self.shift = shift
        self.slots = slots
        self.rows = rows
        self.row_stride = row_stride
        self.lens = lens
        self.width = width


@gluon.jit
def counts_of(window, second, is_valid, token, TWO: gl.constexpr):
    """Entries of a token's rows in the window cache and in the second one."""
    valid = gl.load(is_valid + token) != 0
    count = gl.minimum(gl.maximum(gl.load(window.lens + token), 0), window.width)
    count = gl.where(valid, count, 0)
    more = count * 0
    if TWO:
        more = gl.minimum(gl.maximum(gl.load(second.lens + token), 0), second.width)
        more = gl.where(valid, more, 0)
    return count, more


@gluon.jit
def blocks_of(window, second, is_valid, token, TWO: gl.constexpr):
    """Blocks of a token: those of the window, then those of the second cache."""
    count, more = counts_of(window, second, is_valid, token, TWO)
    blocks = (count + BLOCK - 1) // BLOCK
    if TWO:
        blocks += (more + BLOCK - 1) // BLOCK
    return blocks


@gluon.jit
def _slots(window, second, start, more_start, count, more, border, block, lane, TWO: gl.constexpr):
    """Slots of the entries ``lane`` of a block, -1 for none; `border` is the first block of the second cache."""
    if TWO:
        late = block >= border
        at = gl.where(late, block - border, block) * BLOCK + lane
        row = gl.where(late, second.rows, window.rows) + gl.where(late, more_start, start)
        slots = gl.load(row + at, mask=at < gl.where(late, more, count), other=-1)
        limit = gl.where(late, second.slots, window.slots)
    else:
        at = block * BLOCK + lane
        slots = gl.load(window.rows + (start + at), mask=at < count, other=-1)
        limit = window.slots
    return gl.where(slots < limit, slots, -1)


@gluon.jit
def _places(window, second, border, block, slots, TWO: gl.constexpr):
    """Addresses of the data rows and of the scale rows of slots; of absent ones those of slot 0."""
    pages = window.pages
    stride = window.page_stride
    entries = window.entries
    magic = window.magic
    shift = window.shift
    if TWO:
        late = block >= border
        pages = gl.where(late, second.pages, pages)
        stride = gl.where(late, second.page_stride, stride)
        entries = gl.where(late, second.entries, entries)
        magic = gl.where(late, second.magic, magic)
        shift = gl.where(late, second.shift, shift)
    slots = gl.maximum(slots, 0)
    doubled = slots.to(gl.uint32) << 1
    high = gl.umulhi(doubled, gl.zeros_like(doubled) + magic.to(gl.uint32))
    page = (high >> shift.to(gl.uint32)).to(gl.int32)
    inside = slots - page * entries
    base = pages + page.to(gl.int64) * stride
    return base + inside * ROW_BYTES, base + (entries * ROW_BYTES + inside * SCALE_BYTES)


@gluon.jit
def _load_words(data, live, PART: gl.constexpr):
    """Words [64, 16] at byte 64 * PART of the data rows."""
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, CODES)) + 16 * PART
    at = gl.expand_dims(data.to(gl.pointer_type(gl.int32)), 1) + gl.expand_dims(word, 0)
    return gl.load(gl.multiple_of(at, [1, 16]), mask=gl.expand_dims(live, 1), other=0)


@gluon.jit
def _load_rope(data, live):
    """Words [64, 32] of two bf16, 0 in absent rows."""
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, VALUES)) + 112
    data = gl.convert_layout(data.to(gl.pointer_type(gl.int32)), gl.SliceLayout(1, VALUES), assert_trivial=True)
    live = gl.convert_layout(live, gl.SliceLayout(1, VALUES), assert_trivial=True)
    at = gl.expand_dims(data, 1) + gl.expand_dims(word, 0)
    return gl.load(gl.multiple_of(at, [1, 16]), mask=gl.expand_dims(live, 1), other=0)


@gluon.jit
def _load_scales(scales, live):
    """[64] uint64: the eight scale bytes of each row."""
    return gl.load(scales.to(gl.pointer_type(gl.uint64)), mask=live, other=0)


@gluon.jit
def _decode(words, scales, GROUP: gl.constexpr):
    """Codes [64, 16], four a word, times their group's scale: words [64, 32] of two bf16."""
    of_group = (scales >> (32 * (GROUP // 4))).to(gl.int32)
    of_group, words = gl.broadcast(gl.expand_dims(of_group, 1), words)
    low, high = gl.inline_asm_elementwise(
        EXPAND[GROUP % 4], "=r,=r,r,r", [words, of_group], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(low, high).reshape([64, 32]), VALUES, assert_trivial=True)


@gluon.jit
def _beside(left, right):
    """Two tensors [64, n] as one [64, 2 n]."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _note_nan(seen, words):
    """Set the high bit of a byte of ``seen`` where a code is 0x7F or 0xFF, which no shift makes a NaN."""
    return seen | ((words & 0x7F7F7F7F) + 0x01010101)


@gluon.jit
def _has_nan_scale(scales):
    """[64] whether one of a row's seven scale bytes is 255."""
    low = scales.to(gl.int32)
    high = (scales >> 32).to(gl.int32)
    low = ((low & 0x7F7F7F7F) + 0x01010101) & low & -2139062144  # 0x80808080
    high = ((high & 0x7F7F7F7F) + 0x01010101) & high & 0x00808080
    return (low | high) != 0


@gluon.jit
def _prefetch(data, slots):
    gl.inline_asm_elementwise(PREFETCH, "=r,l,r", [data, slots], dtype=gl.int32, is_pure=False, pack=1)


@aggregate
class Queries:
    """The queries of the step; the heads of a token are contiguous."""

    start: gl.tensor  # address of token 0
    token_stride: gl.tensor  # elements
    heads: gl.tensor  # of a token

    @gluon.constexpr_function
    def __init__(self, start, token_stride, heads):
        self.start = start
        self.token_stride = token_stride
        self.heads = heads


@gluon.jit
def _copy_query(shared, queries, tile, TILES: gl.constexpr):
    """Start copying a tile's query; of heads past the last one nothing is copied, and what they give is not stored."""
    first = (tile % TILES) * 64
    source = queries.start + (tile // TILES).to(gl.int64) * queries.token_stride + first * 512
    heads = queries.heads - first
    head = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, QUERY)), 1)
    dim = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, QUERY)), 0)
    columns = shared.query._reinterpret(gl.bfloat16, [8, 64, 64], TILE)  # swizzled columns of 64 lie one after another
    for c in range(gl.num_programs(1) * 8):  # 8, which the compiler is not to know: unrolled, this takes 40 registers
        at = gl.multiple_of(source + c * 64 + (head * 512 + dim), [1, 16])
        async_copy.async_copy_global_to_shared(columns.index(c), at, mask=head < heads)
    async_copy.mbarrier_arrive(shared.query_full, increment_count=False)


@gluon.jit
def feed(shared, queries, window, second, work, TILES: gl.constexpr, TWO: gl.constexpr, CUT: gl.constexpr):
    """The feeding role: every block of this program's tiles, in order."""
    lane = gl.arange(0, 64, layout=OF_ROWS)
    thread = gl.arange(0, 256, layout=QUARTERS)
    near = thread & 63
    quarter = (thread >> 6) * (ROW_BYTES // 4)
    turn = 0
    served = 0  # tiles that have blocks
    first_tile, end_tile, step = work.tiles(CUT)
    for tile in range(first_tile, end_tile, step):
        token = tile // TILES
        count, more = counts_of(window, second, work.is_valid, token, TWO)
        border = (count + BLOCK - 1) // BLOCK
        blocks = border
        if TWO:
            blocks = border + (more + BLOCK - 1) // BLOCK
        start = token * window.row_stride
        more_start = start
        if TWO:
            more_start = token * second.row_stride
        first, end = work.piece(tile, blocks, CUT)
        if first < end:
            if served == 0:
                _copy_query(shared, queries, tile, TILES)
            slots = _slots(window, second, start, more_start, count, more, border, first, lane, TWO)
            next_slots = _slots(window, second, start, more_start, count, more, border, first + 1, lane, TWO)
            live = slots >= 0
            data, places = _places(window, second, border, first, slots, TWO)
            scales = _load_scales(places, live)
            c0 = _load_words(data, live, 0)
            c1 = _load_words(data, live, 1)
            c2 = _load_words(data, live, 2)
            c3 = _load_words(data, live, 3)
            c4 = _load_words(data, live, 4)
            c5 = _load_words(data, live, 5)
            c6 = _load_words(data, live, 6)
            rope = _load_rope(data, live)
            if TWO:
                far = _slots(window, second, start, more_start, count, more, border, first + 2, near, TWO)
            for block in range(first, end):
                stage = turn & 1
                bias = gl.where(live, gl.where(_has_nan_scale(scales), float("nan"), 0.0), float("-inf"))
                seen = _note_nan(gl.full([64, 16], 0, gl.int32, CODES), c0)
                seen = _note_nan(_note_nan(_note_nan(seen, c1), c2), c3)
                seen = _note_nan(_note_nan(_note_nan(seen, c4), c5), c6)
                bias = gl.where(gl.reduce_or(seen & -2139062144, 1) != 0, float("nan"), bias)  # 0x80808080

                live = next_slots >= 0
                data, places = _places(window, second, border, block + 1, next_slots, TWO)
                next_slots = _slots(window, second, start, more_start, count, more, border, block + 2, lane, TWO)
                if TWO:
                    ahead, _ = _places(window, second, border, block + 2, far, TWO)
                    _prefetch(ahead + quarter, far)
                    far = _slots(window, second, start, more_start, count, more, border, block + 3, near, TWO)

                mbarrier.wait(shared.key_free.index(stage), ((turn >> 1) & 1) ^ 1)
                key = shared.keys.index(stage)._reinterpret(gl.int32, [64, 256], KEY_WORDS)
                key.slice(0, 64, dim=1).store(_beside(_decode(c0, scales, 0), _decode(c1, scales, 1)))
                key.slice(64, 64, dim=1).store(_beside(_decode(c2, scales, 2), _decode(c3, scales, 3)))
                key.slice(128, 64, dim=1).store(_beside(_decode(c4, scales, 4), _decode(c5, scales, 5)))
                key.slice(192, 64, dim=1).store(_beside(_decode(c6, scales, 6), rope))
                shared.bias.index(stage).store(bias)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(shared.key_full.index(stage), count=1)
                scales = _load_scales(places, live)
                c0 = _load_words(data, live, 0)
                c1 = _load_words(data, live, 1)
                c2 = _load_words(data, live, 2)
                c3 = _load_words(data, live, 3)
                c4 = _load_words(data, live, 4)
                c5 = _load_words(data, live, 5)
                c6 = _load_words(data, live, 6)
                rope = _load_rope(data, live)
                turn += 1
                if (block == first) & (served > 0):
                    mbarrier.wait(shared.query_free, (served & 1) ^ 1)
                    _copy_query(shared, queries, tile, TILES)
            served += 1
