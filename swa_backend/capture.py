"""Which graph capture, if any, a launch would go to now."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_UNKNOWN = -1


def capture_id(tensor: torch.Tensor) -> int:
    """Number of the capture that the current stream of a tensor's device is in, 0 outside of any.

    Every capture has a number of its own, also two of the same metadata; only where the driver does not tell them are
    all of them -1.
    """
    if not tensor.is_cuda:
        return 0
    stream = torch._C._cuda_getCurrentRawStream(tensor.get_device())
    # The default stream cannot be captured; to ask the driver about another costs microseconds.
    if not stream or not torch.cuda.is_current_stream_capturing():
        return 0
    asked = _driver()
    if asked is None:
        return _UNKNOWN
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    if asked(stream, ctypes.byref(status), ctypes.byref(number)):
        return _UNKNOWN
    return number.value


@cache
def _driver() -> Any:
    """``cuStreamGetCaptureInfo`` in its first form, which every driver keeps; None without a CUDA driver."""
    try:
        asked = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
    except (OSError, AttributeError):
        return None
    asked.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    asked.restype = ctypes.c_int
    return asked
