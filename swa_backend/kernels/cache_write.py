"""Quantise keys and insert them into pages of any writable layout; twin of `swa_backend.reference.codec.write_kv`.

A program takes a tile of tokens: it reads whole rows of 512 values, finds the scale of every group, and stores a
token's codes, bf16 tail and scales. Tokens with one slot would be written by programs that run at the same time, so
each program leaves out a token whose slot a later one has: the last one wins as a whole, as in the reference.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend._math import cdiv
from swa_backend.cache_layout import HEAD_DIM, Dialect
from swa_backend.kernels.fp8 import INFINITY_BITS, MAGNITUDE, bits_of, encode_e4m3, float_of, scale_code
from swa_backend.kernels.jit import Tuning, address, device_function, kernel
from swa_backend.kernels.paging import PAGE_TYPES, cache_layouts, is_aligned, layout_key, page_numbers, scale_of, wide
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.pages import PageView

DIM: tl.constexpr = tl.constexpr(HEAD_DIM)
NO_SLOT: tl.constexpr = tl.constexpr(-1)
PAST_SLOTS: tl.constexpr = tl.constexpr(2**31 - 1)
UE8M0_NAN: tl.constexpr = tl.constexpr(255)

# Tokens of a program, how many of them it holds in registers at once, and slots that it compares with at a time. A
# step of decodes needs many small programs; for a large one what counts is how often all slots are read. Narrow
# accesses take too many registers for large tiles.
FEW = {"TOKENS": 4, "ROWS": 4, "SCAN": 128}
MANY = {"TOKENS": 32, "ROWS": 16, "SCAN": 1024}
MOST_FEW = 1024


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    for layout in cache_layouts(config, dialects, written=True):
        for aligned, tile in ((True, FEW), (True, MANY), (False, FEW)):
            yield {**layout_key(layout), "ALIGNED": aligned, **tile}


@device_function
def _either(a, b):
    return a | b


@device_function
def superseded(slot_mapping, slot, first, tokens, TOKENS: tl.constexpr, SCAN: tl.constexpr):
    """Bit i: whether a later token has the slot of a tile's token i (anything where ``slot`` [TOKENS] is -1).

    Tokens of one page usually have slots that rise by one. Then it is enough that no later slot lies between the
    first and the last of them; only otherwise is every slot compared with every later one.
    """
    offset = tl.arange(0, TOKENS)
    lane = tl.arange(0, SCAN)
    live = slot >= 0
    low = tl.min(tl.where(live, slot, PAST_SLOTS), 0)
    high = tl.max(slot, 0)
    origin = tl.min(tl.where(live, slot - offset, PAST_SLOTS), 0)
    rising = (tl.max(tl.where(live, slot - offset, origin), 0) == origin).to(tl.int32)
    seen = tl.zeros([SCAN], tl.int32)
    if rising > 0:
        at = first + TOKENS
        while at < tokens:
            index = at + lane
            later = tl.load(slot_mapping + tl.minimum(index, tokens - 1), mask=index < tokens, other=NO_SLOT)
            seen |= ((later >= low) & (later <= high)).to(tl.int32)
            at += SCAN
    taken = tl.zeros([], tl.int32)
    if (tl.max(seen, 0) > 0) | (rising == 0):
        equal = tl.zeros([SCAN], tl.int32)  # bit i: equals the slot of token i
        at = first
        while at < tokens:
            index = at + lane
            later = tl.load(slot_mapping + tl.minimum(index, tokens - 1), mask=index < tokens, other=NO_SLOT)
            for i in tl.static_range(TOKENS):
                own = tl.load(slot_mapping + tl.minimum(first + i, tokens - 1))
                equal |= ((later == own) & (index > first + i)).to(tl.int32) << i
            at += SCAN
        taken = tl.reduce(equal, 0, _either)
    return taken


@device_function
def slots_of(slot_mapping, token, tokens, num_slots):
    """Slot of each token as int32; NO_SLOT past the last token and where there is no such slot."""
    slot = tl.load(slot_mapping + tl.minimum(token, tokens - 1))
    return tl.where((token < tokens) & (slot >= 0) & (slot < num_slots), slot, NO_SLOT).to(tl.int32)


@kernel(
    types={
        "k": "*bf16",  # [>= tokens, 512]
        "slot_mapping": "*i64",  # [tokens]
        "k_stride": "i64",  # values
        "tokens": "i32",
        "pages": "*u8",
        "scale": "*u8",  # one float32 of a per-tensor layout, else not read
        **PAGE_TYPES,
    },
    tuning={
        "cuda": Tuning(4, 1, tiles={"HW_FP8": 1}),
        "cuda:80": Tuning(4, 1, tiles={"HW_FP8": 0}),
        "cuda:86": Tuning(4, 1, tiles={"HW_FP8": 0}),
        "": Tuning(4, 1, tiles={"HW_FP8": 0}),
    },
    keys=_keys,
)
def write_pages(
    k, slot_mapping, k_stride, tokens, pages, scale,
    page_stride, data_stride, scale_start, scale_stride, entries, num_pages,
    VALUES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, QUANTISED: tl.constexpr, FNUZ: tl.constexpr,
    ALIGNED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SCAN: tl.constexpr, HW_FP8: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = DIM // GROUP  # of a whole row; the first QUANTISED // GROUP of them are quantised
    TAIL: tl.constexpr = DIM - QUANTISED
    LIMIT: tl.constexpr = 240.0 if FNUZ else 448.0
    NAN_CODE: tl.constexpr = 0x80 if FNUZ else 0x7F
    first = tl.program_id(0) * TOKENS
    num_slots = num_pages.to(tl.int64) * entries
    group = tl.arange(0, GROUPS)
    value = (group * GROUP)[None, :, None] + tl.arange(0, GROUP)[None, None, :]

    # The first keys are asked for before any slot is known: both take their time from memory at once.
    token = tl.minimum(first + tl.arange(0, ROWS), tokens - 1)
    asked = tl.load(wide((k + token.to(tl.int64) * k_stride)[:, None, None], value, ALIGNED))
    whole = slots_of(slot_mapping, first + tl.arange(0, TOKENS), tokens, num_slots)
    taken = superseded(slot_mapping, whole, first, tokens, TOKENS, SCAN)

    for part in tl.static_range(TOKENS // ROWS):
        place = part * ROWS + tl.arange(0, ROWS)
        token = tl.minimum(first + place, tokens - 1)
        row = k + token.to(tl.int64) * k_stride
        raw = asked
        if part:
            raw = tl.load(wide(row[:, None, None], value, ALIGNED))
        slot = slots_of(slot_mapping, first + place, tokens, num_slots)
        live = (slot >= 0) & (((taken >> place) & 1) == 0)
        slot = tl.where(live, slot, 0)
        page = slot // entries
        entry = (slot - page * entries).to(tl.int64)
        start = pages + page.to(tl.int64) * page_stride
        data = start + entry * data_stride

        if VALUES == "bf16":
            at = wide(data.to(tl.pointer_type(tl.bfloat16))[:, None, None], value, ALIGNED)
            tl.store(at, raw, mask=live[:, None, None])
        else:
            numbers = raw.to(tl.float32)
            magnitude = bits_of(numbers) & MAGNITUDE
            if SCALES == "tensor":
                scaled = tl.div_rn(numbers, tl.load(scale.to(tl.pointer_type(tl.float32))))
                lost = (magnitude >= INFINITY_BITS) | (scaled != scaled)
                scaled = tl.minimum(tl.maximum(tl.where(lost, 0.0, scaled), -LIMIT), LIMIT)
            else:
                amax = tl.max(magnitude, 2)
                lost = amax >= INFINITY_BITS
                code = scale_code(tl.where(lost, 0, amax), FNUZ)
                # Exact: the reciprocal is a power of two, and the product at most the dialect's maximum.
                scaled = tl.where(lost[:, :, None], 0.0, numbers * float_of((254 - code) << 23)[:, :, None])
                code = tl.where(group[None, :] < QUANTISED // GROUP, tl.where(lost, UE8M0_NAN, code), 0)
                at = wide((start + scale_start + entry * scale_stride)[:, None], group[None, :], ALIGNED, 8)
                tl.store(at, code.to(tl.uint8), mask=live[:, None])
                lost = lost[:, :, None]
            codes = tl.where(lost, NAN_CODE, encode_e4m3(scaled, FNUZ, HW_FP8)).to(tl.uint8)
            wanted = live[:, None, None] & (group < QUANTISED // GROUP)[None, :, None]
            tl.store(wide(data[:, None, None], value, ALIGNED), codes, mask=wanted)
            if TAIL:
                dim = tl.arange(0, TAIL)
                copied = tl.load(wide((row + QUANTISED)[:, None], dim[None, :], ALIGNED))
                at = wide((data + QUANTISED).to(tl.pointer_type(tl.bfloat16))[:, None], dim[None, :], ALIGNED)
                tl.store(at, copied, mask=live[:, None])


def write_kv(k: torch.Tensor, pages: PageView, slot_mapping: torch.Tensor) -> None:
    """Quantise keys and store them in their slots; the padding of a page is not touched.

    Args:
        k: [>= T, 512] bf16, rows any distance apart.
        pages: pages to write, of a writable layout.
        slot_mapping: [T] int64, contiguous. A slot that is negative, or at or past ``pages.num_slots``, stores
            nothing; of equal slots the last one wins.
    """
    tokens = slot_mapping.shape[0]
    aligned = is_aligned(pages, k)
    tile = MANY if aligned and tokens > MOST_FEW else FEW
    kind = (write_pages, aligned, tile["TOKENS"])
    bound = pages.launches.get(kind)
    if bound is None:
        launcher = write_pages.on(k.device, **layout_key(pages.layout), ALIGNED=aligned, **tile)
        bound = pages.launches[kind] = launcher.bind(pages.data, scale_of(pages), *page_numbers(pages))
    grid = (cdiv(tokens, tile["TOKENS"]), 1, 1)
    bound.launch(grid, address(k), address(slot_mapping), k.stride(0), tokens)
