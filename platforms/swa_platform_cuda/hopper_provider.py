"""Our own Hopper kernels as an attention provider for sm90; today it serves where ``SWA_BACKEND_ATTENTION`` names it.

Decode reads the paged caches (`swa_platform_cuda.hopper_decode`); with a second cache it is ours where that was
measured to be faster than FlashMLA, see `TWO_CACHES_FROM_TOKENS`. Prefill of layers that see their window only goes to
the ring kernel (`swa_platform_cuda.hopper_window_prefill`); prefill with a second cache to FlashMLA's kernel over
gathered keys where a FlashMLA build serves the layers, since gathering shares the dequantisation among a request's
tokens. What neither takes, the decode kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from swa_backend.cache_layout import Dialect
from swa_backend.provider import AttentionProvider, head_reasons
from swa_backend.provider_choice import forced_provider
from swa_platform_cuda.flashmla_discovery import Finder
from swa_platform_cuda.flashmla_provider import FlashMLAAttention
from swa_platform_cuda.hopper_probe import ARCH, Taken, Toolchain, resource_reasons, taken_by

if TYPE_CHECKING:
    from swa_backend.cache_layout import PageLayout
    from swa_backend.config import BackendConfig
    from swa_backend.platform import Target
    from swa_backend.provider import AttentionCall, AttentionShape

LAYOUT = "fp8_ds_mla"
TWO_CACHES_FROM_TOKENS: int | None = None
"""Decode tokens from which our kernel decodes layers with a second cache, too; None: FlashMLA does wherever it serves.

Measured beside FlashMLA in one run on an H200, ours with 128 + 512 keys takes 1.0 to 1.3 of its time: feeding blocks of
keys is what bounds it. With one cache it takes 0.84 to 0.95. Without FlashMLA, in the batch-invariant mode, and where
``SWA_BACKEND_ATTENTION`` asks for ``hopper``, ours always does.
"""


class Paged(Protocol):
    """Attention straight from the paged caches; see `swa_platform_cuda.hopper_decode.PagedDecode`."""

    def attend(self, call: AttentionCall, tokens: slice, rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Write the rows of the tokens."""


class Window(Protocol):
    """Prefill of layers that see their window only; see `swa_platform_cuda.hopper_window_prefill.WindowPrefill`."""

    def reserve(self, config: BackendConfig, device: torch.device) -> None: ...

    def supports(self, call: AttentionCall) -> bool: ...

    def attend(self, call: AttentionCall) -> None: ...


class Kernels(NamedTuple):
    """What the provider calls, imported late."""

    paged: Callable[[torch.device, bool], Paged]  # device, batch-invariant
    window: Window
    taken: Callable[[torch.device, int, bool], Taken]  # device, heads, two caches: of the decode kernel's key


def gluon_kernels() -> Kernels:
    """The Gluon kernels; whatever their import raises."""
    from swa_platform_cuda.hopper_decode import PagedDecode, decode_launcher
    from swa_platform_cuda.hopper_window_prefill import WindowPrefill

    return Kernels(
        PagedDecode, WindowPrefill(), lambda device, heads, two: taken_by(decode_launcher(device, heads, two))
    )


class HopperAttention(AttentionProvider):
    """The Gluon kernels of this package.

    Args:
        target: the chip; None = that of the builder's device, on which the kernels are compiled and looked at.
        finder: says what the device is.
        toolchain: the compiler.
        load_kernels: imports the kernels.
        flashmla: serves layers with a second cache, where it can and is faster.
    """

    name = "hopper"

    def __init__(
        self,
        target: Target | None,
        finder: Finder | None = None,
        toolchain: Toolchain | None = None,
        load_kernels: Callable[[], Kernels] = gluon_kernels,
        flashmla: FlashMLAAttention | None = None,
    ) -> None:
        self._target = target
        self._finder = finder or Finder.here()
        self._toolchain = toolchain or Toolchain.here()
        self._load_kernels = load_kernels
        self._flashmla = flashmla or FlashMLAAttention(target, self._finder)
        self._kernels: Kernels | None = None
        self._paged: dict[tuple[torch.device, bool], Paged] = {}
        self._checked: dict[object, tuple[str, ...]] = {}
        self._flashmla_serves: dict[AttentionShape, bool] = {}  # layers with a second cache
        self._forced = False

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        """Every reason why the shape cannot be served; empty when it can."""
        reasons = head_reasons(shape)
        reasons.extend(_layout_reasons((shape.swa_layout, *shape.compressed_layouts)))
        arch = self._target.arch if self._target is not None else self._finder.capability(shape.device)
        if arch != ARCH:
            reasons.append(f"its kernels are for sm{ARCH}, not {'no device' if arch is None else f'sm{arch}'}")
            return tuple(reasons)
        reasons.extend(self._toolchain.reasons())
        if not reasons and self._target is None:
            reasons.extend(self._compiled_reasons(shape))
        if not reasons and shape.compressed_layouts:
            self._flashmla_serves[shape] = not self._flashmla.supports(shape)
            self._forced = forced_provider() == self.name
            self.takes_plans = self._flashmla_serves[shape] and not self._forced  # FlashMLA's decodes
        return tuple(reasons)

    def reserve(self, config: BackendConfig, device: torch.device) -> None:
        """Allocate what the steps of a configuration take on a device."""
        self._paged_on(device, config.batch_invariant)
        kernels = self._loaded()
        kernels.window.reserve(config, device)
        if any(self._flashmla_serves.values()):
            self._flashmla.reserve(config, device)

    def decode(self, call: AttentionCall) -> None:
        """Write the rows of the decode tokens, padded ones included."""
        metadata = call.metadata
        tokens = metadata.num_decode_tokens
        if call.compressed is not None and not self._forced and self._flashmla_is_there(call):
            shape = metadata.shape
            ours = TWO_CACHES_FROM_TOKENS is not None and tokens >= TWO_CACHES_FROM_TOKENS
            if not ours and shape is not None and not shape.batch_invariant:
                self._flashmla.decode(call)
                return
        self._paged_for(call).attend(call, slice(0, tokens), metadata.decode_swa_indices, metadata.decode_swa_lens)

    def prefill(self, call: AttentionCall) -> None:
        """Write the rows of the prefill tokens, padded ones included."""
        metadata = call.metadata
        rows, lens = metadata.prefill_swa_indices, metadata.prefill_swa_lens
        if rows is None or lens is None:
            return
        window = self._loaded().window
        if call.compressed is None:
            if window.supports(call):
                window.attend(call)
                return
        elif self._flashmla_is_there(call):
            self._flashmla.prefill(call)
            return
        self._paged_for(call).attend(call, slice(metadata.num_decode_tokens, metadata.num_tokens), rows, lens)

    def _compiled_reasons(self, shape: AttentionShape) -> tuple[str, ...]:
        """Compile the keys that the shape needs, and compare what they take with what was tested."""
        device = torch.device("cuda") if shape.device is None else shape.device
        keys = {
            f"the decode kernel over {one + 1} cache(s)": bool(one) for one in range(1 + bool(shape.compressed_layouts))
        }
        known = (device, shape.num_heads, len(keys))
        found = self._checked.get(known)
        if found is None:
            try:
                taken = self._loaded().taken
            except Exception as error:  # an experimental module may raise anything
                return (f"its kernels cannot be imported: {type(error).__name__}: {error}",)
            version = self._toolchain.triton_version() or ""
            found = resource_reasons(keys, lambda name: taken(device, shape.num_heads, keys[name]), version)
            self._checked[known] = found
        return found

    def _flashmla_is_there(self, call: AttentionCall) -> bool:
        shape = call.metadata.shape
        return shape is not None and self._flashmla_serves.get(shape, False)

    def _loaded(self) -> Kernels:
        if self._kernels is None:
            self._kernels = self._load_kernels()
        return self._kernels

    def _paged_for(self, call: AttentionCall) -> Paged:
        shape = call.metadata.shape
        return self._paged_on(call.q.device, shape is not None and shape.batch_invariant)

    def _paged_on(self, device: torch.device, batch_invariant: bool) -> Paged:
        found = self._paged.get((device, batch_invariant))
        if found is None:
            found = self._paged[device, batch_invariant] = self._loaded().paged(device, batch_invariant)
        return found


def _layout_reasons(layouts: Iterable[PageLayout]) -> list[str]:
    reasons = []
    for layout in dict.fromkeys(layouts):
        if layout.name != LAYOUT:
            reasons.append(f"it reads {LAYOUT}, not {layout.name}")
        elif layout.dialect is not Dialect.OCP:
            reasons.append(f"{layout.name} is in the {layout.dialect} dialect; it reads ocp")
    return reasons
