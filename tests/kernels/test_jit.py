"""The launch layer: keys, tuning, argument checks, strict mode, and what does and does not compile."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton.language as tl

from swa_backend.errors import ProviderError
from swa_backend.kernels import jit
from swa_backend.kernels.jit import STRICT_VARIABLE, Tuning, all_kernels, kernel, mark_warm, stats
from swa_backend.platform import Target

TUNING = {
    "": Tuning(1, 1, tiles={"TILE": 16}),
    "hip": Tuning(2, 1, tiles={"TILE": 32}),
    "hip:gfx950": Tuning(4, 1, tiles={"TILE": 64}),
}


@kernel(
    types={"out": "*i32", "count": "i32", "stride": "i64", "value": "i32"},
    tuning=TUNING,
    keys=lambda config, dialects: ({"DOUBLE": double} for double in (False, True)),
)
def fill_for_test(out, count, stride, value, DOUBLE: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    if DOUBLE:
        value = value * 2
    tl.store(out + tl.where(inside, at, 0) * stride, value + tl.zeros([TILE], tl.int32), mask=inside)


@kernel(
    types={"out": "*i32"}, tuning={"hip:gfx942": Tuning(1, 1, tiles={"TILE": 16})}, keys=lambda config, dialects: ({},)
)
def one_chip_for_test(out, TILE: tl.constexpr):
    tl.store(out + tl.arange(0, TILE), tl.zeros([TILE], tl.int32))


@pytest.fixture(autouse=True)
def _not_warm() -> Iterator[None]:
    yield
    mark_warm(False)


def grid_of(launcher: jit.Launcher, count: int) -> jit.Grid:
    return -(-count // launcher.tiles["TILE"]), 1, 1


def test_launch_fills_what_it_should(device: torch.device) -> None:
    out = torch.zeros(100, dtype=torch.int32, device=device)
    launcher = fill_for_test.on(device, DOUBLE=True)
    launcher.launch(grid_of(launcher, 45), out, 45, 2, 21)
    assert out[:90:2].tolist() == [42] * 45
    assert out[1:90:2].tolist() == [0] * 45
    assert out[90:].tolist() == [0] * 10


def test_bound_arguments_come_last(device: torch.device) -> None:
    launcher = fill_for_test.on(device, DOUBLE=False)
    bound = launcher.bind(1, 9)
    for count in (3, 20):
        out = torch.zeros(32, dtype=torch.int32, device=device)
        bound.launch(grid_of(launcher, count), out, count)
        assert out.tolist() == [9] * count + [0] * (32 - count)


def test_an_empty_grid_launches_nothing(device: torch.device) -> None:
    out = torch.zeros(16, dtype=torch.int32, device=device)
    fill_for_test.on(device, DOUBLE=False).launch((0, 1, 1), out, 16, 1, 5)
    assert not out.any()


def test_one_launcher_per_key_whatever_the_order(device: torch.device) -> None:
    first = fill_for_test.on(device, DOUBLE=True)
    assert fill_for_test.on(device, DOUBLE=True) is first
    assert fill_for_test.on(device, DOUBLE=False) is not first
    assert first.key == {"DOUBLE": True, "TILE": first.tiles["TILE"]}
    assert str(first).startswith("fill_for_test[")
    assert "DOUBLE=True" in str(first)


@pytest.mark.parametrize("key", [{}, {"DOUBLE": True, "MORE": 1}, {"OTHER": True}])
def test_a_key_names_the_kernel_s_constants_exactly(device: torch.device, key: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="fill_for_test: key has"):
        fill_for_test.on(device, **key)


def test_types_name_the_leading_arguments() -> None:
    with pytest.raises(TypeError, match="must name the leading arguments"):
        kernel(types={"count": "i32"}, tuning={}, keys=lambda config, dialects: ())(lambda out, count: None)


@pytest.mark.parametrize(
    ("target", "tile"), [("cuda:90", 16), ("hip:gfx942", 32), ("hip:gfx950", 64), ("interpret:cpu", 16)]
)
def test_the_most_particular_tuning_is_taken(target: str, tile: int) -> None:
    assert fill_for_test.tuning_for(Target.parse(target)).tiles["TILE"] == tile


def test_a_kernel_of_one_chip_says_so() -> None:
    assert one_chip_for_test.serves(Target.parse("hip:gfx942"))
    assert not one_chip_for_test.serves(Target.parse("cuda:90"))
    with pytest.raises(ProviderError, match=r"one_chip_for_test.*found cuda:90.*legal: hip:gfx942"):
        one_chip_for_test.tuning_for(Target.parse("cuda:90"))


def test_declared_kernels_are_registered() -> None:
    names = [one.name for one in all_kernels()]
    assert "fill_for_test" in names
    assert names == sorted(names)


def test_a_tensor_of_another_type_is_refused(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("compiled launches do not look at types again")
    launcher = fill_for_test.on(device, DOUBLE=False)
    with pytest.raises(TypeError, match=r"out is declared \*i32, the tensor is \*i64"):
        launcher.launch((1, 1, 1), torch.zeros(16, dtype=torch.int64), 16, 1, 5)


def test_h1_strict_mode_names_kernel_and_key(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.zeros(16, dtype=torch.int32, device=device)
    fill_for_test._launchers.clear()
    fill_for_test.on(device, DOUBLE=False).compile()
    mark_warm()
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    before = stats()
    fill_for_test.on(device, DOUBLE=False).launch((1, 1, 1), out, 16, 1, 5)  # compiled: fine
    assert out.tolist() == [5] * 16
    with pytest.raises(ProviderError, match=r"kernel fill_for_test: found a compilation after warm-up .*DOUBLE=True"):
        fill_for_test.on(device, DOUBLE=True).launch((1, 1, 1), out, 16, 1, 6)
    assert out.tolist() == [5] * 16
    assert stats().compilations == before.compilations
    assert stats().launches == before.launches + 1
    monkeypatch.delenv(STRICT_VARIABLE)
    fill_for_test.on(device, DOUBLE=True).launch((1, 1, 1), out, 16, 1, 6)
    assert out.tolist() == [12] * 16
    assert stats().compilations == before.compilations + 1


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_h1_no_stride_count_value_or_alignment_compiles_anything(target: str) -> None:
    from swa_backend.kernels.offline import compile_only

    pool = torch.zeros(4096, dtype=torch.int32)
    with compile_only(target) as driver:
        launcher = fill_for_test.on(pool.device, DOUBLE=False)
        for first, count, stride, value in ((0, 16, 1, 1), (1, 1, 16, 0), (3, 0, 2**40, 16), (16, 2**30, 7, -5)):
            launcher.launch((1, 1, 1), pool[first:], count, stride, value)
        huge = torch.empty(2**30, dtype=torch.int32, device="meta")  # 4 GiB: AMD code could depend on that
        launcher.launch((1, 1, 1), huge, 1, 1, 1)
    assert len(driver.launches) == 5
    assert len({compiled.hash for compiled in driver.compiled}) == 1
