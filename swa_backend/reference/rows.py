"""The metadata build in plain PyTorch: the CPU platform's engine, and the twin of the one-launch kernel.

No loop over tokens: every array here is a whole batch. Positions, slots and lengths fit int32 because the builder
limits page numbers so that every slot does.
"""

from __future__ import annotations

import torch

from swa_backend.step import BuildStep, CompressedGroupStep, RaggedRows, SwaGroupStep

FULL_ROW_RATIO_PAD = 64  # entries past a row's end are -1 up to this multiple, so that a kernel may read whole blocks


def build(step: BuildStep) -> None:
    """Fill every output of ``step``; see `BuildStep` for shapes."""
    tokens = torch.arange(step.num_tokens, dtype=torch.int32, device=step.seq_lens.device)
    starts = step.query_start_loc
    mapped = tokens < starts[-1]
    requests = torch.searchsorted(starts[1:].contiguous(), tokens, right=True, out_int32=True)
    requests = torch.where(mapped, requests, 0)
    step.token_to_req.copy_(requests)

    query_lens = starts[1:] - starts[:-1]
    prefixes = step.seq_lens - query_lens
    token_requests = requests.long()
    prefix = prefixes[token_requests]
    seq_len = step.seq_lens[token_requests]
    position = prefix + tokens - starts[token_requests]
    bounds = _row_bounds(step, tokens, mapped, requests, prefixes, query_lens, prefix, seq_len, position)

    for group in step.swa:
        _build_swa_group(step, group, mapped, token_requests, *bounds)
    for compressed in step.compressed:
        _build_compressed_group(compressed, mapped, token_requests, position)


def _row_bounds(
    step: BuildStep,
    tokens: torch.Tensor,
    mapped: torch.Tensor,
    requests: torch.Tensor,
    prefixes: torch.Tensor,
    query_lens: torch.Tensor,
    prefix: torch.Tensor,
    seq_len: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """First position that each token sees, and one past the last; both [T] int32. Fills visibility and gather lens."""
    window = step.window
    if not step.causal:
        return (prefix - window).clamp_(min=0), seq_len
    replay = torch.zeros_like(prefixes) if step.replay_start is None else step.replay_start
    gather_lens = query_lens + (prefixes - replay).clamp_(min=0, max=window - 1)
    if step.prefill_gather_lens is not None:
        step.prefill_gather_lens.copy_(gather_lens[step.num_decodes :])
    token_requests = requests.long()
    start = position - (window - 1)
    end = position + 1
    if step.left_visible is not None and step.right_visible is not None:
        valid = step.swa[0].slot_mapping >= 0
        left, right = _visibility(step, mapped & valid & (tokens >= step.num_decode_tokens), requests, position)
        step.left_visible.copy_(left)
        step.right_visible.copy_(right)
        start = start - (left - (window - 1)).clamp_(min=0)
        end = end + right
    gathered = torch.where(tokens >= step.num_decode_tokens, seq_len - gather_lens[token_requests], 0)
    start = torch.maximum(torch.maximum(start, replay[token_requests]), gathered).clamp_(min=0)
    return start, torch.minimum(end, seq_len)


def _visibility(
    step: BuildStep, sees: torch.Tensor, requests: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far left and right each token sees inside its image span; 0 outside of one."""
    zeros = torch.zeros_like(position)
    spans = step.spans
    if spans is None or spans.shape[0] == 0:
        return zeros, zeros
    request, first, last = (column.long() for column in spans.unbind(1))
    # Spans are sorted by request, then position, and do not overlap: the last one that begins at or before the token
    # is the only one that can hold it.
    begins = (request << 32) | first
    found = torch.searchsorted(begins, (requests.long() << 32) | position.clamp(min=0).long(), right=True) - 1
    at = found.clamp(min=0)
    inside = sees & (found >= 0) & (request[at] == requests) & (position <= last[at])
    left = (position - first[at]).clamp(max=step.max_image_tokens - 1).int()
    right = (last[at] - position).clamp(max=step.max_image_tokens).int()
    return torch.where(inside, left, zeros), torch.where(inside, right, zeros)


def _build_swa_group(
    step: BuildStep,
    group: SwaGroupStep,
    mapped: torch.Tensor,
    token_requests: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
) -> None:
    valid = mapped & (group.slot_mapping >= 0)
    group.is_valid_token.copy_(valid)
    length = torch.where(valid, (end - start).clamp_(min=0), 0)
    split = step.num_decode_tokens
    if split:
        group.decode_lens[split:].zero_()
        _write_rows(group, token_requests[:split], start[:split], length[:split],
                    group.decode_indices, group.decode_lens[:split])
        _write_ragged(group.decode_ragged, group.decode_indices, group.decode_lens[:split])
    if group.prefill_indices is not None and group.prefill_lens is not None:
        _write_rows(group, token_requests[split:], start[split:], length[split:],
                    group.prefill_indices, group.prefill_lens)
        _write_ragged(group.prefill_ragged, group.prefill_indices, group.prefill_lens)


def _write_rows(
    group: SwaGroupStep,
    token_requests: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    out_rows: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    width = out_rows.shape[1]
    out_lens.copy_(length.clamp(max=width))
    offsets = torch.arange(width, dtype=torch.int32, device=start.device)
    live = offsets < out_lens[:, None]
    position = start[:, None] + offsets
    out_rows.copy_(_slots(group.block_table, token_requests[:, None], position, live, group.page_tokens, group.num_pages))


def _slots(
    block_table: torch.Tensor,
    requests: torch.Tensor,
    position: torch.Tensor,
    live: torch.Tensor,
    page_entries: int,
    num_pages: int,
) -> torch.Tensor:
    """Slot of each position, or -1 where it is not live, outside the table's logical shape, or on no page."""
    rows, columns = block_table.shape
    if rows == 0 or columns == 0:
        return torch.full_like(position, -1)
    column = position // page_entries
    live = live & (column < columns) & (requests < rows)
    # A dead lane's address is clamped into the table: its value is never used, but it must be readable.
    page = block_table[requests.clamp(max=rows - 1), column.clamp(0, columns - 1).long()]
    live = live & (page >= 0) & (page < num_pages)
    return torch.where(live, page * page_entries + position % page_entries, -1)


def _write_ragged(ragged: RaggedRows | None, rows: torch.Tensor, lens: torch.Tensor) -> None:
    """Rows without their gaps, in a buffer whose row starts past the live ones repeat the last one."""
    if ragged is None:
        return
    offsets = torch.arange(rows.shape[1], device=rows.device)
    live = (offsets < lens[:, None]) & (rows >= 0)
    ends = live.sum(1).cumsum(0)
    ragged.indptr[0] = 0
    ragged.indptr[1 : rows.shape[0] + 1] = ends
    ragged.indptr[rows.shape[0] + 1 :] = ends[-1] if rows.shape[0] else 0
    entries = rows[live]
    ragged.indices[: entries.shape[0]] = entries


def _build_compressed_group(
    group: CompressedGroupStep, mapped: torch.Tensor, token_requests: torch.Tensor, position: torch.Tensor
) -> None:
    valid = mapped & (group.slot_mapping >= 0) & (position >= 0)
    completes = valid & ((position + 1) % group.ratio == 0)
    group.compressed_slot_mapping.copy_(
        _slots(group.block_table, token_requests, position // group.ratio, completes, group.entries_per_page,
               group.num_pages)
    )
    if group.rows is None or group.lens is None:
        return
    width = group.rows.shape[1]
    group.lens.copy_(torch.where(valid, (position + 1) // group.ratio, 0).clamp_(max=width))
    longest = int(group.lens.max()) if group.lens.numel() else 0
    used = min(width, -(-longest // FULL_ROW_RATIO_PAD) * FULL_ROW_RATIO_PAD)
    entries = torch.arange(used, dtype=torch.int32, device=position.device)
    live = entries < group.lens[:, None]
    group.rows[:, :used] = _slots(
        group.block_table, token_requests[:, None], entries.expand(len(position), used), live, group.entries_per_page,
        group.num_pages,
    )
