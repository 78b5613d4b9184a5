"""The whole metadata build of a step in one launch, for any mix of decodes and prefills and every cache group.

Programs are dealt out by number::

    for each sliding-window group:  decode tiles | prefill tiles | tiles that clear the tail of the decode lengths
    for each compressed group:      tiles of tokens
    tiles of prefill requests       (gather lengths)

A tile of tokens finds the request of each (guess, else a 64-way search over query_start_loc), derives positions and
row bounds, looks pages up and stores whole rows. Where rows without gaps are wanted, tiles learn where their entries
begin by a decoupled look-back: each publishes how many entries it has, then sums those of the tiles before it. The
words they publish carry the number of the launch, so that nothing has to be cleared in between.

The engine's tables and slots of up to eight groups come as addresses: one kernel serves any number of groups, and
a group's outputs lie ``capacity`` rows behind those of the group before it.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton.language as tl

from swa_backend.kernels.jit import device_function

NO_PAGE: tl.constexpr = tl.constexpr(-1)
FANOUT: tl.constexpr = tl.constexpr(64)  # candidates looked at together in a search
LOOK_BACK: tl.constexpr = tl.constexpr(64)  # earlier tiles looked at together
ROW_PAD: tl.constexpr = tl.constexpr(64)  # rows of complete entries are padded with -1 to whole blocks

# Published word of a tile: launch number << 34 | state << 32 | number of entries.
ENTRIES_OF_TILE: tl.constexpr = tl.constexpr(1)
ENTRIES_UP_TO_TILE: tl.constexpr = tl.constexpr(2)


@device_function
def requests_of(starts, token, inside, num_reqs, guess_len, GUESS: tl.constexpr):
    """Request of each token (the last one that starts at or before it and is not empty), 0 for padding.

    Returns (request [N] int32, mapped [N] bool: the token belongs to a request).
    """
    total = tl.load(starts + num_reqs)
    mapped = inside & (token < total)
    request = tl.zeros_like(token)
    search = True
    if GUESS:
        # In a decode step all queries usually have one length: one load instead of a search.
        guess = tl.minimum(token // guess_len, num_reqs - 1)
        first = tl.load(starts + guess)
        past = tl.load(starts + guess + 1)
        wrong = mapped & ((token < first) | (token >= past))
        request = guess
        search = tl.sum(wrong.to(tl.int32), 0) > 0
    if search:
        request = tl.zeros_like(token)
        span = num_reqs
        while span > 0:
            stride = (span + FANOUT - 1) // FANOUT
            at = request[:, None] + (tl.arange(0, FANOUT)[None, :] + 1) * stride
            real = at <= num_reqs
            start = tl.load(starts + tl.where(real, at, 0))
            request += tl.sum((real & (start <= token[:, None])).to(tl.int32), 1) * stride
            span = stride - 1
    return tl.where(mapped, request, 0), mapped


@device_function
def positions_of(starts, seq_lens, request, token):
    """(position, prefix, seq_len, query_len), each [N] int32."""
    first = tl.load(starts + request)
    query_len = tl.load(starts + request + 1) - first
    seq_len = tl.load(seq_lens + request)
    prefix = seq_len - query_len
    return prefix + token - first, prefix, seq_len, query_len


@device_function
def slots_of(table, table_stride, columns, request, entry, live, page_entries, num_pages):
    """Slot of entry number ``entry`` [N, M] of each request [N, 1]; -1 where not live or on no page."""
    column = entry // page_entries
    live = live & (column < columns)
    # A dead lane's address stays inside the table: masked loads may still touch it.
    address = table + request.to(tl.int64) * table_stride + tl.where(live, column, 0)
    page = tl.load(address, mask=live, other=NO_PAGE)
    live = live & (page >= 0) & (page < num_pages)
    return tl.where(live, page * page_entries + entry - column * page_entries, NO_PAGE)


@device_function
def visibility_of(spans, num_spans, request, position, sees, max_image_tokens):
    """How far left and right each token sees inside its image span; spans are sorted and do not overlap."""
    low = tl.zeros_like(position)
    size = num_spans
    while size > 0:  # number of spans that begin at or before the token
        half = (size + 1) // 2
        at = tl.minimum(low + half, num_spans) - 1
        span_request = tl.load(spans + at * 3)
        first = tl.load(spans + at * 3 + 1)
        before = (span_request < request) | ((span_request == request) & (first <= position))
        low = tl.where(before & (low + half <= num_spans), low + half, low)
        size = size - half
    at = tl.maximum(low - 1, 0)
    some = sees & (low > 0)
    span_request = tl.load(spans + at * 3, mask=some, other=-1)
    first = tl.load(spans + at * 3 + 1, mask=some, other=0)
    last = tl.load(spans + at * 3 + 2, mask=some, other=-1)
    held = some & (span_request == request) & (position <= last)
    left = tl.where(held, tl.minimum(position - first, max_image_tokens - 1), 0)
    right = tl.where(held, tl.minimum(last - position, max_image_tokens), 0)
    return left, right


@device_function
def entries_before(scan, tile, count, epoch):
    """Publish a tile's number of entries; returns how many the tiles before it have. One tile calls it once."""
    tag = epoch << 34
    if tile == 0:
        tl.atomic_xchg(scan, tag | (ENTRIES_UP_TO_TILE.to(tl.int64) << 32) | count.to(tl.int64))
        return tl.zeros_like(count)
    tl.atomic_xchg(scan + tile, tag | (ENTRIES_OF_TILE.to(tl.int64) << 32) | count.to(tl.int64))
    before = tl.zeros_like(count)
    nearest = tile - 1
    while nearest >= 0:
        distance = tl.arange(0, LOOK_BACK)
        at = nearest - distance
        word = tl.load(scan + tl.maximum(at, 0), volatile=True)
        state = tl.where((word >> 34) == epoch, (word >> 32) & 3, 0)
        state = tl.where(at >= 0, state, ENTRIES_OF_TILE)
        entries = tl.where(at >= 0, word & 0xFFFFFFFF, 0).to(tl.int32)
        end = tl.min(tl.where(state == ENTRIES_UP_TO_TILE, distance, LOOK_BACK), 0)
        missing = tl.sum(((state == 0) & (distance < end)).to(tl.int32), 0)
        if missing == 0:
            before += tl.sum(tl.where(distance <= end, entries, 0), 0)
            nearest = tl.where(end < LOOK_BACK, -1, nearest - LOOK_BACK)
    tl.atomic_xchg(scan + tile, tag | (ENTRIES_UP_TO_TILE.to(tl.int64) << 32) | (before + count).to(tl.int64))
    return before
