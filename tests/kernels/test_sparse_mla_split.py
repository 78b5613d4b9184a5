"""Rows whose keys several programs share: partial results add up, and a batch-invariant row is always cut alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swa_backend import split_plan
from swa_backend.portable.provider import TritonAttention
from swa_backend.split_plan import Split, SplitPlan
from tests.kernels.attention_calls import Case, make_case

PAIR = ("fp8_ds_mla", "ocp"), ("fp8_ds_mla", "ocp")
MANY = 999  # compute units: every tile gets a program of its own


def long_case(device: torch.device, tokens: int = 2, **options: Any) -> Case:
    return make_case(device, *PAIR, tokens=tokens, width=140, second_width=130, **options)


@pytest.mark.simulate
def test_a_tile_a_program(device: torch.device) -> None:
    make_case(device, *PAIR, tokens=2, width=33, second_width=40, heads=3).check(TritonAttention(units=MANY))


@pytest.mark.parametrize("heads", [2, 66])
def test_splits_of_long_rows(device: torch.device, heads: int) -> None:
    case = long_case(device, heads=heads)
    case.sink[-1], case.sink[0] = math.inf, -math.inf
    _, lse = case.check(TritonAttention(units=MANY))
    _, whole = case.run(TritonAttention(units=1))
    assert torch.allclose(lse, whole, atol=1e-5)


def test_more_splits_than_a_row_has_tiles(device: torch.device) -> None:
    """As in a graph that was captured for longer rows."""
    case = long_case(device)
    case.lens[:], case.second_lens[:] = (3, 0), (0, 0)
    case.check(TritonAttention(units=MANY))


def test_live_entries_decide_not_the_width_of_the_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, split = [], SplitPlan.split

    def asking(plan: SplitPlan, *given: Any) -> Split:
        asked.append(given)
        return split(plan, *given)

    monkeypatch.setattr(SplitPlan, "split", asking)
    case = long_case(device)
    case.lens, case.second_lens = case.lens.clip(max=20), case.second_lens.clip(max=5)
    case.max_seq_len = 20
    case.check(TritonAttention(units=MANY))
    assert asked == [(2, [20, 5])]


def test_nan_goes_through_a_split(device: torch.device) -> None:
    case = long_case(device)
    case.q[0, 1, 7] = math.nan
    out, lse = case.run(TritonAttention(units=MANY))
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan()
    assert torch.isfinite(out[0, 0]).all()
    assert torch.isfinite(out[1]).all()


@pytest.fixture
def short_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch-invariant rows are cut after every tile of an interpreted kernel."""
    monkeypatch.setattr(split_plan, "FIXED_KEYS", 128)


@pytest.mark.usefixtures("short_cuts")
def test_n5_a_batch_invariant_row_alone_equals_the_row_in_a_batch(device: torch.device) -> None:
    case = make_case(device, *PAIR, tokens=3, width=140, second_width=200, heads=3, batch_invariant=True)
    case.second_lens[1] = min(case.second_lens[1], 100)
    whole = case.check(TritonAttention(units=8))
    for units, token in ((MANY, 0), (1, 1), (8, 2)):
        alone = case.run(TritonAttention(units=units), slice(token, token + 1))
        for found, right in zip(alone, whole, strict=True):
            assert torch.equal(found[0], right[token])
    # As in a step whose host bound is lower: fewer splits, cut at the same places.
    case.second_lens = case.second_lens.clip(max=100)
    expected = case.run(TritonAttention(units=8))
    case.max_seq_len = 4 * 100 + 3
    for found, right in zip(case.run(TritonAttention(units=8)), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.usefixtures("short_cuts")
def test_batch_invariant_tokens_are_launched_as_room_allows(device: torch.device) -> None:
    case = make_case(device, *PAIR, tokens=3, width=140, second_width=130, heads=2, batch_invariant=True)
    for units in (1, 4):  # room for 1 token at a time, for 2
        case.check(TritonAttention(units=units))
