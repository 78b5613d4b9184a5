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

from swa_backend.cache_layout import Dialect
from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.kernels.paging import wide
from swa_backend.platform import CacheRole
from swa_platform_cuda.hopper_work import HEADS_OF_A_TILE, head_tiles

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.kernels.jit import Launcher

DIM: tl.constexpr = tl.constexpr(512)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
TILE_HEADS: tl.constexpr = tl.constexpr(HEADS_OF_A_TILE)
PROGRAM_LIMIT = 256
"""Most programs of a decode."""
GROUPS = 32
"""Programs here for each of the decode's; with 8 the heads of 64 cut tiles took four rounds of 3 us each."""


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
    tuning={"": Tuning(4, 1, tiles={"PIECES": 16, "LIMIT": PROGRAM_LIMIT})},
    keys=_keys,
)
def hopper_combine(
    piece_out, piece_lse, cuts, sink, out, lse, out_stride, lse_stride, wants_lse, heads, programs,
    TILES: tl.constexpr, PIECES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    # Which programs began a tile that they did not finish; every program here looks at all of them.
    every = tl.arange(0, LIMIT)
    inside = every < programs
    at = cuts + 2 * tl.where(inside, every, 0)
    tiles = tl.load(at + 2, mask=inside, other=-1)
    parted = inside & (tl.load(at + 3, mask=inside, other=0) > 0)
    began = (tl.load(at, mask=inside, other=0) < tiles) | (tl.load(at + 1, mask=inside, other=0) == 0)
    mine = (parted & began).to(tl.int32)
    number = tl.cumsum(mine, axis=0)
    own_heads = tl.minimum(heads, TILE_HEADS)
    dim = tl.arange(0, DIM)
    some = tl.arange(0, PIECES)
    for item in range(tl.program_id(0), tl.sum(mine, axis=0) * own_heads, tl.num_programs(0)):
        hit = (mine > 0) & (number == item // own_heads + 1)
        program = tl.sum(tl.where(hit, every, 0), axis=0)
        tile = tl.sum(tl.where(hit, tiles, 0), axis=0)
        count = tl.sum((parted & (tiles == tile)).to(tl.int32), axis=0) + 1
        own = item % own_heads
        head = (tile % TILES) * TILE_HEADS + own
        if head < heads:
            token = (tile // TILES).to(tl.int64)
            base = tl.zeros_like(head).to(tl.float32) - float("inf")
            total = tl.zeros_like(head).to(tl.float32)
            acc = tl.zeros((DIM,), tl.float32)
            for first in range(0, count, PIECES):
                piece = first + some
                mask = piece < count
                row = tl.where(mask, 2 * (program + piece) + (piece == 0).to(tl.int32), 0) * TILE_HEADS + own
                logs = tl.load(piece_lse + row, mask=mask, other=float("-inf"))
                values = wide(piece_out, row.to(tl.int64)[:, None] * DIM + dim[None, :], True)
                values = tl.load(values, mask=mask[:, None], other=0.0)
                higher = tl.maximum(base, tl.max(logs, axis=0))
                safe = tl.where(higher == float("-inf"), 0.0, higher)
                rescale = tl.exp2(base - safe)
                weight = tl.exp2(logs - safe)
                total = total * rescale + tl.sum(weight, axis=0)
                acc = acc * rescale + tl.sum(values * weight[:, None], axis=0)
                base = higher
            sinks = tl.exp2(tl.load(sink + head) * LOG2_E - base)
            inverse = tl.where(total == 0, 0.0, 1.0 / (total + sinks))
            to = out + token * out_stride + head * DIM + dim
            tl.store(tl.multiple_of(to, 16), (acc * inverse).to(tl.bfloat16))
            if wants_lse != 0:
                logs_of_all = tl.where(total == 0, float("-inf"), (base + tl.log2(total)) * LN_2)
                tl.store(lse + token * lse_stride + head, logs_of_all)


def combine_launcher(device: torch.device, heads: int) -> Launcher:
    """The launcher for a number of heads; its grid is `GROUPS` times the decode's programs."""
    return hopper_combine.on(device, TILES=head_tiles(heads))


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
    to, stride = (sink, 0) if lse is None else (lse, lse.stride(0))
    combine_launcher(out.device, heads).launch(
        (programs * GROUPS, 1, 1),
        piece_out, piece_lse, cuts, sink, out, to, out.stride(0), stride, int(lse is not None), heads, programs,
    )  # fmt: skip
