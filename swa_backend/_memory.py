"""Which bytes a tensor spans, to tell whether an output would overwrite an input; and memory that runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swa_backend.errors import SwaBackendError


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first byte and of one past its last; (0, 0) without elements."""
    if not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size()


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the bytes that two tensors span have any in common."""
    (begin, end), (other_begin, other_end) = memory_span(first), memory_span(second)
    return begin < other_end and other_begin < end


@contextmanager
def allocating(error: type[SwaBackendError], field: str, what: str, fix: str) -> Iterator[None]:
    """Tell memory that runs out in this block as what asked for it; other errors pass.

    Args:
        error: class to raise.
        field: setting that the size follows from.
        what: what was to be allocated.
        fix: what makes it smaller.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as failure:  # torch's allocators raise RuntimeError, on a GPU a subclass
        if not isinstance(failure, MemoryError) and "memory" not in str(failure).lower():
            raise
        raise error(field, found=f"{what}, for which memory is missing", legal="what is free", fix=fix) from failure
