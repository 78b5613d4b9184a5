"""Puts the pieces of cut tiles together: the second half of a decode on Hopper.

Program p of the decode left the piece of a tile that an earlier program began at 2 p, and the piece of the tile that
it began and did not finish at 2 p + 1. A piece is a float32 softmax of its own keys without the sink, and the base-2
logarithm of its sum; one without keys is 0 and -inf. The tile that ends a program's share, and begins in it, is put
together here by one group of programs; the sink is applied once.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend._math import cdiv
from swa_backend.cache_layout import Dialect
from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.kernels.paging import wide
from swa_backend.platform import CacheRole
from swa_platform_cuda.hopper_work import HEADS_OF_A_TILE, head_tiles

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

DIM: tl.constexpr = tl.constexpr(512)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
TILE_HEADS: tl.constexpr = tl.constexpr(HEADS_OF_A_TILE)
PROGRAM_LIMIT = 256
"""Most programs of a decode."""


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    if any(layer.compressed for layer in config.model.present_layer_types):
        yield {"TILES": head_tiles(config.num_heads)}


@kernel(
    types={
        "piece_out": "*fp32",  # [2 programs, 64, 512]
        "piece_lse": "*fp32",  # [2 programs, 64]
        "cuts": "*i32",  # [programs + 1, 2], see hopper_work
        "sink": "*fp32",  # [heads]
        "out": "*bf16",  # [tokens, heads, 512]
        "lse": "*fp32",  # [tokens, heads]
        "out_stride": "i64",  # elements from token to token
        "lse_stride": "i64",
        "wants_lse": "i32",
        "heads": "i32",
        "programs": "i32",
    },
    tuning={"": Tuning(2, 1, tiles={"HEADS": 2, "PIECES": 4, "LIMIT": PROGRAM_LIMIT})},
    keys=_keys,
)
def hopper_combine(
    piece_out, piece_lse, cuts, sink, out, lse, out_stride, lse_stride, wants_lse, heads, programs,
    TILES: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    every = tl.arange(0, LIMIT)
    inside = every <= programs
    at = 2 * tl.where(inside, every, 0)
    tiles = tl.load(cuts + at, mask=inside, other=-1)
    blocks = tl.load(cuts + at + 1, mask=inside, other=0)
    tile = tl.load(cuts + 2 * program + 2)
    cut = tl.load(cuts + 2 * program + 3)
    began_here = (tl.load(cuts + 2 * program) < tile) | (tl.load(cuts + 2 * program + 1) == 0)
    own = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head = (tile % TILES) * TILE_HEADS + own
    live = head < heads
    head = tl.where(live, head, 0)
    if (cut > 0) & began_here:
        count = tl.sum(((tiles == tile) & (blocks > 0)).to(tl.int32), axis=0) + 1
        token = (tile // TILES).to(tl.int64)
        dim = tl.arange(0, DIM)
        some = tl.arange(0, PIECES)
        logs_of_sinks = tl.load(sink + head, mask=live, other=0.0) * LOG2_E

        base = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        acc = tl.zeros((HEADS, DIM), tl.float32)
        for first in range(0, count, PIECES):
            piece = first + some
            row = (2 * (program + piece) + (piece == 0).to(tl.int32))[:, None] * TILE_HEADS + own[None, :]
            mask = (piece < count)[:, None] & live[None, :]
            row = tl.where(mask, row, 0)
            logs = tl.load(piece_lse + row, mask=mask, other=float("-inf"))
            values = wide(piece_out, row.to(tl.int64)[:, :, None] * DIM + dim[None, None, :], True)
            values = tl.load(values, mask=mask[:, :, None], other=0.0)
            higher = tl.maximum(base, tl.max(logs, axis=0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            rescale = tl.exp2(base - safe)
            weight = tl.exp2(logs - safe[None, :])
            total = total * rescale + tl.sum(weight, axis=0)
            acc = acc * rescale[:, None] + tl.sum(values * weight[:, :, None], axis=0)
            base = higher

        sinks = tl.exp2(logs_of_sinks - base)
        inverse = tl.where(total == 0, 0.0, 1.0 / (total + sinks))
        to = wide(out + token * out_stride, head[:, None] * DIM + dim[None, :], True)
        tl.store(to, (acc * inverse[:, None]).to(tl.bfloat16), mask=live[:, None])
        if wants_lse != 0:
            logs = tl.where(total == 0, float("-inf"), (base + tl.log2(total)) * LN_2)
            tl.store(lse + token * lse_stride + head, logs, mask=live)


def combine_pieces(
    piece_out: torch.Tensor,
    piece_lse: torch.Tensor,
    cuts: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the rows of the tiles that the cuts part.

    Args:
        piece_out: [2 programs, 64, 512] float32 softmax of each piece, without the sink.
        piece_lse: [2 programs, 64] float32 base-2 logarithms of their sums.
        cuts: [programs + 1, 2] int32; see `swa_platform_cuda.hopper_work`.
        sink: [h] float32.
        out: [n, h, 512] bf16 with contiguous heads; rows of tiles that are not cut stay.
        lse: [n, h] float32, natural and without the sink; None if not wanted.
    """
    heads, programs = sink.shape[0], cuts.shape[0] - 1
    launcher = hopper_combine.on(out.device, TILES=head_tiles(heads))
    groups = cdiv(min(heads, HEADS_OF_A_TILE), launcher.tiles["HEADS"])
    to, stride = (sink, 0) if lse is None else (lse, lse.stride(0))
    launcher.launch(
        (programs, groups, 1),
        piece_out, piece_lse, cuts, sink, out, to, out.stride(0), stride, int(lse is not None), heads, programs,
    )  # fmt: skip
