"""The independent check of index rows: right rows pass, and one wrong number in any place is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swa_backend.replay.hashing import mix
from swa_backend.replay.row_check import RowCheck

GROUP = "window"
SLOTS = 64
KEYS = mix(np.arange(1, 31, dtype=np.uint64))  # content of a request of 30 tokens
PLACE = np.random.default_rng(4).permutation(SLOTS)[:30].astype(np.int64)  # where each of its tokens lies
FIRST = np.array([0, 3, 10, 22])
COUNT = np.array([4, 8, 0, 8])
WIDTH = 8


def checker() -> RowCheck:
    check = RowCheck({GROUP: SLOTS})
    check.wrote(GROUP, PLACE, KEYS)
    return check


def right_rows() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.full((4, WIDTH), -1, dtype=torch.int32)
    for i, (first, count) in enumerate(zip(FIRST, COUNT, strict=True)):
        rows[i, :count] = torch.from_numpy(PLACE[first : first + count])
    return rows, torch.from_numpy(COUNT.astype(np.int32))


def runs(rows: torch.Tensor, lens: torch.Tensor, *, check: RowCheck | None = None, padded: bool = True) -> int:
    check = check or checker()
    check.runs(GROUP, rows, lens, KEYS, FIRST, COUNT, padded=padded)
    assert check.verdict.rows == 4
    assert bool(check.verdict.examples) == bool(check.verdict.mismatches)
    return check.verdict.mismatches


class TestRuns:
    def test_right_rows_pass(self):
        assert runs(*right_rows()) == 0

    @pytest.mark.parametrize("row", range(4))
    @pytest.mark.parametrize("column", range(WIDTH))
    @pytest.mark.parametrize("value", [-1, 0, SLOTS, 2**31 - 1, "neighbour"])
    def test_one_wrong_entry_is_one_wrong_row(self, row, column, value):
        rows, lens = right_rows()
        before = int(rows[row, column])
        rows[row, column] = before + 1 if value == "neighbour" else value
        assert runs(rows, lens) == (int(rows[row, column]) != before)

    def test_swapped_entries(self):
        rows, lens = right_rows()
        rows[1, [2, 5]] = rows[1, [5, 2]]
        assert runs(rows, lens) == 1

    @pytest.mark.parametrize("row", range(4))
    @pytest.mark.parametrize("change", [-1, 1])
    def test_wrong_length(self, row, change):
        rows, lens = right_rows()
        lens = lens.clone()
        lens[row] += change
        assert runs(rows, lens) == 1

    def test_padding_means_nothing_where_it_is_said_so(self):
        rows, lens = right_rows()
        rows[0, 6] = 5
        assert runs(rows, lens) == 1
        assert runs(rows, lens, padded=False) == 0
        rows[0, 3] = 5
        assert runs(rows, lens, padded=False) == 1

    def test_row_that_is_too_narrow(self):
        rows, lens = right_rows()
        assert runs(rows[:, :7], lens) == 2

    def test_slot_that_was_written_again(self):
        check = checker()
        check.wrote(GROUP, PLACE[23:24], KEYS[:1])
        assert runs(*right_rows(), check=check) == 1

    def test_slot_that_nobody_wrote(self):
        check = RowCheck({GROUP: SLOTS})
        check.wrote(GROUP, np.where(np.arange(30) == 23, -1, PLACE), KEYS)
        assert runs(*right_rows(), check=check) == 1

    def test_many_rows_are_checked_in_parts(self):
        n = 10_000
        rows = torch.from_numpy(np.tile(PLACE[:5], (n, 1)).astype(np.int32))
        rows[4095, 0] = rows[4096, 4] = rows[9999, 2] = 0
        wrong = int(PLACE[0] != 0) + int(PLACE[4] != 0) + int(PLACE[2] != 0)
        check = checker()
        lens, first = torch.full((n,), 5, dtype=torch.int32), np.zeros(n, dtype=np.int64)
        check.runs(GROUP, rows, lens, KEYS, first, np.full(n, 5))
        assert (check.verdict.rows, check.verdict.mismatches) == (n, wrong)
        assert "row 4095" in check.verdict.examples[0]


PICKS = torch.tensor([[2, -1, 0, 3], [-1, -1, -1, -1], [7, 5, 6, 1], [-1, 4, -1, 2]], dtype=torch.int32)
BASE = np.array([0, 4, 9, 20])


def right_picks() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.full((4, 4), -1, dtype=torch.int32)
    lens = torch.zeros(4, dtype=torch.int32)
    for i, own in enumerate(PICKS.tolist()):
        slots = [int(PLACE[BASE[i] + pick]) for pick in own if pick >= 0]
        rows[i, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        lens[i] = len(slots)
    return rows, lens


def picks(rows: torch.Tensor, lens: torch.Tensor) -> int:
    check = checker()
    check.picks(GROUP, rows, lens, KEYS, BASE, PICKS)
    assert check.verdict.rows == 4
    return check.verdict.mismatches


class TestPicks:
    def test_right_rows_pass(self):
        assert picks(*right_picks()) == 0

    @pytest.mark.parametrize("row", range(4))
    @pytest.mark.parametrize("column", range(4))
    @pytest.mark.parametrize("value", [-1, 0, SLOTS, "neighbour"])
    def test_one_wrong_entry(self, row, column, value):
        rows, lens = right_picks()
        before = int(rows[row, column])
        rows[row, column] = before + 1 if value == "neighbour" else value
        assert picks(rows, lens) == (int(rows[row, column]) != before)

    def test_dropped_entry_other_order_wrong_length(self):
        rows, lens = right_picks()
        rows[2, 1:] = torch.cat([rows[2, 2:], torch.tensor([-1], dtype=torch.int32)])
        lens[2] = 3
        assert picks(rows, lens) == 1
        rows, lens = right_picks()
        rows[2] = rows[2].flip(0)
        assert picks(rows, lens) == 1
        rows, lens = right_picks()
        lens[0] += 1
        assert picks(rows, lens) == 1


def test_equal():
    check = checker()
    check.equal(GROUP, "the slot", np.array([1, 2, 3]), np.array([1, 2, 3]))
    assert check.verdict.mismatches == 0
    check.equal(GROUP, "the slot", np.array([1, 5, 4]), np.array([1, 2, 3]))
    assert check.verdict.mismatches == 2
    assert check.verdict.examples == [f"{GROUP}: the slot of token 1 is 5, must be 2"]
