"""Everything of Triton's inside that the launch layer touches, in one place: probed, with a slower way around it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
import triton

from swa_backend.platform import Target

log = logging.getLogger(__name__)

INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRET_TARGET = Target("interpret", "cpu")


_runtime = triton.knobs.runtime


def current_stream(index: int | None) -> int:
    """Handle of a GPU's current stream."""
    handle: int = torch._C._cuda_getCurrentRawStream(index)  # type: ignore[arg-type]
    return handle


def target_of(index: int | None) -> Target:
    """The chip of a GPU by its index, or (None) of the driver that is active without one."""
    if INTERPRETED:
        return INTERPRET_TARGET
    if index is None:
        found = triton.runtime.driver.active.get_current_target()
    else:
        with torch.cuda.device(index):
            found = triton.runtime.driver.active.get_current_target()
    return Target(found.backend, str(found.arch))


def hooked() -> bool:
    """Whether a profiler has asked to see launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def fast_path(compiled: Any) -> tuple[Any, Any, Any] | None:
    """Triton's launcher, function handle and packed metadata of a loaded kernel; None where they are not known."""
    try:
        run = compiled.run  # loads the binary
        parts = run, compiled.function, compiled.packed_metadata
    except AttributeError as error:
        _warn_once(f"{type(compiled).__name__}: {error}")
        return None
    if type(run).__name__ not in ("CudaLauncher", "HIPLauncher") or not isinstance(parts[2], tuple):
        _warn_once(f"launcher {type(run).__name__}, metadata {type(parts[2]).__name__}")
        return None
    return parts


@contextmanager
def one_parse_at_a_time() -> Iterator[None]:
    """While it lasts, threads that compile take turns at parsing kernels.

    CPython counts the depth of a syntax tree in one place for all threads: two that parse at once now and then end in
    ``SystemError: AST constructor recursion depth mismatch``.
    """
    if INTERPRETED:
        yield
        return
    parse, turn = triton.JITFunction.parse, RLock()

    def in_turn(function: Any) -> Any:
        with turn:
            return parse(function)

    triton.JITFunction.parse = in_turn
    try:
        yield
    finally:
        triton.JITFunction.parse = parse


_warned = False


def _warn_once(what: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "Triton %s is not laid out as expected (%s): kernels are launched the slow way", triton.__version__, what
        )


def check_dtypes(kernel: str, types: Mapping[str, str], args: tuple[Any, ...]) -> None:
    """Catch a tensor of another type than declared: compiled code would reinterpret its bytes silently."""
    for (name, kind), value in zip(types.items(), args, strict=True):
        if isinstance(value, torch.Tensor) and kind != (found := _POINTER_TYPES.get(value.dtype)):
            raise TypeError(f"{kernel}: {name} is declared {kind}, the tensor is {found or value.dtype}")


_POINTER_TYPES = {
    torch.bool: "*u8",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}
