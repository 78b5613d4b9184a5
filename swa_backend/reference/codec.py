"""Cache pages in plain PyTorch: quantise, write, dequantise and gather, exact for every byte and every layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swa_backend.cache_layout import HEAD_DIM, Dialect, PageLayout
from swa_backend.errors import CacheError
from swa_backend.pages import PageView
from swa_backend.reference import fp8

_CHUNK = 2048  # rows coded at a time: their intermediates stay in a CPU's cache and reuse memory
_GATHER_CHUNK = 32 * _CHUNK  # rows gathered at a time: bounds the float32 copy to 128 MiB


def quantise(
    k: torch.Tensor, layout: PageLayout, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode keys as the rows of a page.

    Each group of values gets the scale 2^e with the least e for which ``2^e * fp8_max >= max(amax, 1e-4)``; a value
    is ``clamp(x / 2^e)`` rounded to nearest even. Where a group holds NaN or infinity all its codes are the dialect's
    NaN code and its scale byte is 255; with one scale for the whole cache only the value itself becomes NaN. bf16
    values are copied.

    Args:
        k: [n, 512] bf16 or another float dtype.
        layout: layout of the cache; a writable one.
        scale: float32 [1] for ``fp8_per_tensor``.

    Returns:
        Data rows uint8 [n, layout.data_bytes], scale rows uint8 [n, layout.scale_bytes] (unused scale bytes are 0).

    Raises:
        CacheError: the layout is read only.
    """
    if not layout.writable:
        raise CacheError(
            "layout", found=layout.name, legal="a writable layout", fix=f"{layout.name} caches can only be read."
        )
    n = k.shape[0]
    scales = torch.zeros(n, layout.scale_bytes, dtype=torch.uint8, device=k.device)
    tail = k[:, layout.quantised_dims :].to(torch.bfloat16, memory_format=torch.contiguous_format).view(torch.uint8)
    if layout.dialect is None:
        return tail, scales
    values = k[:, : layout.quantised_dims].to(torch.float32, memory_format=torch.contiguous_format)
    if scale is not None:
        codes = fp8.encode_e4m3(values / scale, layout.dialect)
        return codes.masked_fill_(~values.isfinite(), layout.dialect.nan_code), scales
    codes, scales[:, : layout.num_groups] = _quantise_groups(
        values.view(n, layout.num_groups, layout.group), layout.dialect
    )
    return torch.cat((codes.flatten(1), tail), dim=1), scales


def _quantise_groups(values: torch.Tensor, dialect: Dialect) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [n, groups, group] and UE8M0 bytes uint8 [n, groups] of float32 [n, groups, group]."""
    amax = values.abs().amax(dim=2)
    lost = ~amax.isfinite()
    exponents = fp8.scale_exponents(amax.masked_fill(lost, 0.0), dialect)
    codes = fp8.encode_e4m3(values * fp8.power_of_two(-exponents)[..., None], dialect)
    codes.masked_fill_(lost[..., None], dialect.nan_code)
    # The exponents of finite float32 give bytes 105..248, so none needs clamping.
    scales = (exponents + fp8.UE8M0_BIAS).masked_fill_(lost, fp8.UE8M0_NAN)
    return codes, scales.to(torch.uint8)


def write_kv(k: torch.Tensor, pages: PageView, slot_mapping: torch.Tensor) -> None:
    """Quantise keys and store them in their slots; the padding of a page is not touched.

    Args:
        k: [>= T, 512] bf16 or another float dtype, any strides.
        pages: pages to write.
        slot_mapping: [T] int64. A slot that is negative, or at or past ``pages.num_slots``, stores nothing. Of equal
            slots the last one wins, with its data and its scales.

    Raises:
        CacheError: the layout is read only.
    """
    wanted = ((slot_mapping >= 0) & (slot_mapping < pages.num_slots)).nonzero().squeeze(1)
    slots, order = slot_mapping[wanted].sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    torch.ne(slots[:-1], slots[1:], out=last[:-1])
    slots, tokens = slots[last], wanted[order[last]]
    for begin in range(0, slots.numel(), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        _store(pages, slots[chunk], *quantise(k[tokens[chunk]], pages.layout, pages.scale))


def _store(view: PageView, slots: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Put data rows and scale rows, uint8 [n, bytes], where the distinct ``slots`` [n] int64 have them."""
    layout, entries = view.layout, view.entries
    page, entry = slots // entries, slots % entries
    _rows(view, layout.data_offset(entries, 0), layout.data_stride, layout.data_bytes)[page, entry] = data
    if layout.scale_bytes:
        _rows(view, layout.scale_offset(entries, 0), layout.scale_stride, layout.scale_bytes)[page, entry] = scales


def _rows(view: PageView, offset: int, stride: int, length: int) -> torch.Tensor:
    """One row of every entry, uint8 [num_pages, entries, length]; entry 0's begins at byte ``offset`` of its page."""
    first = view.data.storage_offset() + offset
    return view.data.as_strided((view.num_pages, view.entries, length), (view.page_stride, stride, 1), first)


def dequantise_slots(view: PageView, slots: torch.Tensor) -> torch.Tensor:
    """Read entries.

    Each value is its code times its scale, rounded once to float32: exact but for overflow to infinity, and for the
    product with the float32 scale of ``fp8_per_tensor``.

    Args:
        view: pages to read.
        slots: integers of any shape. A slot that is negative, or at or past ``view.num_slots``, reads as zeros.

    Returns:
        float32 [*slots.shape, 512].
    """
    flat = slots.reshape(-1).to(torch.int64)
    out = torch.empty(flat.numel(), HEAD_DIM, dtype=torch.float32, device=view.device)
    for begin in range(0, flat.numel(), _CHUNK):
        _dequantise(view, flat[begin : begin + _CHUNK], out[begin : begin + _CHUNK])
    return out.view(*slots.shape, HEAD_DIM)


def _dequantise(view: PageView, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Read the entries of ``slots`` [n] int64 to ``out`` [n, 512] float32."""
    layout, entries = view.layout, view.entries
    real = (slots >= 0) & (slots < view.num_slots)
    slots = slots.where(real, 0)
    page_offset, entry = slots // entries * view.page_stride, slots % entries
    data = _fetch(view, page_offset + entry * layout.data_stride + layout.data_offset(entries, 0), layout.data_bytes)
    split = layout.quantised_dims
    if layout.dialect is not None:
        out[:, :split] = fp8.decode_e4m3(data[:, :split], layout.dialect)
    elif split:
        out[:] = fp8.decode_e2m1(data)
    if layout.rope_dims:
        out[:, split:] = data[:, -2 * layout.rope_dims :].view(torch.bfloat16)
    if layout.group:
        first = layout.scale_offset(entries, 0)
        codes = _fetch(view, page_offset + entry * layout.scale_stride + first, layout.num_groups)
        is_e8 = layout.scale_format == "ue8m0"
        scales = fp8.decode_ue8m0(codes) if is_e8 else fp8.decode_e4m3(codes, Dialect.OCP)
        out[:, :split].view(-1, layout.num_groups, layout.group).mul_(scales[..., None])
    elif view.scale is not None:
        out.mul_(view.scale)
    out.masked_fill_(~real[:, None], 0.0)


def _fetch(view: PageView, offsets: torch.Tensor, length: int) -> torch.Tensor:
    """``length`` bytes from each of ``offsets`` [n] int64, counted from the first page: uint8 [n, length].

    Selects from a view in which a row begins at every byte, which copies a row at a time whatever the page stride is.
    """
    reach = (view.num_pages - 1) * view.page_stride + view.layout.used_bytes(view.entries)
    return view.data.as_strided((reach - length + 1, length), (1, 1)).index_select(0, offsets)


def gather_kv(
    pages: PageView,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    out: torch.Tensor,
    offset: int,
) -> None:
    """Dequantise the last entries of each request to a workspace; other rows of it are not touched.

    Position ``seq_lens[r] - gather_lens[r] + j`` goes to ``out[r, offset + j]``. A position whose page is negative or
    at or past ``pages.num_pages``, or that lies outside the table, gives a zero row. Rows past the workspace's end are
    not written.

    Args:
        pages: pages to read.
        block_table: [R, C] int32 page numbers.
        seq_lens: [R] int32 entries of each request.
        gather_lens: [R] int32 entries to read of each; None = all.
        out: [R, M, 512] bf16, any strides.
        offset: first row of ``out`` to write.
    """
    for request, position, row in _gathered(seq_lens, gather_lens, out.shape[1], offset):
        rows = dequantise_slots(pages, _slots(pages, block_table, request, position))
        out[request, row] = rows.to(out.dtype)


def _gathered(
    seq_lens: torch.Tensor, gather_lens: torch.Tensor | None, height: int, offset: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(request, position, workspace row) of the rows to gather, int64 [n] each, a bounded number at a time."""
    seq_lens = seq_lens.to(torch.int64)
    lens = seq_lens if gather_lens is None else gather_lens.to(torch.int64)
    ends = lens.clamp(min=0, max=max(height - offset, 0)).cumsum(0)
    starts = ends - ends.diff(prepend=ends.new_zeros(1))
    total = int(ends[-1]) if ends.numel() else 0
    for begin in range(0, total, _GATHER_CHUNK):
        flat = torch.arange(begin, min(begin + _GATHER_CHUNK, total), device=ends.device)
        request = torch.searchsorted(ends, flat, right=True)
        j = flat - starts[request]
        yield request, (seq_lens - lens)[request] + j, offset + j


def _slots(view: PageView, block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Slot of each position, int64 [n]; outside the cache where the table has none, or a page that does not exist."""
    columns = block_table.shape[1]
    if not columns:
        return torch.full_like(position, -1)
    column = position.div(view.entries, rounding_mode="floor")
    page = block_table[request, column.clamp(0, columns - 1)].to(torch.int64)
    inside = (column >= 0) & (column < columns)
    return (page * view.entries + position % view.entries).where(inside, -1)
