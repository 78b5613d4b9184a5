"""What a step's metadata has to be, one token and one position at a time.

Written from the rules alone; it shares no code with the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swa_backend.fuzz.case import Knobs
from swa_backend.fuzz.step import Step


@dataclass(frozen=True, slots=True)
class Right:
    """The right metadata of a step, as far as it is one value a token or request.

    Attributes:
        decodes, decode_tokens: where decodes end, in requests and tokens.
        request: [T]; 0 for padding.
        valid: window group -> [T] bool.
        sees: for each token of a request the positions that it sees, whether or not it is valid.
        left, right: [T] visibility; None where no prefill has an image.
        gather: [prefills].
    """

    decodes: int
    decode_tokens: int
    request: np.ndarray
    valid: dict[str, np.ndarray]
    sees: list[np.ndarray]
    left: np.ndarray | None
    right: np.ndarray | None
    gather: np.ndarray


def split(queries: list[int], tokens: int, max_query_len: int, threshold: int) -> tuple[int, int]:
    """Decode requests and decode tokens of a causal batch."""
    if max_query_len <= threshold:
        return len(queries), tokens
    before = 0
    for number, query in enumerate(queries):
        if query > threshold:
            return number, before
        before += query
    return len(queries), tokens


def right_metadata(step: Step, knobs: Knobs) -> Right:
    """The right metadata of a step."""
    queries, tokens = step.queries.tolist(), step.num_tokens
    if not step.causal or step.captured:
        decodes, decode_tokens = len(queries), tokens
    else:
        decodes, decode_tokens = split(queries, tokens, step.max_query_len, knobs.threshold)
    request = np.zeros(tokens, dtype=np.int64)
    request[: len(step.row)] = step.row
    mapped = np.arange(tokens) < len(step.row)
    valid = {name: mapped & (slots >= 0) for name, slots in step.slots.items()}
    gather = np.array([_gather(step, row, knobs) for row in range(decodes, len(queries))], dtype=np.int64)

    spans = step.spans if step.spans is not None and knobs.image_tokens else {}
    images = any(row >= decodes for row in spans)
    left, right = (np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.int64)) if images else (None, None)
    sees = []
    for token, (row, position) in enumerate(zip(step.row.tolist(), step.position.tolist(), strict=True)):
        part = step.parts[row]
        others = np.arange(part.end)
        if not step.causal:
            sees.append(others[others >= part.start - knobs.window])
            continue
        is_prefill = token >= decode_tokens
        before = after = 0
        if is_prefill and valid["main"][token] and left is not None and right is not None:
            for first, last in spans.get(row, ()):
                if first <= position <= last:
                    before = min(position - first, knobs.image_tokens - 1)
                    after = min(last - position, knobs.image_tokens)
            left[token], right[token] = before, after
        seen = (others >= position - max(knobs.window - 1, before)) & (others <= position + after)
        if step.replay is not None:
            seen &= others >= step.replay[row]
        if is_prefill:
            seen &= others >= part.end - _gather(step, row, knobs)
        sees.append(others[seen])
    return Right(decodes, decode_tokens, request, valid, sees, left, right, gather)


def _gather(step: Step, row: int, knobs: Knobs) -> int:
    part = step.parts[row]
    replay = 0 if step.replay is None else int(step.replay[row])
    return part.count + min(max(part.start - replay, 0), knobs.window - 1)


def slots_of(table: np.ndarray, row: int, entries: np.ndarray, page_entries: int, pages: int) -> np.ndarray:
    """Slot of each entry number [n] of a request, -1 where its table has no page of the cache."""
    columns = entries // page_entries
    inside = columns < table.shape[1]
    page = np.full(len(entries), -1, dtype=np.int64)
    page[inside] = table[row, columns[inside]]
    return np.where((page >= 0) & (page < pages), page * page_entries + entries % page_entries, -1)
