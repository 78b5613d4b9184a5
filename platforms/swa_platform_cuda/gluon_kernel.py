"""Gluon kernels under the same launch layer as Triton's: `swa_backend.kernels.jit` with the other front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from triton.experimental import gluon

from swa_backend.kernels.jit import Kernel, KeySource, Tuning


class GluonKernel(Kernel):
    """A Gluon function, its argument types, its tuning, and its launchers so far."""

    def __init__(
        self, fn: Callable[..., Any], types: Mapping[str, str], tuning: Mapping[str, Tuning], keys: KeySource
    ) -> None:
        super().__init__(fn, types, tuning, keys)
        self.fn = gluon.jit(fn, do_not_specialize=list(types))


def gluon_kernel(
    *, types: Mapping[str, str], tuning: Mapping[str, Tuning], keys: KeySource
) -> Callable[[Callable[..., Any]], GluonKernel]:
    """Declare a Gluon kernel; arguments as those of `swa_backend.kernels.jit.kernel`."""
    return lambda fn: GluonKernel(fn, types, tuning, keys)
