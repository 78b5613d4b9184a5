"""The shared Triton kernels as a platform's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swa_backend.kernels import cache_gather, cache_write, topk
from swa_backend.kernels.metadata_launch import MetadataLauncher

if TYPE_CHECKING:
    import torch

    from swa_backend.buffers import IndexBuffers
    from swa_backend.pages import PageView
    from swa_backend.step import BuildStep


class TritonOperations:
    """`swa_backend.operations.Operations` for tensors on a GPU (or, interpreted, on the CPU)."""

    def prepare_build(self, buffers: IndexBuffers) -> Callable[[BuildStep], None]:
        return MetadataLauncher(buffers)

    def write_kv(self, k: torch.Tensor, pages: PageView, slot_mapping: torch.Tensor) -> None:
        cache_write.write_kv(k, pages, slot_mapping)

    def gather_kv(
        self,
        pages: PageView,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor | None,
        out: torch.Tensor,
        offset: int,
    ) -> None:
        cache_gather.gather_kv(pages, block_table, seq_lens, gather_lens, out, offset)

    def map_topk(
        self,
        local: torch.Tensor,
        token_to_req: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        entries_per_page: int,
        is_valid: torch.Tensor,
        ratio: int,
        num_pages: int | None,
        out_slots: torch.Tensor,
        out_lens: torch.Tensor,
    ) -> None:
        topk.map_topk(
            local, token_to_req, positions, block_table, entries_per_page, is_valid, ratio, num_pages, out_slots,
            out_lens,
        )  # fmt: skip
