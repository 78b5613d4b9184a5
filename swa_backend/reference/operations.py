"""The reference as a platform's operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from swa_backend.buffers import IndexBuffers
from swa_backend.pages import PageView
from swa_backend.reference import codec, rows, topk
from swa_backend.step import BuildStep


class ReferenceOperations:
    """`swa_backend.operations.Operations` in plain PyTorch, on any device."""

    def prepare_build(self, buffers: IndexBuffers) -> Callable[[BuildStep], None]:
        return partial(rows.build, buffers)

    def write_kv(self, k: torch.Tensor, pages: PageView, slot_mapping: torch.Tensor) -> None:
        codec.write_kv(k, pages, slot_mapping)

    def gather_kv(
        self,
        pages: PageView,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor | None,
        out: torch.Tensor,
        offset: int,
    ) -> None:
        codec.gather_kv(pages, block_table, seq_lens, gather_lens, out, offset)

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
            local,
            token_to_req,
            positions,
            block_table,
            entries_per_page,
            is_valid,
            ratio,
            num_pages,
            out_slots,
            out_lens,
        )
