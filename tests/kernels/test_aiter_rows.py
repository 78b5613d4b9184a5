"""Compressed rows packed without gaps: by hand, and against plain lists."""

from __future__ import annotations

import pytest
import torch

from swa_backend.cache_layout import Dialect
from swa_backend.platform import CacheRole
from swa_platform_rocm.aiter_room import Room
from swa_platform_rocm.aiter_rows import aiter_ragged_rows, ragged_rows
from swa_platform_rocm.aiter_rows_reference import ragged_rows as plain_ragged_rows
from tests.support import make_config

SLOTS = 500
WILD = [-1, SLOTS, SLOTS + 7, 2**31 - 1, -(2**31)]


def expected(rows: torch.Tensor, lens: torch.Tensor, valid: torch.Tensor) -> tuple[list[int], list[int]]:
    """(indices, indptr) as lists."""
    indices: list[int] = []
    indptr = [0]
    for row, length, counts in zip(rows.tolist(), lens.tolist(), valid.tolist(), strict=True):
        indices += [slot for slot in row[: max(length, 0)] if counts and 0 <= slot < SLOTS]
        indptr.append(len(indices))
    return indices, indptr


def packed(room: Room, tokens: int) -> tuple[list[int], list[int]]:
    indptr = room.indptr[: tokens + 1].tolist()
    return room.indices[: indptr[-1]].tolist(), indptr


def poisoned(device: torch.device, entries: int) -> Room:
    room = Room.allocate(entries, device)
    room.indices.fill_(2**31 - 1)
    room.indptr.fill_(-7)
    return room


@pytest.mark.simulate
def test_by_hand(device: torch.device) -> None:
    rows = torch.tensor([[5, -1, 6, 9], [1, 2, 3, 4], [7, 7, SLOTS, 499], [0, 0, 0, 0]], dtype=torch.int32)
    lens = torch.tensor([3, 4, 9, -2], dtype=torch.int32)
    valid = torch.tensor([True, False, True, True])
    room = poisoned(device, 16)
    ragged_rows(rows.to(device), lens.to(device), valid.to(device), SLOTS, room)
    assert packed(room, 4) == ([5, 6, 7, 7, 499], [0, 2, 2, 5, 5])
    assert int(room.indices[5]) == 2**31 - 1, "nothing is written behind the last entry"


@pytest.mark.parametrize("run", [ragged_rows, plain_ragged_rows], ids=["kernel", "twin"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 256), (70, 257), (2, 1000)])
def test_rows_of_any_width(device: torch.device, run: object, tokens: int, width: int) -> None:
    generator = torch.Generator().manual_seed(tokens * 1000 + width)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    room = poisoned(device, tokens * width)
    for _ in range(2):  # the second launch finds the words of the first
        rows = draw(0, SLOTS, tokens, width)
        holes = draw(0, 4, tokens, width) == 0
        rows[holes] = torch.tensor(WILD, dtype=torch.int32)[draw(0, len(WILD), int(holes.sum())).long()]
        lens, valid = draw(-3, width + 4, tokens), draw(0, 5, tokens) > 0
        spread = torch.full((tokens, width + 5), 3, dtype=torch.int32)  # rows further apart than they are wide
        spread[:, :width] = rows
        run(spread.to(device)[:, :width], lens.to(device), valid.to(device), SLOTS, room)  # type: ignore[operator]
        assert packed(room, tokens) == expected(rows, lens, valid)


@pytest.mark.parametrize(
    ("ratios", "window", "keys"), [((0, 4), Dialect.OCP, 1), ((0, 4), Dialect.FNUZ, 0), ((0, 0), Dialect.OCP, 0)]
)
def test_it_is_warmed_up_where_aiter_can_be_chosen(ratios: tuple[int, ...], window: Dialect, keys: int) -> None:
    dialects = {CacheRole.SWA: window, CacheRole.COMPRESSED: Dialect.OCP}
    assert len(list(aiter_ragged_rows.keys(make_config(compress_ratios=ratios), dialects))) == keys
