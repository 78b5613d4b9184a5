"""Where the decodes of a batch end and its prefills begin: one function, host tensors only."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from swa_backend.errors import BatchError

LIST_REQUESTS = 128  # up to so many requests a list is faster than the tensor operations, which cost microseconds each


class Split(NamedTuple):
    """Requests and tokens of a batch on each side of the border; padding tokens count with the last side."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_start_loc_cpu: torch.Tensor,
    num_tokens: int,
    max_query_len: int,
    decode_threshold: int,
    *,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    is_prefilling: torch.Tensor | None = None,
) -> Split:
    """Split a batch ordered decodes, short extends, prefills.

    The first request that is not a decode begins the prefills, whatever the lengths after it.

    Args:
        query_start_loc_cpu: [R + 1] int32 host tensor, first token of each request.
        num_tokens: tokens of the step, padding included.
        max_query_len: largest query length of the batch.
        decode_threshold: longest query that is still a decode.
        require_uniform: decodes must all have the same query length (zero-length requests aside).
        treat_short_extends_as_decodes: a request still prefilling counts as a decode if its query is short.
        is_prefilling: [R] bool host tensor, needed when short extends are not decodes.

    Raises:
        BatchError: short extends are to be told apart and ``is_prefilling`` is missing or has another length.
    """
    num_reqs = query_start_loc_cpu.shape[0] - 1
    if (
        max_query_len <= decode_threshold
        and (not require_uniform or decode_threshold <= 1)
        and treat_short_extends_as_decodes
    ):
        return Split(num_reqs, 0, num_tokens, 0)
    if num_reqs <= 0:
        return Split(0, 0, 0, 0)
    if require_uniform or not treat_short_extends_as_decodes:
        num_decodes = _first_prefill(
            query_start_loc_cpu,
            decode_threshold,
            require_uniform=require_uniform,
            is_prefilling=None if treat_short_extends_as_decodes else _prefilling(is_prefilling, num_reqs),
        )
    else:
        num_decodes = _first_longer(query_start_loc_cpu, decode_threshold)
    if num_decodes == num_reqs:
        return Split(num_reqs, 0, num_tokens, 0)
    num_decode_tokens = int(query_start_loc_cpu[num_decodes]) if num_decodes else 0
    return Split(num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens)


def _first_longer(query_start_loc_cpu: torch.Tensor, threshold: int) -> int:
    """Number of the first request whose query is longer than ``threshold``, that of all requests without one."""
    num_reqs = query_start_loc_cpu.shape[0] - 1
    if num_reqs > LIST_REQUESTS:
        return _first(query_start_loc_cpu.diff() > threshold)
    starts = query_start_loc_cpu.tolist()
    return next((i for i, (start, end) in enumerate(pairwise(starts)) if end - start > threshold), num_reqs)


def _first_prefill(
    query_start_loc_cpu: torch.Tensor, threshold: int, *, require_uniform: bool, is_prefilling: torch.Tensor | None
) -> int:
    query_lens = query_start_loc_cpu.diff()
    first = query_lens[0]
    if first > threshold:
        return 0
    starts = (query_lens != first) & (query_lens != 0) if require_uniform else query_lens > threshold
    return _first(starts if is_prefilling is None else starts | is_prefilling)


def _first(flags: torch.Tensor) -> int:
    """Index of the first flag that is set, the number of flags if none is."""
    at = int(flags.view(torch.uint8).argmax())
    return at if at or bool(flags[0]) else flags.shape[0]


def _prefilling(is_prefilling: torch.Tensor | None, num_reqs: int) -> torch.Tensor:
    if not (
        isinstance(is_prefilling, torch.Tensor)
        and is_prefilling.dtype == torch.bool
        and tuple(is_prefilling.shape) == (num_reqs,)
        and is_prefilling.device.type == "cpu"
    ):
        found = "None" if is_prefilling is None else type(is_prefilling).__name__
        if isinstance(is_prefilling, torch.Tensor):
            found = f"{is_prefilling.dtype} of shape {tuple(is_prefilling.shape)} on {is_prefilling.device}"
        raise BatchError(
            "is_prefilling",
            found=found,
            legal=f"a bool host tensor of shape ({num_reqs},)",
            fix="Pass it with the batch, or treat short extends as decodes.",
        )
    return is_prefilling
