"""The whole metadata build of a step in one launch, for any mix of decodes and prefills and every cache group.

Programs are dealt out by number::

    for each sliding-window group:  decode tiles | prefill tiles | tiles that clear the tail of the decode lengths
    for each compressed group:      tiles of tokens
    tiles of prefill requests       (gather lengths)

A tile of tokens finds the request of each (guess, else a search over query_start_loc), derives positions and row
bounds, looks pages up and stores whole rows.

The twin in plain PyTorch is `swa_backend.reference.rows`; `swa_backend.kernels.metadata_launch` calls this.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from swa_backend.kernels.jit import Tuning, device_function, kernel
from swa_backend.kernels.look_back import entries_before, finish_launch, launch_number
from swa_backend.kernels.lookup import of_group, positions_of, requests_of, slots_of, visibility_of

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig
    from swa_backend.platform import CacheRole

MAX_GROUPS = 8  # cache groups of one launch; each brings a block table and a slot mapping
ROW_BLOCK = tl.constexpr(64)  # full rows are written in whole blocks
GROUP_FIELDS = tl.constexpr(4)  # page entries, pages, ratio, full row


@device_function
def window_rows(
    tile,
    first_token,
    last_token,
    starts,
    seq_lens,
    replay_start,
    spans,
    num_spans,
    num_reqs,
    guess_len,
    max_image_tokens,
    table,
    table_stride,
    columns,
    slots,
    main_slots,
    page_entries,
    num_pages,
    write_shared,
    token_to_req,
    left_visible,
    right_visible,
    is_valid,
    rows,
    lens,
    ragged_indices,
    ragged_indptr,
    scan,
    launch,
    PREFILL: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    IMAGES: tl.constexpr,
    REPLAY: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """One tile of decode or prefill rows of one sliding-window group."""
    ROWS: tl.constexpr = TILE // BLOCK if TILE >= BLOCK else 1
    number = tile * ROWS + tl.arange(0, ROWS)
    token = first_token + number
    inside = token < last_token
    # A dead lane's address stays inside the batch: masked loads may still touch it.
    real = tl.where(inside, token, 0)
    request, mapped = requests_of(starts, token, inside, num_reqs, guess_len, not PREFILL)
    valid = mapped & (tl.load(slots + real, mask=inside, other=-1) >= 0)
    position, prefix, seq_len, query_len = positions_of(starts, seq_lens, request, token)
    if CAUSAL:
        start = position - (WINDOW - 1)
        end = position + 1
        replay = tl.zeros_like(position)
        if REPLAY:
            replay = tl.load(replay_start + request)
        if PREFILL:
            if IMAGES:
                sees = mapped & (tl.load(main_slots + real, mask=inside, other=-1) >= 0)
                left, right = visibility_of(spans, num_spans, request, position, sees, max_image_tokens)
                start -= tl.maximum(left - (WINDOW - 1), 0)
                end += right
                if write_shared:
                    tl.store(left_visible + token, left, mask=inside)
                    tl.store(right_visible + token, right, mask=inside)
            gather_len = query_len + tl.minimum(tl.maximum(prefix - replay, 0), WINDOW - 1)
            start = tl.maximum(start, seq_len - gather_len)
        start = tl.maximum(tl.maximum(start, replay), 0)
        end = tl.minimum(end, seq_len)
    else:
        start = tl.maximum(prefix - WINDOW, 0)
        end = seq_len
    if write_shared:
        tl.store(token_to_req + token, request, mask=inside)
        if IMAGES and not PREFILL:  # the arrays cover all tokens, decodes see no image
            tl.store(left_visible + token, tl.zeros_like(token), mask=inside)
            tl.store(right_visible + token, tl.zeros_like(token), mask=inside)
    length = tl.minimum(tl.where(valid, tl.maximum(end - start, 0), 0), WIDTH)
    tl.store(is_valid + token, valid.to(tl.uint8), mask=inside)
    tl.store(lens + number, length, mask=inside)

    offset = tl.arange(0, BLOCK)
    live = offset[None, :] < length[:, None]
    slot = slots_of(
        table, table_stride, columns, request[:, None], start[:, None] + offset[None, :], live, page_entries, num_pages
    )
    tl.store(rows + number[:, None] * WIDTH + offset[None, :], slot, mask=inside[:, None] & (offset < WIDTH)[None, :])
    if RAGGED:
        kept = (slot >= 0).to(tl.int32)
        count = tl.sum(kept, 1)
        up_to = tl.cumsum(count, 0)
        before = entries_before(scan, tile, tl.sum(count, 0), launch)
        tl.store(ragged_indptr + 1 + number, before + up_to, mask=inside)
        place = before + (up_to - count)[:, None] + tl.cumsum(kept, 1) - 1
        tl.store(ragged_indices + place, slot, mask=kept > 0)


@device_function
def compressed_rows(
    tile,
    num_tokens,
    starts,
    seq_lens,
    num_reqs,
    table,
    table_stride,
    columns,
    slots,
    page_entries,
    num_pages,
    ratio,
    out_slots,
    full,
    full_rows,
    full_lens,
    full_width,
    TILE: tl.constexpr,
):
    """One tile of tokens of one compressed group: slots of the entries they complete, and full rows where wanted."""
    ROWS: tl.constexpr = TILE // ROW_BLOCK
    token = tile * ROWS + tl.arange(0, ROWS)
    inside = token < num_tokens
    request, mapped = requests_of(starts, token, inside, num_reqs, 1, False)
    slot = tl.load(slots + tl.where(inside, token, 0), mask=inside, other=-1)
    position, _, _, _ = positions_of(starts, seq_lens, request, token)
    valid = mapped & (slot >= 0) & (position >= 0)
    complete = tl.where(valid, (position + 1) // ratio, 0)
    completes = valid & (complete * ratio == position + 1)
    entry = tl.where(completes, position // ratio, 0)
    own = slots_of(table, table_stride, columns, request, entry, completes, page_entries, num_pages)
    tl.store(out_slots + token, own.to(tl.int64), mask=inside)
    if full:
        length = tl.minimum(complete, full_width)
        tl.store(full_lens + token, length, mask=inside)
        longest = tl.max(length, 0)
        first = 0
        while first < longest:
            entries = first + tl.arange(0, ROW_BLOCK)
            live = entries[None, :] < length[:, None]
            found = slots_of(
                table, table_stride, columns, request[:, None], entries[None, :] + tl.zeros_like(length)[:, None], live,
                page_entries, num_pages,
            )  # fmt: skip
            # A row is written in whole blocks up to its own length: the live part bounds the work.
            target = full_rows + token[:, None].to(tl.int64) * full_width + entries[None, :]
            tl.store(target, found, mask=inside[:, None] & (first < length)[:, None])
            first += ROW_BLOCK


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterable[Mapping[str, object]]:
    """Causal steps with and without spans and replay, and non-causal draft steps; with ragged rows and without."""
    window, prefill_width = config.model.window_size, config.prefill_width
    for ragged in (False, True):
        for images in (False, True) if config.max_image_tokens else (False,):
            for replay in (False, True):
                yield metadata_key(window, config.causal_decode_width, prefill_width,
                                   causal=True, images=images, replay=replay, ragged=ragged)  # fmt: skip
        if config.non_causal_width:
            yield metadata_key(window, config.non_causal_width, prefill_width,
                               causal=False, images=False, replay=False, ragged=ragged)  # fmt: skip


def metadata_key(
    window: int, decode_width: int, prefill_width: int, *, causal: bool, images: bool, replay: bool, ragged: bool
) -> dict[str, object]:
    """The compile key of one kind of step."""
    return {
        "CAUSAL": causal,
        "WINDOW": window,
        "DECODE_WIDTH": decode_width,
        "DECODE_BLOCK": triton.next_power_of_2(decode_width),
        "PREFILL_WIDTH": prefill_width,
        "PREFILL_BLOCK": triton.next_power_of_2(prefill_width),
        "IMAGES": images,
        "REPLAY": replay,
        "RAGGED": ragged,
    }


STEP_TYPES = {
    "starts": "*i32",  # [R + 1] query_start_loc
    "seq_lens": "*i32",  # [R]
    "replay_start": "*i32",  # [R]; read with REPLAY
    "spans": "*i32",  # [num_spans, 3]; read with IMAGES
    "num_spans": "i32",
    "num_reqs": "i32",
    "num_decodes": "i32",
    "num_tokens": "i32",
    "num_decode_tokens": "i32",
    "guess_len": "i32",  # likely query length of every decode
    "decode_tiles": "i32",
    "prefill_tiles": "i32",
    "clear_tiles": "i32",
    "token_tiles": "i32",  # of a compressed group
    "num_programs": "i32",  # of the launch
}
GROUP_TYPES = {
    "table": "*i32",  # [R, columns]
    "slots": "*i64",  # [T]
    "stride": "i64",  # elements from row to row of the table
    "columns": "i32",
}
ALL_GROUP_TYPES = {f"{name}{group}": kind for group in range(MAX_GROUPS) for name, kind in GROUP_TYPES.items()}
BUFFER_TYPES = {
    "group_table": "*i32",  # [groups, 4] page entries, pages, ratio, full row
    "token_to_req": "*i32",  # [capacity]
    "left_visible": "*i32",  # [capacity], written with IMAGES
    "right_visible": "*i32",
    "gather_lens": "*i32",  # [max requests]
    "is_valid": "*u8",  # [G, capacity]
    "decode_indices": "*i32",  # [G, capacity, DECODE_WIDTH]
    "decode_lens": "*i32",  # [G, capacity]
    "prefill_indices": "*i32",  # [G, capacity, PREFILL_WIDTH]
    "prefill_lens": "*i32",  # [G, capacity]
    "decode_ragged": "*i32",  # [G, decode_ragged_stride], written with RAGGED
    "decode_indptr": "*i32",  # [G, capacity + 1]
    "prefill_ragged": "*i32",  # [G, capacity * PREFILL_WIDTH]
    "prefill_indptr": "*i32",  # [G, capacity + 1]
    "scan": "*i64",  # [G, 2, scan_stride] published counts
    "launch_words": "*i64",  # [2] number of the launch; programs that have finished
    "compressed_slots": "*i64",  # [C, capacity]
    "full_rows": "*i32",  # [F, capacity, full_width]
    "full_lens": "*i32",  # [F, capacity]
    "capacity": "i64",  # tokens that every per-token buffer holds
    "decode_ragged_stride": "i64",
    "scan_stride": "i64",
    "full_width": "i32",
    "max_image_tokens": "i32",
    "num_swa": "i32",  # G
    "num_compressed": "i32",  # C
}

_TUNING = {
    "cuda": Tuning(4, 1, {"TILE": 1024}),
    "hip": Tuning(4, 1, {"TILE": 1024}),
    "interpret": Tuning(4, 1, {"TILE": 1024}),
}


@kernel(types={**STEP_TYPES, **ALL_GROUP_TYPES, **BUFFER_TYPES}, tuning=_TUNING, keys=_keys)
def build_metadata(
    starts, seq_lens, replay_start, spans, num_spans, num_reqs, num_decodes, num_tokens, num_decode_tokens, guess_len,
    decode_tiles, prefill_tiles, clear_tiles, token_tiles, num_programs,
    table0, slots0, stride0, columns0, table1, slots1, stride1, columns1,
    table2, slots2, stride2, columns2, table3, slots3, stride3, columns3,
    table4, slots4, stride4, columns4, table5, slots5, stride5, columns5,
    table6, slots6, stride6, columns6, table7, slots7, stride7, columns7,
    group_table, token_to_req, left_visible, right_visible, gather_lens, is_valid,
    decode_indices, decode_lens, prefill_indices, prefill_lens,
    decode_ragged, decode_indptr, prefill_ragged, prefill_indptr, scan, launch_words,
    compressed_slots, full_rows, full_lens,
    capacity, decode_ragged_stride, scan_stride, full_width, max_image_tokens, num_swa, num_compressed,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DECODE_WIDTH: tl.constexpr, DECODE_BLOCK: tl.constexpr, PREFILL_WIDTH: tl.constexpr, PREFILL_BLOCK: tl.constexpr,
    IMAGES: tl.constexpr, REPLAY: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Everything of a step; see the module for how programs are dealt out."""
    program = tl.program_id(0)
    launch = launch_number(launch_words) if RAGGED else 0
    group_tiles = decode_tiles + prefill_tiles + clear_tiles
    swa_programs = num_swa * group_tiles
    group = program // tl.maximum(group_tiles, 1)
    tile = program - group * group_tiles
    if program >= swa_programs:
        group = num_swa + (program - swa_programs) // token_tiles
        tile = (program - swa_programs) % token_tiles
    known = tl.minimum(group, 7)
    table = of_group(known, table0, table1, table2, table3, table4, table5, table6, table7)
    slots = of_group(known, slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    stride = of_group(known, stride0, stride1, stride2, stride3, stride4, stride5, stride6, stride7)
    columns = of_group(
        known, columns0, columns1, columns2, columns3, columns4, columns5, columns6, columns7
    )
    wide = group.to(tl.int64)
    if program < swa_programs:
        page_entries = tl.load(group_table + group * GROUP_FIELDS)
        num_pages = tl.load(group_table + group * GROUP_FIELDS + 1)
        if tile < decode_tiles:
            window_rows(
                tile, 0, num_decode_tokens, starts, seq_lens, replay_start, spans, num_spans, num_reqs, guess_len,
                max_image_tokens, table, stride, columns, slots, slots0, page_entries, num_pages, group == 0,
                token_to_req, left_visible, right_visible, is_valid + wide * capacity,
                decode_indices + wide * capacity * DECODE_WIDTH, decode_lens + wide * capacity,
                decode_ragged + wide * decode_ragged_stride, decode_indptr + wide * (capacity + 1),
                scan + wide * 2 * scan_stride, launch,
                False, CAUSAL, WINDOW, DECODE_WIDTH, DECODE_BLOCK, TILE, IMAGES, REPLAY, RAGGED,
            )  # fmt: skip
        elif tile < decode_tiles + prefill_tiles:
            if CAUSAL:  # a non-causal step has decodes only
                window_rows(
                    tile - decode_tiles, num_decode_tokens, num_tokens, starts, seq_lens, replay_start, spans,
                    num_spans, num_reqs, guess_len, max_image_tokens, table, stride, columns, slots, slots0,
                    page_entries, num_pages, group == 0, token_to_req, left_visible, right_visible,
                    is_valid + wide * capacity, prefill_indices + wide * capacity * PREFILL_WIDTH,
                    prefill_lens + wide * capacity, prefill_ragged + wide * capacity * PREFILL_WIDTH,
                    prefill_indptr + wide * (capacity + 1), scan + (wide * 2 + 1) * scan_stride, launch,
                    True, CAUSAL, WINDOW, PREFILL_WIDTH, PREFILL_BLOCK, TILE, IMAGES, REPLAY, RAGGED,
                )  # fmt: skip
        else:
            cleared = num_decode_tokens + (tile - decode_tiles - prefill_tiles) * TILE + tl.arange(0, TILE)
            tl.store(decode_lens + wide * capacity + cleared, tl.zeros([TILE], tl.int32), mask=cleared < capacity)
    elif group < num_swa + num_compressed:
        page_entries = tl.load(group_table + group * GROUP_FIELDS)
        num_pages = tl.load(group_table + group * GROUP_FIELDS + 1)
        ratio = tl.load(group_table + group * GROUP_FIELDS + 2)
        full = tl.load(group_table + group * GROUP_FIELDS + 3)
        at = tl.maximum(full, 0).to(tl.int64) * capacity
        compressed_rows(
            tile, num_tokens, starts, seq_lens, num_reqs, table, stride, columns, slots, page_entries, num_pages,
            ratio, compressed_slots + (wide - num_swa) * capacity, full >= 0, full_rows + at * full_width,
            full_lens + at, full_width, TILE,
        )  # fmt: skip
    else:
        number = (program - swa_programs - num_compressed * token_tiles) * TILE + tl.arange(0, TILE)
        request = num_decodes + number
        real = request < num_reqs
        # Requests that are not there read the first one's lengths.
        request = tl.where(real, request, 0)
        query_len = tl.load(starts + request + 1) - tl.load(starts + request)
        cached = tl.load(seq_lens + request) - query_len
        if REPLAY:
            cached -= tl.load(replay_start + request)
        tl.store(gather_lens + number, query_len + tl.minimum(tl.maximum(cached, 0), WINDOW - 1), mask=real)
    if RAGGED:
        finish_launch(launch_words, launch, num_programs)
