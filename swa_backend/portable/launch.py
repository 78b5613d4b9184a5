"""Launches of the portable attention kernels on one device, prepared once for each pair of caches."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swa_backend._math import cdiv
from swa_backend.kernels.jit import address
from swa_backend.kernels.paging import divisor, page_numbers, scale_of
from swa_backend.kernels.sparse_mla import head_key, sparse_mla, sparse_mla_key
from swa_backend.kernels.sparse_mla_reduce import MOST_SPLITS, sparse_mla_reduce
from swa_backend.kernels.sparse_mla_softmax import LOG2_E
from swa_backend.kernels.sparse_mla_window_launch import WindowAttention
from swa_backend.kernels.triton_internals import target_of
from swa_backend.layer_types import LayerType
from swa_backend.portable.partials import Partials
from swa_backend.split_plan import Split, SplitPlan, compute_units

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.pages import PageView
    from swa_backend.platform import Target
    from swa_backend.provider import AttentionCall

_ALIGNED_BYTES = 16
_PARTIAL = 0.015  # what a partial result costs, in tiles of keys: 128 kB there and back; measured on an H200


class SparseAttention:
    """The kernels on one device.

    Args:
        device: where the calls' tensors live.
        target: the chip that it stands for, None = what the device is.
        units: compute units to plan for, None = the chip's.
    """

    def __init__(self, device: torch.device, target: Target | None, units: int | None) -> None:
        self._device = device
        self._tiles = sparse_mla.tuning_for(target_of(device.index if device.type == "cuda" else None)).tiles
        self._units = units or compute_units(device, target)
        self._plans = {invariant: self._plan(batch_invariant=invariant) for invariant in (False, True)}
        self._partials: dict[int, Partials] = {}
        self._outgrown: list[Partials] = []  # a captured graph may still write there

    @cached_property
    def window(self) -> WindowAttention:
        """The form for window-only prefill."""
        return WindowAttention()

    def reserve(self, config: BackendConfig) -> None:
        """Allocate partial results for the steps of a configuration."""
        heads = config.num_heads
        for tile in {self._head_tile(heads, aligned=aligned) for aligned in (True, False)}:
            programs = 0
            if config.batch_invariant:
                programs = cdiv(heads, tile) * self._plans[True].split(1, _widest_rows(config)).splits
            self._room(tile, programs)
        self.window.reserve(config, self._device)

    def attend(self, call: AttentionCall, first: int, count: int, rows: WindowRows) -> None:
        """Write the rows of the tokens ``first .. first + count - 1``, whose window rows are ``rows``."""
        if not count:
            return
        second, metadata = call.compressed, call.metadata
        heads, longest = call.q.shape[1], call.metadata.max_seq_len
        entries = [rows.width]
        if second is not None:
            entries.append(second.rows.shape[1])
        if longest:
            entries[0] = min(rows.width, longest)
            if second is not None:
                entries[1] = min(entries[1], longest // second.ratio)
        aligned = _aligned(call)
        tile = self._head_tile(heads, aligned=aligned)
        head_tiles = cdiv(heads, tile)
        invariant = metadata.shape is not None and metadata.shape.batch_invariant
        split = self._plans[invariant].split(count * head_tiles, entries)
        partials, at_once = self._room(tile, 0), count
        if split.splits > 1:
            needed = head_tiles * split.splits
            if partials.programs < needed:  # rows wider than the configuration's
                partials = self._room(tile, needed)
            at_once = min(count, partials.programs // needed)
        prepared = self._prepared(call, partials, aligned=aligned)
        for start in range(0, count, at_once):
            prepared.launch(call, rows, first + start, start, min(at_once, count - start), head_tiles, split)

    def _plan(self, *, batch_invariant: bool) -> SplitPlan:
        return SplitPlan(
            self._units,
            self._tiles["KEYS"],
            partial=_PARTIAL,
            most=MOST_SPLITS,
            batch_invariant=batch_invariant,
        )

    def _head_tile(self, heads: int, *, aligned: bool) -> int:
        return min(head_key(heads, aligned=aligned), self._tiles["MOST_HEADS"])

    def _room(self, tile: int, programs: int) -> Partials:
        """Partial results of ``programs`` programs of ``tile`` heads, or of as many as the plan can ask for."""
        found = self._partials.get(tile)
        if found is None or found.programs < programs:
            if found is not None:
                self._outgrown.append(found)
            found = self._partials[tile] = Partials(max(programs, self._plans[False].capacity), tile, self._device)
        return found

    def _prepared(self, call: AttentionCall, partials: Partials, *, aligned: bool) -> _Prepared:
        """The launches for a call's caches and head count, made on the first call of each."""
        second = None if call.compressed is None else call.compressed.pages
        key = ("sparse_mla", second, call.q.shape[1], aligned, partials)
        found: _Prepared | None = call.pages.launches.get(key)
        if found is None:
            found = call.pages.launches[key] = _Prepared(call.pages, second, call.q, partials, aligned=aligned)
        return found


class WindowRows(NamedTuple):
    """Window rows of n tokens: slots [n, 1, width] with lens [n] int32, or the same without gaps where a platform
    keeps them so: indices, and indptr [n + 1] int32."""

    slots: torch.Tensor
    lens: torch.Tensor
    indices: torch.Tensor | None
    indptr: torch.Tensor | None

    @property
    def width(self) -> int:
        return self.slots.shape[2]


class _Prepared:
    """The kernels bound to a pair of caches."""

    def __init__(
        self, pages: PageView, second: PageView | None, q: torch.Tensor, partials: Partials, *, aligned: bool
    ) -> None:
        heads = q.shape[1]
        key = sparse_mla_key(pages.layout, None if second is None else second.layout, heads, aligned=aligned)
        launcher = sparse_mla.on(q.device, **key)
        self._attend = launcher.bind(
            partials.sums, partials.peaks, *_cache(pages), *_cache(pages if second is None else second)
        )
        self._reduce = sparse_mla_reduce.on(q.device).bind(partials.heads, partials.sums, partials.peaks)

    def launch(
        self, call: AttentionCall, rows: WindowRows, first: int, row: int, count: int, head_tiles: int, split: Split
    ) -> None:
        """Launch for ``count`` tokens from ``first`` on, whose window rows begin at ``row``."""
        out, second = call.out, call.compressed
        heads, splits = call.q.shape[1], split.splits
        q_row, q_head, _ = call.q.stride()
        out_row, out_head, _ = out.stride()
        rows_stride = rows.slots.stride(0)
        to, sink = _from(out, first, out_row), address(call.attn_sink)
        lse, has_lse = (sink, 0) if call.lse is None else (_from(call.lse, first, heads), 1)
        if rows.indices is not None and rows.indptr is not None:
            slots, lens, ragged = address(rows.indices), _from(rows.indptr, row, 1), 1
        else:
            slots, lens, ragged = _from(rows.slots, row, rows_stride), _from(rows.lens, row, 1), 0
        second_slots, second_lens, second_stride, second_width = slots, lens, 0, 0
        if second is not None:
            second_stride, second_width = second.rows.stride(0), second.rows.shape[1]
            second_slots, second_lens = _from(second.rows, first, second_stride), _from(second.lens, first, 1)
        self._attend.launch(
            (count * head_tiles, splits, 1),
            _from(call.q, first, q_row), to, lse, slots, lens, second_slots, second_lens,
            _from(call.metadata.is_valid_token, first, 1), sink, q_row, q_head, out_row, out_head, rows_stride,
            second_stride, rows.width, second_width, ragged, has_lse, heads, splits, split.tiles,
            call.scale * LOG2_E.value,
        )  # fmt: skip
        if splits > 1:
            self._reduce.launch((count, heads, 1), to, lse, sink, out_row, out_head, heads, splits, has_lse)


def _widest_rows(config: BackendConfig) -> tuple[int, int]:
    """Entries of the widest rows that the layers of a configuration have."""
    layers = config.model.present_layer_types
    second = config.model.index_topk if any(layer.indexed for layer in layers) else 0
    if LayerType.C128A in layers:
        second = max(second, cdiv(config.scheduler.max_model_len, LayerType.C128A.ratio))
    return max(config.max_decode_width, config.prefill_width), second


def _aligned(call: AttentionCall) -> bool:
    """Whether 16-byte accesses are possible on queries, output and pages."""
    q_row, q_head, _ = call.q.stride()
    out_row, out_head, _ = call.out.stride()
    bits = (q_row | q_head | out_row | out_head) * call.q.element_size() | call.q.data_ptr() | call.out.data_ptr()
    for pages in (call.pages, *((call.compressed.pages,) if call.compressed is not None else ())):
        bits |= pages.data.stride(0) | pages.data.data_ptr()
    return not bits % _ALIGNED_BYTES


def _cache(pages: PageView) -> tuple[Any, ...]:
    """The kernel's arguments for one cache."""
    *numbers, entries, _ = page_numbers(pages)
    return (pages.data, scale_of(pages), *numbers, entries, pages.num_slots, *divisor(entries))


def _from(tensor: torch.Tensor, row: int, stride: int) -> torch.Tensor | int:
    """What to pass for a tensor from a row on: its address on a GPU, else a view."""
    if tensor.is_cuda:
        return tensor.data_ptr() + row * stride * tensor.element_size()
    return tensor[row:] if row else tensor
