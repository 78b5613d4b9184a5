"""Repairs of Triton's CPU interpreter, for tests only: without them it computes something else than a GPU.

The interpreter keeps bf16 as ``uint16`` and fp8 as ``uint8`` arrays of bit patterns, and forgets about it in places.
Repaired, for Triton 3.6.0 to 3.9.0 (some faults are gone in 3.9):

* arithmetic, comparison, ``tl.dot`` and conversion of bf16 and fp8 compute on values, not on bit patterns,
* fp32 is rounded to bf16 and fp8 to nearest even, with the carry into the exponent; fp8 saturates as ``cvt.satfinite``,
* NaN codes of e4m3 decode to NaN (0x7F was 480),
* ``tl.minimum`` and ``tl.maximum`` return the operand that is not NaN, ``tl.clamp`` a bound,
* ``int1`` wraps around like any integer instead of saturating,
* shifting right does not change the type of its operands for later uses,
* arguments get the types that the kernel declares (a small ``i64`` was computed with as ``i32``),
* the language is prepared once a launch, not at every call of a device function: half of the time of some tests.

Everything is patched on the interpreter's classes: kernels declared before or after `apply` are interpreted alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_builder = interpreter.InterpreterBuilder
_handle = interpreter.TensorHandle

TORCH_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # what torch.from_numpy takes, by size in bytes
POINTED_TO = {"u8": torch.uint8, "i8": torch.int8}  # what a tensor of another one-byte type is declared as

_applied = False


def apply() -> None:
    """Repair the interpreter of this process; again: nothing."""
    global _applied
    if _applied:
        return
    _applied = True
    _repair_formats()
    _repair_nan_operands()
    _repair_integers()
    _repair_arguments()
    _repair_cost()


def decode(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """Values of a float format's bit patterns, as float32 (fp64: float64)."""
    raw = np.ascontiguousarray(bits)
    values = torch.from_numpy(raw.view(BITS[raw.itemsize])).view(TORCH_TYPES[dtype.name])
    wide: np.ndarray = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32).numpy()
    return wide.reshape(np.shape(bits))


def encode(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Bit patterns (as the interpreter stores them) of values rounded to nearest even; fp8 saturates."""
    wide = torch.from_numpy(np.ascontiguousarray(values))
    kind = TORCH_TYPES[dtype.name]
    if kind.itemsize == 1:
        wide = wide.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
    narrow = wide.to(kind).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize])
    bits: np.ndarray = narrow.numpy().view(interpreter._get_np_dtype(dtype))
    return bits.reshape(np.shape(values))


def _is_pattern(dtype: Any) -> bool:
    """Whether the interpreter keeps a type as bit patterns."""
    return dtype.is_floating() and dtype.name in TORCH_TYPES and dtype.name not in ("fp16", "fp32", "fp64")


def _values(handle: Any) -> np.ndarray:
    dtype = handle.dtype.scalar
    return decode(handle.data, dtype) if _is_pattern(dtype) and handle.data.dtype != np.bool_ else handle.data


def _wrap(values: np.ndarray, dtype: Any) -> Any:
    """A handle of ``dtype`` for computed values; comparisons give int1."""
    if values.dtype == np.bool_:
        return _handle(values, tl.int1)
    return _handle(encode(values, dtype), dtype)


def _repair_formats() -> None:
    convert, binary, unary, cast, dot = (
        interpreter._convert_float,
        _builder.binary_op,
        _builder.unary_op,
        _builder.cast_impl,
        _builder.create_dot,
    )

    def convert_float(bits: Any, source: Any, target: Any, rounding: Any) -> Any:
        toward_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source.name not in TORCH_TYPES or target.name not in TORCH_TYPES or toward_zero:
            return convert(bits, source, target, rounding)
        return encode(decode(bits, source), target)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        dtype = lhs.dtype.scalar
        if not dtype.is_ptr() and _is_pattern(dtype):
            return _wrap(op(_values(lhs), _values(rhs)), dtype)
        return binary(self, lhs, rhs, op)

    def unary_op(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
        if _is_pattern(arg.dtype.scalar):
            return _wrap(op(_values(arg)), arg.dtype.scalar)
        return unary(self, arg, op)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        to = target.scalar
        if _is_pattern(to):
            return _handle(encode(_values(source).astype(np.float32), to), to)
        if _is_pattern(source.dtype.scalar):
            return _handle(_values(source).astype(interpreter._get_np_dtype(to)), to)
        return cast(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        if not acc.dtype.scalar.is_floating():
            return dot(self, a, b, acc, *rest)
        product = np.matmul(_values(a).astype(np.float32), _values(b).astype(np.float32))
        dtype = acc.dtype.scalar
        if _is_pattern(dtype):
            return _wrap(product + _values(acc), dtype)
        return _handle((product + acc.data).astype(acc.data.dtype), dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        exact = _values(x).astype(np.float64) * _values(y).astype(np.float64) + _values(z)
        return _wrap(exact, dtype) if _is_pattern(dtype) else _handle(exact.astype(z.data.dtype), dtype)

    interpreter._convert_float = convert_float
    _builder.binary_op, _builder.unary_op, _builder.cast_impl = binary_op, unary_op, cast_impl
    _builder.create_dot, _builder.create_fma = create_dot, create_fma
    # Missing before 3.9: constants of bf16.
    _builder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)


def _repair_nan_operands() -> None:
    def create_clampf(self: Any, arg: Any, low: Any, high: Any, propagate: Any) -> Any:
        if propagate == interpreter._ir.PROPAGATE_NAN.NONE:
            return self.binary_op(self.binary_op(arg, low, np.fmax), high, np.fmin)
        return self.binary_op(self.binary_op(arg, low, np.maximum), high, np.minimum)

    _builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    _builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    _builder.create_clampf = create_clampf


def _repair_integers() -> None:
    binary = _builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if lhs.data.dtype == np.bool_ and rhs.data.dtype == np.bool_:
            wide = op(lhs.data.astype(np.int8), rhs.data.astype(np.int8))
            return _handle((wide & 1).astype(np.bool_), tl.int1)
        return binary(self, lhs, rhs, op)

    def create_ashr(self: Any, lhs: Any, rhs: Any) -> Any:
        signed = [_handle(h.data.astype(interpreter._get_signed_np_dtype(h.data.dtype)), h.dtype) for h in (lhs, rhs)]
        return self.binary_op(*signed, np.right_shift)

    _builder.binary_op, _builder.create_ashr = binary_op, create_ashr


def _repair_arguments() -> None:
    function = interpreter.InterpretedFunction
    run = function.run

    def run_with_types(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        declared = self.fn.__annotations__
        typed = [_as_declared(declared.get(name), value) for name, value in zip(self.arg_names, args, strict=False)]
        named = {name: _as_declared(declared.get(name), value) for name, value in kwargs.items()}
        return run(self, *typed, grid=grid, warmup=warmup, **named)

    function.run = run_with_types


def _repair_cost() -> None:
    """Every call of a device function prepares the language again, at a cost of more than what most of them compute;
    once a launch and module is enough."""
    prepare, prepared = interpreter._patch_lang, set()

    def prepare_once(fn: Any) -> Any:
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if languages <= prepared:
            return interpreter._LangPatchScope()
        scope = prepare(fn)
        prepared.update(languages)
        restore = scope.restore

        def forget() -> None:
            prepared.clear()
            restore()

        scope.restore = forget
        return scope

    interpreter._patch_lang = prepare_once


def _as_declared(kind: Any, value: Any) -> Any:
    """An argument as compiled code would see it: numbers of the declared type, bytes as the declared bytes."""
    if not isinstance(kind, str):
        return value
    if isinstance(value, torch.Tensor) and kind.startswith("*"):
        wanted = POINTED_TO.get(kind[1:])
        return value if wanted is None or value.dtype == wanted else value.view(wanted)
    if isinstance(value, (bool, int, float)) and not kind.startswith("*") and "constexpr" not in kind:
        dtype = tl.str_to_ty(kind, None)
        return tl.tensor(_handle(np.array([value]).astype(interpreter._get_np_dtype(dtype)), dtype), dtype)
    return value
