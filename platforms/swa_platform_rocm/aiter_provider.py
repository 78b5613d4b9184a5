"""aiter's sparse MLA kernel as an attention provider: gfx950, the 584-byte cache, one cache or two in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from swa_backend._math import cdiv
from swa_backend.cache_layout import HEAD_DIM, Dialect, PageLayout
from swa_backend.provider import AttentionProvider, head_reasons
from swa_backend.split_plan import SplitPlan, compute_units
from swa_platform_rocm.aiter_discovery import ARCH, CURRENT, AiterKernel, Found, find_aiter
from swa_platform_rocm.aiter_room import MOST_TOKENS, Room, Rooms, entries_of
from swa_platform_rocm.chips import device_arch

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.pages import PageView
    from swa_backend.platform import Target
    from swa_backend.provider import AttentionCall, AttentionShape

_LAYOUT = "fp8_ds_mla"
_MOST_SINK = 1e30  # stands for infinity, of which the kernel makes NaN
_HEAD_TILE = 16
_KEY_TILE = 64
_MOST_SPLITS = 16
_MOST_BYTES = 2**31 - 1  # that a 32-bit offset reaches

RaggedRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Room], None]  # see aiter_rows_reference


def triton_rows() -> RaggedRows:
    """The Triton kernel that packs compressed rows."""
    from swa_platform_rocm.aiter_rows import ragged_rows

    return ragged_rows


class AiterAttention(AttentionProvider):
    """`sparse_mla_fwd`, or `pa_decode_sparse` of an aiter that has no such function yet.

    The kernel gives no lse: a call that asks for one goes to the first of ``others`` that serves the shape. Window rows
    are the builder's own, and the kernel does not look whether a slot is in the cache: the builder has to know how many
    pages there are. Compressed rows, which may come from elsewhere, are looked through on the way.

    Args:
        target: the chip; None = that of the builder's device.
        others: providers of the platform that give an lse, in order of preference.
        find: looks for the kernel; called only once the device is known to be a gfx950.
        load_rows: imports what packs compressed rows.
        arch_of_device: asks the driver for a device's architecture.
    """

    name = "aiter"

    def __init__(
        self,
        target: Target | None,
        others: Sequence[AttentionProvider],
        find: Callable[[], Found] = find_aiter,
        load_rows: Callable[[], RaggedRows] = triton_rows,
        arch_of_device: Callable[[torch.device | None], str | None] = device_arch,
    ) -> None:
        self._target = target
        self._others = tuple(others)
        self._find = find
        self._load_rows = load_rows
        self._arch_of_device = arch_of_device
        self._rooms = Rooms()
        self._plans: dict[torch.device, SplitPlan] = {}
        self._beside: dict[AttentionShape | None, AttentionProvider] = {}

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        """Every reason why the shape cannot be served; empty when it can."""
        reasons = head_reasons(shape)
        reasons.extend(_layout_reasons((shape.swa_layout, *shape.compressed_layouts)))
        if shape.batch_invariant:
            reasons.append("batch_invariant is set; its tiles follow the number of rows")
        wrong_chip = self._chip_reason(shape.device)
        reasons.extend((wrong_chip,) if wrong_chip else self._found.reasons)
        return tuple(reasons)

    def reserve(self, config: BackendConfig, device: torch.device) -> None:
        """Allocate what the steps of a configuration take on a device."""
        self._rooms.on(device, entries_of(config))
        for other in self._others:
            other.reserve(config, device)

    def decode(self, call: AttentionCall) -> None:
        """Write the rows of the decode tokens, padded ones included."""
        metadata = call.metadata
        if call.lse is not None:
            self._other(call).decode(call)
            return
        indices, indptr = metadata.decode_swa_ragged_indices, metadata.decode_swa_ragged_indptr
        if indices is None or indptr is None:
            raise RuntimeError("aiter's kernel takes ragged rows, which this metadata does not have")
        self._attend(call, 0, metadata.num_decode_tokens, indices, indptr, metadata.decode_swa_width)

    def prefill(self, call: AttentionCall) -> None:
        """Write the rows of the prefill tokens, padded ones included."""
        metadata = call.metadata
        if call.lse is not None:
            self._other(call).prefill(call)
            return
        indices, indptr = metadata.prefill_swa_ragged_indices, metadata.prefill_swa_ragged_indptr
        rows = metadata.prefill_swa_indices
        if indices is None or indptr is None or rows is None:
            raise RuntimeError("aiter's kernel takes ragged rows, which this metadata does not have")
        self._attend(call, metadata.num_decode_tokens, metadata.num_tokens, indices, indptr, rows.shape[-1])

    @cached_property
    def _found(self) -> Found:
        return self._find()

    @cached_property
    def _pack(self) -> RaggedRows:
        return self._load_rows()

    def _chip_reason(self, device: torch.device | None) -> str | None:
        """Why aiter is not even imported: it asks the driver for the GPU, and compiles for it."""
        if self._target is not None and self._target.arch != ARCH:
            return f"it reads this cache on {ARCH} only; the target is {self._target.arch}"
        arch = self._arch_of_device(device)
        if arch is None:
            return f"it reads this cache on {ARCH} only; no GPU is visible"
        return None if arch == ARCH else f"it reads this cache on {ARCH} only; the device is {arch}"

    def _other(self, call: AttentionCall) -> AttentionProvider:
        """Who serves a call that asks for an lse."""
        shape = call.metadata.shape
        found = self._beside.get(shape)
        if found is None:
            able = (one for one in self._others if shape is None or not one.supports(shape))
            found = self._beside[shape] = next(able, self._others[-1])
        return found

    def _attend(
        self, call: AttentionCall, first: int, last: int, indices: torch.Tensor, indptr: torch.Tensor, width: int
    ) -> None:
        """Attention of the tokens ``first .. last - 1``, whose ragged rows have at most ``width`` entries each."""
        kernel = self._found.kernel
        if kernel is None:
            raise RuntimeError("aiter is used where it does not serve")
        second_width = 0 if call.compressed is None else call.compressed.rows.shape[1]
        room = self._rooms.on(call.q.device, second_width)
        heads = call.q.shape[1]
        sink = torch.clamp(call.attn_sink, -_MOST_SINK, _MOST_SINK, out=room.sink[:heads])
        entries = _most_entries(call, width, second_width)
        step = _tokens_of_a_call(call, room)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            extra = None
            if call.compressed is not None:
                second = call.compressed
                valid = call.metadata.is_valid_token[begin:end]
                rows, lens = second.rows[begin:end], second.lens[begin:end]
                self._pack(rows, lens, valid, second.pages.num_slots, room)
                extra = _token_rows(second.pages), room.indptr[: end - begin + 1], room.indices[: rows.numel()]
            _call(
                kernel,
                call.q[begin:end],
                _token_rows(call.pages),
                indptr[begin - first : end - first + 1],
                indices,
                call.scale,
                sink,
                call.out[begin:end],
                extra,
                self._splits(kernel, call.q.device, (end - begin) * cdiv(heads, _HEAD_TILE), entries),
            )

    def _splits(self, kernel: AiterKernel, device: torch.device, programs: int, entries: tuple[int, int]) -> int:
        """How many programs share a row; one where their partial results would be rounded."""
        if not kernel.exact_partials:
            return 1
        plan = self._plans.get(device)
        if plan is None:
            units = compute_units(device, self._target)
            plan = self._plans[device] = SplitPlan(units, _KEY_TILE, programs_per_unit=2, most=_MOST_SPLITS)
        return plan.split(programs, entries).splits


def _call(
    kernel: AiterKernel,
    q: torch.Tensor,
    pages: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor,
    out: torch.Tensor,
    extra: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    splits: int,
) -> None:
    """One launch of the kernel, all arguments by name. Ragged rows hold no -1, so none has to be looked for."""
    extra_pages, extra_indptr, extra_indices = extra or (None, None, None)
    given: dict[str, Any] = {
        "q": q,
        "kv_indptr": indptr,
        "kv_indices": indices,
        "softmax_scale": scale,
        "kv_splits": splits,
        "has_invalid": False,
        "attn_sink": sink,
        "extra_indptr": extra_indptr,
        "extra_indices": extra_indices,
    }
    if "out" in kernel.arguments:
        given["out"] = out
    if kernel.form is CURRENT:
        # The cache's format fixes its geometry; what is said of it is that all 512 values of a row are keys and values.
        given |= {"kv_buffer": pages, "extra_kv": extra_pages, "return_lse": False}
        given |= {"kv_lora_rank": HEAD_DIM, "qk_rope_head_dim": 0}
    else:
        given |= {"unified_kv": pages, "extra_cache": extra_pages}
    written = kernel.function(**given)
    if isinstance(written, tuple):
        written = written[0]
    if written.data_ptr() != out.data_ptr():
        out.copy_(written)


def _token_rows(pages: PageView) -> torch.Tensor:
    """[pages, entries, 584] uint8 as aiter tells formats apart; its kernel takes the address and the page stride."""
    found: torch.Tensor | None = pages.launches.get(AiterAttention)
    if found is None:
        size = pages.layout.bytes_per_token
        found = pages.data.as_strided((pages.num_pages, pages.entries, size), (pages.page_stride, size, 1))
        pages.launches[AiterAttention] = found
    return found


def _most_entries(call: AttentionCall, width: int, second_width: int) -> tuple[int, int]:
    """The most entries that a token can have in each cache in this step, as far as the host knows it."""
    longest = call.metadata.max_seq_len
    if longest and call.compressed is not None:
        second_width = min(second_width, longest // call.compressed.ratio)
    return min(width, longest or width), second_width


def _tokens_of_a_call(call: AttentionCall, room: Room) -> int:
    """How many tokens one launch takes: by the space for their compressed rows, and by what 32 bits reach."""
    tokens = min(MOST_TOKENS, _MOST_BYTES // (2 * max(call.q.stride(0), call.out.stride(0), 1)))
    if call.compressed is not None:
        tokens = min(tokens, room.indices.numel() // call.compressed.rows.shape[1])
    return max(tokens, 1)


def _layout_reasons(layouts: Sequence[PageLayout]) -> list[str]:
    reasons = []
    for layout in dict.fromkeys(layouts):
        if layout.name != _LAYOUT:
            reasons.append(f"it reads {_LAYOUT}, not {layout.name}")
        elif layout.dialect is not Dialect.OCP:
            reasons.append(f"it reads {_LAYOUT} in the {Dialect.OCP} dialect, not in {layout.dialect}")
    return reasons
