"""The watch over dead lanes sees what it is there to see."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from swa_backend.kernels.jit import Tuning, kernel
from tests.kernels.lanes import span_of
from tests.kernels.on_device import at_the_end


@kernel(
    types={"values": "*i32", "out": "*i32", "count": "i32"},
    tuning={"": Tuning(1, 1, tiles={"TILE": 16})},
    keys=lambda config, dialects: (),
)
def copy_for_test(values, out, count, CLAMP_LOAD: tl.constexpr, MASK_STORE: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    inside = at < count
    loaded = tl.load(values + (tl.where(inside, at, 0) if CLAMP_LOAD else at), mask=inside, other=0)
    tl.store(out + at, loaded, mask=inside if MASK_STORE else at < TILE)


def run(device: torch.device, *, clamp: bool, mask: bool, count: int = 9) -> list[int]:
    values = at_the_end(torch.arange(count, dtype=torch.int32), device)
    out = torch.zeros(count, dtype=torch.int32, device=device)
    copy_for_test.on(device, CLAMP_LOAD=clamp, MASK_STORE=mask).launch((1, 1, 1), values, out, count)
    found: list[int] = out.tolist()
    return found


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--kernels") != "interpret":
        pytest.skip("only the interpreter shows every lane")


def test_lanes_inside_and_stores_that_are_masked_pass(device: torch.device) -> None:
    assert run(device, clamp=True, mask=True) == list(range(9))


def test_a_dead_lane_that_loads_past_its_tensor_is_seen(device: torch.device) -> None:
    with pytest.raises(Exception, match=r"a load of int32 has 7 of 16 lanes outside every argument; .* of values"):
        run(device, clamp=False, mask=True)


def test_a_live_lane_that_stores_past_its_tensor_is_seen(device: torch.device) -> None:
    with pytest.raises(Exception, match="a store of int32 has 7 of 16 lanes outside every argument"):
        run(device, clamp=True, mask=False)


def test_what_a_view_spans_and_what_its_storage_does() -> None:
    whole = torch.zeros(4, 10, dtype=torch.int32)
    view, start = whole[1:3, 2:5], whole.data_ptr()
    assert span_of(view, whole=False) == (start + 12 * 4, start + 25 * 4)
    assert span_of(view, whole=True) == (start, start + 160)
    assert span_of(whole[:0], whole=False)[0] == span_of(whole[:0], whole=False)[1]
