"""Which bytes a tensor spans, to tell whether an output would overwrite an input."""

from __future__ import annotations

import torch


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
