"""The checks of `attend` on every call: types, devices, shapes, strides; values are in `attention_values`."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from swa_backend._checks import show
from swa_backend._memory import overlap
from swa_backend.batch import check_tensor
from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.cache_layout import HEAD_DIM, check_same_layout
from swa_backend.config import MAX_HEADS_PER_RANK
from swa_backend.errors import BatchError, CacheError
from swa_backend.metadata import CompressedGroupMetadata, DeepseekSparseSWAMetadata
from swa_backend.provider import AttentionShape, CompressedRows
from swa_backend.row_marks import mark_of

if TYPE_CHECKING:
    from swa_backend.pages import PageView


_FITS = "attend"  # key under which pages remember the last shape that they fitted
_FLOAT32_MAX = torch.finfo(torch.float32).max


def is_usual(q: torch.Tensor, attn_sink: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether these are what nearly every call brings, so that `check_query` and `check_output` would pass.

    It looks at each tensor once, and is no more than that: what it does not recognise may still be right.
    """
    if not (isinstance(q, torch.Tensor) and q.dtype is torch.bfloat16 and q.is_contiguous()):
        return False
    shape, device = q.shape, q.device
    if not (
        len(shape) == 3
        and shape[2] == HEAD_DIM
        and 1 <= shape[1] <= MAX_HEADS_PER_RANK
        and isinstance(attn_sink, torch.Tensor)
        and attn_sink.dtype is torch.float32
        and attn_sink.dim() == 1
        and attn_sink.numel() == shape[1]
        and attn_sink.is_contiguous()
        and attn_sink.device == device
    ):
        return False
    return out is None or (
        isinstance(out, torch.Tensor)
        and out.dtype is torch.bfloat16
        and out.shape == shape
        and out.is_contiguous()
        and out.device == device
        and abs(out.data_ptr() - q.data_ptr()) >= q.nbytes  # apart from q
    )


def check_query(q: torch.Tensor, attn_sink: torch.Tensor) -> None:
    """Refuse a query that is not [T', 1..128, 512] bf16, or sinks that are not [h] float32 beside it.

    Raises:
        BatchError: naming the argument.
    """
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    check_tensor("q", q, torch.bfloat16, (-1, -1, HEAD_DIM), device)
    heads = q.shape[1]
    if not 1 <= heads <= MAX_HEADS_PER_RANK:
        raise BatchError(
            "q",
            found=f"{heads} heads",
            legal=f"1 to {MAX_HEADS_PER_RANK} heads",
            fix="Share the heads among more tensor-parallel ranks.",
        )
    check_tensor("attn_sink", attn_sink, torch.float32, (heads,), device)


def check_output(out: torch.Tensor, q: torch.Tensor) -> None:
    """Refuse an output that has not the shape of ``q``, shares memory with it, or names an element twice.

    Raises:
        BatchError: naming ``out``.
    """
    check_tensor("out", out, torch.bfloat16, q.shape, q.device)
    if not out.numel():
        return
    rows, heads, dim = out.shape
    row_stride, head_stride, _ = out.stride()
    by_row = (heads == 1 or head_stride >= dim) and (rows == 1 or row_stride > (heads - 1) * head_stride + dim - 1)
    by_head = (rows == 1 or row_stride >= dim) and (heads == 1 or head_stride > (rows - 1) * row_stride + dim - 1)
    if not (by_row or by_head):
        raise BatchError(
            "out",
            found=f"strides {out.stride()}, with elements that share memory",
            legal="a tensor whose rows lie apart",
            fix="Pass a buffer of its own, not an expanded one.",
        )
    if overlap(out, q):
        raise BatchError(
            "out", found="memory that q spans", legal="memory apart from q", fix="Pass another buffer, or None."
        )


def check_scale(scale: float) -> float:
    """``scale`` as a float.

    Raises:
        BatchError: it is not a Python number that is finite in float32.
    """
    factor = math.nan
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        with suppress(OverflowError):  # an integer beyond every float
            factor = float(scale)
    if not abs(factor) <= _FLOAT32_MAX:
        raise BatchError(
            "scale",
            found=show(scale) if isinstance(scale, (int, float)) else type(scale).__name__,
            legal="a Python number that is finite in float32, or None for 512 ** -0.5",
            fix="Pass the host value: the device is never read.",
        )
    return factor


def check_metadata(metadata: DeepseekSparseSWAMetadata, q: torch.Tensor) -> None:
    """Refuse what no builder made, and a step of another device or of more tokens than the query has.

    Raises:
        BatchError: naming ``metadata`` or ``q``.
    """
    if not isinstance(metadata, DeepseekSparseSWAMetadata):
        raise BatchError(
            "metadata",
            found=type(metadata).__name__,
            legal="a DeepseekSparseSWAMetadata, or None in a profiling run",
            fix="Pass what builder.build() returned.",
        )
    if metadata.builds is not None and metadata.builds.value != metadata.generation:
        raise BatchError(
            "metadata",
            found="a step whose index buffers a later build or update of its builder has filled",
            legal="what the builder's latest build() or update returned",
            fix="Attend before the next build(), or keep a builder for each step that is alive at a time.",
        )
    device = metadata.is_valid_token.device
    if device != q.device:
        raise BatchError(
            "metadata",
            found=f"a step on {device}",
            legal=f"{q.device}, where q lives",
            fix="Construct the builder with the device of the layers.",
        )
    if metadata.num_prefill_tokens and (metadata.prefill_swa_indices is None or metadata.prefill_swa_lens is None):
        raise BatchError(
            "metadata",
            found=f"{metadata.num_prefill_tokens} prefill tokens without rows",
            legal="prefill_swa_indices and prefill_swa_lens of every prefill token",
            fix="Pass what builder.build() returned.",
        )
    tokens, heads, _ = q.shape
    if tokens < metadata.num_decode_tokens + metadata.num_prefill_tokens:
        raise BatchError(
            "q",
            found=f"{tokens} rows",
            legal=f"at least the step's {metadata.num_tokens} tokens",
            fix="Pass the query of the whole step, padding included.",
        )
    if metadata.shape is not None and heads != metadata.shape.num_heads:
        check_tensor("q", q, torch.bfloat16, (-1, metadata.shape.num_heads, HEAD_DIM), q.device)


def check_caches(
    q: torch.Tensor,
    metadata: DeepseekSparseSWAMetadata,
    cache: DeepseekV4SWACache,
    compressed: tuple[CompressedCache, torch.Tensor, torch.Tensor] | None,
    capture: int,
) -> tuple[PageView, CompressedRows | None]:
    """The pages of both caches and the compressed rows, once they fit the query and what the metadata was built for.

    Args:
        q, metadata, cache, compressed: as `attend` has them.
        capture: number of the graph capture that launches go to, 0 outside.

    Raises:
        BatchError: the compressed rows do not fit the step.
        CacheError: a cache is of another kind, page size, layout or device, or is not bound.
    """
    if not isinstance(cache, DeepseekV4SWACache):
        raise CacheError(
            "cache",
            found=type(cache).__name__,
            legal="a DeepseekV4SWACache",
            fix="Pass the layer's sliding-window cache; its second cache belongs in `compressed`.",
        )
    pages = cache.pages
    if cache.block_size != metadata.block_size:
        raise CacheError(
            "cache.block_size",
            found=f"{cache.block_size} tokens a page",
            legal=f"{metadata.block_size}, for which the metadata's slots were built",
            fix="Pass the metadata of this cache's own group.",
        )
    shape = metadata.shape
    # Pages stay as they are, and the shape object is that of one builder: what fitted once fits again.
    if shape is None or pages.launches.get(_FITS) is not shape:
        _check_device("cache", pages, q)
        if shape is not None:
            check_same_layout("cache layout", pages.layout, shape.swa_layout)
        pages.launches[_FITS] = shape
    if compressed is None:
        return pages, None
    return pages, _check_compressed(q, metadata, pages, compressed, capture)


def _check_compressed(
    q: torch.Tensor,
    metadata: DeepseekSparseSWAMetadata,
    window: PageView,
    compressed: tuple[CompressedCache, torch.Tensor, torch.Tensor],
    capture: int,
) -> CompressedRows:
    if not isinstance(compressed, (tuple, list)) or len(compressed) != 3:
        raise BatchError(
            "compressed",
            found=type(compressed).__name__,
            legal="(CompressedCache, rows, lens), or None",
            fix="Pass the cache with the slots and lengths that map_topk or the builder made.",
        )
    cache, rows, lens = compressed
    if not isinstance(cache, CompressedCache):
        raise CacheError(
            "compressed[0]",
            found=type(cache).__name__,
            legal="a CompressedCache",
            fix="Pass the layer's second cache; the sliding-window cache is an argument of its own.",
        )
    pages = cache.pages
    if metadata.shape is None or pages.launches.get(_FITS) is not metadata.shape:
        _check_device("compressed[0]", pages, q)
        _check_mixing(metadata, window, pages, q)
        pages.launches[_FITS] = metadata.shape
    tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    mark, built = mark_of(rows, lens, cache.ratio, pages.num_slots, metadata), None
    known = mark is not None
    if mark is None:
        built = _built(metadata, rows, lens)
        known = built is not None and rows is built.rows and lens is built.lens
    elif mark.capture != capture:
        mark = None
    if not known:
        check_tensor("compressed[1] (rows)", rows, torch.int32, (-1, -1), q.device)
    shape = rows.shape
    if shape[0] < tokens or shape[1] < 1:
        raise BatchError(
            "compressed[1] (rows)",
            found=f"shape {tuple(shape)}",
            legal=f"at least {tokens} rows, the step's tokens, of at least 1 entry",
            fix="Pass a row for every token, padding included.",
        )
    if not known:
        check_tensor("compressed[2] (lens)", lens, torch.int32, shape[:1], q.device)
    if shape[0] > tokens:
        rows, lens = rows[:tokens], lens[:tokens]
    return CompressedRows(pages, cache.ratio, rows, lens, mark, built)


def _built(
    metadata: DeepseekSparseSWAMetadata, rows: torch.Tensor, lens: torch.Tensor
) -> CompressedGroupMetadata | None:
    """The group of the step whose complete entries these are, None if they are others."""
    for group in metadata.compressed.values():
        own_rows, own_lens = group.rows, group.lens
        if own_rows is None or own_lens is None:
            continue
        if rows is own_rows and lens is own_lens:
            return group
        if (
            isinstance(rows, torch.Tensor)
            and isinstance(lens, torch.Tensor)
            and rows.data_ptr() == own_rows.data_ptr()
            and lens.data_ptr() == own_lens.data_ptr()
        ):
            return group
    return None


def _check_mixing(metadata: DeepseekSparseSWAMetadata, pages: PageView, second: PageView, q: torch.Tensor) -> None:
    """Two caches of different layouts are read together only by a provider that says it can."""
    shape = metadata.shape
    if second.layout in (shape.compressed_layouts if shape is not None else (pages.layout,)):
        return
    asked = AttentionShape(
        num_heads=q.shape[1],
        head_dim=HEAD_DIM,
        swa_layout=pages.layout,
        swa_page_tokens=metadata.block_size,
        compressed_layouts=(second.layout,),
        decode_widths=(metadata.decode_swa_width,) if shape is None else shape.decode_widths,
        batch_invariant=shape is not None and shape.batch_invariant,
        device=q.device,
    )
    reasons = metadata.provider.supports(asked)
    if reasons:
        raise CacheError(
            "compressed[0] layout",
            found=f"{second.layout.name} beside {pages.layout.name}",
            legal=f"a layout that the provider {metadata.provider.name!r} reads beside it ({'; '.join(reasons)})",
            fix="Configure the caches with layouts that one provider serves together.",
        )


def _check_device(field: str, pages: PageView, q: torch.Tensor) -> None:
    if pages.device != q.device:
        raise CacheError(
            field, found=f"pages on {pages.device}", legal=f"{q.device}, where q lives", fix="Keep them on one device."
        )
