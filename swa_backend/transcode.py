"""Pages from one fp8 dialect to the other, for a cache that moves between vendors.

An e4m3 code of the same bits means half as much in fnuz as in OCP, and a scale byte one larger means twice as much. So

* **OCP to fnuz**: codes keep their bits and the scale byte grows by one: every value stays what it was. -0, which fnuz
  does not have, becomes 0. A group whose scale byte is 254 keeps it and its values are coded again: exact up to
  240 x 2^127, which larger ones become; both are far beyond float32.
* **fnuz to OCP**: codes keep their bits and the scale byte shrinks by one: every value stays what it was. A group that
  holds 240 or -240, whose bits are NaN in OCP, or whose scale byte is 0, keeps the byte and its values are coded again,
  rounded to nearest even: exact from 2^-6 on and for even multiples of 2^-10, else off by 2^-10 (times the scale).
* NaN stays NaN; a group whose scale byte is 255 is NaN altogether and is written as the writer does it.

A cache with one scale for all (``fp8_per_tensor``) gets twice the scale on its way to fnuz; on its way to OCP the scale
stays, and every value is coded again.
"""

from __future__ import annotations

from functools import cache

import torch

from swa_backend._memory import overlap
from swa_backend.cache import PagedCache
from swa_backend.cache_layout import Dialect, PageLayout, check_same_layout
from swa_backend.errors import CacheError
from swa_backend.pages import PageView
from swa_backend.reference.fp8 import UE8M0_NAN, decode_e4m3, encode_e4m3

_VALUES = 2**21  # coded at a time, which bounds the temporaries
_LARGEST_SCALE = 254
_MAGNITUDE = 0x7F  # of a code; all ones: NaN in OCP, 240 in fnuz


def transcode_pages(source: PagedCache | PageView, destination: PagedCache | PageView) -> None:
    """Write every page of one cache to another in the destination's fp8 dialect; see above for the rule.

    Between caches of one dialect, or of a layout without e4m3 values, bytes are copied. The padding of a page is not
    touched. Nothing is read on the host. The destination may lie where the source does: that changes pages in place.

    Args:
        source: a bound cache, or pages.
        destination: pages of the same layout but for the dialect, as many and as large, on the same device. Of an
            ``fp8_per_tensor`` cache the scale is written too.

    Raises:
        CacheError: an argument is no cache or not bound, layouts differ in more than the dialect, the numbers of pages
            or entries or the devices differ, or the two overlap without being at one place.
    """
    old, new = _pages("source", source), _pages("destination", destination)
    _check(old, new)
    if old.layout.dialect is new.layout.dialect or old.layout.dialect is None or new.layout.dialect is None:
        new.data.copy_(old.data)
        if old.scale is not None and new.scale is not None:
            new.scale.copy_(old.scale)
        return
    layout, entries = old.layout, old.entries
    step = max(_VALUES // (entries * layout.quantised_dims), 1)
    for first in range(0, old.num_pages, step):
        pages = slice(first, first + step)
        data, scales = _rows(old, pages)
        codes = data[..., : layout.quantised_dims].view(*data.shape[:2], max(layout.num_groups, 1), -1)
        used = scales[..., : layout.num_groups]
        if layout.group:
            coded, used = _transcode_groups(codes, used, old.layout.dialect, new.layout.dialect)
        else:
            again = new.layout.dialect is Dialect.OCP
            coded = _table(old.layout.dialect, new.layout.dialect, again=again, device=codes.device)[codes.int()]
        new_data, new_scales = _rows(new, pages)
        new_data[..., layout.quantised_dims :] = data[..., layout.quantised_dims :]
        new_scales[..., layout.num_groups :] = scales[..., layout.num_groups :]
        new_data[..., : layout.quantised_dims] = coded.flatten(-2)
        new_scales[..., : layout.num_groups] = used
    if old.scale is not None and new.scale is not None:
        new.scale.copy_(old.scale * 2 if new.layout.dialect is Dialect.FNUZ else old.scale)


def _transcode_groups(
    codes: torch.Tensor, scales: torch.Tensor, source: Dialect, destination: Dialect
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [.., groups, group] and UE8M0 bytes [.., groups] in another dialect."""
    if destination is Dialect.FNUZ:
        moves = scales < _LARGEST_SCALE
        moved = scales + 1
    else:
        moves = (scales > 0) & ~((codes & _MAGNITUDE) == _MAGNITUDE).any(dim=-1)
        moved = scales - 1
    lost = scales == UE8M0_NAN
    index = codes.int()
    kept = _table(source, destination, again=False, device=codes.device)[index]
    again = _table(source, destination, again=True, device=codes.device)[index]
    coded = kept.where(moves[..., None], again).masked_fill_(lost[..., None], destination.nan_code)
    return coded, moved.where(moves & ~lost, scales)


@cache
def _table(source: Dialect, destination: Dialect, *, again: bool, device: torch.device) -> torch.Tensor:
    """uint8 [256]: the code that each code becomes, the same bits or the nearest value (``again``)."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e4m3(codes, source)
    new = encode_e4m3(values, destination) if again else codes.clone()
    new[values.isnan()] = destination.nan_code
    if destination is Dialect.FNUZ:
        new[values == 0] = 0
    return new.to(device)


def _rows(view: PageView, pages: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Data rows and scale rows of some pages, uint8 [n, entries, bytes]; views."""
    layout, entries = view.layout, view.entries

    def rows(offset: int, stride: int, length: int) -> torch.Tensor:
        first = view.data.storage_offset() + offset
        return view.data.as_strided((view.num_pages, entries, length), (view.page_stride, stride, 1), first)[pages]

    data = rows(layout.data_offset(entries, 0), layout.data_stride, layout.data_bytes)
    if not layout.scale_bytes:
        return data, data[..., :0]
    return data, rows(layout.scale_offset(entries, 0), layout.scale_stride, layout.scale_bytes)


def _pages(field: str, given: object) -> PageView:
    if isinstance(given, PagedCache):
        return given.pages
    if isinstance(given, PageView):
        return given
    raise CacheError(
        field,
        found=type(given).__name__,
        legal="a DeepseekV4SWACache, a CompressedCache or a PageView",
        fix="Bind the memory to a cache, or view it with PageView.of(tensor, layout, entries).",
    )


def _check(old: PageView, new: PageView) -> None:
    check_same_layout("destination layout", new.layout, _in_dialect(old.layout, new.layout))
    for what in ("entries", "num_pages", "device"):
        if getattr(old, what) != getattr(new, what):
            raise CacheError(
                f"destination {what}",
                found=getattr(new, what),
                legal=f"{getattr(old, what)}, as the source has",
                fix="Move the bytes to the device first, and bind as many pages of the same size.",
            )
    at_one_place = old.data.data_ptr() == new.data.data_ptr() and old.page_stride == new.page_stride
    if not at_one_place and overlap(old.data, new.data):
        raise CacheError(
            "destination",
            found="memory that the source spans, at another place",
            legal="memory apart from the source, or exactly the same",
            fix="Allocate a cache of its own.",
        )


def _in_dialect(layout: PageLayout, other: PageLayout) -> PageLayout:
    return layout if other.dialect is None else layout.with_dialect(other.dialect)
