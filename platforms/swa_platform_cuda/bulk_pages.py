"""Pages as the bulk copies of NVIDIA's kernels take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_backend._checks import INT32_MAX
from swa_backend.errors import CacheError

if TYPE_CHECKING:
    from swa_backend.pages import PageView

ALIGNED_BYTES = 16
"""Of an address or a stride that a kernel's bulk copies take."""


def check_pages(
    pages: PageView, kernels: str, multiple: int = ALIGNED_BYTES, limit: int = INT32_MAX, chip: str = ""
) -> None:
    """Refuse pages whose distance or address a kernel cannot take.

    Args:
        pages: the cache.
        kernels: whose they are, as errors name them.
        multiple: what the distance between pages, in bytes, has to be a multiple of.
        limit: the largest distance.
        chip: what the limits of the distance depend on, as errors name it.

    Raises:
        CacheError: the distance between pages or the address of the first is one that they cannot take.
    """
    stride = pages.page_stride
    if pages.num_pages > 1 and (stride % multiple or stride > limit):
        raise CacheError(
            "cache page stride",
            found=f"{pages.num_pages} pages {stride} bytes apart",
            legal=f"a multiple of {multiple}, at most {limit}, for {kernels}{chip}",
            fix="Allocate with cache.allocate(num_pages, device), or pad the engine's blocks to such a distance.",
        )
    past = pages.data.data_ptr() % ALIGNED_BYTES
    if past:
        raise CacheError(
            "cache address",
            found=f"{past} bytes past a multiple of {ALIGNED_BYTES}",
            legal=f"a multiple of {ALIGNED_BYTES} for {kernels}",
            fix="Let the cache begin at such an address inside its storage.",
        )
