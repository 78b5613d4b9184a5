"""The portable Triton kernels as an attention provider: any layout, one or two caches, any head count to 128."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swa_backend.provider import AttentionProvider, head_reasons

if TYPE_CHECKING:
    import torch

    from swa_backend.config import BackendConfig
    from swa_backend.platform import Target
    from swa_backend.portable.launch import SparseAttention
    from swa_backend.provider import AttentionCall, AttentionShape


class TritonAttention(AttentionProvider):
    """Kernels of the library's own in Triton; they read pages in place and allocate nothing per call.

    Args:
        target: the chip; None = that of the builder's device.
        units: compute units to plan for; None = the chip's.
        chip_reasons: the platform's reasons against a device's chip (None: where it is not known yet).
    """

    name = "triton"

    def __init__(
        self,
        target: Target | None = None,
        units: int | None = None,
        chip_reasons: Callable[[torch.device | None], Sequence[str]] = lambda device: (),
    ) -> None:
        self._target = target
        self._units = units
        self._chip_reasons = chip_reasons
        self._attention: dict[torch.device, SparseAttention] = {}

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        """Every reason why the shape cannot be served; empty when it can."""
        reasons = head_reasons(shape)
        reasons.extend(_triton_reasons())
        reasons.extend(self._chip_reasons(shape.device))
        return tuple(reasons)

    def reserve(self, config: BackendConfig, device: torch.device) -> None:
        """Allocate what the steps of a configuration take on a device."""
        self._on(device).reserve(config)

    def decode(self, call: AttentionCall) -> None:
        """Write the rows of the decode tokens, padded ones included."""
        from swa_backend.portable.launch import WindowRows

        metadata = call.metadata
        rows = WindowRows(
            metadata.decode_swa_indices,
            metadata.decode_swa_lens,
            metadata.decode_swa_ragged_indices,
            metadata.decode_swa_ragged_indptr,
        )
        self._on(call.q.device).attend(call, 0, metadata.num_decode_tokens, rows)

    def prefill(self, call: AttentionCall) -> None:
        """Write the rows of the prefill tokens, padded ones included."""
        from swa_backend.portable.launch import WindowRows

        metadata = call.metadata
        if metadata.prefill_swa_indices is None or metadata.prefill_swa_lens is None:
            return
        attention = self._on(call.q.device)
        if attention.window.supports(call):
            attention.window.attend(call)
            return
        rows = WindowRows(
            metadata.prefill_swa_indices,
            metadata.prefill_swa_lens,
            metadata.prefill_swa_ragged_indices,
            metadata.prefill_swa_ragged_indptr,
        )
        attention.attend(call, metadata.num_decode_tokens, metadata.num_prefill_tokens, rows)

    def _on(self, device: torch.device) -> SparseAttention:
        found = self._attention.get(device)
        if found is None:
            from swa_backend.portable.launch import SparseAttention

            found = self._attention[device] = SparseAttention(device, self._target, self._units)
        return found


def _triton_reasons() -> tuple[str, ...]:
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken package may raise anything
        return (f"Triton cannot be imported ({type(error).__name__}: {error})",)
    return ()
