"""Attention straight from the paged caches: every decode, and prefill where its keys are not gathered first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swa_backend._math import ceil_to
from swa_backend.capture import capture_id
from swa_backend.errors import CacheError, ProviderError
from swa_backend.layer_types import LayerType
from swa_backend.row_marks import version_of
from swa_platform_cuda.flashmla_build import (
    DECODE_HEADS,
    DECODE_WIDTH_MULTIPLE,
    HEAD_DIM,
    FlashMLABuild,
    Keys,
)
from swa_platform_cuda.flashmla_contents import SM100
from swa_platform_cuda.flashmla_plan import PlanShape, TilePlan

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


_PADDED_HEADS = {heads: padded_heads(heads, DECODE_HEADS) for heads in range(1, DECODE_HEADS[-1] + 1)}


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
    if second is None:
        return False
    given = second.rows
    for group in call.metadata.compressed.values():
        rows = group.rows
        if rows is not None and (rows is given or rows.data_ptr() == given.data_ptr()):
            return True
    return False


def _cache_key(arch: str) -> object:
    return "flashmla cache", arch


def cache_of(pages: PageView, arch: str) -> torch.Tensor:
    """The pages as the kernels take them: [pages, entries, 1, bytes of an entry] uint8; nothing is copied.

    Raises:
        CacheError: the distance between pages or the address of the first is one that they cannot take.
    """
    key = _cache_key(arch)
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


class _Ready(NamedTuple):
    """What layers of a type share in a step.

    Attributes:
        key: what it was made for; see `PagedAttention._key`.
        kept: tensors whose identity is part of the key: alive, so that no other can take their place.
        heads: heads that the kernel computes, padding included.
        rows: [n, 1, w] int32 window entries.
        lens: [n] int32.
        extra_rows: [n, 1, w] int32 second entries; None without any, or if each layer has its own.
        extra_lens: [n] int32, None without second entries.
        vendor_plan: the vendor's plan for these lengths.
        changes: of the workspace, after this was prepared in it.
    """

    key: tuple[object, ...]
    kept: tuple[object, ...]
    heads: int
    rows: torch.Tensor
    lens: torch.Tensor
    extra_rows: torch.Tensor | None
    extra_lens: torch.Tensor | None
    vendor_plan: Any
    changes: int


class PagedAttention:
    """Calls of the decode kernel.

    The first layer of a type prepares what is the same for all of them, the others look it up. For entries that an
    indexer picked that takes in the plan only if they are known to be distinct (`RowsMark`): it is then made for the
    most that the positions allow, and rows hold -1 from their own length up to that. A plan for other picks serves the
    one mapping that it was made for, and rows of unknown origin are cleaned and planned for call by call, since nothing
    tells when they change.

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
        self._cache_key = _cache_key(arch)

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
            kind: "decode" or "prefill"; each has its own buffers.
            tokens: which of the call's tokens, n of them.
            rows: [n, 1, w] int32, their window rows.
            lens: [n] int32.
            plan: for their decode.
            layer_type: what kind of layer the call is for.

        Raises:
            CacheError: a cache that the kernel cannot take; nothing was launched.
            ProviderError: the plan is one for another decode.
        """
        second, pages = call.compressed, call.pages
        cache = pages.launches.get(self._cache_key)
        if cache is None:
            cache = cache_of(pages, self._arch)
        extra_cache = None
        if second is not None:
            extra_cache = second.pages.launches.get(self._cache_key)
            if extra_cache is None:
                extra_cache = cache_of(second.pages, self._arch)
        whole = tokens.start == 0 and tokens.stop == call.q.shape[0]
        key = _key(call, kind, rows, lens, layer_type)
        ready: _Ready | None = plan.ready
        if ready is None or ready.key != key or ready.changes != self._workspace.changes:
            ready = self._prepare(call, key, kind, tokens, rows, lens, plan, layer_type)
            plan.ready = None if key[-1] is None else ready
        extra = None
        if second is not None:
            extra_rows, extra_lens = ready.extra_rows, ready.extra_lens
            if extra_rows is None:
                own = second.rows if whole else second.rows[tokens]
                if _takes(own):
                    extra_rows = own.unsqueeze(1)
                else:
                    own_lens = second.lens if whole else second.lens[tokens]
                    valid = call.metadata.is_valid_token
                    valid = valid if whole else valid[tokens]
                    extra_rows, _ = self._tidy(call, f"{kind} picked", own, own_lens, valid, second.pages, once=False)
            extra = Keys(extra_cache, extra_rows, extra_lens)
        self._launch(call, kind, tokens, whole, ready, Keys(cache, ready.rows, ready.lens), extra)

    def _prepare(
        self,
        call: AttentionCall,
        key: tuple[object, ...],
        kind: str,
        tokens: slice,
        rows: torch.Tensor,
        lens: torch.Tensor,
        plan: TilePlan,
        layer_type: LayerType,
    ) -> _Ready:
        metadata, second = call.metadata, call.compressed
        valid = metadata.is_valid_token[tokens]
        heads = _PADDED_HEADS[call.q.shape[1]]
        kept: list[object] = [rows, lens, metadata.is_valid_token]
        given: list[torch.Tensor] = [lens]
        version: int | None = 0
        extra_width = None
        if second is not None:
            mark = second.mark
            if mark is None:
                version = None if key[-1] is None else 0
            elif not mark.distinct:
                version = mark.number
            given.append(mark.positions if mark is not None and mark.distinct else second.lens)
            extra_width = ceil_to(second.rows.shape[1], DECODE_WIDTH_MULTIPLE)
            kept += [second.rows, second.lens, mark]
        shape = PlanShape(
            layer_type, valid.shape[0], 1, heads, call.pages.entries, ceil_to(rows.shape[2], DECODE_WIDTH_MULTIPLE),
            None if second is None else second.pages.entries, extra_width,
        )  # fmt: skip
        vendor_plan = plan.use(self._build.new_plan, shape, metadata.generation, *given, version=version)
        window = self._tidy(call, f"{kind} window", rows.squeeze(1), lens, valid, call.pages, once=True)
        extra_rows = extra_lens = None
        if second is not None:
            mark, own, own_lens = second.mark, second.rows[tokens], second.lens[tokens]
            if mark is None:
                complete = is_group_rows(call)
                name = f"{kind} {'complete' if complete else 'picked'}"
                extra_rows, extra_lens = self._tidy(call, name, own, own_lens, valid, second.pages, once=complete)
            elif mark.distinct:
                name = f"{kind} most entries"
                extra_lens = self._workspace.take(name, valid.shape[0])
                if not self._workspace.holds(name, key, kept):
                    self._tools.entry_bounds(mark.positions[tokens], valid, mark.ratio, own.shape[1], extra_lens)
            else:
                extra_lens = own_lens
        return _Ready(key, tuple(kept), heads, *window, extra_rows, extra_lens, vendor_plan, self._workspace.changes)

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
            capture_id(rows), *((one.data_ptr(), version_of(one)) for one in (rows, lens, valid)),
        )  # fmt: skip
        if not once or not self._workspace.holds(f"{name} rows", contents):
            self._tools.tidy_rows(rows, lens, valid, pages.num_slots, out_rows, out_lens)
        return out_rows.unsqueeze(1), out_lens

    def _launch(
        self,
        call: AttentionCall,
        kind: str,
        tokens: slice,
        whole: bool,
        ready: _Ready,
        keys: Keys,
        extra: Keys | None,
    ) -> None:
        q, out = (call.q, call.out) if whole else (call.q[tokens], call.out[tokens])
        count, given, _ = q.shape
        heads, sink, takes_out = ready.heads, call.attn_sink, self._build.takes_out
        if heads != given:
            sink = padded_sink(sink, heads, self._workspace)
        if heads != given or not bulk_copies(q):
            padded = self._workspace.take(f"{kind} q", count, heads, HEAD_DIM, dtype=torch.bfloat16)
            padded[:, :given].copy_(q)
            q = padded
        direct = takes_out and heads == given and out.is_contiguous() and bulk_copies(out)
        into = None
        if direct:
            into = out.unsqueeze(1)
        elif takes_out:
            into = self._workspace.take(f"{kind} out", count, heads, HEAD_DIM, dtype=torch.bfloat16).unsqueeze(1)
        shape = call.metadata.shape
        result, lse = self._build.decode(
            q.unsqueeze(1), keys, extra, sink, call.scale, ready.vendor_plan, into,
            shape is not None and shape.batch_invariant,
        )  # fmt: skip
        if not direct:
            out.copy_(result.squeeze(1)[:, :given])
        if call.lse is not None:
            write_lse(lse.squeeze(2)[:, :given], call.lse[tokens])


def _key(
    call: AttentionCall, kind: str, rows: torch.Tensor, lens: torch.Tensor, layer_type: LayerType
) -> tuple[object, ...]:
    """Equal for two calls that may share what is prepared; the last element is None if no further call may.

    Tensors count by identity and by torch's count of their changes.
    """
    metadata, second, pages = call.metadata, call.compressed, call.pages
    valid = metadata.is_valid_token
    first = (
        kind, layer_type, metadata.generation, call.q.shape[1], pages.entries, pages.num_pages, capture_id(rows),
        id(rows), id(lens), id(valid), version_of(rows), version_of(lens), version_of(valid),
    )  # fmt: skip
    if second is None:
        return first
    other, given, mark = second.pages, second.rows, second.mark
    if mark is None:
        whose = None
        if is_group_rows(call):
            whose = (id(given), id(second.lens), version_of(given), version_of(second.lens))
        return (*first, other.entries, other.num_pages, whose)
    whose = (id(mark.positions), mark.versions[2]) if mark.distinct else (mark.number,)
    return (*first, other.entries, other.num_pages, given.shape[1], whose)


def _takes(rows: torch.Tensor) -> bool:
    """Whether the kernel reads rows [n, w] of a mark as they are."""
    aligned = not (rows.shape[1] % DECODE_WIDTH_MULTIPLE or rows.data_ptr() % _ALIGNED_BYTES)
    return aligned and rows.is_contiguous()


def bulk_copies(tensor: torch.Tensor) -> bool:
    """Whether address and strides of a bf16 tensor [n, h, 512] suit the kernels' bulk copies."""
    if tensor.data_ptr() % _ALIGNED_BYTES:
        return False
    if tensor.is_contiguous():
        return True
    entries = _ALIGNED_BYTES // tensor.element_size()
    row, head, _ = tensor.stride()
    return not (row % entries or head % entries)


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
