"""Window-only prefill with the portable kernels: which of the two serves a call, and its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swa_backend._math import cdiv
from swa_backend.kernels.paging import divisor, is_aligned, page_numbers, scale_of
from swa_backend.kernels.sparse_mla_window import LOG2_E, head_tile, sparse_mla_window, window_key
from swa_backend.kernels.sparse_mla_window_held import sparse_mla_window_held
from swa_backend.kernels.triton_internals import target_of
from swa_backend.kernels.window_plan import WindowPlans

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.kernels.jit import Launcher
    from swa_backend.metadata import DeepseekSparseSWAMetadata
    from swa_backend.pages import PageView
    from swa_backend.provider import AttentionCall

NEAR = 1 << 22  # values from token to token: below it, offsets within a program are 32-bit numbers
HELD = 128  # places that are held


class WindowAttention:
    """Prefill of layers that see their window only; a window is loaded once for neighbouring tokens.

    Every row comes out the same alone and in a batch, and every time.

    Args:
        hold: whether to keep whole windows in shared memory where the chip has room; measured to be faster there.
    """

    def __init__(self, *, hold: bool = True) -> None:
        self.hold = hold
        self._plans = WindowPlans()

    def can_hold(self, device: torch.device) -> bool:
        """Whether windows are kept in shared memory on a device."""
        target = target_of(device.index if device.type == "cuda" else None)
        return self.hold and sparse_mla_window_held.serves(target)

    def reserve(self, config: BackendConfig, device: torch.device) -> None:
        """Allocate what the steps of a configuration take on a device."""
        self._plans.reserve(config.scheduler.max_num_batched_tokens, device)

    def supports(self, call: AttentionCall) -> bool:
        """Whether `attend` is the way to serve a call: where no tokens would share a window, one each is faster.

        Decided on the host alone, the same way for every replay of a graph.
        """
        metadata = call.metadata
        if call.compressed is not None or metadata.prefill_swa_indices is None:
            return False
        if self._holds(metadata, call.q, call.out):
            return True
        key = window_key(call.pages.layout, call.q.shape[1], aligned=True)
        return sparse_mla_window.on(call.q.device, **key).tiles["ROWS"] >= 2 * head_tile(call.q.shape[1])

    def attend(self, call: AttentionCall) -> None:
        """Write the rows of all prefill tokens, padded ones included.

        Args:
            call: one that `supports` is true of.
        """
        metadata, pages = call.metadata, call.pages
        rows, lens = metadata.prefill_swa_indices, metadata.prefill_swa_lens
        assert rows is not None and lens is not None  # noqa: PT018
        tokens, _, width = rows.shape
        if not tokens:
            return
        own = slice(metadata.num_decode_tokens, metadata.num_tokens)
        first, joins = self._plans.of(metadata)
        q, out = call.q[own], call.out[own]
        lse = None if call.lse is None else call.lse[own]
        heads = q.shape[1]
        launcher, programs = self._launcher(metadata, pages, q, out, tokens)
        launcher.launch(
            (programs, 1, 1),
            q, out, call.attn_sink if lse is None else lse, rows, lens, first, joins, call.attn_sink,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), rows.stride(0), width, tokens, int(lse is not None),
            heads, call.scale * LOG2_E.value, pages.data, scale_of(pages), *page_numbers(pages)[:5], pages.num_slots,
            *divisor(pages.entries),
        )  # fmt: skip

    def _launcher(
        self, metadata: DeepseekSparseSWAMetadata, pages: PageView, q: torch.Tensor, out: torch.Tensor, tokens: int
    ) -> tuple[Launcher, int]:
        heads = q.shape[1]
        key = window_key(pages.layout, heads, aligned=is_aligned(pages, q) and is_aligned(pages, out))
        height = head_tile(heads)
        if self._holds(metadata, q, out):
            held = sparse_mla_window_held.on(q.device, **key)
            return held, cdiv(tokens, held.tiles["TOKENS"]) * cdiv(heads, height)
        tiles = sparse_mla_window.on(q.device, **key)
        height = min(height, tiles.tiles["ROWS"])
        return tiles, cdiv(tokens, tiles.tiles["ROWS"] // height) * cdiv(heads, height)

    def _holds(self, metadata: DeepseekSparseSWAMetadata, q: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether the windows of a call are kept in shared memory; an image makes rows longer than what is held."""
        near = max(q.stride(0), out.stride(0)) < NEAR
        return (
            near
            and metadata.prefill_right_visible is None
            and metadata.window_size <= HELD
            and self.can_hold(q.device)
        )
