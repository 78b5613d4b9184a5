"""Keys of a paged cache inside attention kernels: which slots a tile names, where they lie, and what they are in bf16.

A key comes in eight chunks of 64 values, each a tensor of its own: a chunk is what a scale (or two, or four) belongs to
in every layout, and small tensors leave the compiler free to store one while it decodes the next. Every stored value is
exact in bf16, except that of a per-tensor layout, whose one scale is left to the caller (`tensor_scale`).
"""
# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: N803, RUF005, SIM108

from __future__ import annotations

import triton.language as tl

from swa_backend.kernels.fp8 import decode_e2m1, decode_e4m3, decode_ue8m0
from swa_backend.kernels.jit import device_function
from swa_backend.kernels.paging import quotient, wide

CHUNK: tl.constexpr = tl.constexpr(64)
CHUNKS: tl.constexpr = tl.constexpr(8)
NONE: tl.constexpr = tl.constexpr(-1)


@device_function
def tile_slots(rows, first, length, width, num_slots, TILE: tl.constexpr):
    """Slots [TILE] of the entries ``first ..`` of a row, and which of them are any: those among the first ``length``.

    Memory is the row's for ``width`` entries, so that slots need not wait until the length is known. Dead lanes have
    slot 0 and point to the row's first entry.
    """
    at = first + tl.arange(0, TILE)
    inside = at < width
    slot = tl.load(rows + tl.where(inside, at, 0), mask=inside, other=NONE)
    live = (at < length) & (slot >= 0) & (slot < num_slots)
    return tl.where(live, slot, 0), live


@device_function
def places(pages, slot, page_stride, data_stride, scale_start, scale_stride, entries, magic, shift):
    """Pointers [TILE] to the data row and to the scale row of each slot; 64-bit offsets."""
    page = quotient(slot, magic, shift)
    entry = (slot - page * entries).to(tl.int64)
    start = pages + page.to(tl.int64) * page_stride
    return start + entry * data_stride, start + scale_start + entry * scale_stride


@device_function
def load_scales(scales, live, LAYOUT: tl.constexpr, ALIGNED: tl.constexpr):
    """The scale bytes of each key as a tuple of uint64 [TILE], eight bytes a word; empty without any."""
    words = ()
    for number in tl.static_range(
        1 if LAYOUT == "fp8_ds_mla" else 2 if LAYOUT == "fp8_ds_mla_v41" else 4 if LAYOUT == "fp4_ds_mla_v41" else 0
    ):
        if ALIGNED:
            word = tl.load((scales + number * 8).to(tl.pointer_type(tl.uint64)), mask=live, other=0)
        else:
            word = tl.load(scales + number * 8, mask=live, other=0).to(tl.uint64)
            for byte in tl.static_range(1, 8):
                one = tl.load(scales + number * 8 + byte, mask=live, other=0).to(tl.uint64)
                word = word | (one << (8 * byte))
        words = words + (word,)
    return words


@device_function
def load_chunk(data, live, C: tl.constexpr, LAYOUT: tl.constexpr, ALIGNED: tl.constexpr):
    """Chunk C of each key as it is stored: codes [TILE, 64], or [TILE, 32] bytes of two, or bf16 [TILE, 64]."""
    if LAYOUT == "bf16" or (LAYOUT == "fp8_ds_mla" and C == CHUNKS - 1):
        if LAYOUT == "bf16":
            start = data + C * 128
        else:
            start = data + 448
        lane = tl.arange(0, CHUNK)
        at = wide(start.to(tl.pointer_type(tl.bfloat16))[:, None], lane[None, :], ALIGNED, 8)
        found = tl.load(at, mask=live[:, None], other=0.0)
    elif LAYOUT == "fp4_ds_mla_v41":
        lane = tl.arange(0, CHUNK // 2)
        found = tl.load(wide((data + C * 32)[:, None], lane[None, :], ALIGNED), mask=live[:, None], other=0)
    else:
        lane = tl.arange(0, CHUNK)
        found = tl.load(wide((data + C * 64)[:, None], lane[None, :], ALIGNED), mask=live[:, None], other=0)
    return found


@device_function
def scale_byte(words, NUMBER: tl.constexpr):
    """Scale byte of each key by its number in the scale row: uint8 [TILE]."""
    return ((words[NUMBER // 8] >> (8 * (NUMBER % 8))) & 255).to(tl.uint8)


@device_function
def decode_chunk(
    codes, words, C: tl.constexpr, LAYOUT: tl.constexpr, FNUZ: tl.constexpr, HW_FP8: tl.constexpr, TILE: tl.constexpr
):
    """Values [TILE, 64] bf16 of a chunk that `load_chunk` loaded; without the scale of a per-tensor layout."""
    if LAYOUT == "bf16" or (LAYOUT == "fp8_ds_mla" and C == CHUNKS - 1):
        values = codes
    elif LAYOUT == "fp4_ds_mla_v41":
        pairs = codes.to(tl.int32)
        nibbles = tl.reshape(tl.join(pairs & 15, pairs >> 4), (TILE, CHUNK))
        group = (tl.arange(0, CHUNK) // 16)[None, :]
        scale = decode_e4m3(scale_byte(words, 4 * C), False, False)[:, None]
        for part in tl.static_range(1, 4):
            one = decode_e4m3(scale_byte(words, 4 * C + part), False, False)[:, None]
            scale = tl.where(group >= part, one, scale)
        values = (decode_e2m1(nibbles) * scale).to(tl.bfloat16)
    elif LAYOUT == "fp8_per_tensor":
        values = decode_e4m3(codes, FNUZ, HW_FP8).to(tl.bfloat16)
    elif LAYOUT == "fp8_ds_mla_v41":
        first = decode_ue8m0(scale_byte(words, 2 * C))[:, None]
        second = decode_ue8m0(scale_byte(words, 2 * C + 1))[:, None]
        scale = tl.where((tl.arange(0, CHUNK) < 32)[None, :], first, second)
        values = (decode_e4m3(codes, FNUZ, HW_FP8) * scale).to(tl.bfloat16)
    else:
        tl.static_assert(LAYOUT == "fp8_ds_mla")
        scale = decode_ue8m0(scale_byte(words, C))[:, None]
        values = (decode_e4m3(codes, FNUZ, HW_FP8) * scale).to(tl.bfloat16)
    return values


@device_function
def beside(a, b):
    """[TILE, 2 * n] of two tensors [TILE, n]; nothing moves between threads."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@device_function
def joined(chunks, PARTS: tl.constexpr):
    """The eight chunks as a tuple of PARTS tensors: every product of matrices has a cost of its own."""
    found = chunks
    if PARTS <= 4:
        four = ()
        for c in tl.static_range(4):
            four = four + (beside(chunks[2 * c], chunks[2 * c + 1]),)
        found = four
        if PARTS <= 2:
            two = ()
            for c in tl.static_range(2):
                two = two + (beside(four[2 * c], four[2 * c + 1]),)
            found = two
            if PARTS == 1:
                found = (beside(two[0], two[1]),)
    return found


@device_function
def tensor_scale(scale, LAYOUT: tl.constexpr):
    """What keys and values of a cache are still to be multiplied by."""
    if LAYOUT == "fp8_per_tensor":
        found = tl.load(scale.to(tl.pointer_type(tl.float32)))
    else:
        found = 1.0
    return found
