"""Attention of tokens over paged fp8 caches with the Hopper kernels: buffers, shared cuts, launches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swa_backend.capture import capture_id
from swa_backend.kernels.paging import divisor
from swa_backend.split_plan import compute_units
from swa_platform_cuda.bulk_pages import ALIGNED_BYTES, check_pages
from swa_platform_cuda.flashmla_workspace import Workspace
from swa_platform_cuda.hopper_combine import GROUPS, PROGRAM_LIMIT, combine_launcher
from swa_platform_cuda.hopper_decode_kernel import hopper_decode
from swa_platform_cuda.hopper_work import HEADS_OF_A_TILE, NEVER, Costs, head_tiles, share_work

if TYPE_CHECKING:
    from swa_backend.kernels.jit import Bound, Launcher
    from swa_backend.pages import PageView
    from swa_backend.provider import AttentionCall

LOG2_E = 1.4426950408889634
_HEAD_DIM = 512


def _page_numbers(pages: PageView) -> tuple[int, int, int, int, int, int]:
    """(address, bytes from page to page, entries of a page, what divides by them, entries of all pages).

    Raises:
        CacheError: the distance between pages or the address of the first is one that the kernel cannot take.
    """
    found: tuple[int, int, int, int, int, int] | None = pages.launches.get("hopper decode")
    if found is None:
        check_pages(pages, "the Hopper kernels")
        stride = pages.page_stride if pages.num_pages > 1 else 0
        found = (pages.data.data_ptr(), stride, pages.entries, *divisor(pages.entries), pages.num_slots)
        pages.launches["hopper decode"] = found
    return found


def _cache_arguments(pages: PageView, rows: torch.Tensor, lens: torch.Tensor) -> tuple[int, ...]:
    """The run-time arguments for one cache and rows [n, w] or [n, 1, w] of it."""
    data, *numbers = _page_numbers(pages)
    return data, rows.data_ptr(), lens.data_ptr(), *numbers, rows.stride(0), rows.shape[-1]


def decode_launcher(device: torch.device, heads: int, two: bool) -> Launcher:
    """The decode kernel's launcher for a number of heads, over one cache or two."""
    return hopper_decode.on(device, TILES=head_tiles(heads), TWO=two, CUT=two)


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether a bf16 tensor [n, h, 512] has contiguous heads, aligned to 16 bytes."""
    return tensor.stride(1) == _HEAD_DIM and not (tensor.stride(0) % 8 or tensor.data_ptr() % ALIGNED_BYTES)


class PagedDecode:
    """Calls of the kernels on one device. Layers run one after the other and share the buffers.

    Args:
        device: a Hopper GPU.
        batch_invariant: no tile is cut, so that a row comes out the same in every batch.
        costs: where tiles are cut.
    """

    def __init__(self, device: torch.device, batch_invariant: bool, costs: Costs | None = None) -> None:
        costs = costs or Costs()
        self._combines = not batch_invariant
        self._costs = costs if self._combines else replace(costs, least=NEVER, least_share=1, slack=0)
        self._programs = min(compute_units(device), PROGRAM_LIMIT)
        kinds = [(ratio, decodes) for ratio in (1, 2, 4, 128) for decodes in (True, False)]
        buffers = torch.zeros(len(kinds) + 1, self._programs + 1, 2, dtype=torch.int32, device=device)
        self._no_cuts = buffers[-1]
        self._cuts: dict[tuple[int, bool], torch.Tensor] = dict(zip(kinds, buffers, strict=False))
        self._cut_for: dict[tuple[int, bool], object] = {}
        pieces = 2 * self._programs if self._combines else 1
        self._piece_out = torch.zeros(pieces, HEADS_OF_A_TILE, _HEAD_DIM, device=device)
        self._piece_lse = torch.zeros(pieces, HEADS_OF_A_TILE, device=device)
        self._pieces = (self._piece_out.data_ptr(), self._piece_lse.data_ptr())
        self._launchers: dict[tuple[bool, bool], Bound] = {}
        self._combiners: dict[bool, Bound] = {}
        self._workspace = Workspace(device)

    def attend(self, call: AttentionCall, tokens: slice, rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Write the rows of the tokens.

        Queries and outputs whose heads are not contiguous, or not aligned to 16 bytes, are copied; the first such
        call makes the buffers for it.

        Args:
            call: the layer's call.
            tokens: which of its tokens, n of them.
            rows: [n, 1, w] int32 window rows.
            lens: [n] int32.

        Raises:
            CacheError: a cache that the kernel cannot take; nothing was launched.
        """
        second, sink = call.compressed, call.attn_sink
        q, given, lse, valid = call.q, call.out, call.lse, call.metadata.is_valid_token
        if tokens.start or tokens.stop != q.shape[0]:
            q, given, valid = q[tokens], given[tokens], valid[tokens]
            lse = None if lse is None else lse[tokens]
        n, heads, _ = q.shape
        window = _cache_arguments(call.pages, rows, lens)
        out = given
        if not _is_usual(q):
            q = self._workspace.take("q", *q.shape, dtype=q.dtype).copy_(q)
        if not _is_usual(given):
            out = self._workspace.take("out", *q.shape, dtype=q.dtype)
        if second is None:
            more, cuts, programs = window, self._no_cuts, min(self._programs, n * head_tiles(heads))
        else:
            more_rows, more_lens = second.rows[tokens], second.lens[tokens]
            more = _cache_arguments(second.pages, more_rows, more_lens)
            cuts = self._cut(call, tokens, lens, rows.shape[2], more_lens, more_rows.shape[1], valid)
            programs = self._programs
        wants_lse = int(lse is not None)
        to, lse_stride = (sink, 0) if lse is None else (lse, lse.stride(0))
        out_at, lse_at, sink_at, cuts_at = out.data_ptr(), to.data_ptr(), sink.data_ptr(), cuts.data_ptr()
        self._bound(q.device, heads, second is not None).launch(
            (programs, 1, 1),
            q.data_ptr(), out_at, lse_at, sink_at, valid.data_ptr(), *window, *more, cuts_at, *self._pieces,
            q.stride(0), out.stride(0), lse_stride, call.scale * LOG2_E, wants_lse, n, heads,
        )  # fmt: skip
        if second is not None and self._combines:
            self._combine(q.device, heads).launch(
                (programs * GROUPS, 1, 1),
                *self._pieces, cuts_at, sink_at, out_at, lse_at, out.stride(0), lse_stride, wants_lse, heads, programs,
            )  # fmt: skip
        if out is not given:
            given.copy_(out)

    def _bound(self, device: torch.device, heads: int, two: bool) -> Bound:
        key = (heads > HEADS_OF_A_TILE, two)
        found = self._launchers.get(key)
        if found is None:
            found = self._launchers[key] = decode_launcher(device, heads, two).bind()
        return found

    def _combine(self, device: torch.device, heads: int) -> Bound:
        found = self._combiners.get(heads > HEADS_OF_A_TILE)
        if found is None:
            found = self._combiners[heads > HEADS_OF_A_TILE] = combine_launcher(device, heads).bind()
        return found

    def _cut(
        self,
        call: AttentionCall,
        tokens: slice,
        lens: torch.Tensor,
        width: int,
        more_lens: torch.Tensor,
        more_width: int,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        """Where the work of these tokens is cut: made by the first layer of a type in a step, or in a capture."""
        metadata, second = call.metadata, call.compressed
        assert second is not None
        heads = call.q.shape[1]
        kind = second.ratio, tokens.stop == metadata.num_decode_tokens
        step = (metadata.generation, valid.data_ptr(), tokens.start, tokens.stop, heads, more_width, capture_id(lens))
        cuts = self._cuts.get(kind)
        if cuts is None:  # a ratio that no layer of today's models has
            cuts = self._cuts[kind] = torch.zeros_like(self._no_cuts)
        if self._cut_for.get(kind) != step:
            share_work(lens, width, more_lens, more_width, valid, heads, self._costs, cuts)
            self._cut_for[kind] = step
        return cuts
