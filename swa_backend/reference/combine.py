"""Combined prefill rows in plain PyTorch."""

from __future__ import annotations

import torch

from swa_backend.combine import CombineStep, CompressedRows
from swa_backend.reference.topk import _slots


def combine_rows(step: CombineStep) -> None:
    """Fill ``out_rows`` and ``out_lens``.

    Entry i of a token's window is position ``end - len + i`` and lies in workspace row
    ``request * chunk.width + chunk.compressed + position - (seq_len - gather_len)``; where its slot is -1 the entry is
    -1 in place. Then follow the compressed entries that `map_topk` would keep, in their order and packed, each in row
    ``request * chunk.width + entry``. ``out_lens`` counts both parts. A token that is not valid, or whose request is
    not in the chunk, gets -1 and 0.
    """
    rows, lens = step.out_rows, step.out_lens
    rows.fill_(-1)
    lens.zero_()
    if not rows.shape[0]:
        return
    requests = step.token_to_req.long()
    number = requests - step.num_decodes  # counted from the first prefill
    served = step.is_valid & (number >= step.chunk.first) & (number < step.chunk.end)
    requests, number = requests.where(served, step.num_decodes + step.chunk.first), number.where(served, 0)
    base = (number - step.chunk.first) * step.chunk.width

    starts = step.query_start_loc.long()
    token = step.first_token + torch.arange(rows.shape[0], device=rows.device)
    seq_len = step.seq_lens.long()[requests]
    position = seq_len - (starts[requests + 1] - token)
    right = 0 if step.right_visible is None else step.right_visible.long()
    end = torch.minimum(position + right + 1, seq_len)
    window_len = step.window_lens.long().where(served, 0)
    gathered = seq_len - step.gather_lens.long()[number]
    first = end - window_len - gathered + step.chunk.compressed + base
    at = torch.arange(step.window_rows.shape[1], device=rows.device)
    live = (at < window_len[:, None]) & (step.window_rows >= 0)
    rows[:, : at.numel()] = (first[:, None] + at).where(live, -1)
    lens.copy_(window_len)
    if step.compressed is not None:
        _append(step, step.compressed, requests, position, served, base, window_len)


def _append(
    step: CombineStep,
    compressed: CompressedRows,
    requests: torch.Tensor,
    position: torch.Tensor,
    served: torch.Tensor,
    base: torch.Tensor,
    window_len: torch.Tensor,
) -> None:
    """Add the compressed entries behind the ``window_len`` entries that the rows have."""
    rows = step.out_rows
    if compressed.topk is None:
        every = torch.arange(step.chunk.compressed, device=rows.device)
        local = every.expand(rows.shape[0], -1)
    else:
        local = compressed.topk.long()
    if not local.shape[1] or not compressed.block_table.numel():
        return
    _, keep = _slots(
        local,
        requests,
        position,
        compressed.block_table,
        compressed.entries_per_page,
        served,
        compressed.ratio,
        compressed.num_pages,
    )
    keep &= local < step.chunk.compressed
    target = torch.where(keep, window_len[:, None] + keep.cumsum(dim=1) - 1, rows.shape[1])
    wider = torch.cat((rows, rows.new_full((rows.shape[0], 1), -1)), dim=1)
    wider.scatter_(1, target, torch.where(keep, base[:, None] + local, -1).to(rows.dtype))
    rows.copy_(wider[:, :-1])
    step.out_lens.add_(keep.sum(dim=1))
