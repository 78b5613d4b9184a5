"""Attention straight from the paged caches: every decode, and prefill where its keys are not gathered first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swa_platform_cuda.bulk_pages import ALIGNED_BYTES
from swa_platform_cuda.flashmla_build import DECODE_WIDTH_MULTIPLE, HEAD_DIM, FlashMLABuild
from swa_platform_cuda.flashmla_forms import bulk_copies, cache_key, cache_of, padded_sink, write_lse
from swa_platform_cuda.flashmla_shared import Preparer, Shared, second_identity

if TYPE_CHECKING:
    from swa_backend.layer_types import LayerType
    from swa_backend.provider import AttentionCall, CompressedRows
    from swa_platform_cuda.flashmla_plan import TilePlan
    from swa_platform_cuda.flashmla_provider import RowTools
    from swa_platform_cuda.flashmla_workspace import Workspace


class PagedAttention:
    """Calls of the decode kernel. The first layer of a type prepares what all of them share, the others look it up.

    Args:
        build: whose kernel.
        arch: compute capability of the device.
        workspace: where rows, and queries and outputs with more heads than were given, are put.
        tools: the row operations.
    """

    def __init__(self, build: FlashMLABuild, arch: str, workspace: Workspace, tools: RowTools) -> None:
        self._build = build
        self._arch = arch
        self._workspace = workspace
        self._cache_key = cache_key(arch)
        self._preparer = Preparer(build, workspace, tools)

    def attend(
        self,
        call: AttentionCall,
        kind: str,
        tokens: slice,
        rows: torch.Tensor,
        lens: torch.Tensor,
        plan: TilePlan,
        layer_type: LayerType,
    ) -> None:
        """Write the rows of the tokens.

        Args:
            call: the layer's call.
            kind: "decode" or "direct" (of prefill tokens); each has its own buffers.
            tokens: which of the call's tokens, n of them.
            rows: [n, 1, w] int32, their window rows.
            lens: [n] int32.
            plan: for their decode.
            layer_type: what kind of layer the call is for.

        Raises:
            CacheError: a cache that the kernel cannot take; nothing was launched.
            ProviderError: the plan is one for another decode.
        """
        second = call.compressed
        cache = call.pages.launches.get(self._cache_key)
        if cache is None:
            cache = cache_of(call.pages, self._arch)
        extra_cache = extra_rows = None
        if second is not None:
            extra_cache = second.pages.launches.get(self._cache_key)
            if extra_cache is None:
                extra_cache = cache_of(second.pages, self._arch)
        shared: Shared | None = plan.shared
        if shared is None or not shared.serves(call, layer_type, rows, lens, self._workspace):
            shared = self._preparer.prepare(call, layer_type, kind, tokens, rows, lens, plan)
            plan.shared = shared if second_identity(call) is not None else None
        q, out = call.q, call.out
        count, given, _ = q.shape
        whole = tokens.stop - tokens.start == count
        if not whole:
            q, out = q[tokens], out[tokens]
            count = q.shape[0]
        if second is not None:
            extra_rows = shared.extra_rows
            if extra_rows is None:
                extra_rows = self._own_rows(call, kind, tokens, second, shared)

        heads, takes_out = shared.heads, self._build.takes_out
        sink = call.attn_sink
        if heads != given:
            sink = padded_sink(sink, heads, self._workspace)
        if heads != given or not bulk_copies(q):
            padded = self._workspace.take(f"{kind} q", count, heads, HEAD_DIM, dtype=torch.bfloat16)
            padded[:, :given].copy_(q)
            q = padded
        direct = takes_out and heads == given and bulk_copies(out) and out.is_contiguous()
        into = None
        if direct:
            into = out.unsqueeze(1)
        elif takes_out:
            into = self._workspace.take(f"{kind} out", count, heads, HEAD_DIM, dtype=torch.bfloat16).unsqueeze(1)
        result, lse = self._build.decode(
            q.unsqueeze(1), cache, shared.rows, shared.lens, extra_cache, extra_rows, shared.extra_lens, sink,
            call.scale, shared.vendor_plan, into, shared.batch_invariant,
        )  # fmt: skip
        if not direct:
            out.copy_(result.squeeze(1)[:, :given])
        if call.lse is not None:
            write_lse(lse.squeeze(2)[:, :given], call.lse[tokens])

    def _own_rows(
        self, call: AttentionCall, kind: str, tokens: slice, second: CompressedRows, shared: Shared
    ) -> torch.Tensor:
        """[n, 1, w] int32: one layer's second entries, padded if the kernel has not their width."""
        given, last = second.rows, shared.last_rows
        if last is not None and last[0] is given:  # engines keep one buffer for all layers
            return last[1]
        rows = given[tokens]
        if _takes(rows):
            taken = rows.unsqueeze(1)
            shared.last_rows = given, taken
            return taken
        lens, valid = second.lens[tokens], call.metadata.is_valid_token[tokens]
        return self._preparer.tidy(call, f"{kind} picked", rows, lens, valid, second.pages, once=False)[0]


def _takes(rows: torch.Tensor) -> bool:
    """Whether the kernel reads rows [n, K] of a mark as they are."""
    aligned = not (rows.shape[1] % DECODE_WIDTH_MULTIPLE or rows.data_ptr() % ALIGNED_BYTES)
    return aligned and rows.is_contiguous()
