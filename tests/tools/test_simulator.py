"""The simulator computes what the chip would, and refuses what the chip would not forgive."""
# ruff: noqa: N803

import re
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tests.tools.simulator import SimulationError, simulate, why_not  # noqa: E402
from tests.tools.simulator.build import SimulatedKernel  # noqa: E402

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.simulate,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
TARGETS = ("hip:gfx942", "hip:gfx950")


@triton.jit
def reduce_and_scan(values, total, largest, running, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(values + i, mask=i < N - 3, other=0)
    tl.store(total, tl.sum(v, 0))
    tl.atomic_max(largest, tl.max(v, 0))
    tl.store(running + i, tl.cumsum(v, 0), mask=i % 2 == 0)


def _reduce(n=512):
    values = torch.randint(-1000, 1000, (n,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    total, largest = torch.zeros(1, dtype=torch.int32), torch.full((1,), -5000, dtype=torch.int32)
    running = torch.full((n,), 7, dtype=torch.int32)
    reduce_and_scan[(1,)](values, total, largest, running, n)
    return values, total, largest, running


@triton.jit
def rows_of_their_own(values, sums, stride, N: tl.constexpr):
    row = tl.program_id(0)
    v = tl.load(values + row * stride + tl.arange(0, N))
    tl.store(sums + row, tl.sum(v, 0))


@pytest.mark.parametrize("target", TARGETS)
def test_every_program_may_have_a_buffer_of_its_own_and_sum_floats(target):
    """300 base addresses, and float lanes that are moved as they are."""
    values = torch.randint(-50, 50, (300, 64), generator=torch.Generator().manual_seed(4)).float()
    sums = torch.full((300,), -1.0)
    with simulate(target):
        rows_of_their_own[(300,)](values, sums, 64, 64)
    assert torch.equal(sums, values.sum(1))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("backwards", [False, True])
def test_integers_are_exact(target, backwards):
    with simulate(target, backwards=backwards) as driver:
        values, total, largest, running = _reduce()
    assert driver.launches == [("reduce_and_scan", (1, 1, 1))]
    values[-3:] = 0
    expected = values.cumsum(0).int()
    assert total.item() == values.sum()
    assert largest.item() == values.max()
    assert torch.equal(running[::2], expected[::2])
    assert (running[1::2] == 7).all()


@triton.jit
def programs(out, columns):
    row, column = tl.program_id(0), tl.program_id(1)
    tl.atomic_add(out + row * columns + column, row * 10 + column + 100 * tl.num_programs(1))


def test_every_program_runs_once():
    out = torch.zeros(3, 5, dtype=torch.int32)
    with simulate(TARGETS[0]):
        programs[(3, 5)](out, 5)
    assert torch.equal(out, torch.arange(3)[:, None].int() * 10 + torch.arange(5).int() + 500)


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(left, right, input_precision="ieee"))


FORMATS = {
    torch.float32: TARGETS,
    torch.float16: TARGETS,
    torch.bfloat16: TARGETS,
    torch.float8_e4m3fnuz: TARGETS[:1],
    torch.float8_e5m2fnuz: TARGETS[:1],
    torch.float8_e4m3fn: TARGETS[1:],
    torch.float8_e5m2: TARGETS[1:],
}


@pytest.mark.parametrize(("dtype", "target"), [(dtype, t) for dtype, targets in FORMATS.items() for t in targets])
@pytest.mark.parametrize("shape", [(16, 16, 128), (64, 32, 64)])
def test_matrix_product(dtype, target, shape):
    m, n, k = shape
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(m, k, generator=generator).to(dtype), torch.randn(k, n, generator=generator).to(dtype)
    c = torch.zeros(m, n)
    with simulate(target) as driver:
        product[(1,)](a, b, c, m, n, k)
    assert "llvm.amdgcn.mfma" in driver.compiled[0].asm["llir"]
    expected = a.double() @ b.double()
    assert ((c - expected).abs() <= 1e-6 * (a.double().abs() @ b.double().abs())).all()


@triton.jit
def codes_of(values, codes, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(codes + i, tl.load(values + i).to(KIND).to(tl.uint8, bitcast=True))


@triton.jit
def values_of(codes, values, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(values + i, tl.load(codes + i).to(KIND, bitcast=True).to(tl.float32))


DIALECTS = [("hip:gfx942", torch.float8_e4m3fnuz, tl.float8e4b8), ("hip:gfx950", torch.float8_e4m3fn, tl.float8e4nv)]


@pytest.mark.parametrize(("target", "dtype", "kind"), DIALECTS)
def test_every_fp8_code_of_the_chips_own_dialect(target, dtype, kind):
    codes, values = torch.arange(256, dtype=torch.uint8), torch.zeros(256)
    with simulate(target):
        values_of[(1,)](codes, values, kind, 256)
    assert torch.equal(values.nan_to_num(777.0), codes.view(dtype).float().nan_to_num(777.0))


@pytest.mark.parametrize(("target", "dtype", "kind"), DIALECTS)
def test_fp8_rounding(target, dtype, kind):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2  # ties, and a bit to either side
    values = torch.cat((finite, between, between * (1 + 2.0**-20), between * (1 - 2.0**-20)))
    values = torch.nn.functional.pad(values, (0, 1024 - len(values)))
    found = torch.zeros(1024, dtype=torch.uint8)
    with simulate(target):
        codes_of[(1,)](values, found, kind, 1024)
    assert torch.equal(found.view(dtype).float(), values.to(dtype).float())


@triton.jit
def center(values, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(values + i)
    v -= tl.max(v, 0)
    tl.store(values + i, v + tl.sum(v, 0))


def _altered(change):
    """The `center` kernel with its code changed, and an argument for it."""
    values = torch.arange(512, dtype=torch.int32)
    with simulate(TARGETS[0]) as driver:
        center[(1,)](values, 512)
    compiled = driver.compiled[0]
    return SimpleNamespace(asm={"llir": change(compiled.asm["llir"])}, metadata=compiled.metadata), values


BARRIER = re.compile(r"^  (?:tail )?call void @llvm\.amdgcn\.s\.barrier\(\).*\n", re.M)


def test_any_missing_barrier_is_a_race():
    kernel, values = _altered(lambda ir: ir)
    text = kernel.asm["llir"]
    barriers = list(BARRIER.finditer(text))
    assert len(barriers) >= 3
    SimulatedKernel(kernel).run((1, 1, 1), [values.data_ptr()])
    for barrier in barriers:
        kernel.asm["llir"] = text[: barrier.start()] + text[barrier.end() :]
        for backwards in (False, True):
            values.copy_(torch.arange(512))
            with pytest.raises(SimulationError, match="race: wave"):
                SimulatedKernel(kernel).run((1, 1, 1), [values.data_ptr()], backwards=backwards)


ODD_LANES_WAIT = """{
  %item = call i32 @llvm.amdgcn.workitem.id.x()
  %odd = trunc i32 %item to i1
  br i1 %odd, label %wait, label %end
wait:
  call void @llvm.amdgcn.s.barrier()
  br label %end
end:
  call void @llvm.amdgcn.s.barrier()
  ret void
}
"""


def test_a_barrier_that_not_all_reach_is_refused():
    kernel, values = _altered(lambda ir: re.sub(r"\{\n.*?\n\}\n", lambda _: ODD_LANES_WAIT, ir, count=1, flags=re.S))
    with pytest.raises(SimulationError, match="barrier in a branch"):
        SimulatedKernel(kernel).run((1, 1, 1), [values.data_ptr()])


ODD_LANES_VOTE_FIRST = """{
  %item = call i32 @llvm.amdgcn.workitem.id.x()
  %odd = trunc i32 %item to i1
  %at = getelementptr i64, ptr addrspace(1) %0, i32 %item
  br i1 %odd, label %then, label %join
join:
  %first = phi i64 [ 0, %entry ], [ %vote, %then ]
  %all = call i64 @llvm.amdgcn.ballot.i64(i1 true)
  %sum = add i64 %first, %all
  store i64 %sum, ptr addrspace(1) %at, align 8
  ret void
then:
  %vote = call i64 @llvm.amdgcn.ballot.i64(i1 true)
  br label %join
}
declare i64 @llvm.amdgcn.ballot.i64(i1)
""".replace("{\n", "{\nentry:\n", 1)


def test_a_wave_finishes_a_branch_before_it_goes_on_together():
    body = re.compile(r"\{\n.*?\n\}\n", re.S)
    kernel, _ = _altered(lambda ir: body.sub(lambda _: ODD_LANES_VOTE_FIRST, ir, count=1))
    votes = torch.zeros(256, dtype=torch.int64)
    SimulatedKernel(kernel).run((1, 1, 1), [votes.data_ptr()])
    odd = 0x5555555555555555 * 2 - (1 << 64)  # as a signed number
    assert votes.tolist() == [-1, odd - 1] * 128


KEEP_FOR_LATER = """{
entry:
  %item = call i32 @llvm.amdgcn.workitem.id.x()
  %at = getelementptr bfloat, ptr addrspace(1) %0, i32 %item
  %x = load <1 x bfloat>, ptr addrspace(1) %at, align 2
  %odd = trunc i32 %item to i1
  br i1 %odd, label %then, label %join
then:
  %vote = call i64 @llvm.amdgcn.ballot.i64(i1 true)
  br label %join
join:
  store <1 x bfloat> %x, ptr addrspace(1) %at, align 2
  ret void
}
declare i64 @llvm.amdgcn.ballot.i64(i1)
"""


def test_moved_bf16_codes_stay_as_they_are():
    """NaN codes too, quiet or not, although the CPU keeps bf16 numbers as fp32 from block to block."""
    body = re.compile(r"\{\n.*?\n\}\n", re.S)
    kernel, _ = _altered(lambda ir: body.sub(lambda _: KEEP_FOR_LATER, ir, count=1))
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    simulated = SimulatedKernel(kernel)
    for part in (kept := codes.clone()).split(256):
        simulated.run((1, 1, 1), [part.data_ptr()])
    assert torch.equal(kept, codes)


def test_what_is_not_simulated_is_named():
    kernel, _ = _altered(lambda ir: ir.replace("llvm.amdgcn.readlane.i32", "llvm.amdgcn.readlanes.i32"))
    with pytest.raises(SimulationError, match=r"not simulated: readlanes\.i32"):
        SimulatedKernel(kernel)


def test_other_chips_are_refused():
    with pytest.raises(SimulationError, match="cuda:90 is not simulated"), simulate("cuda:90"):
        pass


@triton.jit
def add_into_pages(pages, index, stride, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(pages + index * stride + i, i.to(tl.uint8))


def test_addresses_beyond_two_gigabytes():
    """64-bit offsets reach the far end of a large allocation (untouched pages cost no memory)."""
    pages = torch.empty(5 << 30, dtype=torch.uint8)
    with simulate(TARGETS[0]):
        add_into_pages[(1,)](pages, 1, (4 << 30) + 7, 64)
    start = (4 << 30) + 7
    assert pages[start : start + 64].tolist() == list(range(64))
