"""Compressed rows as aiter takes them, packed without gaps; twin of `swa_platform_rocm.aiter_rows_reference`.

A program takes a token: it counts the entries that stay, learns from the look-back how many the tokens before it have,
and stores its own behind them. So one launch does it, whatever the lengths are, and no length is read on the host.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend.cache_layout import Dialect
from swa_backend.kernels.jit import Tuning, device_function, kernel
from swa_backend.kernels.look_back import entries_before, finish_launch, launch_number
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_platform_rocm.aiter_room import Room

NONE: tl.constexpr = tl.constexpr(-1)


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    # Where the window cache is fnuz, aiter's kernel does not run.
    if dialects[CacheRole.SWA] is Dialect.OCP and any(kind.compressed for kind in config.model.present_layer_types):
        yield {}


@device_function
def _entries(row, first, length, num_slots, BLOCK: tl.constexpr):
    """BLOCK entries of a row from ``first`` on, and which of them stay."""
    at = first + tl.arange(0, BLOCK)
    live = at < length
    slot = tl.load(row + tl.where(live, at, 0), mask=live, other=NONE)
    return slot, (slot >= 0) & (slot < num_slots)


@kernel(
    types={
        "rows": "*i32",  # [tokens, width]
        "lens": "*i32",  # [tokens]
        "is_valid": "*u8",  # [tokens]
        "out_indices": "*i32",  # [tokens * width]
        "out_indptr": "*i32",  # [tokens + 1]
        "scan": "*i64",  # [tokens], see `look_back`
        "launch_words": "*i64",  # [2]
        "row_stride": "i64",
        "width": "i32",
        "num_slots": "i32",
        "tokens": "i32",
    },
    tuning={"": Tuning(1, 1, tiles={"BLOCK": 256})},
    keys=_keys,
)
def aiter_ragged_rows(
    rows, lens, is_valid, out_indices, out_indptr, scan, launch_words, row_stride, width, num_slots, tokens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    launch = launch_number(launch_words)
    token = tl.program_id(0)
    length = tl.minimum(tl.maximum(tl.load(lens + token), 0), width)
    length = tl.where(tl.load(is_valid + token) != 0, length, 0)
    row = rows + token.to(tl.int64) * row_stride
    count = token * 0
    first = count
    while first < length:
        _, keep = _entries(row, first, length, num_slots, BLOCK)
        count += tl.sum(keep.to(tl.int32), 0)
        first += BLOCK
    before = entries_before(scan, token, count, launch)
    tl.store(out_indptr + token + 1, before + count)
    tl.store(out_indptr, 0, mask=token == 0)
    first = token * 0
    while first < length:
        slot, keep = _entries(row, first, length, num_slots, BLOCK)
        kept = keep.to(tl.int32)
        at = before + tl.cumsum(kept, 0) - 1
        tl.store(out_indices + tl.where(keep, at, 0), slot, mask=keep)
        before += tl.sum(kept, 0)
        first += BLOCK
    finish_launch(launch_words, launch, tokens)


def ragged_rows(rows: torch.Tensor, lens: torch.Tensor, is_valid: torch.Tensor, num_slots: int, room: Room) -> None:
    """Pack rows without gaps into ``room.indices`` and ``room.indptr``; see the twin."""
    tokens = rows.shape[0]
    aiter_ragged_rows.on(rows.device).launch(
        (tokens, 1, 1),
        rows, lens, is_valid, room.indices, room.indptr, room.scan, room.launch_words, rows.stride(0), rows.shape[1],
        num_slots, tokens,
    )  # fmt: skip
