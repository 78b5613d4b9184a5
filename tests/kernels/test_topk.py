"""The top-k kernel against hand values and a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.kernels.topk import map_topk
from tests.test_topk import slow

FAR = 1 << 21  # a position from which every entry used here is complete


def run(
    device: torch.device, topk: Any, requests: list[int], table: Any, *, positions: list[int] | None = None,
    valid: list[bool] | None = None, entries_per_page: int = 16, ratio: int = 4, num_pages: int | None = None,
    wide: bool = False,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """Map into poisoned outputs whose rows lie apart; what lies between must stay."""
    local = torch.as_tensor(topk, dtype=torch.int32, device=device)
    tokens, width = local.shape
    at = torch.tensor(positions if positions is not None else [FAR] * tokens, device=device)
    out = torch.full((tokens, width + 3), 77, dtype=torch.int32, device=device)
    lens = torch.full((tokens,), 77, dtype=torch.int32, device=device)
    map_topk(
        local,
        torch.tensor(requests, dtype=torch.int32, device=device),
        at if wide else at.int(),
        torch.as_tensor(table, dtype=torch.int32, device=device),
        entries_per_page,
        torch.tensor(valid if valid is not None else [True] * tokens, device=device),
        ratio,
        num_pages,
        out[:, :width],
        lens,
    )
    assert (out[:, width:] == 77).all()
    return out[:, :width].tolist(), lens.tolist()


def padded(rows: list[list[int]], width: int) -> tuple[list[list[int]], list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows], [len(row) for row in rows]


@pytest.mark.simulate
def test_g1_a_view_of_a_wider_table(device: torch.device) -> None:
    whole = torch.tensor([[*range(10, 18), *[777] * 8], [*range(20, 28), *[888] * 8]], dtype=torch.int32).to(device)
    slots, lens = run(
        device, [[3, 9999, -1], [9999, 3, -1], [1, 2, 3], [4, 5, 6]], [0, 1, 5, -1], whole[:, :8],
        valid=[True, True, False, False],
    )  # fmt: skip
    assert slots == [[163, -1, -1], [323, -1, -1], [-1] * 3, [-1] * 3]
    assert lens == [1, 1, 0, 0]
    slots, lens = run(device, [[3, 9999, -1]] * 4, [0, 1, 5, -1], whole[:, :8])  # requests outside, though valid
    assert [row[0] for row in slots] == [163, 323, -1, -1]
    assert lens == [1, 1, 0, 0]


def test_g10_the_last_row_never_reads_past_its_columns(device: torch.device) -> None:
    # What follows the table holds legal page numbers.
    storage = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], dtype=torch.int32).to(device)
    entries = [0, 3, 127, 128, 130, 8192, 100000, 1048575, 2**31 - 1]
    slots, lens = run(device, [entries], [1], storage[:2], entries_per_page=32, ratio=1, positions=[2**31 - 2])
    assert slots == [[160, 163, 8 * 32 + 31] + [-1] * 6]
    assert lens == [3]


def test_s8_only_complete_entries(device: torch.device) -> None:
    positions = [1023, 1024, 1025, 1026, 1027]  # sequence 1028, five queries
    slots, lens = run(device, [[255, 256, 0]] * 5, [0] * 5, [list(range(20))], positions=positions)
    assert lens == [2, 2, 2, 2, 3]
    assert slots == [[255, 0, -1]] * 4 + [[255, 256, 0]]


@pytest.mark.parametrize(
    ("page", "entries_per_page", "num_pages", "entry", "slot"),
    [
        (-1, 16, None, 3, -1),
        (-(2**31), 16, 5, 3, -1),
        (5, 16, 5, 3, -1),
        (4, 16, 5, 3, 67),
        (2**31 - 1, 16, None, 0, -1),
        (2**27 - 1, 16, None, 15, 2**31 - 1),
        (2**27, 16, None, 0, -1),
        (44_739_242, 48, None, 31, 2**31 - 1),  # the last page that int32 slots reach, and not to its end
        (44_739_242, 48, None, 32, -1),
        (2**31 - 1, 1, None, 0, 2**31 - 1),
    ],
)
def test_pages_outside_the_cache_or_int32(
    device: torch.device, page: int, entries_per_page: int, num_pages: int | None, entry: int, slot: int
) -> None:
    slots, lens = run(device, [[entry]], [0], [[page]], entries_per_page=entries_per_page, num_pages=num_pages)
    assert (slots, lens) == ([[slot]], [int(slot >= 0)])


@pytest.mark.parametrize("width", [1, 127, 512, 1024, 2048])
@pytest.mark.parametrize("kind", ["anything", "first", "all", "none"])
def test_equals_a_plain_loop(device: torch.device, width: int, kind: str) -> None:
    rng = np.random.default_rng(width)
    columns, entries_per_page = 40, 64
    table = rng.integers(-1, 300, (3, columns))
    topk = rng.integers(-60, columns * entries_per_page + 60, (5, width))
    if kind != "anything":
        table = rng.integers(0, 250, (3, columns))
        topk = rng.integers(0, columns * entries_per_page, (5, width))
        kept = {"first": rng.integers(0, width + 1, (5, 1)), "all": width, "none": 0}[kind]
        topk = np.where(np.arange(width) < kept, topk, -1)
    requests = [0, 2, 1, 3, 2]
    positions = [4 * 2560, 4 * 900, 17, 4 * 2560, -1] if kind == "anything" else [FAR] * 5
    valid = [True, True, True, True, kind != "first"]
    wide = bool(width % 2)
    found = run(
        device, topk, requests, table, positions=positions, valid=valid, entries_per_page=entries_per_page,
        num_pages=250, wide=wide,
    )  # fmt: skip
    rows = slow(topk.tolist(), requests, positions, table.tolist(), entries_per_page, valid, 4, 250)
    assert found == padded(rows, width)


@pytest.mark.parametrize("entries_per_page", [1, 2, 3, 7, 48, 100, 641])
@pytest.mark.parametrize("ratio", [1, 3, 128])
def test_any_page_size_and_ratio(device: torch.device, entries_per_page: int, ratio: int) -> None:
    rng = np.random.default_rng(entries_per_page)
    topk = rng.integers(-5, 9 * entries_per_page + 5, (3, 50))
    table = rng.integers(0, 20, (1, 9))
    positions = rng.integers(0, 9 * entries_per_page * ratio, 3).tolist()
    found = run(
        device, topk, [0] * 3, table, positions=positions, entries_per_page=entries_per_page, ratio=ratio, num_pages=19
    )
    rows = slow(topk.tolist(), [0] * 3, positions, table.tolist(), entries_per_page, [True] * 3, ratio, 19)
    assert found == padded(rows, 50)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_an_empty_table_keeps_nothing(device: torch.device, shape: tuple[int, int]) -> None:
    assert run(device, [[0, 1]], [0], np.empty(shape)) == ([[-1, -1]], [0])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_to_map(device: torch.device, shape: tuple[int, int]) -> None:
    assert run(device, np.empty(shape), [0] * shape[0], [[1]]) == ([[]] * shape[0], [0] * shape[0])
