"""Where every lane of an interpreted kernel points, dead ones included.

Some pairs of GPU and compiler fault on a masked lane's address, or read there all the same. The interpreter touches
live lanes only, so that a kernel whose dead lanes point past a tensor computes the right result there. `every_lane`
makes it an error: loads and atomics must stay within what the launch was given with all their lanes, stores with
those that store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from swa_backend.kernels.jit import Launcher

WHOLE_STORAGE = ("pages",)  # a base address, by which the whole memory of a cache is meant


@contextmanager
def every_lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts, an interpreted launch fails that points outside the tensors it was given."""
    given: list[tuple[str, int, int]] = []
    launch = Launcher._launch_slowly
    load, store, atomic = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        InterpreterBuilder.create_atomic_rmw,
    )

    def launching(self: Launcher, grid: Any, args: tuple[Any, ...]) -> None:
        given[:] = [
            (name, *span_of(value, whole=name in WHOLE_STORAGE))
            for name, value in zip(self.kernel.types, args, strict=True)
            if isinstance(value, torch.Tensor)
        ]
        launch(self, grid, args)

    def loading(self: Any, pointers: Any, *rest: Any) -> Any:
        check(given, "a load", pointers)
        return load(self, pointers, *rest)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(given, "a store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def exchanging(self: Any, operation: Any, pointers: Any, *rest: Any) -> Any:
        check(given, "an atomic", pointers)
        return atomic(self, operation, pointers, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "_launch_slowly", launching)
        patch.setattr(InterpreterBuilder, "create_masked_load", loading)
        patch.setattr(InterpreterBuilder, "create_masked_store", storing)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", exchanging)
        yield


def span_of(tensor: torch.Tensor, *, whole: bool) -> tuple[int, int]:
    """First address and the one past the last, of a view or of its whole storage."""
    if whole:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def check(given: list[tuple[str, int, int]], what: str, pointers: Any, mask: Any = None) -> None:
    element = pointers.get_element_ty()
    size = max(element.primitive_bitwidth // 8, 1)
    first = np.asarray(pointers.data).astype(np.uint64).ravel()
    if mask is not None:
        first = first[np.broadcast_to(np.asarray(mask.data), np.shape(pointers.data)).ravel().astype(bool)]
    if not first.size:
        return
    low, high = int(first.min()), int(first.max()) + size
    if any(begin <= low and high <= end for _, begin, end in given):
        return
    inside = np.zeros(first.shape, bool)
    for _, begin, end in given:
        inside |= (first >= begin) & (first + np.uint64(size) <= end)
    if inside.all():
        return
    stray = int(first[~inside][0])
    name, begin, end = min(given, key=lambda one: min(abs(stray - one[1]), abs(stray - one[2])))
    raise AssertionError(
        f"{what} of {element} has {int((~inside).sum())} of {first.size} lanes outside every argument; the first is "
        f"{stray - begin} bytes from the start of {name}, which has {end - begin}"
    )
