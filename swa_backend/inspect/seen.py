"""Which keys each token of a built step sees, read back from the rows that attention gets.

Rows hold slots. They are turned back into positions by the lengths of the rows, and every slot is compared with the
one that the block table gives for that position, so that a wrong row shows up instead of being drawn as if it were
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from swa_backend.inspect.step_input import CompressedInput, StepInput
from swa_backend.layer_types import LayerType
from swa_backend.metadata import DeepseekSparseSWAMetadata


class Key(IntEnum):
    """Why a token sees a key, or does not."""

    NOTHING = 0
    WINDOW = 1
    IMAGE = 2
    DRAFT = 3
    ENTRY = 4
    CANDIDATE = 5  # an entry that the indexer may pick; which ones it picked is not known
    MISSING = 6  # its page is not there


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The tokens of a step and their windows. T tokens; all arrays are on the host.

    Attributes:
        request: [T] request of each token, -1 for padding past the last request.
        position: [T] absolute position, -1 for padding.
        valid: [T] whether the token has a slot.
        first, end: [T] the window is positions ``first .. end - 1``; equal where nothing is seen.
        slots: [T, width] the row, -1 filled.
        missing: [T, width] entries of the live part that are -1.
        problems: rows that are not what table and lengths say, in words.
    """

    request: np.ndarray
    position: np.ndarray
    valid: np.ndarray
    first: np.ndarray
    end: np.ndarray
    slots: np.ndarray
    missing: np.ndarray
    problems: tuple[str, ...]

    @property
    def lens(self) -> np.ndarray:
        """[T] positions that each window spans."""
        lens: np.ndarray = self.end - self.first
        return lens


@dataclass(frozen=True, slots=True)
class SeenEntries:
    """The compressed entries of one layer type.

    Attributes:
        complete: [T] complete entries before each token, those that it may see.
        entries: for each token the entries that it sees, ascending; all complete ones where picks are not known.
        missing: for each token those of them whose page is not there.
        known: [T] whether ``entries`` are exactly what is seen, False where the indexer's picks are not known.
    """

    complete: np.ndarray
    entries: Sequence[np.ndarray]
    missing: Sequence[np.ndarray]
    known: np.ndarray


def seen_tokens(step: StepInput, metadata: DeepseekSparseSWAMetadata) -> SeenTokens:
    """Windows of all tokens of a step."""
    request, position, seq = _positions(step)
    valid = metadata.is_valid_token.cpu().numpy()
    slots, lens = _rows(metadata)
    right = np.zeros(len(request), dtype=np.int64)
    if metadata.prefill_right_visible is not None:
        right[metadata.num_decode_tokens :] = metadata.prefill_right_visible.cpu().numpy()[metadata.num_decode_tokens :]
    end = np.minimum(position + right + 1, seq) if step.batch.causal else seq
    end = np.where(lens > 0, end, np.maximum(position + 1, 0))
    first = end - lens
    columns = np.arange(slots.shape[1])
    live = columns < lens[:, None]
    table = step.batch.block_table_tensor.numpy()
    expected = _slots_of(table, request, first[:, None] + columns, step.config.page_tokens, step.num_pages)
    wrong = np.flatnonzero((slots != np.where(live, expected, -1)).any(axis=1))
    problems = [f"token {t}: its row is not that of positions {first[t]} to {end[t] - 1}" for t in wrong[:8].tolist()]
    unexpected = np.flatnonzero(lens * ~valid)[:8].tolist()
    problems += [f"token {t}: a row of {lens[t]} positions although it has no slot" for t in unexpected]
    return SeenTokens(request, position, valid, first, end, slots, live & (slots < 0), tuple(problems))


def window_keys(step: StepInput, seen: SeenTokens, token: int) -> np.ndarray:
    """`Key` of each position ``first .. end - 1`` of a token's window."""
    first, end, position = int(seen.first[token]), int(seen.end[token]), int(seen.position[token])
    where = np.arange(first, end)
    if step.batch.causal:
        usual = (where > position - step.config.model.window_size) & (where <= position)
        keys = np.where(usual, Key.WINDOW, Key.IMAGE)
    else:
        request = int(seen.request[token])
        starts = step.batch.query_start_loc_cpu
        block = int(step.batch.seq_lens[request]) - int(starts[request + 1] - starts[request])
        keys = np.where(where < block, Key.WINDOW, Key.DRAFT)
    return np.where(seen.missing[token, : end - first], Key.MISSING, keys)


def seen_entries(
    kind: LayerType, group: CompressedInput, step: StepInput, metadata: DeepseekSparseSWAMetadata, seen: SeenTokens
) -> SeenEntries:
    """Compressed entries that the tokens of a layer type see."""
    complete = np.where(seen.valid, (seen.position + 1) // kind.ratio, 0)
    built = metadata.compressed[kind.value]
    known = np.ones(len(complete), dtype=bool)
    if built.lens is not None:  # every complete entry, as the build says
        entries = [np.arange(n) for n in built.lens.cpu().tolist()]
    elif group.picks is not None:
        entries = [np.unique(row[(row >= 0) & (row < n)]) for row, n in zip(group.picks.numpy(), complete, strict=True)]
    else:
        entries = [np.arange(n) for n in complete.tolist()]
        known = complete <= step.config.model.index_topk  # an indexer that may pick more than there are picks all
    per_page = group.page_tokens // kind.ratio
    table = group.table.numpy()
    missing = []
    for token, own in enumerate(entries):
        slots = _slots_of(table, seen.request[token : token + 1], own[None], per_page, group.num_pages)[0]
        missing.append(own[slots < 0])
    return SeenEntries(complete, entries, missing, known)


def _positions(step: StepInput) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Request, position and context length [T] of every token; -1, -1, 0 for padding past the last request."""
    starts, tokens = step.batch.query_start_loc_cpu.numpy().astype(np.int64), step.batch.num_actual_tokens
    counts, seq_lens = np.diff(starts), step.batch.seq_lens.numpy().astype(np.int64)
    request = np.repeat(np.arange(len(counts)), counts)
    position = seq_lens[request] - counts[request] + np.arange(len(request)) - starts[request]
    padding = np.full(tokens - len(request), -1)
    return (
        np.concatenate([request, padding]),
        np.concatenate([position, padding]),
        np.concatenate([seq_lens[request], np.zeros_like(padding)]),
    )


def _rows(metadata: DeepseekSparseSWAMetadata) -> tuple[np.ndarray, np.ndarray]:
    """Rows [T, width] and lens [T] of decode and prefill tokens together."""
    parts = [(metadata.decode_swa_indices[:, 0], metadata.decode_swa_lens)]
    if metadata.prefill_swa_indices is not None and metadata.prefill_swa_lens is not None:
        parts.append((metadata.prefill_swa_indices[:, 0], metadata.prefill_swa_lens))
    width = max(rows.shape[1] for rows, _ in parts)
    slots = [torch.nn.functional.pad(rows.cpu(), (0, width - rows.shape[1]), value=-1) for rows, _ in parts]
    return torch.cat(slots).numpy(), torch.cat([lens.cpu() for _, lens in parts]).numpy().astype(np.int64)


def _slots_of(
    table: np.ndarray, request: np.ndarray, places: np.ndarray, per_page: int, num_pages: int | None
) -> np.ndarray:
    """Slots of places [n, m] of requests [n] in a cache of ``per_page`` places a page; -1 where there is no page."""
    if not table.size:
        return np.full(places.shape, -1)
    column = places // per_page
    inside = (request[:, None] >= 0) & (places >= 0) & (column < table.shape[1])
    rows = np.clip(request, 0, len(table) - 1)[:, None]
    page = table[rows, np.clip(column, 0, table.shape[1] - 1)].astype(np.int64)
    inside &= (page >= 0) & (page < (num_pages if num_pages is not None else 2**31))
    return np.where(inside, page * per_page + places % per_page, -1)
