"""The rows of a batch computed the slow way: one token, one position at a time, in plain Python.

Written from the rules alone, and shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenRow:
    valid: bool
    request: int
    position: int
    row: list[int]  # slots, -1 where a position has none; without the padding to the row's width
    left: int = 0
    right: int = 0


def slot_of(table: Sequence[int], position: int, page_tokens: int, num_pages: int | None = None) -> int:
    column = position // page_tokens
    if column >= len(table):
        return -1
    page = table[column]
    if page < 0 or (num_pages is not None and page >= num_pages):
        return -1
    return page * page_tokens + position % page_tokens


def rows_of(
    queries: Sequence[int],
    seqs: Sequence[int],
    tables: Sequence[Sequence[int]],
    slots: Sequence[int],
    *,
    num_decode_tokens: int,
    window: int,
    page_tokens: int,
    num_pages: int | None = None,
    causal: bool = True,
    replay: Sequence[int] | None = None,
    spans: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    max_image_tokens: int = 0,
) -> list[TokenRow]:
    """One row per slot in ``slots``, padding included."""
    result = []
    token = 0
    for request, (query, seq) in enumerate(zip(queries, seqs, strict=True)):
        prefix = seq - query
        start_of_replay = replay[request] if replay else 0
        gather = query + min(max(prefix - start_of_replay, 0), window - 1)
        for position in range(prefix, seq):
            is_prefill = token >= num_decode_tokens
            valid = slots[token] >= 0
            left = right = 0
            if is_prefill and max_image_tokens and valid:
                for first, last in (spans or {}).get(request, ()):
                    if first <= position <= last:
                        left, right = (
                            min(position - first, max_image_tokens - 1),
                            min(last - position, max_image_tokens),
                        )
            if causal:
                sees = []
                for other in range(seq):
                    behind = position - other
                    near = -right <= behind <= max(window - 1, left)
                    kept = other >= start_of_replay and (not is_prefill or other >= seq - gather)
                    if near and kept:
                        sees.append(other)
            else:
                sees = [other for other in range(seq) if other >= prefix - window]
            row = [slot_of(tables[request], other, page_tokens, num_pages) for other in sees] if valid else []
            result.append(TokenRow(valid, request, position, row, left, right))
            token += 1
    while token < len(slots):
        result.append(TokenRow(False, 0, -1, []))
        token += 1
    return result
