"""The metadata build in plain PyTorch: the CPU platform's engine, and the twin of the one-launch kernel.

No loop over tokens: every array here is a whole batch, or as many of its tokens as fit a bounded temporary. Positions,
slots and lengths fit int32 because page counts are limited so that every slot does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swa_backend.buffers import ROW_BLOCK, GroupPages, IndexBuffers, RaggedBuffers
from swa_backend.step import BuildStep

_MAX_ELEMENTS = 1 << 21  # of one temporary


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What a step's tokens see, whatever the group; all [T]."""

    mapped: torch.Tensor  # bool: belongs to a request
    request: torch.Tensor  # int64, 0 for padding
    position: torch.Tensor  # int32
    start: torch.Tensor  # int32, first position that it sees
    end: torch.Tensor  # int32, one past the last


def build(buffers: IndexBuffers, step: BuildStep) -> None:
    """Fill ``buffers`` for one step of at least one token."""
    tokens = _tokens(buffers, step)
    for number, pages in enumerate(buffers.groups):
        table, slots = step.groups[number]
        if pages.ratio:
            _build_compressed_group(buffers, number - buffers.num_swa_groups, pages, tokens, table, slots)
        else:
            _build_swa_group(buffers, number, pages, step, tokens, table, slots)


def _tokens(buffers: IndexBuffers, step: BuildStep) -> _Tokens:
    """Requests, positions and bounds; fills the request map, visibility and gather lens."""
    numbers = torch.arange(step.num_tokens, dtype=torch.int32, device=step.seq_lens.device)
    starts = step.query_start_loc
    mapped = numbers < starts[-1]
    requests = torch.searchsorted(starts[1:].contiguous(), numbers, right=True, out_int32=True)
    requests = torch.where(mapped, requests, 0)
    buffers.token_to_req[: step.num_tokens] = requests

    query_lens = starts[1:] - starts[:-1]
    prefixes = step.seq_lens - query_lens
    request = requests.long()
    prefix, seq_len = prefixes[request], step.seq_lens[request]
    position = prefix + numbers - starts[request]
    window = buffers.window
    if not step.causal:
        return _Tokens(mapped, request, position, (prefix - window).clamp_(min=0), seq_len)

    replay = torch.zeros_like(prefixes) if step.replay_start is None else step.replay_start
    gather_lens = query_lens + (prefixes - replay).clamp_(min=0, max=window - 1)
    buffers.gather_lens[: step.num_prefills] = gather_lens[step.num_decodes :]
    start, end = position - (window - 1), position + 1
    prefilling = numbers >= step.num_decode_tokens
    if step.spans is not None and buffers.left_visible is not None and buffers.right_visible is not None:
        sees = mapped & prefilling & (step.groups[0][1] >= 0)
        left, right = _visibility(step.spans, buffers.max_image_tokens, sees, requests, position)
        buffers.left_visible[: step.num_tokens] = left
        buffers.right_visible[: step.num_tokens] = right
        start = start - (left - (window - 1)).clamp_(min=0)
        end = end + right
    gathered = torch.where(prefilling, seq_len - gather_lens[request], 0)
    start = torch.maximum(torch.maximum(start, replay[request]), gathered).clamp_(min=0)
    return _Tokens(mapped, request, position, start, torch.minimum(end, seq_len))


def _visibility(
    spans: torch.Tensor, max_image_tokens: int, sees: torch.Tensor, requests: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far left and right each token sees inside its image span; 0 outside of one."""
    zeros = torch.zeros_like(position)
    if spans.shape[0] == 0:
        return zeros, zeros
    request, first, last = (column.long() for column in spans.unbind(1))
    # Spans are sorted by request, then position, and do not overlap: the last one that begins at or before the token
    # is the only one that can hold it.
    begins = (request << 32) | first
    found = torch.searchsorted(begins, (requests.long() << 32) | position.clamp(min=0).long(), right=True) - 1
    at = found.clamp(min=0)
    inside = sees & (found >= 0) & (request[at] == requests) & (position <= last[at])
    left = (position - first[at]).clamp(max=max_image_tokens - 1).int()
    right = (last[at] - position).clamp(max=max_image_tokens).int()
    return torch.where(inside, left, zeros), torch.where(inside, right, zeros)


def _build_swa_group(
    buffers: IndexBuffers,
    number: int,
    pages: GroupPages,
    step: BuildStep,
    tokens: _Tokens,
    table: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    valid = tokens.mapped & (slots >= 0)
    buffers.is_valid[number, : step.num_tokens] = valid
    length = torch.where(valid, (tokens.end - tokens.start).clamp_(min=0), 0)
    split = step.num_decode_tokens
    if split:
        rows, lens = buffers.decode_indices, buffers.decode_lens[number]
        if not step.causal and buffers.noncausal_indices is not None:
            rows = buffers.noncausal_indices
        lens[split:].zero_()
        _write_rows(table, pages, tokens, length, slice(0, split), rows[number, :split], lens[:split])
        _write_ragged(buffers.decode_ragged, number, rows[number, :split], lens[:split])
    if step.num_prefill_tokens:
        count = step.num_prefill_tokens
        rows, lens = buffers.prefill_indices[number, :count], buffers.prefill_lens[number, :count]
        _write_rows(table, pages, tokens, length, slice(split, step.num_tokens), rows, lens)
        _write_ragged(buffers.prefill_ragged, number, rows, lens)


def _write_rows(
    table: torch.Tensor,
    pages: GroupPages,
    tokens: _Tokens,
    length: torch.Tensor,
    part: slice,
    out_rows: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    width = out_rows.shape[1]
    out_lens.copy_(length[part].clamp(max=width))
    offsets = torch.arange(width, dtype=torch.int32, device=table.device)
    live = offsets < out_lens[:, None]
    position = tokens.start[part, None] + offsets
    out_rows.copy_(_slots(table, pages, tokens.request[part, None], position, live))


def _slots(
    table: torch.Tensor, pages: GroupPages, request: torch.Tensor, entry: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Slot of each entry number, or -1 where it is not live, outside the table's logical shape, or on no page."""
    rows, columns = table.shape
    if rows == 0 or columns == 0:
        return torch.full_like(entry, -1)
    column = entry // pages.page_entries
    live = live & (column < columns) & (request < rows)
    # A dead lane's address is clamped into the table: its value is never used, but it must be readable.
    page = table[request.clamp(max=rows - 1), column.clamp(0, columns - 1).long()]
    live = live & (page >= 0) & (page < pages.num_pages)
    return torch.where(live, page * pages.page_entries + entry % pages.page_entries, -1)


def _write_ragged(ragged: RaggedBuffers | None, number: int, rows: torch.Tensor, lens: torch.Tensor) -> None:
    """Rows without their gaps."""
    if ragged is None:
        return
    offsets = torch.arange(rows.shape[1], device=rows.device)
    live = (offsets < lens[:, None]) & (rows >= 0)
    ragged.indptr[number, 0] = 0
    ragged.indptr[number, 1 : rows.shape[0] + 1] = live.sum(1).cumsum(0)
    entries = rows[live]
    ragged.indices[number, : entries.shape[0]] = entries


def _build_compressed_group(
    buffers: IndexBuffers,
    number: int,
    pages: GroupPages,
    tokens: _Tokens,
    table: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    position, count = tokens.position, len(tokens.position)
    valid = tokens.mapped & (slots >= 0) & (position >= 0)
    completes = valid & ((position + 1) % pages.ratio == 0)
    buffers.compressed_slots[number, :count] = _slots(table, pages, tokens.request, position // pages.ratio, completes)
    if pages.full_row < 0:
        return
    rows, lens = buffers.full_rows[pages.full_row, :count], buffers.full_lens[pages.full_row, :count]
    width = rows.shape[1]
    lens.copy_(torch.where(valid, (position + 1) // pages.ratio, 0).clamp_(max=width))
    padded = (lens + (ROW_BLOCK - 1)) // ROW_BLOCK * ROW_BLOCK
    used = int(padded.max())
    entries = torch.arange(used, dtype=torch.int32, device=position.device)
    tokens_at_once = max(1, _MAX_ELEMENTS // max(used, 1))
    for first in range(0, count if used else 0, tokens_at_once):
        part = slice(first, first + tokens_at_once)
        live = entries < lens[part, None]
        number_of = entries.expand(live.shape)
        found = _slots(table, pages, tokens.request[part, None], number_of, live)
        # Each row is written up to its own length, in whole blocks, as the kernel does.
        target = rows[part, :used]
        target.copy_(torch.where(entries < padded[part, None], found, target))
