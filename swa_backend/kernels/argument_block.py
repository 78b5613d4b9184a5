"""Kernel arguments in one prepared block of memory, handed to the CUDA driver as it is.

Triton's launcher takes every argument apart at every launch; here only the leading ones are written anew, by one call
of `struct`, and the block goes to ``cuLaunchKernel`` whole. That is a small part of the host time for a kernel of many
arguments.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

_CODES = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}
_END, _BUFFER_POINTER, _BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*
_SCRATCH_POINTERS = 2  # Triton appends a global and a profiling scratch pointer to every kernel
_WARP = 32


@cache
def _driver() -> Any:
    """``cuLaunchKernel``, or None where there is no CUDA driver."""
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    launch.restype = ctypes.c_int
    return launch


class ArgumentBlock:
    """The arguments of one bound kernel. Like the buffers it points to, it belongs to one thread at a time."""

    __slots__ = ("_block", "_extra", "_function", "_keep", "_launch", "_leading", "_shared", "_threads")

    def __init__(self, function: int, warps: int, shared: int, kinds: Sequence[str], values: Sequence[Any]) -> None:
        codes = [_CODES.get(kind, "Q") for kind in kinds]
        # Native alignment is that of kernel parameters, and a prefix of the format lies where the whole puts it.
        whole = struct.Struct("@" + "".join(codes) + "Q" * _SCRATCH_POINTERS)
        self._leading = [struct.Struct("@" + "".join(codes[:count])) for count in range(len(codes) + 1)]
        self._block = ctypes.create_string_buffer(whole.size)
        whole.pack_into(self._block, 0, *values, *[0] * _SCRATCH_POINTERS)
        size = ctypes.c_size_t(whole.size)
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self._block), _BUFFER_SIZE, ctypes.addressof(size), _END
        )
        self._keep = (size, extra)
        self._extra = ctypes.addressof(extra)
        self._function = function
        self._threads = warps * _WARP
        self._shared = shared
        self._launch = _driver()

    @classmethod
    def of(cls, compiled: Any, types: Mapping[str, str], values: Sequence[Any]) -> ArgumentBlock | None:
        """For a kernel that Triton has loaded; None if it needs more than a plain launch, or looks unfamiliar."""
        try:
            run, meta, function = compiled.run, compiled.metadata, compiled.function
            plain = (
                type(run).__name__ == "CudaLauncher"
                and run.num_ctas == 1
                and not (run.launch_cooperative_grid or run.launch_pdl)
                and not (run.global_scratch_size or run.profile_scratch_size)
                and not getattr(run, "gsan_enabled", False)  # a sanitizer of later versions adds arguments
                and all(kind in _CODES or kind.startswith("*") for kind in types.values())
            )
            warps, shared = meta.num_warps, meta.shared
        except AttributeError:
            return None
        if not plain or not isinstance(function, int) or _driver() is None:
            return None
        return cls(function, warps, shared, tuple(types.values()), values)

    def launch(self, grid: tuple[int, int, int], stream: int, leading: Sequence[Any]) -> bool:
        """Launch with other leading arguments; False if the driver refused, and nothing was launched.

        Addresses are taken as they are, tensors take a little longer.
        """
        form = self._leading[len(leading)]
        try:
            form.pack_into(self._block, 0, *leading)
        except (struct.error, TypeError):  # tensors among them
            form.pack_into(
                self._block, 0, *[value.data_ptr() if hasattr(value, "data_ptr") else value for value in leading]
            )
        x, y, z = grid
        status: int = self._launch(
            self._function, x, y, z, self._threads, 1, 1, self._shared, stream, None, self._extra
        )
        return status == 0
