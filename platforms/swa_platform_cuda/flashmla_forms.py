"""How FlashMLA wants tensors: caches, queries, outputs, sinks, lse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from swa_backend._checks import INT32_MAX
from swa_platform_cuda.bulk_pages import ALIGNED_BYTES, check_pages
from swa_platform_cuda.flashmla_build import DECODE_HEADS
from swa_platform_cuda.flashmla_contents import SM100

if TYPE_CHECKING:
    from swa_backend.pages import PageView
    from swa_platform_cuda.flashmla_workspace import Workspace

def padded_heads(heads: int, legal: tuple[int, ...]) -> int:
    """The smallest head count that a kernel has for this many."""
    return next(count for count in legal if count >= heads)


PADDED_HEADS = tuple(padded_heads(heads, DECODE_HEADS) for heads in range(DECODE_HEADS[-1] + 1))
"""By number of heads, how many decode computes."""


def cache_key(arch: str) -> object:
    """Where pages keep what `cache_of` made."""
    return "flashmla cache", arch


def cache_of(pages: PageView, arch: str) -> torch.Tensor:
    """The pages as the kernels take them: [pages, entries, 1, bytes of an entry] uint8; nothing is copied.

    Raises:
        CacheError: the distance between pages or the address of the first is one that they cannot take.
    """
    key = cache_key(arch)
    found: torch.Tensor | None = pages.launches.get(key)
    if found is None:
        _check_pages(pages, arch)
        size = pages.layout.bytes_per_token
        found = pages.launches[key] = pages.data.view(pages.num_pages, pages.entries, 1, size)
    return found


def _check_pages(pages: PageView, arch: str) -> None:
    multiple, limit = ALIGNED_BYTES, INT32_MAX
    if arch in SM100:  # its kernels see the cache as rows of one data row's length
        multiple = pages.layout.data_stride
        limit = min(limit, INT32_MAX * multiple // pages.num_pages)
    check_pages(pages, "FlashMLA", multiple, limit, chip=f" on sm{arch}")


def bulk_copies(tensor: torch.Tensor) -> bool:
    """Whether address and strides of a bf16 tensor [n, h, 512] suit the kernels' bulk copies."""
    if tensor.data_ptr() % ALIGNED_BYTES:
        return False
    if tensor.is_contiguous():
        return True
    entries = ALIGNED_BYTES // tensor.element_size()
    row, head, _ = tensor.stride()
    return not (row % entries or head % entries)


def padded_sink(sink: torch.Tensor, heads: int, workspace: Workspace) -> torch.Tensor:
    """The sinks of ``heads`` heads; those that were not given are -inf."""
    given = sink.shape[0]
    if given == heads:
        return sink
    padded = workspace.take(f"sinks of {heads}", heads, dtype=torch.float32)
    if not workspace.holds(f"sinks of {heads}", given):
        padded.fill_(-torch.inf)
    padded[:given].copy_(sink)
    return padded


def write_lse(found: torch.Tensor, lse: torch.Tensor) -> None:
    """FlashMLA's lse in this library's convention: an empty row is -inf, not +inf."""
    torch.nan_to_num(found, nan=math.nan, posinf=-math.inf, neginf=-math.inf, out=lse)
