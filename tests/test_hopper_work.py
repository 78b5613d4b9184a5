"""How a Hopper decode shares its work, and how the pieces come together again, against plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from swa_platform_cuda.hopper_combine import combine_pieces
from swa_platform_cuda.hopper_work import NEVER, Costs, share_work

Cut = tuple[int, int]


def plain_cuts(blocks: list[int], tiles: int, programs: int, costs: Costs) -> list[Cut]:
    """Where the work is cut, by walking along the line of all tiles."""
    lengths = [costs.tile + count for count in blocks for _ in range(tiles)]
    total = sum(lengths)
    share = max(math.ceil(total / programs), costs.least_share)
    whole = math.ceil(share / max(lengths)) * max(lengths)
    if whole <= share + costs.slack:
        share = whole
    cuts = []
    for program in range(programs + 1):
        left, tile = program * share, 0
        while tile < len(lengths) and left >= lengths[tile]:
            left -= lengths[tile]
            tile += 1
        if tile == len(lengths):
            cuts.append((tile, 0))
            continue
        block = left - costs.tile
        if block < costs.least:
            cuts.append((tile, 0))
        elif lengths[tile] - costs.tile - block < costs.least:
            cuts.append((tile + 1, 0))
        else:
            cuts.append((tile, block))
    return cuts


def blocks_of(lens: list[int], width: int, more: list[int], more_width: int, valid: list[bool]) -> list[int]:
    found = []
    for n, m, live in zip(lens, more, valid, strict=True):
        counts = (min(max(n, 0), width), min(max(m, 0), more_width)) if live else (0, 0)
        found.append(sum(math.ceil(count / 64) for count in counts))
    return found


def cut_on(
    device: torch.device, lens: list[int], more: list[int], valid: list[bool], heads: int, programs: int, costs: Costs,
    more_width: int = 8192,
) -> list[Cut]:  # fmt: skip
    cuts = torch.full((programs + 1, 2), -77, dtype=torch.int32, device=device)
    numbers = [torch.tensor(values, dtype=torch.int32, device=device) for values in (lens, more)]
    share_work(numbers[0], 128, numbers[1], more_width, torch.tensor(valid, device=device), heads, costs, cuts)
    return [(tile, block) for tile, block in cuts.tolist()]


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 2, 3, 0), Costs(3, 1, 1, 10), Costs(2, NEVER, 1, 0)])
def test_ragged_rows_are_cut_where_plain_loops_cut(device: torch.device, heads: int, costs: Costs) -> None:
    rng = np.random.default_rng(heads + costs.tile)
    for tokens, programs in ((1, 7), (5, 132), (40, 16), (700, 9)):
        lens = [int(n) for n in rng.integers(-2, 140, tokens)]
        more = [int(n) for n in np.where(rng.random(tokens) < 0.3, rng.integers(0, 8300, tokens), 3)]
        valid = [bool(v) for v in rng.random(tokens) < 0.9]
        blocks = blocks_of(lens, 128, more, 8192, valid)
        expected = plain_cuts(blocks, math.ceil(heads / 64), programs, costs)
        assert cut_on(device, lens, more, valid, heads, programs, costs) == expected


def test_rows_of_equal_length_are_whole_when_that_costs_little(device: torch.device) -> None:
    cuts = cut_on(device, [128] * 512, [512] * 512, [True] * 512, 64, 132, Costs(2, 1, 2, 4))
    assert cuts == [(min(4 * program, 512), 0) for program in range(133)], "a share of 47 blocks becomes four tiles"


def test_few_long_rows_are_cut_into_equal_pieces(device: torch.device) -> None:
    cuts = cut_on(device, [128] * 2, [640] * 2, [True] * 2, 64, 4, Costs(2, 1, 2, 0))
    assert cuts == [(0, 0), (0, 5), (1, 0), (1, 5), (2, 0)], "each row has two blocks, then ten"


def test_a_row_among_short_ones_is_shared(device: torch.device) -> None:
    """Lengths from 1 to 8,320 in a batch: nobody has much more than the average."""
    more = [1] * 60 + [8192] + [1] * 60
    cuts = cut_on(device, [128] * 121, more, [True] * 121, 64, 132, Costs(2, 1, 2, 4))
    lengths = [2 + math.ceil(m / 64) + 2 for m in more]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    at = [int(starts[tile]) + (block + 2 if block else 0) for tile, block in cuts]
    assert at == sorted(at)
    assert (at[0], at[-1]) == (0, sum(lengths))
    assert max(np.diff(at)) <= math.ceil(sum(lengths) / 132) + 4


def test_without_cuts_inside_tiles_every_tile_is_whole(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    more = [int(n) for n in rng.integers(0, 4000, 300)]
    cuts = cut_on(device, [128] * 300, more, [True] * 300, 64, 132, Costs(2, NEVER, 1, 0))
    assert all(block == 0 for _, block in cuts)
    assert [tile for tile, _ in cuts] == sorted(tile for tile, _ in cuts)
    assert (cuts[0], cuts[-1]) == ((0, 0), (300, 0))


@pytest.mark.parametrize(("heads", "tokens", "programs"), [(1, 3, 9), (64, 2, 16), (70, 3, 8), (128, 4, 4)])
def test_n3_pieces_come_together(device: torch.device, heads: int, tokens: int, programs: int) -> None:
    rng = np.random.default_rng(heads)
    tiles = math.ceil(heads / 64)
    more = [640, 65, 1, 300][:tokens]
    costs = Costs(1, 1, 1, 0)
    cuts = cut_on(device, [128] * tokens, more, [True] * tokens, heads, programs, costs)
    scores = rng.normal(0, 4, (tokens, heads, 900))
    values = rng.normal(0, 1, (tokens, 900, 512))
    sink = np.linspace(-3, 3, heads)
    sink[0] = -np.inf
    out = torch.full((tokens, heads, 512), 7.0, dtype=torch.bfloat16, device=device)
    lse = torch.full((tokens, heads), 7.0, device=device)
    piece_out = torch.full((2 * programs, 64, 512), torch.nan)
    piece_lse = torch.full((2 * programs, 64), torch.nan)
    cut_tiles = {tile for tile, block in cuts if block}
    for program in range(programs):
        for tile in cut_tiles:
            begin = max(cuts[program], (tile, 0))
            end = min(cuts[program + 1], (tile + 1, 0))
            if begin >= end:
                continue
            token, first = tile // tiles, tile % tiles * 64
            count = 128 + more[token]
            last = math.ceil(count / 64) if end[0] > tile else end[1]
            keys = slice(64 * begin[1], min(64 * last, count))
            number = 2 * program + (begin[1] == 0)
            own = scores[token, first : first + 64, keys]
            logs = np.logaddexp.reduce(own, axis=1, initial=-np.inf)
            piece_out[number, : len(own)] = torch.tensor(np.exp(own - logs[:, None]) @ values[token, keys])
            piece_lse[number, : len(own)] = torch.tensor(logs / np.log(2))
    combine_pieces(
        piece_out.to(device), piece_lse.to(device), torch.tensor(cuts, dtype=torch.int32, device=device),
        torch.tensor(sink, dtype=torch.float32, device=device), out, lse,
    )  # fmt: skip
    assert cut_tiles, "nothing was cut"
    for tile in range(tokens * tiles):
        token = tile // tiles
        own = slice(tile % tiles * 64, min(tile % tiles * 64 + 64, heads))
        if tile not in cut_tiles:
            assert (out[token, own] == 7).all()
            assert (lse[token, own] == 7).all()
            continue
        count = 128 + more[token]
        logs = np.logaddexp.reduce(scores[token, own, :count], axis=1)
        expected = np.exp(scores[token, own, :count] - np.logaddexp(logs, sink[own])[:, None]) @ values[token, :count]
        found = out[token, own].double().cpu().numpy()
        assert np.linalg.norm(found - expected) <= 2.5e-3 * np.linalg.norm(expected)
        np.testing.assert_allclose(lse[token, own].double().cpu().numpy(), logs, atol=1e-5)


def test_pieces_without_keys_leave_zeros(device: torch.device) -> None:
    """A row can be shorter by now than when it was cut."""
    cuts = torch.tensor([[0, 0], [0, 3], [0, 6], [1, 0]], dtype=torch.int32, device=device)
    piece_out = torch.zeros(6, 64, 512, device=device)
    piece_lse = torch.full((6, 64), -torch.inf, device=device)
    out = torch.full((1, 2, 512), torch.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((1, 2), torch.nan, device=device)
    for sink in (0.0, torch.inf, -torch.inf):
        combine_pieces(piece_out, piece_lse, cuts, torch.full((2,), sink, device=device), out, lse)
        assert not out.any()
        assert torch.isneginf(lse).all()
    piece_out[1, :2], piece_lse[1, :2] = 1.5, 0.0
    combine_pieces(piece_out, piece_lse, cuts, torch.full((2,), -torch.inf, device=device), out, lse)
    assert (out == 1.5).all()
    assert (lse == 0).all()


def test_a_nan_in_one_piece_is_one_in_the_row(device: torch.device) -> None:
    cuts = torch.tensor([[0, 0], [0, 3], [1, 0], [2, 0]], dtype=torch.int32, device=device)
    piece_out = torch.ones(6, 64, 512, device=device)
    piece_lse = torch.zeros(6, 64, device=device)
    piece_lse[2, 1] = torch.nan
    out = torch.zeros(2, 2, 512, dtype=torch.bfloat16, device=device)
    combine_pieces(piece_out, piece_lse, cuts, torch.zeros(2, device=device), out, None)
    assert torch.isnan(out[0, 1]).all()
    assert torch.isfinite(out[0, 0]).all()
    assert not out[1].any()
