"""What the cache kernels share: a page layout as compile key and run-time numbers, alignment, slots and their bytes."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from swa_backend.cache_layout import Dialect, PageLayout, get_layout
from swa_backend.kernels.jit import device_function
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.pages import PageView

PLAIN_GROUP = 64  # how a row without stored scales is cut up
WIDE_BYTES = 16
WIDE: tl.constexpr = tl.constexpr(WIDE_BYTES)

PAGE_TYPES = {
    "page_stride": "i64",  # bytes from page to page
    "data_stride": "i64",  # bytes from entry to entry
    "scale_start": "i64",  # byte of a page at which its first scale row begins
    "scale_stride": "i64",
    "entries": "i32",  # of a page
    "num_pages": "i32",
}


def layout_key(layout: PageLayout) -> Mapping[str, object]:
    """The part of a compile key that a layout decides."""
    return _layout_key(layout.name, layout.dialect)


@cache
def _layout_key(name: str, dialect: Dialect | None) -> Mapping[str, object]:
    layout = get_layout(name, dialect or Dialect.OCP)
    return {
        "VALUES": str(layout.value_format),
        "SCALES": str(layout.scale_format or "none"),
        "GROUP": layout.group or PLAIN_GROUP,
        "QUANTISED": layout.quantised_dims,
        "FNUZ": layout.dialect is Dialect.FNUZ,
    }


def page_numbers(pages: PageView) -> tuple[int, int, int, int, int, int]:
    """The run-time arguments of `PAGE_TYPES`."""
    layout, entries = pages.layout, pages.entries
    scale_start = layout.scale_offset(entries, 0)
    return pages.page_stride, layout.data_stride, scale_start, layout.scale_stride, entries, pages.num_pages


def scale_of(pages: PageView) -> torch.Tensor:
    """The scale of a per-tensor layout as bytes; for other layouts any bytes, which no kernel reads."""
    return pages.data if pages.scale is None else pages.scale.view(torch.uint8)


def is_aligned(pages: PageView, rows: torch.Tensor) -> bool:
    """Whether 16-byte accesses are possible on the pages and on the rows of a bf16 tensor [..., n, 512]."""
    apart = 0
    for stride in rows.stride()[:-1]:
        apart |= stride
    apart = apart * rows.element_size() | rows.data_ptr() | pages.page_stride | pages.data.data_ptr()
    return apart % WIDE_BYTES == 0 and rows.stride(-1) == 1


def cache_layouts(
    config: BackendConfig, dialects: Mapping[CacheRole, Dialect], *, written: bool
) -> Iterable[PageLayout]:
    """Layouts of the caches that a config has, each once; only those that can be written if so asked."""
    found = [get_layout(config.cache_layout, dialects[CacheRole.SWA])]
    if any(layer.compressed for layer in config.model.present_layer_types):
        found.append(get_layout(config.compressed_layout, dialects[CacheRole.COMPRESSED]))
    return dict.fromkeys(layout for layout in found if layout.writable or not written)


def table_rows(table: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A block table and its row stride. Nothing is read of an empty one, but dead lanes have to point somewhere:
    ``other``, any int32 tensor that is not empty, stands for it.
    """
    return (table, table.stride(0)) if table.numel() else (other, 0)


def divisor(number: int) -> tuple[int, int]:
    """(magic, shift) with which `quotient` divides by ``number``, an int from 1 to 2^31 - 1."""
    bits = (number - 1).bit_length()
    return -(-(1 << (31 + bits)) // number), bits


@device_function
def quotient(dividends, magic, shift):
    """int32 dividends, divided exactly by the number that ``magic`` and ``shift`` stand for; garbage below 0.

    A chip has no integer division: one by a number that is only known at run time costs about twenty instructions.
    """
    doubled = dividends.to(tl.uint32) << 1
    return (tl.umulhi(doubled, tl.zeros_like(doubled) + magic.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@device_function
def wide(start, offsets, ALIGNED: tl.constexpr, BYTES: tl.constexpr = WIDE):
    """``start + offsets``; where the key says so, each run of the last dimension begins at a multiple of ``BYTES``.

    A hint belongs to the operation that makes the pointers: it has to be made here.
    """
    pointers = start + offsets
    if ALIGNED:
        if len(pointers.shape) == 3:
            pointers = tl.multiple_of(pointers, [1, 1, BYTES])
        else:
            pointers = tl.multiple_of(pointers, [1, BYTES])
    return pointers
