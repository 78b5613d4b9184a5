"""The value rules of a batch, checked only in validation mode: they read the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from swa_backend._math import cdiv
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.buffers import GroupPages
from swa_backend.errors import ValidationError
from swa_backend.split import Split

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig


def validate_batch(
    batch: CommonAttentionMetadata,
    split: Split,
    config: BackendConfig,
    groups: Sequence[GroupPages],
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    null_page: int | None,
) -> None:
    """Check every value that a build relies on.

    Raises:
        ValidationError: naming the field, and the request or token at fault.
    """
    starts = batch.query_start_loc.cpu()
    host = batch.query_start_loc_cpu
    seq_lens = batch.seq_lens.cpu()
    query_lens = starts[1:] - starts[:-1]
    if batch.num_reqs == 0:
        return
    if int(starts[0]) != 0:
        _refuse("query_start_loc[0]", int(starts[0]), 0, "Begin the flat token order at 0.")
    _first(query_lens < 0, "query_start_loc", starts[1:], "values that never fall", "Sum the query lengths in order.")
    _first(starts != host, "query_start_loc_cpu", host, "the values of query_start_loc", "Copy one from the other.")
    if int(query_lens.max()) > batch.max_query_len:
        _refuse("max_query_len", batch.max_query_len, f">= {int(query_lens.max())}", "Pass the batch's maximum.")
    _first(
        seq_lens < query_lens,
        "seq_lens",
        seq_lens,
        "at least the query length",
        "Count this step's tokens in the context length.",
    )
    _first(
        seq_lens > batch.max_seq_len,
        "seq_lens",
        seq_lens,
        f"at most max_seq_len = {batch.max_seq_len}",
        "Pass the batch's maximum as max_seq_len.",
    )
    upper = batch.seq_lens_cpu_upper_bound
    if upper is not None:
        _first(upper < seq_lens, "seq_lens_cpu_upper_bound", upper, "at least seq_lens", "Pass an upper bound.")
        first = split.num_decodes
        _first(
            upper[first:] != seq_lens[first:],
            "seq_lens_cpu_upper_bound",
            upper[first:],
            "exactly seq_lens for prefills",
            "Prefill lengths are known on the host: pass them.",
            first,
        )
    if batch.replay_start is not None:
        replay, prefix = batch.replay_start.cpu(), seq_lens - query_lens
        _first(
            (replay < 0) | (replay > prefix),
            "replay_start",
            replay,
            "0 to the prefix length",
            "Replay begins inside the prefix.",
        )
    _validate_tables(batch, config, groups, inputs, null_page, starts, seq_lens)


def _validate_tables(
    batch: CommonAttentionMetadata,
    config: BackendConfig,
    groups: Sequence[GroupPages],
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    null_page: int | None,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Slots inside the cache, and a real page under every position that a live token can see."""
    query_lens = starts[1:] - starts[:-1]
    mapped = int(starts[-1])
    oldest = seq_lens - query_lens - (config.model.window_size - (1 if batch.causal else 0))
    if batch.causal and batch.replay_start is not None:  # a draft block sees its whole window, whatever replays
        oldest = torch.maximum(oldest, batch.replay_start.cpu())
    oldest = oldest.clamp(min=0)
    for pages, given in zip(groups, inputs, strict=True):
        name, entries = pages.name, pages.page_entries
        begin, end = (torch.zeros_like(seq_lens), seq_lens // pages.ratio) if pages.ratio else (oldest, seq_lens)
        table, slots = (tensor.cpu() for tensor in given)
        limit = pages.num_pages * entries
        if not pages.ratio:
            _first(
                slots >= limit,
                f"slot_mapping of {name}",
                slots,
                f"below {limit} slots",
                "Map tokens into the cache.",
                what="token",
            )
        _first(
            slots[mapped:] >= 0,
            f"slot_mapping of {name}",
            slots[mapped:],
            "-1 for padding",
            "Give tokens past query_start_loc[-1] the slot -1.",
            mapped,
            what="token",
        )
        for request in range(batch.num_reqs):
            tokens = slice(int(starts[request]), int(starts[request + 1]))
            if not bool((slots[tokens] >= 0).any()):
                continue
            first, last = int(begin[request]) // entries, cdiv(int(end[request]), entries)
            if last > table.shape[1]:
                _refuse(
                    f"block table of {name}, request {request}",
                    f"{table.shape[1]} columns",
                    f"at least {last}",
                    "Pass as many columns as the context has pages.",
                )
            live = table[request, first:last]
            _first(
                (live < 0) | (live >= pages.num_pages),
                f"block table of {name}, request {request}",
                live,
                f"page numbers from 0 to {pages.num_pages - 1}",
                "Keep every page in the live window allocated.",
                first,
                what="column",
            )
            if null_page is not None:
                _first(
                    live == null_page,
                    f"block table of {name}, request {request}",
                    live,
                    f"no null page {null_page} in the live window",
                    "Keep every page in the window allocated.",
                    first,
                    what="column",
                )


def _first(
    wrong: torch.Tensor, field: str, values: torch.Tensor, legal: str, fix: str, base: int = 0, what: str = "request"
) -> None:
    """Refuse the first element that is wrong."""
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        _refuse(f"{field}, {what} {base + at}", values[at].item(), legal, fix)


def _refuse(field: str, found: object, legal: object, fix: str) -> None:
    raise ValidationError(field, found=found, legal=legal, fix=fix)
