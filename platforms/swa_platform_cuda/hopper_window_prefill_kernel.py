"""Window-only prefill on Hopper: a ring of dequantised keys slides over the tokens. Gluon, sm90.

A program has a run of consecutive tokens and a block of 64 heads. Neighbouring tokens see nearly the same keys, so it
keeps them in shared memory as bf16 and dequantises one new key a token, where a decode kernel dequantises 128.

Ring: 144 rows of 512 values. The key in place p (position p of its request) lies in row p mod 144. A token in place p
sees the places p - length + 1 .. p, at most 128 of them. ::

    place   p-135      p-127                                        p              p+8
              |  free   |       seen by the token in place p        |  slab ahead  |
    ring  ----+---------+-------------------------------------------+--------------+----   144 rows, cyclic

Eight rows, a slab, are loaded at a time, early in the slab before it: no token waits for its own key. Scores are
computed for all 144 rows, and those outside the token's window are replaced by -inf. Their weights are exactly 0, which
leaves nothing of a key only if it is finite: what is not finite is stored as 0, and such a key's bias is NaN, so that
the tokens that do see it become NaN and no other.

Roles: one warpgroup feeds (`swa_platform_cuda.hopper_window_ring`), three attend, in turn::

    feed       | query 0 | query 1 | query 2 | query 3, slab | query 4 | ...
    attend 0             | scores 0 | softmax | values, store 0        | scores 3 ...
    attend 1                        | scores 1 | softmax | values, store 1        | scores 4 ...
    attend 2                                   | scores 2 | softmax | values, store 2        | ...

The query's place in shared memory goes from one token to the next as soon as its scores are there; meanwhile the
others multiply weights, which stay in registers, and keys, 128 columns of the output at a time.

Barriers; those of a turn have a phase for each of its tokens, one parity bit being enough since none is let go before
the one before it is done:

================  ========================================  ======================================================
barrier           arrivals of a phase                       what it says
================  ========================================  ======================================================
query_full[3]     128: feeding threads, copies landed       the query of the turn's token is in shared memory
query_free        1: the warpgroup whose turn it is         .. and multiplied: that of the next token may come
keys_full[3]      1: feed                                   every ring row that the turn's token sees holds its key
done[3]           1: the warpgroup                          it will not read the ring again for this token
================  ========================================  ======================================================

Layouts: keys and query in the 128-byte swizzle that the tensor cores read. Scores are accumulators of 64 x 128 and
64 x 16, weights the same registers seen as left operands, values accumulators of 64 x 128, rearranged inside each warp
so that a thread stores 16 bytes.

Where a row does not slide (it is of another request, an entry is missing in it alone, the row before is empty), the
whole ring is loaded anew. The plan tells: `swa_backend.kernels.window_plan`.

Every row comes out the same whatever run it is in: its place decides where its keys lie and in which order they are
added, and that does not change with the batch.
"""
# mypy: ignore-errors
# ruff: noqa: N803

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from swa_backend.cache_layout import Dialect
from swa_backend.kernels.jit import Tuning
from swa_backend.platform import CacheRole
from swa_platform_cuda.gluon_kernel import gluon_kernel
from swa_platform_cuda.hopper_window_ring import (
    DIM,
    EXTRA,
    FLAT,
    HEADS,
    MAIN,
    RING,
    TILE,
    TURNS,
    Cache,
    Run,
    Shared,
    feed,
)

HEADS_OF_A_PROGRAM = HEADS.value
LONGEST_ROW = 128
PART = gl.constexpr(128)  # values of a head that are computed together
PARTS = gl.constexpr(4)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # 64 x 128, values too
EXTRA_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # 64 x 16
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
OF_HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
OF_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
EXTRA_OF_HEADS = gl.constexpr(gl.SliceLayout(1, EXTRA_SCORES))
EXTRA_OF_KEYS = gl.constexpr(gl.SliceLayout(0, EXTRA_SCORES))
# From accumulators to sixteen bytes a thread in two exchanges between the four lanes of a row: one alone is done by
# shuffles, both at once would take shared memory.
EXCHANGED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 16], [0, 32], [0, 64]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)


@aggregate
class Results:
    """Where results go, and what they depend on beside queries and keys; for the heads of a program."""

    out: gl.tensor  # address of token 0
    out_token_stride: gl.tensor  # values
    lse: gl.tensor
    lse_token_stride: gl.tensor
    sink: gl.tensor
    factor: gl.tensor  # of the logits, in base 2
    heads: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, out_token_stride, lse, lse_token_stride, sink, factor, heads):
        self.out = out
        self.out_token_stride = out_token_stride
        self.lse = lse
        self.lse_token_stride = lse_token_stride
        self.sink = sink
        self.factor = factor
        self.heads = heads


@gluon.jit
def _seen(place, length, row):
    """Whether a token in ``place`` sees a ring row."""
    behind = place - row
    behind = gl.where(behind < 0, behind + RING, behind)
    return gl.expand_dims(behind < length, 0)


@gluon.jit
def _store(start, values, heads, FULL: gl.constexpr):
    """Round 64 x 128 values and store them from ``start`` on, 16 bytes a thread."""
    rounded = gl.convert_layout(gl.convert_layout(values.to(gl.bfloat16), EXCHANGED), STORED)
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, STORED)) + (heads >> 16), 1)
    dim = gl.expand_dims(gl.arange(0, PART, layout=gl.SliceLayout(0, STORED)), 0)
    pointers = gl.multiple_of(start + (head * DIM + dim), [1, 16])
    if FULL:
        gl.store(pointers, rounded)
    else:
        gl.store(pointers, rounded, mask=head < heads)


@gluon.jit
def _attend(shared, run, results, TURN: gl.constexpr, LSE: gl.constexpr, FULL: gl.constexpr):
    """The role of a warpgroup that takes every third token."""
    head = gl.arange(0, HEADS, layout=OF_HEADS)
    row = gl.arange(0, MAIN, layout=OF_KEYS)
    extra_row = MAIN + gl.arange(0, EXTRA, layout=EXTRA_OF_KEYS)
    sinks = gl.load(results.sink + gl.minimum(head, results.heads - 1)) * LOG2_E
    phase = 0
    for token in range(run.first + TURN, run.end, TURNS):
        length = run.length(token)
        place = run.place(token, length)
        mbarrier.wait(shared.keys_full.index(TURN), phase)
        mbarrier.wait(shared.query_full.index(TURN), phase)
        fence_async_shared()
        # Always 0, which the compiler does not know: what it worked out ahead of the loop of a hundred operands'
        # addresses would not fit the registers.
        nought = token >> 24
        query = shared.query.index(nought)
        keys = shared.keys.index(nought)
        extra_keys = shared.extra_keys.index(nought)
        s = gl.zeros([HEADS, MAIN], gl.float32, layout=SCORES)
        e = gl.zeros([HEADS, EXTRA], gl.float32, layout=EXTRA_SCORES)
        s = warpgroup_mma(query, keys.permute((1, 0)), s, use_acc=False, is_async=True)
        e = warpgroup_mma(query, extra_keys.permute((1, 0)), e, use_acc=False, is_async=True)
        s, e = warpgroup_mma_wait(0, deps=[s, e])
        gl.thread_barrier()
        mbarrier.arrive(shared.query_free, count=1)

        bias = gl.expand_dims(shared.bias.load(OF_KEYS).to(gl.float32), 0)
        s = gl.where(_seen(place, length, row), s * results.factor + bias, float("-inf"))
        bias = gl.expand_dims(shared.extra_bias.load(EXTRA_OF_KEYS).to(gl.float32), 0)
        e = gl.where(_seen(place, length, extra_row), e * results.factor + bias, float("-inf"))
        peak = gl.maximum(gl.max(s, 1), gl.convert_layout(gl.max(e, 1), OF_HEADS))
        peak = gl.where(peak == float("-inf"), 0.0, peak)
        s = gl.exp2(s - gl.expand_dims(peak, 1))
        e = gl.exp2(e - gl.expand_dims(gl.convert_layout(peak, EXTRA_OF_HEADS), 1))
        total = gl.sum(s, 1) + gl.convert_layout(gl.sum(e, 1), OF_HEADS)
        weights = gl.convert_layout(s.to(gl.bfloat16), WEIGHTS)
        extra_weights = gl.convert_layout(e.to(gl.bfloat16), WEIGHTS)
        # A sum of weights is 0 only without any entry; it may be NaN.
        share = gl.expand_dims(gl.where(total == 0, 0.0, 1.0 / (total + gl.exp2(sinks - peak))), 1)
        if LSE:
            to_lse = results.lse + token.to(gl.int64) * results.lse_token_stride + head
            gl.store(to_lse, (peak + gl.log2(total)) * LN_2, mask=head < results.heads)
        to = results.out + token.to(gl.int64) * results.out_token_stride
        for part in gl.static_range(PARTS):
            v = gl.zeros([HEADS, PART], gl.float32, layout=SCORES)
            columns = keys.slice(part * PART, PART, dim=1)
            extra_columns = extra_keys.slice(part * PART, PART, dim=1)
            v = warpgroup_mma(weights, columns, v, use_acc=False, is_async=True)
            v = warpgroup_mma(extra_weights, extra_columns, v, is_async=True)
            v = warpgroup_mma_wait(0, deps=[v])
            if part == PARTS - 1:
                gl.thread_barrier()
                mbarrier.arrive(shared.done.index(TURN), count=1)
            _store(to + part * PART, v * share, results.heads, FULL)
        phase ^= 1


def _keys(config, dialects):
    if config.cache_layout == "fp8_ds_mla" and dialects[CacheRole.SWA] is Dialect.OCP:
        for lse in (False, True):
            yield {"LSE": lse, "FULL": config.num_heads % HEADS_OF_A_PROGRAM == 0}


@gluon_kernel(
    types={
        "q": "*bf16",  # [tokens, heads, 512], the heads of a token contiguous, aligned to 16 bytes
        "out": "*bf16",  # likewise
        "lse": "*fp32",  # [tokens, heads], the heads of a token contiguous; not touched without LSE
        "sink": "*fp32",  # [heads]
        "pages": "*u8",  # of an fp8_ds_mla cache, aligned to 16 bytes
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
    tuning={"cuda:90": Tuning(4, 1, {"REGISTERS": 144, "FEED_REGISTERS": 80}, spilled_bytes=48)},
    keys=_keys,
)
def hopper_window_prefill(
    q, out, lse, sink, pages, rows, lens, first_places, joins, scale, tokens, heads, span,
    q_token_stride, out_token_stride, lse_token_stride, row_stride, page_stride, scale_start, entries, num_slots,
    LSE: gl.constexpr, FULL: gl.constexpr, REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of ``span`` tokens a program over their windows; program (run of tokens, block of heads)."""
    shared = Shared(
        gl.allocate_shared_memory(gl.bfloat16, [1, MAIN, DIM], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [1, EXTRA, DIM], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [MAIN], FLAT),
        gl.allocate_shared_memory(gl.bfloat16, [EXTRA], FLAT),
        gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, DIM], TILE),
        gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER),
    )
    mbarrier.init(shared.query_free, count=1)
    for turn in gl.static_range(TURNS):
        mbarrier.init(shared.query_full.index(turn), count=128)
        mbarrier.init(shared.keys_full.index(turn), count=1)
        mbarrier.init(shared.done.index(turn), count=1)
    fence_async_shared()
    first_head = gl.program_id(1) * HEADS
    here = gl.minimum(heads - first_head, HEADS)
    first = gl.program_id(0) * span
    run = Run(first, gl.minimum(first + span, tokens), rows, row_stride, lens, first_places, joins)
    cache = Cache(pages, page_stride, scale_start, entries, num_slots)
    results = Results(
        out + first_head * DIM, out_token_stride, lse + first_head, lse_token_stride, sink + first_head,
        scale * LOG2_E, here,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (shared, run, results, 0, LSE, FULL)),
            (_attend, (shared, run, results, 1, LSE, FULL)),
            (_attend, (shared, run, results, 2, LSE, FULL)),
            (feed, (shared, run, cache, q + first_head * DIM, q_token_stride, here)),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, FEED_REGISTERS],
    )
