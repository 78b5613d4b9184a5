"""Prepared argument blocks: byte for byte what a C structure of the same arguments holds, and when to do without."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.kernels import argument_block, jit, triton_internals
from swa_backend.kernels.argument_block import ArgumentBlock
from swa_backend.kernels.jit import Launcher, Tuning, stats
from swa_backend.kernels.metadata import ALL_GROUP_TYPES, BUFFER_TYPES, STEP_TYPES
from swa_backend.platform import Target
from tests.kernels.test_jit import fill_for_test

C_TYPES = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}
SIGNATURES = {
    "one": ["i32"],
    "pointers": ["*i32", "*u8", "*bf16"],
    "odd numbers before wide ones": ["i32", "i64", "i32", "*i32", "u32", "u32", "i64", "fp32", "*u8"],
    "wide ones first": ["*i32", "i64", "i32"],
    "every kind": ["i32", "u32", "i64", "u64", "fp32", "*fp32"],
    "the metadata kernel": list({**STEP_TYPES, **ALL_GROUP_TYPES, **BUFFER_TYPES}.values()),
}


class FakeDriver:
    """In place of ``cuLaunchKernel``: keeps what it was given, and the block as the driver would read it."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []
        self.block = b""

    def __call__(self, *args: Any) -> int:
        self.calls.append(args)
        assert args[9] is None, "either parameters or extra, never both"
        extra = (ctypes.c_void_p * 5).from_address(args[10])
        assert (extra[0], extra[2], extra[4]) == (1, 2, None)  # CU_LAUNCH_PARAM_BUFFER_POINTER, .._SIZE, .._END
        size = ctypes.c_size_t.from_address(extra[3] or 0).value
        self.block = ctypes.string_at(extra[1] or 0, size)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(argument_block, "_driver", lambda: fake)
    return fake


def values_of(kinds: Sequence[str], seed: int) -> list[Any]:
    """Numbers that show a wrong place or width: large ones, negative ones, all different."""
    found: list[Any] = []
    for at, kind in enumerate(kinds):
        number = 1 + at + 1000 * seed
        found.append(
            {
                "i32": -number,
                "u32": 2**32 - number,
                "i64": -(2**40) - number,
                "u64": 2**64 - number,
                "fp32": number + 0.5,
            }.get(kind, 0x7F00_0000_0000 + 256 * number)
        )
    return found


def as_structure(kinds: Sequence[str], values: Sequence[Any]) -> bytes:
    fields = [(f"field{at}", C_TYPES.get(kind, ctypes.c_uint64)) for at, kind in enumerate([*kinds, "*", "*"])]
    kind = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    # Padding between the arguments means nothing: bytes of a structure of zeros.
    return bytes(kind(*values, 0, 0))


@pytest.mark.parametrize("kinds", SIGNATURES.values(), ids=SIGNATURES)
def test_a_block_is_the_structure_of_its_arguments(driver: FakeDriver, kinds: list[str]) -> None:
    first = values_of(kinds, 0)
    block = ArgumentBlock(1234, 4, 99, kinds, first)
    assert block.launch((5, 6, 7), 77, first)
    assert driver.calls[-1][:9] == (1234, 5, 6, 7, 128, 1, 1, 99, 77)
    assert driver.block == as_structure(kinds, first)
    # Any number of leading arguments anew; those behind keep their first values.
    for count in range(len(kinds) + 1):
        other = values_of(kinds, count + 1)
        block = ArgumentBlock(1234, 4, 99, kinds, first)
        assert block.launch((1, 1, 1), 0, other[:count])
        assert driver.block == as_structure(kinds, other[:count] + first[count:])


def test_leading_tensors_are_passed_by_address(driver: FakeDriver) -> None:
    kinds = ["*i32", "i32", "*i32", "i64"]
    a, b = torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    block = ArgumentBlock(1, 1, 0, kinds, [0, 0, 0, 9])
    assert block.launch((1, 1, 1), 0, (a, -3, b))
    assert driver.block == as_structure(kinds, [a.data_ptr(), -3, b.data_ptr(), 9])
    assert block.launch((1, 1, 1), 0, (a.data_ptr(), 4))
    assert driver.block == as_structure(kinds, [a.data_ptr(), 4, b.data_ptr(), 9])


def test_a_number_that_does_not_fit_is_an_error_and_no_launch(driver: FakeDriver) -> None:
    block = ArgumentBlock(1, 1, 0, ["i32", "i32"], [0, 0])
    with pytest.raises(struct.error):
        block.launch((1, 1, 1), 0, (2**31,))
    assert not driver.calls


def test_a_driver_that_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_block, "_driver", lambda: FakeDriver(status=400))
    assert not ArgumentBlock(1, 1, 0, ["i32"], [0]).launch((1, 1, 1), 0, (3,))


class CudaLauncher:
    """Named and laid out like Triton's, for a kernel that needs nothing but a plain launch."""

    num_ctas = 1
    launch_cooperative_grid = launch_pdl = False
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, **changes: Any) -> None:
        self.__dict__.update(changes)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


def compiled_by(run: Any, function: Any = 4321) -> Any:
    meta = SimpleNamespace(num_warps=2, shared=16)
    return SimpleNamespace(run=run, metadata=meta, function=function, packed_metadata=(2, 1, 16))


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "change",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"gsan_enabled": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_kernel_that_needs_more_than_a_plain_launch_gets_no_block(change: dict[str, Any]) -> None:
    types = {"count": "i32"}
    assert ArgumentBlock.of(compiled_by(CudaLauncher()), types, [1]) is not None
    assert ArgumentBlock.of(compiled_by(CudaLauncher(**change)), types, [1]) is None


@pytest.mark.usefixtures("driver")
def test_what_looks_unfamiliar_gets_no_block() -> None:
    class HIPLauncher(CudaLauncher):
        pass

    types = {"count": "i32"}
    bare = compiled_by(CudaLauncher())
    del bare.metadata
    for compiled in (compiled_by(HIPLauncher()), compiled_by(CudaLauncher(), object()), bare, None, object()):
        assert ArgumentBlock.of(compiled, types, [1]) is None


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("kind", ["i1", "i8", "u16", "fp16", "bf16", "fp64"])
def test_a_number_of_another_width_gets_no_block(kind: str) -> None:
    assert ArgumentBlock.of(compiled_by(CudaLauncher()), {"count": "i32", "scale": kind}, [1, 1]) is None


def test_without_a_driver_there_is_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_block, "_driver", lambda: None)
    assert ArgumentBlock.of(compiled_by(CudaLauncher()), {"count": "i32"}, [1]) is None


# The launch layer around it, on a machine whose only device is a pretence


class OnDevice:
    """A loaded launcher of device 0: no GPU takes part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.current = 0
        self.run = CudaLauncher(**changes)
        self.slow: list[tuple[Any, ...]] = []
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        monkeypatch.setattr(jit, "current_stream", lambda index: 70 + index)
        monkeypatch.setattr(jit, "hooked", lambda: False)
        monkeypatch.setattr(Launcher, "_launch_slowly", lambda launcher, grid, args: self.slow.append((grid, args)))
        monkeypatch.setattr(torch.cuda, "device", lambda index: _Switch(self, index))
        key = {"DOUBLE": False, "TILE": 16}
        self.launcher = Launcher(fill_for_test, Target.parse("cuda:90"), 0, key, Tuning(2, 1, tiles={"TILE": 16}))
        compiled = compiled_by(self.run)
        self.launcher._compiled = compiled
        self.launcher._fast = triton_internals.fast_path(compiled)
        self.launcher._ready = True


class _Switch:
    def __init__(self, owner: OnDevice, index: int) -> None:
        self.owner, self.index, self.before = owner, index, owner.current

    def __enter__(self) -> None:
        self.owner.current = self.index

    def __exit__(self, *error: object) -> None:
        self.owner.current = self.before


TYPES = ["*i32", "i32", "i64", "i32"]  # of fill_for_test


def test_a_bound_kernel_goes_to_the_driver_at_once(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    on = OnDevice(monkeypatch)
    bound = on.launcher.bind(5, 2**40, 9)
    before = stats().launches
    bound.launch((3, 1, 1), 0x1000)
    bound.launch((4, 1, 1), 0x2000)
    assert [call[:9] for call in driver.calls] == [
        (4321, 3, 1, 1, 64, 1, 1, 16, 70),
        (4321, 4, 1, 1, 64, 1, 1, 16, 70),
    ]
    assert driver.block == as_structure(TYPES, [0x2000, 5, 2**40, 9])
    bound.launch((1, 1, 1), 0x3000, -8, 6)  # some that were bound, anew
    assert driver.block == as_structure(TYPES, [0x3000, -8, 6, 9])
    assert not on.run.calls
    assert not on.slow
    assert stats().launches == before + 3


@pytest.mark.parametrize("why", ["refused", "no block", "another device"])
def test_a_bound_kernel_falls_back_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, why: str
) -> None:
    on = OnDevice(monkeypatch, **({"launch_pdl": True} if why == "no block" else {}))
    driver.status = 1 if why == "refused" else 0
    on.current = 1 if why == "another device" else 0
    bound = on.launcher.bind(5, 2**40, 9)
    before = stats().launches
    for pointer in (0x1000, 0x2000):
        bound.launch((3, 1, 1), pointer)
        grid_stream_function = (3, 1, 1, 70, 4321)
        assert on.run.calls[-1] == (
            *grid_stream_function, (2, 1, 16), None, None, None, pointer, 5, 2**40, 9, False, 16,
        )  # fmt: skip
    assert len(on.run.calls) == 2
    assert len(driver.calls) == (2 if why == "refused" else 0)
    assert stats().launches == before + 2


def test_a_profiler_s_hooks_take_triton_s_own_path(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    on = OnDevice(monkeypatch)
    bound = on.launcher.bind(5, 6, 9)
    monkeypatch.setattr(jit, "hooked", lambda: True)
    bound.launch((3, 1, 1), 0x1000)
    on.launcher.launch((2, 1, 1), 1, 2, 3, 4)
    assert on.slow == [((3, 1, 1), (0x1000, 5, 6, 9)), ((2, 1, 1), (1, 2, 3, 4))]
    assert not driver.calls
    assert not on.run.calls


def test_a_triton_that_looks_different_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_internals, "_warned", False)

    class NewLauncher(CudaLauncher):
        pass

    strange = compiled_by(CudaLauncher())
    strange.packed_metadata = b"opaque"
    for compiled in (compiled_by(NewLauncher()), strange, object()):
        assert triton_internals.fast_path(compiled) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NewLauncher" in caplog.text
    assert "launched the slow way" in caplog.text
