"""How many programs share a token's keys: enough to fill the chip, no more than tiles, never from capacity."""

from __future__ import annotations

import pytest
import torch

from swa_backend.platform import Target
from swa_backend.split_plan import FIXED_KEYS, Split, SplitPlan, compute_units

H200 = SplitPlan(units=132, key_tile=128)


def test_a_full_chip_is_not_split() -> None:
    for programs in (132, 128, 500, 8192):
        assert H200.split(programs, (128,)) == Split(1)
    assert H200.split(132, (128, 512)) == Split(1)


def test_one_token_is_split_into_its_tiles() -> None:
    assert H200.split(1, (128, 512)) == Split(5)
    assert H200.split(1, (128,)) == Split(1), "one tile cannot be shared"
    assert SplitPlan(units=132, key_tile=64).split(1, (128,)) == Split(2)


def test_splits_fill_the_chip_and_no_more() -> None:
    for programs in range(1, 132):
        splits = H200.split(programs, (128, 8192)).splits
        assert splits <= 65
        assert programs * splits <= H200.capacity
        if 3 <= programs <= 32:
            assert programs * splits > 66, "at least half of the chip works"


def test_programs_that_would_not_be_faster_are_not_launched() -> None:
    assert H200.split(1, (128, 8192)) == Split(33), "65 tiles: two each, as for 64 programs"


def test_more_programs_are_never_split_more() -> None:
    counts = [H200.split(2**n, (128, 512)).splits for n in range(10)]
    assert counts == sorted(counts, reverse=True)


def test_partial_results_have_a_price() -> None:
    plan = SplitPlan(units=132, key_tile=64, partial=0.015)
    assert plan.split(1, (128,)) == Split(2)
    assert plan.split(32, (128,)) == Split(1), "64 partial results cost more than the tile that they save"
    assert plan.split(32, (128, 512)) == Split(4)


def test_only_live_entries_count() -> None:
    assert H200.split(8, (128, 0)) == H200.split(8, (128,))
    assert H200.split(8, (128, 8192)).splits > H200.split(8, (128, 64)).splits
    assert H200.split(8, (0,)) == Split(1)
    assert H200.split(0, (128, 512)).splits >= 1


def test_a_batch_invariant_row_is_cut_at_the_same_places_in_every_batch() -> None:
    plan = SplitPlan(units=132, key_tile=128, batch_invariant=True)
    assert {plan.split(programs, (128, 512)) for programs in (1, 7, 132, 9000)} == {Split(2, FIXED_KEYS // 128)}
    assert plan.split(1, (128, 8192)).tiles == plan.split(1, (128,)).tiles
    assert plan.split(1, (128,)).splits == plan.split(1, (0,)).splits == 1
    assert plan.most_fixed((128, 8192)) == plan.split(3, (128, 8192)).splits == 17


def test_another_chip_has_another_plan() -> None:
    mi300 = SplitPlan(units=compute_units(None, Target.parse("hip:gfx942")), key_tile=128)
    assert mi300.units == 304
    assert mi300.split(132, (128, 512)).splits > 1
    assert mi300.capacity == 608


@pytest.mark.parametrize(("target", "units"), [("cuda:90", 132), ("hip:gfx942", 304), ("hip:gfx950", 256)])
def test_compute_units_of_a_chip_that_is_not_here(target: str, units: int) -> None:
    assert compute_units(None, Target.parse(target)) == units
    assert compute_units(torch.device("cpu"), Target.parse(target)) == units


def test_an_unknown_chip_still_has_a_plan() -> None:
    assert compute_units(None, Target.parse("cuda:999")) > 0
    assert compute_units(torch.device("cpu")) > 0
