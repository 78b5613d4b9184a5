"""Which neighbouring tokens may share their window keys: their rows agree wherever they overlap.

Window rows are slots of consecutive *places* (positions, for rows that a builder made). A row *joins* the one before it
if both belong to one request, neither is empty, neither end moves back, and every place that both have holds the same
entry in both, -1 included. The keys of a run of tokens that join are those of its first row, then those of its last.
A row that joins and ends one place after the one before it *slides*.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from swa_backend._math import cdiv
from swa_backend.capture import capture_id
from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.row_marks import version_of

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig
    from swa_backend.metadata import DeepseekSparseSWAMetadata
    from swa_backend.platform import CacheRole

APART, JOINS, SLIDES = 0, 1, 2  # how a row follows the one before


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    for images in (False, True) if config.max_image_tokens else (False,):
        yield plan_key(config.prefill_width, images=images)


def plan_key(width: int, *, images: bool) -> dict[str, object]:
    """The compile key for rows of a width."""
    return {"BLOCK": triton.next_power_of_2(width), "IMAGES": images}


@kernel(
    types={
        "rows": "*i32",  # [tokens, width]
        "lens": "*i32",  # [tokens]
        "requests": "*i32",  # [tokens] request of each token
        "right_visible": "*i32",  # [tokens] places after its own that a token may see; read with IMAGES
        "starts": "*i32",  # [R + 1] first token of each request in the batch
        "seq_lens": "*i32",  # [R]
        "first": "*i32",  # [tokens] written: place of each row's first entry
        "joins": "*i32",  # [tokens] written: how the row follows the one before: APART, JOINS or SLIDES
        "row_stride": "i64",
        "width": "i32",
        "tokens": "i32",
        "first_token": "i32",  # number of token 0 in the batch
    },
    tuning={"": Tuning(4, 1, {"TILE": 8})},
    keys=_keys,
)
def plan_windows(
    rows, lens, requests, right_visible, starts, seq_lens, first, joins, row_stride, width, tokens, first_token,
    BLOCK: tl.constexpr, IMAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = token < tokens
    token = tl.where(inside, token, 0)
    before = tl.maximum(token - 1, 0)
    length = tl.maximum(tl.minimum(tl.load(lens + token), width), 0)
    length_before = tl.maximum(tl.minimum(tl.load(lens + before), width), 0)
    request = tl.load(requests + token)
    request_before = tl.load(requests + before)
    seq_len = tl.load(seq_lens + request)
    end = seq_len - tl.load(starts + request + 1) + first_token + token + 1
    end_before = tl.load(seq_lens + request_before) - tl.load(starts + request_before + 1) + first_token + before + 1
    if IMAGES:
        end = tl.minimum(end + tl.load(right_visible + token), seq_len)
        end_before = tl.minimum(end_before + tl.load(right_visible + before), tl.load(seq_lens + request_before))
    begin = end - length
    begin_before = end_before - length_before
    joined = (token > 0) & (request == request_before) & (length > 0) & (length_before > 0)
    joined = joined & (begin >= begin_before) & (end >= end_before) & (begin <= end_before)

    entry = tl.arange(0, BLOCK)[None, :]
    both = joined[:, None] & (entry < (end_before - begin)[:, None])
    here = tl.load(rows + token.to(tl.int64)[:, None] * row_stride + tl.where(both, entry, 0), mask=both, other=0)
    there = tl.where(both, entry + (begin - begin_before)[:, None], 0)
    earlier = tl.load(rows + before.to(tl.int64)[:, None] * row_stride + there, mask=both, other=0)
    differ = tl.sum((here != earlier).to(tl.int32), 1) > 0
    tl.store(first + token, begin, mask=inside)
    how = tl.where(end == end_before + 1, 2, 1)
    tl.store(joins + token, tl.where(joined & (differ == 0), how, 0), mask=inside)


def plan_step(metadata: DeepseekSparseSWAMetadata, first: torch.Tensor, joins: torch.Tensor) -> None:
    """Plan the prefill tokens of a step.

    Args:
        metadata: a step with prefill rows.
        first, joins: [>= Tp] int32, written.
    """
    rows, lens, right = metadata.prefill_swa_indices, metadata.prefill_swa_lens, metadata.prefill_right_visible
    assert rows is not None and lens is not None  # noqa: PT018
    tokens, _, width = rows.shape
    decodes = metadata.num_decode_tokens
    launcher = plan_windows.on(rows.device, **plan_key(width, images=right is not None))
    launcher.launch(
        (cdiv(tokens, launcher.tiles["TILE"]), 1, 1),
        rows, lens, metadata.token_to_req_indices[decodes:], lens if right is None else right[decodes:],
        metadata.query_start_loc, metadata.seq_lens, first, joins, rows.stride(0), width, tokens, decodes,
    )  # fmt: skip


class WindowPlans:
    """Plans of the steps on each device: two int32 a token, made by the first layer of a step for all of them."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outgrown: list[torch.Tensor] = []  # a captured graph may still write there
        self._contents: dict[torch.device, object] = {}

    def reserve(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a device, of ``tokens`` entries or more."""
        found = self._buffers.get(device)
        if found is None or found[0].shape[0] < tokens:
            if found is not None:
                self._outgrown.extend(found)
            first, joins = torch.zeros(2, tokens, dtype=torch.int32, device=device).unbind()
            found = self._buffers[device] = first, joins
        return found

    def of(self, metadata: DeepseekSparseSWAMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """(first, joins) of a step with prefill rows; made anew for other rows, and in each captured graph."""
        rows, lens, right = metadata.prefill_swa_indices, metadata.prefill_swa_lens, metadata.prefill_right_visible
        assert rows is not None and lens is not None  # noqa: PT018
        device = rows.device
        first, joins = self.reserve(rows.shape[0], device)
        contents = (
            metadata.generation, rows.shape, capture_id(rows), right is None, first.data_ptr(),
            *((one.data_ptr(), version_of(one)) for one in (rows, lens, metadata.seq_lens, metadata.query_start_loc)),
        )  # fmt: skip
        if self._contents.get(device) != contents:
            plan_step(metadata, first, joins)
            self._contents[device] = contents
        return first, joins
