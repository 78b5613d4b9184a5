"""A bound cache as kernels take it: the bytes of its pages, whatever tensor the engine holds them in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from swa_backend.cache_layout import SLOT_LIMIT, PageLayout, check_layout
from swa_backend.errors import CacheError


def element_dtype(layout: PageLayout) -> torch.dtype:
    """dtype of a cache tensor of this layout: uint8 for packed layouts, else bf16 or float8_e4m3fn.

    float8_e4m3fn only stands for "one fp8 byte a value" here: the layout's dialect says how the bytes are read.
    """
    if layout.packed:
        return torch.uint8
    return torch.bfloat16 if layout.value_format == "bf16" else torch.float8_e4m3fn


def check_num_slots(num_pages: int, entries: int) -> int:
    """Number of slots of a cache, refused from 2^31 on: slots are int32 on the device.

    Raises:
        CacheError: the cache has no page, or too many.
    """
    if num_pages < 1:
        raise CacheError("num_pages", found=num_pages, legal=">= 1", fix="Allocate the cache before it is bound.")
    if num_pages * entries >= SLOT_LIMIT:
        raise CacheError(
            "num_pages",
            found=f"{num_pages} pages of {entries} entries = {num_pages * entries} slots",
            legal=f"fewer than 2^31 slots, so at most {(SLOT_LIMIT - 1) // entries} pages",
            fix="Bind fewer pages; slot numbers are 32-bit integers on the device.",
        )
    return num_pages * entries


@dataclass(frozen=True, slots=True, eq=False)
class PageView:
    """The pages of one cache. Make it with `PageView.of`, which checks what this class relies on.

    Byte ``b`` of page ``p`` lies ``p * page_stride + b`` bytes after the first one; that product needs 64 bits.

    Attributes:
        layout: what the bytes mean.
        entries: tokens (sliding window) or compressed entries of a page.
        num_pages: pages.
        data: uint8 [num_pages, layout.used_bytes(entries)], a view of the engine's memory; ``stride(0)`` is the
            distance between pages in bytes, ``stride(1)`` is 1. The padding between pages is not part of it.
        scale: float32 [1], the one scale of a per-tensor fp8 cache; None for other layouts.
        launches: what kernels keep of one call for the next on the same pages.
    """

    layout: PageLayout
    entries: int
    num_pages: int
    data: torch.Tensor
    scale: torch.Tensor | None = None
    launches: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def page_stride(self) -> int:
        """Bytes from the start of one page to the start of the next."""
        return self.data.stride(0)

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.entries

    @property
    def device(self) -> torch.device:
        return self.data.device

    @classmethod
    def of(cls, tensor: torch.Tensor, layout: PageLayout, entries: int, scale: torch.Tensor | None = None) -> PageView:
        """View an engine's tensor as pages; nothing is copied.

        Args:
            tensor: [pages, 1, entries, n] or [pages, entries, n], uint8 with n = bytes of a token for any layout, or
                bf16 / float8_e4m3fn with n = 512 for the plain layouts. Pages may lie further apart than they are
                long, and the first one anywhere in its storage.
            layout: layout of the bytes.
            entries: entries of a page.
            scale: float32 [1] on the tensor's device for ``fp8_per_tensor``, None for other layouts.

        Raises:
            CacheError: dtype, shape or strides do not fit the layout, pages overlap, the storage is too short, the
                cache has 2^31 slots or more, or the scale is missing, of another form or not wanted.
        """
        check_layout("layout", layout)
        if not isinstance(tensor, torch.Tensor):
            raise CacheError(
                "tensor",
                found=type(tensor).__name__,
                legal="a torch.Tensor",
                fix="Pass what cache.allocate() returned.",
            )
        stride = _page_stride(tensor, layout, entries)
        num_pages = tensor.shape[0]
        check_num_slots(num_pages, entries)
        check_scale(scale, layout, tensor.device)
        offset = tensor.storage_offset() * tensor.element_size()
        used = layout.used_bytes(entries)
        storage = tensor.untyped_storage()
        needed = offset + (num_pages - 1) * stride + used
        if storage.nbytes() < needed:  # memory that was given back under the tensor, as engines do when they sleep
            raise CacheError(
                "tensor",
                found=f"a storage of {storage.nbytes()} bytes",
                legal=f">= {needed} bytes: {num_pages} pages {stride} bytes apart from byte {offset} on",
                fix="Allocate whole pages with cache.allocate(num_pages, device).",
            )
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        data.set_(storage, offset, (num_pages, used), (stride, 1))
        return cls(layout, entries, num_pages, data, scale)


def _page_stride(tensor: torch.Tensor, layout: PageLayout, entries: int) -> int:
    """Distance between pages in bytes; refuses another dtype or shape, rows or pages that are not where they belong."""
    own = element_dtype(layout)
    lengths = {torch.uint8: layout.bytes_per_token, own: layout.bytes_per_token // own.itemsize}
    # From shape and strides alone, since a view of memory that is gone could not be made.
    shape, strides = tuple(tensor.shape), tensor.stride()
    if len(shape) == 4 and shape[1] == 1:
        shape, strides = (shape[0], *shape[2:]), (strides[0], *strides[2:])
    row = lengths.get(tensor.dtype)
    if row is None or len(shape) != 3 or shape[1:] != (entries, row):
        legal = " or ".join(f"{dtype} [pages, 1, {entries}, {length}]" for dtype, length in lengths.items())
        raise CacheError(
            "tensor",
            found=f"{tensor.dtype} {tuple(tensor.shape)}",
            legal=f"{legal}, with or without the dimension of 1 head",
            fix=f"Allocate a {layout.name} cache with cache.allocate(num_pages, device).",
        )
    if strides[2] != 1 or (entries > 1 and strides[1] != row):
        raise CacheError(
            "tensor",
            found=f"strides {tensor.stride()}",
            legal=f"the rows of a page one after the other: strides (..., {row}, 1)",
            fix="Keep each page in one piece; only the distance between pages is free.",
        )
    page = layout.page_bytes(entries)
    if shape[0] <= 1:
        return page  # the stride of a single page says nothing
    stride = strides[0] * tensor.element_size()
    if stride < page:
        raise CacheError(
            "tensor",
            found=f"pages {stride} bytes apart (strides {tensor.stride()})",
            legal=f">= {page}: {entries} x {layout.bytes_per_token} bytes, rounded up to {layout.alignment}",
            fix="Allocate with cache.allocate(num_pages, device): a contiguous tensor has no room for the padding.",
        )
    return stride


def check_scale(scale: torch.Tensor | None, layout: PageLayout, device: torch.device | None = None) -> None:
    """Refuse a scale that the layout has no use for, a missing one, or one of another form or device (None: any).

    Raises:
        CacheError: naming ``scale``.
    """
    if layout.scale_format != "tensor":
        if scale is None:
            return
        raise CacheError(
            "scale", found="a scale", legal=f"None for {layout.name}", fix="Leave it out: its scales are in the pages."
        )
    found = type(scale).__name__
    if isinstance(scale, torch.Tensor):
        if scale.dtype == torch.float32 and scale.shape == (1,) and device in (None, scale.device):
            return
        found = f"{scale.dtype} {tuple(scale.shape)} on {scale.device}"
    raise CacheError(
        "scale",
        found=found,
        legal=f"a float32 tensor of shape (1,) on {device or 'the device of the cache'}",
        fix=f"A {layout.name} cache needs the one scale that its values are multiplied by.",
    )
