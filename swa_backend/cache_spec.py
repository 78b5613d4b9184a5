"""What an engine's memory manager must know of a cache before it allocates pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swa_backend.cache_layout import HEAD_DIM, PageLayout
from swa_backend.platform import CacheRole

_STATE_LAYOUT = "fp8_ds_mla"


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Sizes of one layer's pages; attribute names are those that serving engines use.

    Attributes:
        role: sliding-window or compressed cache.
        layout: byte layout of a page.
        block_size: tokens that a page stands for.
        dtype: dtype of the cache tensor.
        sliding_window: window in tokens; None for a compressed cache.
        compress_ratio: tokens per entry; 1 for a sliding-window cache.
        num_kv_heads: always 1, keys and values being one head.
        head_size: values per entry.
    """

    role: CacheRole
    layout: PageLayout
    block_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    compress_ratio: int = 1
    num_kv_heads: int = 1
    head_size: int = HEAD_DIM

    @property
    def entries_per_page(self) -> int:
        return self.block_size // self.compress_ratio

    @property
    def alignment(self) -> int:
        """Bytes of which a page is a multiple."""
        return self.layout.alignment

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, rounded up to the alignment."""
        return self.layout.page_bytes(self.entries_per_page)

    @property
    def state_content_bytes(self) -> int | None:
        """Bytes of a token where they do not follow from head size and dtype (``fp8_ds_mla``: 584), else None."""
        return self.layout.bytes_per_token if self.layout.name == _STATE_LAYOUT else None
