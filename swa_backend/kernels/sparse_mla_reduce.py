"""Adds up the partial results of tokens whose keys several programs of `sparse_mla` shared (split-KV)."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton.language as tl

from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.kernels.sparse_mla_softmax import DIM, LN_2, LOG2_E

MOST_SPLITS = 64
"""Splits of a row that can be added up."""

MOST: tl.constexpr = tl.constexpr(MOST_SPLITS)


@kernel(
    types={
        "out": "*bf16",  # [tokens, heads, 512]
        "lse": "*fp32",  # [tokens, heads], contiguous; not written unless has_lse
        "sink": "*fp32",  # [heads]
        "out_row": "i64",  # strides in values
        "out_head": "i64",
        "heads": "i32",
        "splits": "i32",
        "has_lse": "i32",
        "tile": "i32",  # heads of a partial result
        "sums": "*fp32",  # [tokens * head tiles, splits, tile, 512]
        "peaks": "*fp32",  # [tokens * head tiles, splits, 2, tile]
    },
    tuning={"": Tuning(4, 1, tiles={"BLOCK": 8}), "interpret": Tuning(1, 1, tiles={"BLOCK": 4})},
    keys=lambda config, dialects: ({},),
)
def sparse_mla_reduce(
    out, lse, sink, out_row, out_head, heads, splits, has_lse, tile, sums, peaks, BLOCK: tl.constexpr
):  # fmt: skip
    """A program takes one head of one token. Whatever the number of splits, those without entries add exactly 0."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    number = (token * tl.cdiv(heads, tile) + head // tile) * splits
    within = head % tile

    every = tl.arange(0, MOST)
    of_every = peaks + (number + tl.minimum(every, splits - 1)) * (2 * tile) + within
    every_peak = tl.load(of_every, mask=every < splits, other=float("-inf"))
    every_total = tl.load(of_every + tile, mask=every < splits, other=0.0)
    highest = tl.max(every_peak, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(every_total * tl.exp2(every_peak - base), 0)

    lane = tl.arange(0, DIM)
    result = tl.zeros([DIM], tl.float32)
    first = 0
    while first < splits:
        split = first + tl.arange(0, BLOCK)
        own = number + tl.minimum(split, splits - 1)
        of_own = peaks + own * (2 * tile) + within
        peak = tl.load(of_own, mask=split < splits, other=float("-inf"))
        # Programs without entries left no sums behind. One whose logits are all NaN has a total.
        filled = (tl.load(of_own + tile, mask=split < splits, other=0.0) != 0.0)[:, None]
        values = tl.load(sums + (own * tile + within)[:, None] * DIM + lane[None, :], mask=filled, other=0.0)
        result += tl.sum(values * tl.exp2(peak - base)[:, None], 0)
        first += BLOCK

    empty = total == 0.0
    divisor = total + tl.exp2(tl.load(sink + head) * LOG2_E - base)
    result = tl.where(empty, 0.0, result / divisor).to(tl.bfloat16)
    tl.store(out + token * out_row + head * out_head + lane, result)
    if has_lse != 0:
        tl.store(lse + token * heads + head, tl.where(empty, float("-inf"), (base + tl.log2(total)) * LN_2))
