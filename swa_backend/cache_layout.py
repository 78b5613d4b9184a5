"""Page layouts as data: where the bytes of a token lie in a page, and what they mean.

A layout is pure arithmetic; nothing here touches a tensor. A page of ``n`` entries is either *planar* (all data rows,
then all scale rows) or *interleaved* (data row and scale row of entry 0, then of entry 1, ...), followed by padding up
to the alignment.

==================  =====  ====  ======  ===========  ============================================================
name                bytes  data  scales  form         values
==================  =====  ====  ======  ===========  ============================================================
``fp8_ds_mla``      584    576   8       planar       448 e4m3, a UE8M0 scale per 64; 64 bf16; 8th scale byte 0
``fp8_ds_mla_v41``  528    512   16      interleaved  512 e4m3, a UE8M0 scale per 32
``fp4_ds_mla_v41``  288    256   32      interleaved  512 e2m1 (even value in the low nibble), an e4m3 scale per 16
``bf16``            1024   1024  0       interleaved  512 bf16
``fp8_per_tensor``  512    512   0       interleaved  512 e4m3, one float32 scale for the whole cache
==================  =====  ====  ======  ===========  ============================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from swa_backend._math import ceil_to
from swa_backend.errors import CacheError

HEAD_DIM = 512
SLOT_LIMIT = 2**31
"""Slots are int32 on the device, so a cache holds fewer than this many."""

ValueFormat = Literal["e4m3", "e2m1", "bf16"]
ScaleFormat = Literal["ue8m0", "e4m3", "tensor"]


class Dialect(StrEnum):
    """How an e4m3 byte is read: ``ocp`` (bias 7, NaN 0x7F and 0xFF, max 448), ``fnuz`` (bias 8, NaN 0x80, max 240)."""

    OCP = "ocp"
    FNUZ = "fnuz"

    @property
    def fp8_max(self) -> float:
        """Magnitude up to which values are written."""
        return 448.0 if self is Dialect.OCP else 240.0

    @property
    def nan_code(self) -> int:
        """Byte that is written for a value that is not finite."""
        return 0x7F if self is Dialect.OCP else 0x80


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One byte layout of a cache page. Checks itself at construction.

    Attributes:
        name: name by which configurations ask for it.
        version: version of the byte layout; caches of different versions are never mixed.
        bytes_per_token: bytes that one entry takes, padding excluded.
        data_bytes: bytes of an entry's data row: the quantised values, then the bf16 tail.
        scale_bytes: bytes of an entry's scale row.
        interleaved: True if an entry's scale row follows its data row, False if all scale rows follow all data rows.
        value_format: format of the quantised values ("bf16": none is quantised).
        scale_format: "ue8m0" or "e4m3" bytes in the page, "tensor" for one float32 beside the cache, None without.
        group: quantised values that share a scale; 0 if no scale is stored in the page.
        quantised_dims: leading values that are quantised.
        rope_dims: trailing values that are stored as bf16 (``quantised_dims + rope_dims == 512``).
        alignment: bytes of which a page is a multiple.
        dialect: dialect of e4m3 *values*; None for other value formats. Scales in e4m3 are always OCP.
        writable: False for layouts that the library only reads.
    """

    name: str
    version: int
    bytes_per_token: int
    data_bytes: int
    scale_bytes: int
    interleaved: bool
    value_format: ValueFormat
    scale_format: ScaleFormat | None
    group: int
    quantised_dims: int
    rope_dims: int
    alignment: int
    dialect: Dialect | None
    writable: bool = True

    def __post_init__(self) -> None:
        quantised_bytes = self.quantised_dims // 2 if self.value_format == "e2m1" else self.quantised_dims
        self._require("quantised_dims + rope_dims", self.quantised_dims + self.rope_dims, HEAD_DIM)
        self._require("data_bytes", self.data_bytes, quantised_bytes + 2 * self.rope_dims)
        self._require("bytes_per_token", self.bytes_per_token, self.data_bytes + self.scale_bytes)
        if (self.dialect is None) is (self.value_format == "e4m3"):
            legal = "'ocp' or 'fnuz'" if self.value_format == "e4m3" else None
            self._refuse("dialect", self.dialect, legal)
        if self.group and (self.quantised_dims % self.group or self.quantised_dims // self.group > self.scale_bytes):
            self._refuse("group", self.group, f"a divisor of {self.quantised_dims} with a scale byte for each group")

    def _require(self, field: str, found: int, legal: int) -> None:
        if found != legal:
            self._refuse(field, found, legal)

    def _refuse(self, field: str, found: object, legal: object) -> None:
        raise CacheError(
            f"layout {self.name}: {field}",
            found=found,
            legal=legal,
            fix="Take a layout from get_layout(name).",
        )

    @property
    def packed(self) -> bool:
        """True if scales are stored in the page, so that the cache is a tensor of bytes, not of elements."""
        return self.scale_bytes > 0

    @property
    def num_groups(self) -> int:
        """Scales of one entry that mean something; ``scale_bytes`` may be larger."""
        return self.quantised_dims // self.group if self.group else 0

    @property
    def data_stride(self) -> int:
        """Bytes from one entry's data row to the next entry's."""
        return self.bytes_per_token if self.interleaved else self.data_bytes

    @property
    def scale_stride(self) -> int:
        """Bytes from one entry's scale row to the next entry's; 0 if no scale is stored in the page."""
        if not self.scale_bytes:
            return 0
        return self.bytes_per_token if self.interleaved else self.scale_bytes

    def data_offset(self, entries: int, j: int) -> int:
        """Byte of entry ``j``'s data row in a page of ``entries`` entries."""
        del entries  # planar pages put the scale rows last, so the data rows never move
        return j * self.data_stride

    def scale_offset(self, entries: int, j: int) -> int:
        """Byte of entry ``j``'s scale row in a page of ``entries`` entries."""
        return (self.data_bytes if self.interleaved else entries * self.data_bytes) + j * self.scale_stride

    def used_bytes(self, entries: int) -> int:
        """Bytes of a page of ``entries`` entries, padding excluded."""
        return entries * self.bytes_per_token

    def page_bytes(self, entries: int) -> int:
        """Bytes of a page of ``entries`` entries, rounded up to the alignment."""
        return ceil_to(self.used_bytes(entries), self.alignment)

    def with_dialect(self, dialect: Dialect) -> PageLayout:
        """The same layout in another fp8 dialect; a layout without e4m3 values is returned as it is.

        Raises:
            CacheError: not a dialect.
        """
        if dialect not in list(Dialect):
            self._refuse("dialect", repr(dialect), "'ocp' or 'fnuz'")
        return self if self.dialect is None else replace(self, dialect=Dialect(dialect))


_LAYOUTS = {
    layout.name: layout
    for layout in (
        PageLayout("fp8_ds_mla", 1, 584, 576, 8, False, "e4m3", "ue8m0", 64, 448, 64, 576, Dialect.OCP),
        PageLayout("fp8_ds_mla_v41", 1, 528, 512, 16, True, "e4m3", "ue8m0", 32, 512, 0, 512, Dialect.OCP),
        PageLayout("fp4_ds_mla_v41", 1, 288, 256, 32, True, "e2m1", "e4m3", 16, 512, 0, 512, None, writable=False),
        PageLayout("bf16", 1, 1024, 1024, 0, True, "bf16", None, 0, 0, 512, 512, None),
        PageLayout("fp8_per_tensor", 1, 512, 512, 0, True, "e4m3", "tensor", 0, 512, 0, 512, Dialect.OCP),
    )
}

LAYOUT_NAMES = tuple(_LAYOUTS)


def get_layout(name: str, dialect: Dialect = Dialect.OCP) -> PageLayout:
    """The current version of a layout.

    Args:
        name: one of `LAYOUT_NAMES`.
        dialect: fp8 dialect of its values; ignored by layouts without e4m3 values.

    Raises:
        CacheError: no layout has this name, or the dialect is none.
    """
    layout = _LAYOUTS.get(name) if isinstance(name, str) else None
    if layout is None:
        raise CacheError(
            "layout", found=repr(name), legal=", ".join(LAYOUT_NAMES), fix="Pass one of these names, or a PageLayout."
        )
    return layout.with_dialect(dialect)


def check_layout(field: str, layout: PageLayout) -> PageLayout:
    """Accept a layout object only if it is a registered one in its current version; returns it.

    Raises:
        CacheError: another type, an unknown name, another version than the current one, or other fields.
    """
    if not isinstance(layout, PageLayout):
        raise CacheError(
            field,
            found=type(layout).__name__,
            legal="a PageLayout or one of " + ", ".join(LAYOUT_NAMES),
            fix="Pass get_layout(name, dialect).",
        )
    current = get_layout(layout.name, layout.dialect or Dialect.OCP)
    if layout != current:
        raise CacheError(
            field,
            found=_describe(layout),
            legal=_describe(current),
            fix="This version of the library cannot read that layout; make the cache with get_layout(name, dialect).",
        )
    return layout


def check_same_layout(field: str, found: PageLayout, expected: PageLayout) -> None:
    """Refuse a cache of another layout, version or dialect than the one that its reader was made for.

    Raises:
        CacheError: they differ.
    """
    if found is not expected and found != expected:
        raise CacheError(
            field,
            found=_describe(found),
            legal=_describe(expected),
            fix="Pass a cache of that layout; caches of different layouts are never read as one another.",
        )


def _describe(layout: PageLayout) -> str:
    dialect = f", {layout.dialect}" if layout.dialect else ""
    return f"{layout.name} version {layout.version} ({layout.bytes_per_token} bytes a token{dialect})"
