"""Which bytes a tensor spans, to tell whether an output would overwrite an input."""

from __future__ import annotations

import torch


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first byte and of one past its last; (0, 0) without elements."""
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size()
