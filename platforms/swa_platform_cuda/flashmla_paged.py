"""Attention straight from the paged caches: every decode, and prefill where its keys are not gathered first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from swa_backend._math import ceil_to
from swa_backend.errors import CacheError, ProviderError
from swa_backend.layer_types import LayerType
from swa_platform_cuda.flashmla_build import (
    DECODE_HEADS,
    DECODE_WIDTH_MULTIPLE,
    HEAD_DIM,
    FlashMLABuild,
    Keys,
)
from swa_platform_cuda.flashmla_contents import SM100
from swa_platform_cuda.flashmla_plan import PlanShape, TilePlan, capturing, version_of

if TYPE_CHECKING:
    from swa_backend.pages import PageView
    from swa_backend.provider import AttentionCall
    from swa_platform_cuda.flashmla_provider import RowTools
    from swa_platform_cuda.flashmla_workspace import Workspace

INT32_MAX = 2**31 - 1
_ALIGNED_BYTES = 16  # of an address or a stride that a kernel's bulk copies take
_TYPE_OF_RATIO = {layer_type.ratio: layer_type for layer_type in LayerType if layer_type.compressed}


def padded_heads(heads: int, legal: tuple[int, ...]) -> int:
    """The smallest head count that a kernel has for this many."""
    return next(count for count in legal if count >= heads)


def layer_type_of(call: AttentionCall) -> LayerType:
    """What kind of layer a call is for.

    Raises:
        ProviderError: no layer has a second cache of this ratio.
    """
    if call.compressed is None:
        return LayerType.SWAONLY
    found = _TYPE_OF_RATIO.get(call.compressed.ratio)
    if found is None:
        raise ProviderError(
            "compressed[0].ratio",
            found=call.compressed.ratio,
            legal=sorted(_TYPE_OF_RATIO),
            fix="Pass the compressed cache of one of the model's layers.",
        )
    return found


def is_group_rows(call: AttentionCall) -> bool:
    """Whether the compressed rows are those that the builder made, the same ones for every layer of a step."""
    second = call.compressed
    return second is not None and any(
        group.rows is not None and group.rows.data_ptr() == second.rows.data_ptr()
        for group in call.metadata.compressed.values()
    )


def cache_of(pages: PageView, arch: str) -> torch.Tensor:
    """The pages as the kernels take them: [pages, entries, 1, bytes of an entry] uint8; nothing is copied.

    Raises:
        CacheError: the distance between pages or the address of the first is one that they cannot take.
    """
    key = ("flashmla cache", arch)
    found: torch.Tensor | None = pages.launches.get(key)
    if found is None:
        _check_pages(pages, arch)
        size = pages.layout.bytes_per_token
        found = pages.launches[key] = pages.data.view(pages.num_pages, pages.entries, 1, size)
    return found


def _check_pages(pages: PageView, arch: str) -> None:
    stride, multiple = pages.page_stride, _ALIGNED_BYTES
    limit = INT32_MAX
    if arch in SM100:  # its kernels see the cache as rows of one data row's length
        multiple = pages.layout.data_stride
        limit = min(limit, INT32_MAX * multiple // pages.num_pages)
    if pages.num_pages > 1 and (stride % multiple or stride > limit):
        raise CacheError(
            "cache page stride",
            found=f"{pages.num_pages} pages {stride} bytes apart",
            legal=f"a multiple of {multiple}, at most {limit}, for FlashMLA on sm{arch}",
            fix="Allocate with cache.allocate(num_pages, device), or pad the engine's blocks to such a distance.",
        )
    if pages.data.data_ptr() % _ALIGNED_BYTES:
        raise CacheError(
            "cache address",
            found=f"{pages.data.data_ptr() % _ALIGNED_BYTES} bytes past a multiple of {_ALIGNED_BYTES}",
            legal=f"a multiple of {_ALIGNED_BYTES} for FlashMLA",
            fix="Let the cache begin at such an address inside its storage.",
        )


class PagedAttention:
    """Calls of the decode kernel.

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
        self._tools = tools

    def attend(
        self,
        call: AttentionCall,
        kind: str,
        tokens: slice,
        rows: torch.Tensor,
        lens: torch.Tensor,
        plan: TilePlan,
    ) -> None:
        """Write the rows of the tokens.

        Args:
            call: the layer's call.
            kind: "decode" or "prefill"; each has its own buffers.
            tokens: which of the call's tokens, n of them.
            rows: [n, 1, w] int32, their window rows.
            lens: [n] int32.
            plan: for their decode.

        Raises:
            CacheError: a cache that the kernel cannot take; nothing was launched.
            ProviderError: the plan is one for another decode.
        """
        metadata, second = call.metadata, call.compressed
        layer_type = layer_type_of(call)
        cache = cache_of(call.pages, self._arch)
        extra_cache = None if second is None else cache_of(second.pages, self._arch)
        whole = tokens.start == 0 and tokens.stop == call.q.shape[0]
        valid = metadata.is_valid_token if whole else metadata.is_valid_token[tokens]
        heads = padded_heads(call.q.shape[1], DECODE_HEADS)
        given = [lens]
        extra_width = None
        if second is not None:
            given.append(second.lens)
            extra_width = ceil_to(second.rows.shape[1], DECODE_WIDTH_MULTIPLE)
        shape = PlanShape(
            layer_type, valid.shape[0], 1, heads, call.pages.entries, ceil_to(rows.shape[2], DECODE_WIDTH_MULTIPLE),
            None if second is None else second.pages.entries, extra_width,
        )  # fmt: skip
        vendor_plan = plan.use(self._build.new_plan, shape, metadata.generation, *given)
        keys = Keys(cache, *self._tidy(call, f"{kind} window", rows.squeeze(1), lens, valid, call.pages, once=True))
        extra = None
        if second is not None and extra_cache is not None:
            complete = layer_type is LayerType.C128A and is_group_rows(call)
            name = f"{kind} {'complete' if complete else 'picked'}"
            own = (second.rows, second.lens) if whole else (second.rows[tokens], second.lens[tokens])
            tidied = self._tidy(call, name, *own, valid, second.pages, once=complete)
            extra = Keys(extra_cache, *tidied)
        self._launch(call, kind, tokens, heads, keys, extra, vendor_plan)

    def _tidy(
        self,
        call: AttentionCall,
        name: str,
        rows: torch.Tensor,
        lens: torch.Tensor,
        valid: torch.Tensor,
        pages: PageView,
        *,
        once: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [n, 1, padded width], lens [n]) without entries that the kernel must not see.

        Those that are the same for all layers of a step are made ``once``.
        """
        tokens, width = rows.shape
        out_rows = self._workspace.take(f"{name} rows", tokens, ceil_to(width, DECODE_WIDTH_MULTIPLE))
        out_lens = self._workspace.take(f"{name} lens", tokens)
        contents = (
            call.metadata.generation, tokens, width, pages.num_slots,
            capturing(rows), *((one.data_ptr(), version_of(one)) for one in (rows, lens, valid)),
        )  # fmt: skip
        if not (self._workspace.holds(f"{name} rows", contents) and once):
            self._tools.tidy_rows(rows, lens, valid, pages.num_slots, out_rows, out_lens)
        return out_rows.unsqueeze(1), out_lens

    def _launch(
        self,
        call: AttentionCall,
        kind: str,
        tokens: slice,
        heads: int,
        keys: Keys,
        extra: Keys | None,
        vendor_plan: Any,
    ) -> None:
        given = call.q.shape[1]
        whole = tokens.start == 0 and tokens.stop == call.q.shape[0]
        q, out = (call.q, call.out) if whole else (call.q[tokens], call.out[tokens])
        count = q.shape[0]
        if heads != given or not bulk_copies(q):
            padded = self._workspace.take(f"{kind} q", count, heads, HEAD_DIM, dtype=torch.bfloat16)
            padded[:, :given].copy_(q)
            q = padded
        direct = self._build.takes_out and heads == given and out.is_contiguous() and bulk_copies(out)
        into = None
        if direct:
            into = out
        elif self._build.takes_out:
            into = self._workspace.take(f"{kind} out", count, heads, HEAD_DIM, dtype=torch.bfloat16)
        invariant = call.metadata.shape is not None and call.metadata.shape.batch_invariant
        result, lse = self._build.decode(
            q.unsqueeze(1), keys, extra, padded_sink(call.attn_sink, heads, self._workspace), call.scale, vendor_plan,
            None if into is None else into.unsqueeze(1), invariant,
        )  # fmt: skip
        if not direct:
            out.copy_(result.squeeze(1)[:, :given])
        if call.lse is not None:
            write_lse(lse.squeeze(2)[:, :given], call.lse[tokens])


def bulk_copies(tensor: torch.Tensor) -> bool:
    """Whether address and strides of a bf16 tensor [n, h, 512] suit the kernels' bulk copies."""
    entries = _ALIGNED_BYTES // tensor.element_size()
    row, head, _ = tensor.stride()
    return not (tensor.data_ptr() % _ALIGNED_BYTES or row % entries or head % entries)


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
