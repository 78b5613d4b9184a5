"""The index and cache operations a platform runs: the contract that the reference and the Triton kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from swa_backend.buffers import IndexBuffers
    from swa_backend.pages import PageView
    from swa_backend.step import BuildStep


class Operations(Protocol):
    """Everything a platform does on the device apart from attention.

    None of these checks its arguments: the public functions that call them do. None reads a value back from the
    device, and none allocates device memory that outlives the call.
    """

    def prepare_build(self, buffers: IndexBuffers) -> Callable[[BuildStep], None]:
        """What a builder calls once a step to fill its buffers; made once, so that a step costs the host little.

        A step without tokens is never passed. Page counts of ``buffers.groups`` may change between calls.
        """

    def write_kv(self, k: torch.Tensor, pages: PageView, slot_mapping: torch.Tensor) -> None:
        """Quantise ``k`` [>= T, 512] bf16 and store row t at ``slot_mapping[t]``; a negative slot stores nothing."""

    def gather_kv(
        self,
        pages: PageView,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor | None,
        out: torch.Tensor,
        offset: int,
    ) -> None:
        """Dequantise the last ``gather_lens[r]`` tokens of each request to ``out[r, offset:]`` ([R, M, 512] bf16)."""

    def map_topk(
        self,
        topk: torch.Tensor,
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
        """Turn request-local compressed positions [T, K] into slots packed to the left, and their counts [T]."""
