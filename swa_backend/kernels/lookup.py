"""Look-ups inside kernels: the request of a token, its position, the slot of a position, what an image lets it see."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton.language as tl

from swa_backend.kernels.jit import device_function

FANOUT = tl.constexpr(64)  # candidates looked at together in a search
NO_PAGE = tl.constexpr(-1)


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
def of_group(group, v0, v1, v2, v3, v4, v5, v6, v7):
    """The argument that belongs to a group."""
    low = tl.where(group == 0, v0, tl.where(group == 1, v1, tl.where(group == 2, v2, v3)))
    high = tl.where(group == 4, v4, tl.where(group == 5, v5, tl.where(group == 6, v6, v7)))
    return tl.where(group < 4, low, high)
