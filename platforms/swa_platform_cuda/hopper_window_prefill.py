"""Window-only prefill on Hopper: what of it the ring kernel serves, and its launch.

The kernel reads the fp8 pages itself: there is no workspace. How rows follow one another is found out once a step for
all of its layers (`swa_backend.kernels.window_plan`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swa_backend._math import cdiv
from swa_backend.cache_layout import HEAD_DIM, Dialect
from swa_backend.kernels.paging import is_aligned
from swa_backend.kernels.window_plan import WindowPlans
from swa_platform_cuda.hopper_window_prefill_kernel import (
    HEADS_OF_A_PROGRAM,
    LONGEST_ROW,
    hopper_window_prefill,
)

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.provider import AttentionCall

LAYOUT = "fp8_ds_mla"
LEAST_SPAN = 4  # tokens of a program: each of them loads a whole window first


class WindowPrefill:
    """Prefill of layers that see their window only.

    Every row comes out the same alone and in a batch, and every time.
    """

    def __init__(self) -> None:
        self._plans = WindowPlans()
        self._processors: dict[torch.device, int] = {}

    def reserve(self, config: BackendConfig, device: torch.device) -> None:
        """Allocate what the steps of a configuration take on a device."""
        self._plans.reserve(config.scheduler.max_num_batched_tokens, device)

    def supports(self, call: AttentionCall) -> bool:
        """Whether `attend` serves a call; decided on the host alone, the same way for every replay of a graph."""
        metadata, pages = call.metadata, call.pages
        return (
            call.compressed is None
            and pages.layout.name == LAYOUT
            and pages.layout.dialect is Dialect.OCP
            and metadata.window_size <= LONGEST_ROW
            and metadata.prefill_right_visible is None  # an image makes rows longer than the ring
            and metadata.prefill_swa_indices is not None
            and metadata.prefill_swa_indices.shape[2] >= LONGEST_ROW
            and call.q.stride(1) == call.out.stride(1) == HEAD_DIM
            and (call.lse is None or call.lse.stride(1) == 1)
            and is_aligned(pages, call.q)
            and is_aligned(pages, call.out)
        )

    def attend(self, call: AttentionCall) -> None:
        """Write the rows of all prefill tokens, padded ones included.

        Args:
            call: one that `supports` is true of.
        """
        metadata, pages = call.metadata, call.pages
        rows, lens = metadata.prefill_swa_indices, metadata.prefill_swa_lens
        assert rows is not None and lens is not None  # noqa: PT018
        tokens, heads = rows.shape[0], call.q.shape[1]
        if not tokens:
            return
        own = slice(metadata.num_decode_tokens, metadata.num_tokens)
        first, joins = self._plans.of(metadata)
        q, out = call.q[own], call.out[own]
        lse = call.lse[own] if call.lse is not None else call.attn_sink
        blocks = cdiv(heads, HEADS_OF_A_PROGRAM)
        span = max(cdiv(tokens * blocks, self._processors_of(call.q.device)), LEAST_SPAN)
        full = heads % HEADS_OF_A_PROGRAM == 0
        launcher = hopper_window_prefill.on(call.q.device, LSE=call.lse is not None, FULL=full)
        launcher.launch(
            (cdiv(tokens, span), blocks, 1),
            q, out, lse, call.attn_sink, pages.data, rows, lens, first, joins, call.scale, tokens, heads, span,
            q.stride(0), out.stride(0), lse.stride(0), rows.stride(0),
            pages.page_stride, pages.layout.scale_offset(pages.entries, 0), pages.entries, pages.num_slots,
        )  # fmt: skip

    def _processors_of(self, device: torch.device) -> int:
        found = self._processors.get(device)
        if found is None:
            found = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
            self._processors[device] = found
        return found
