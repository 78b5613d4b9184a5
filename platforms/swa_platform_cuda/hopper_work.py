"""How the programs of a Hopper decode share its rows of differing length, decided on the device once a step.

The work is a line. Tiles (a token, 64 of its heads) lie on it one after the other, each as long as its blocks of 64
keys and what a tile costs besides. The line is cut into equal shares, one a program; where a cut falls inside a tile,
two programs have a piece each of its keys, and `swa_platform_cuda.hopper_combine` puts the pieces together::

    tiles     |  0            |  1    |  2                        |  3   |
    costs     + + 0 1 2 3 4 5 + + 0 1 + + 0 1 2 3 4 5 6 7 8 9 a b + + 0 1       (+ = a tile's own cost, in blocks)
    programs  | 0               | 1               | 2               | ..
    cuts                      (1, 0)         (2, 4)            (3, 0)           (tile, block), where a program begins

A cut that would part fewer than ``least`` blocks from a tile moves to that tile's edge; with ``least`` larger than any
row no tile is cut. Rows of equal length get a whole number of tiles each if that makes a share longer by no more than
``slack``.

Any cuts make a right result, whatever the lengths are by the time that they are used, because the last piece of a
tile has no end but the row's own. So layers of a type share the cuts that the first of them made.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend.cache_layout import Dialect
from swa_backend.kernels.jit import Tuning, device_function, kernel
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

HEADS_OF_A_TILE = 64
BLOCK_KEYS: tl.constexpr = tl.constexpr(64)
NEVER = 1 << 20
"""``least`` with which no tile is cut: more blocks than a row can have."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What decides where the work is cut, in blocks of 64 keys; measured.

    Attributes:
        tile: what a tile costs besides its blocks (query, first loads, result).
        least: fewest blocks of a piece.
        least_share: shortest share of a program.
        slack: by how much a share may grow for the sake of whole tiles.
    """

    tile: int = 2
    least: int = 1
    least_share: int = 2
    slack: int = 4


def head_tiles(heads: int) -> int:
    """Tiles of a token."""
    return -(-heads // HEADS_OF_A_TILE)


def _keys(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> Iterator[Mapping[str, object]]:
    if any(layer.compressed for layer in config.model.present_layer_types):
        yield {"TILES": head_tiles(config.num_heads)}


@device_function
def _row_costs(lens, more_lens, is_valid, token, tokens, width, more_width, tile_cost):
    """[BLOCK] cost of a tile of each token, 0 past the last token."""
    live = token < tokens
    at = tl.where(live, token, 0)
    count = tl.minimum(tl.maximum(tl.load(lens + at, mask=live, other=0), 0), width)
    more = tl.minimum(tl.maximum(tl.load(more_lens + at, mask=live, other=0), 0), more_width)
    blocks = (count + BLOCK_KEYS - 1) // BLOCK_KEYS + (more + BLOCK_KEYS - 1) // BLOCK_KEYS
    valid = tl.load(is_valid + at, mask=live, other=0) != 0
    return tl.where(live, tl.where(valid, blocks, 0) + tile_cost, 0)


@kernel(
    types={
        "lens": "*i32",  # [tokens] of the window rows
        "more_lens": "*i32",  # [tokens] of the compressed rows
        "is_valid": "*u8",  # [tokens]
        "cuts": "*i32",  # [programs + 1, 2]
        "tokens": "i32",
        "programs": "i32",
        "width": "i32",  # longest row of each cache; lengths are clamped to it
        "more_width": "i32",
        "tile_cost": "i32",  # as in `Costs`
        "least": "i32",
        "least_share": "i32",
        "slack": "i32",
    },
    tuning={"": Tuning(4, 1, tiles={"BLOCK": 512})},
    keys=_keys,
)
def hopper_share_work(
    lens, more_lens, is_valid, cuts, tokens, programs, width, more_width, tile_cost, least, least_share, slack,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    total = tl.zeros_like(tokens)
    longest = tl.zeros_like(tokens)
    for base in range(0, tokens, BLOCK):
        costs = _row_costs(lens, more_lens, is_valid, base + lane, tokens, width, more_width, tile_cost)
        total += tl.sum(costs, axis=0)
        longest = tl.maximum(longest, tl.max(costs, axis=0))
    total *= TILES
    share = tl.maximum((total + programs - 1) // programs, least_share)
    whole = (share + longest - 1) // longest * longest
    share = tl.where(whole - share <= slack, whole, share)
    position = tl.minimum(tl.program_id(0) * share, total)

    # The token whose tiles this position lies in, and where they begin.
    token = tl.zeros_like(tokens)
    start = tl.zeros_like(tokens)
    cost = tl.zeros_like(tokens)
    before = tl.zeros_like(tokens)
    for base in range(0, tokens, BLOCK):
        costs = _row_costs(lens, more_lens, is_valid, base + lane, tokens, width, more_width, tile_cost) * TILES
        ends = before + tl.cumsum(costs, axis=0)
        past = (ends <= position) & (base + lane < tokens)
        token += tl.sum(past.to(tl.int32), axis=0)
        start = tl.maximum(start, tl.max(tl.where(past, ends, 0), axis=0))
        hit = (ends > position) & (ends - costs <= position)
        cost += tl.sum(tl.where(hit, costs // TILES, 0), axis=0)
        before = tl.max(ends, axis=0)
    tile = token * TILES
    inside = position - start
    if TILES == 2:
        second = (inside >= cost) & (cost > 0)
        tile += second.to(tl.int32)
        inside -= tl.where(second, cost, 0)
    block = inside - tile_cost
    block = tl.where(block < least, 0, block)
    late = (block > 0) & (cost - tile_cost - block < least)
    tl.store(cuts + 2 * tl.program_id(0), tile + late.to(tl.int32))
    tl.store(cuts + 2 * tl.program_id(0) + 1, tl.where(late, 0, block))


def share_work(
    lens: torch.Tensor,
    width: int,
    more_lens: torch.Tensor,
    more_width: int,
    is_valid: torch.Tensor,
    heads: int,
    costs: Costs,
    cuts: torch.Tensor,
) -> None:
    """Cut the work of a step's rows; see `swa_platform_cuda.hopper_work_reference`, its twin.

    Args:
        lens: [n] int32 lengths of the window rows; anything outside [0, width] is clamped.
        width: longest window row.
        more_lens: [n] int32 lengths of the compressed rows, likewise.
        more_width: longest compressed row.
        is_valid: [n] bool; a row of another token has no entry.
        heads: of a token, 1 to 128.
        costs: where to cut.
        cuts: [programs + 1, 2] int32, written: first tile and first block of each program, then the end.
    """
    launcher = hopper_share_work.on(cuts.device, TILES=head_tiles(heads))
    launcher.launch(
        (cuts.shape[0], 1, 1),
        lens, more_lens, is_valid, cuts, lens.shape[0], cuts.shape[0] - 1, width, more_width, costs.tile, costs.least,
        costs.least_share, costs.slack,
    )  # fmt: skip
