"""One check for every fault of Triton's interpreter that is repaired: a small kernel and its right result.

Run as a module without the repairs it prints the names of the checks that fail, one a line.
"""
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

N = 16
CHECKS: dict[str, Callable[[], bool]] = {}


def check(function: Callable[[], bool]) -> Callable[[], bool]:
    CHECKS[function.__name__] = function
    return function


@triton.jit
def arithmetic(a, b, added, multiplied, less, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(added + i, x + y)
    tl.store(multiplied + i, -x * y)
    tl.store(less + i, ((x < y) & (y > 0)).to(tl.int32))


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()


def _arithmetic() -> tuple[torch.Tensor, ...]:
    a, b = _bf16(2, N)
    added, multiplied, less = torch.zeros_like(a), torch.zeros_like(a), torch.zeros(N, dtype=torch.int32)
    arithmetic[(1,)](a, b, added, multiplied, less, N)
    return a, b, added, multiplied, less


@check
def bf16_sum() -> bool:
    a, b, added, _, _ = _arithmetic()
    return torch.equal(added, a + b)


@check
def bf16_product() -> bool:
    a, b, _, multiplied, _ = _arithmetic()
    return torch.equal(multiplied, -a * b)


@check
def bf16_comparison() -> bool:
    a, b, _, _, less = _arithmetic()
    return torch.equal(less.bool(), (a < b) & (b > 0))


@triton.jit
def product(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@check
def bf16_dot() -> bool:
    a, b = _bf16(2, N, N)
    c = torch.zeros(N, N)
    product[(1,)](a, b, c, N)
    return torch.allclose(c.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-5)


@triton.jit
def convert(a, b, TO: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(b + i, tl.load(a + i).to(TO))


@check
def fp32_to_bf16_rounds_to_even() -> bool:
    # The last kept bit is odd, even; more than half; a carry into the exponent.
    a = torch.tensor([1 + 3 / 256, 1 + 1 / 256, 1 + 1.01 / 256, 2 - 1 / 512] * 4)
    b = torch.zeros(N, dtype=torch.bfloat16)
    convert[(1,)](a, b, tl.bfloat16, N)
    return b.tolist() == [1 + 4 / 256, 1.0, 1 + 2 / 256, 2.0] * 4


@triton.jit
def from_code(codes, values, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(values + i, tl.load(codes + i).to(KIND, bitcast=True).to(tl.float32))


@triton.jit
def to_code(values, codes, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(codes + i, tl.load(values + i).to(KIND).to(tl.uint8, bitcast=True))


@check
def e4m3_nan_is_nan() -> bool:
    codes = torch.tensor([0x7F, 0xFF] * 8, dtype=torch.uint8)
    values = torch.zeros(N)
    from_code[(1,)](codes, values, tl.float8e4nv, N)
    return bool(values.isnan().all())


def _codes(values: list[float], kind: tl.constexpr) -> list[int]:
    codes = torch.zeros(N, dtype=torch.uint8)
    to_code[(1,)](torch.tensor(values * (N // len(values))), codes, kind, N)
    return [int(code) for code in codes[: len(values)]]


@check
def fp32_to_e4m3_carries_into_the_exponent() -> bool:
    return _codes([1.96875, -15.9], tl.float8e4nv) == [0x40, 0xD8]  # 2, -16


@check
def fp32_to_e4m3_rounds_ties_to_even() -> bool:
    return _codes([1.0625, 1.1875], tl.float8e4nv) == [0x38, 0x3A]  # 1, 1.25


@check
def fp32_to_e4m3_saturates() -> bool:
    return _codes([1000.0, -465.0], tl.float8e4nv) == [0x7E, 0xFE]  # +-448


@check
def fp32_to_e4m3_subnormal() -> bool:
    return _codes([2.0**-9, 1.5 * 2.0**-9, 2.0**-10, 2.0**-6 - 2.0**-12], tl.float8e4nv) == [1, 2, 0, 8]


@triton.jit
def nan_operands(a, b, low, high, bounded, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(low + i, tl.minimum(x, y))
    tl.store(high + i, tl.maximum(x, y))
    tl.store(bounded + i, tl.clamp(x, -1.0, 1.0))


def _nan_operands() -> tuple[list[float], ...]:
    a, b = torch.tensor([float("nan"), 3.0] * 8), torch.tensor([2.0, float("nan")] * 8)
    outputs = [torch.zeros(N) for _ in range(3)]
    nan_operands[(1,)](a, b, *outputs, N)
    return tuple(output[:2].tolist() for output in outputs)


@check
def minimum_and_maximum_skip_nan() -> bool:
    low, high, _ = _nan_operands()
    return low == high == [2.0, 3.0]


@check
def clamp_of_nan_is_a_bound() -> bool:
    return _nan_operands()[2] == [-1.0, 1.0]


@triton.jit
def one_bit(a, b, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i) > 0
    tl.store(b + i, (x + x).to(tl.int32))


@check
def int1_wraps() -> bool:
    b = torch.full((N,), 7, dtype=torch.int32)
    one_bit[(1,)](torch.ones(N, dtype=torch.int32), b, N)
    return not b.any()


@triton.jit
def shift(a, b, N: tl.constexpr):
    i = tl.arange(0, N)
    by = tl.load(b + i).to(tl.uint32)
    shifted = tl.load(a + i) >> (by & 1)
    big = by + 0x80000000
    moved = tl.load(a + i) >> big
    tl.store(a + i, shifted)
    tl.store(b + i, (big >> 31).to(tl.int32) + 0 * moved)


@check
def shifts_keep_the_type_of_their_operands() -> bool:
    a, b = torch.full((N,), -8, dtype=torch.int32), torch.full((N,), 3, dtype=torch.int32)
    shift[(1,)](a, b, N)
    return a.tolist() == [-4] * N and b.tolist() == [1] * N


def declare(**types: str) -> Callable[[Callable[..., None]], triton.JITFunction]:
    """``triton.jit`` with declared argument types, as `swa_backend.kernels.jit` declares them."""

    def decorate(function: Callable[..., None]) -> triton.JITFunction:
        function.__annotations__.update(types)
        return triton.jit(function)

    return decorate


@declare(out="*i64", seen="*u8", stride="i64", count="i32")
def declared(out, seen, stride, count):
    tl.store(out, stride * count)
    tl.store(out + 1, tl.load(seen).to(tl.int64) + 1)


@check
def numbers_have_their_declared_type() -> bool:
    out = torch.zeros(2, dtype=torch.int64)
    declared[(1,)](out, torch.ones(1, dtype=torch.uint8), 1_435_968, 3000)
    return int(out[0]) == 1_435_968 * 3000


@check
def bytes_have_their_declared_type() -> bool:
    out = torch.zeros(2, dtype=torch.int64)
    seen = torch.full((1,), 200, dtype=torch.uint8)
    declared[(1,)](out, seen.view(torch.int8), 1, 1)
    return int(out[1]) == 201


if __name__ == "__main__":
    for name, function in CHECKS.items():
        try:
            right = function()
        except Exception:  # a fault may also show as an error inside the interpreter
            right = False
        if not right:
            print(name)
