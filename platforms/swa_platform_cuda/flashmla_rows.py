"""Index rows as FlashMLA takes them; twin of `swa_platform_cuda.flashmla_rows_reference`.

Its kernels know one kind of missing entry, -1, and read whole blocks of 64 entries: any other entry that is not in the
cache would be an address outside it.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend._math import cdiv
from swa_backend.kernels.jit import Tuning, kernel

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig
    from swa_backend.platform import CacheRole

NONE: tl.constexpr = tl.constexpr(-1)


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    yield {}


@kernel(
    types={
        "rows": "*i32",  # [tokens, width]
        "lens": "*i32",  # [tokens]
        "is_valid": "*u8",  # [tokens]
        "out_rows": "*i32",  # [tokens, out_width]
        "out_lens": "*i32",  # [tokens]
        "row_stride": "i64",
        "out_stride": "i64",
        "width": "i32",
        "out_width": "i32",
        "num_slots": "i32",
    },
    tuning={"": Tuning(1, 1, tiles={"BLOCK": 256})},
    keys=_keys,
)
def flashmla_tidy(
    rows, lens, is_valid, out_rows, out_lens, row_stride, out_stride, width, out_width, num_slots, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lens + token), 0), width)
    length = tl.where(tl.load(is_valid + token) != 0, length, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < length
    slot = tl.load(rows + token * row_stride + tl.where(live, at, 0), mask=live, other=NONE)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, NONE)
    inside = at < out_width
    tl.store(out_rows + token * out_stride + tl.where(inside, at, 0), slot, mask=inside)
    tl.store(out_lens + token, length, mask=tl.program_id(1) == 0)


def tidy_rows(
    rows: torch.Tensor,
    lens: torch.Tensor,
    is_valid: torch.Tensor,
    num_slots: int,
    out_rows: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    """Copy rows so that every entry that does not count is -1; see the twin."""
    if not rows.shape[0]:
        return
    launcher = flashmla_tidy.on(rows.device)
    launcher.launch(
        (rows.shape[0], cdiv(out_rows.shape[1], launcher.tiles["BLOCK"]), 1),
        rows, lens, is_valid, out_rows, out_lens, rows.stride(0), out_rows.stride(0), rows.shape[1], out_rows.shape[1],
        num_slots,
    )  # fmt: skip
