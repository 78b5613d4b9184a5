"""FlashMLA as an attention provider: decode over paged caches, prefill over gathered keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from swa_backend.cache_layout import Dialect
from swa_backend.layer_types import LayerType
from swa_backend.provider import AttentionProvider
from swa_platform_cuda.flashmla_build import DECODE_HEADS, HEAD_DIM, FlashMLABuild
from swa_platform_cuda.flashmla_discovery import Finder, Found, find_flashmla
from swa_platform_cuda.flashmla_forms import padded_heads
from swa_platform_cuda.flashmla_paged import PagedAttention
from swa_platform_cuda.flashmla_plan import TilePlan
from swa_platform_cuda.flashmla_prefill import GatheredPrefill, group_of
from swa_platform_cuda.flashmla_shared import layer_type_of
from swa_platform_cuda.flashmla_workspace import DIRECT_TOKENS, Workspace

if TYPE_CHECKING:
    from swa_backend.cache_layout import PageLayout
    from swa_backend.combine import CombineStep
    from swa_backend.config import BackendConfig
    from swa_backend.operations import Operations
    from swa_backend.platform import Target
    from swa_backend.provider import AttentionCall, AttentionShape


def gathers(call: AttentionCall) -> bool:
    """Whether a step's prefill gathers its keys first, or takes the decode kernel over the pages.

    Measured on an H200, in microseconds of the GPU, gathered and direct, with 64 heads: 8192 tokens 537 and 910
    (swaonly), 1328 and 2811 (c4a), 715 and 1099 (c128a); 1 x 64 tokens behind 4096: 12 and 16, 35 and 42, 18 and 19;
    1 x 16 tokens behind 65,536: 12 and 15, 40 and 23, 27 and 21. Direct calls cost the host a third.
    """
    metadata, second = call.metadata, call.compressed
    if second is None:
        return True
    return metadata.num_prefill_tokens > DIRECT_TOKENS and group_of(call) is not None


class RowTools(NamedTuple):
    """Device work around FlashMLA's own kernels."""

    tidy_rows: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor], None
    ]  # see flashmla_rows_reference
    mark_columns: Callable[[torch.Tensor, torch.Tensor, int, int, torch.Tensor], None]
    entries_of_slots: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None
    ]
    entry_bounds: Callable[[torch.Tensor, torch.Tensor, int, int, torch.Tensor], None]
    combine_rows: Callable[[CombineStep], None]  # see swa_backend.reference.combine
    operations: Operations


def triton_tools() -> RowTools:
    """The Triton kernels.

    Raises:
        ProviderError: Triton is missing or cannot be imported.
    """
    from swa_backend.kernels.loading import load_operations

    operations = load_operations("cuda")
    from swa_backend.kernels.combine import combine_rows
    from swa_platform_cuda.flashmla_rows import entries_of_slots, entry_bounds, mark_columns, tidy_rows

    return RowTools(tidy_rows, mark_columns, entries_of_slots, entry_bounds, combine_rows, operations)


class FlashMLAAttention(AttentionProvider):
    """The first FlashMLA build of this machine that serves the chip.

    Args:
        target: the chip; None = that of the builder's device.
        finder: where builds are looked for.
        load_tools: imports the device work around the kernels.
    """

    name = "flashmla"
    takes_plans = True

    def __init__(
        self,
        target: Target | None,
        finder: Finder | None = None,
        load_tools: Callable[[], RowTools] = triton_tools,
    ) -> None:
        self._target = target
        self._finder = finder or Finder.here()
        self._load_tools = load_tools
        self._found: dict[str | None, Found] = {}
        self._paged: dict[torch.device, PagedAttention] = {}
        self._workspaces: dict[torch.device, Workspace] = {}
        self._gathered: dict[torch.device, GatheredPrefill] = {}
        self._chunk_size = 1
        self._prefill_plans: dict[tuple[torch.device, LayerType], tuple[tuple[int, int], TilePlan]] = {}

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        """Every reason why the shape cannot be served; empty when it can."""
        reasons: list[str] = []
        if not 1 <= shape.num_heads <= DECODE_HEADS[-1]:
            reasons.append(f"num_heads is {shape.num_heads}; it takes 1 to {DECODE_HEADS[-1]}, padded to 64 or 128")
        if shape.head_dim != HEAD_DIM:
            reasons.append(f"head_dim is {shape.head_dim}; it takes {HEAD_DIM}")
        arch = self._arch(shape.device)
        found = self._find(arch)
        if found.build is None or arch is None:
            return (*reasons, *found.reasons)
        pairs = found.build.pairs[arch]
        window = shape.swa_layout.name
        for second in shape.compressed_layouts or (None,):
            name = None if second is None else second.name
            if not any(window == first and name in (None, other) for first, other in pairs):
                legal = ", ".join(f"{first} with {other}" for first, other in sorted(pairs))
                beside = "" if name is None else f" beside {name}"
                reasons.append(f"{found.build.origin} reads {legal} on sm{arch}, not {window}{beside}")
        reasons.extend(_dialect_reasons((shape.swa_layout, *shape.compressed_layouts)))
        if shape.batch_invariant and arch not in found.build.batch_invariant:
            reasons.append(f"batch_invariant is set; {found.build.origin} splits keys by batch on sm{arch}")
        return tuple(reasons)

    def reserve(self, config: BackendConfig, device: torch.device) -> None:
        """Allocate what the steps of a configuration take on a device."""
        build, arch = self._chosen(device)
        self._chunk_size = config.prefill_chunk_size
        self._workspace(device).reserve(
            config,
            padded_heads(config.num_heads, DECODE_HEADS),
            padded_heads(config.num_heads, build.prefill_heads[arch]),
        )

    def forget(self) -> None:
        """A call has raised: what it was about to put into the workspaces may be missing there."""
        for workspace in self._workspaces.values():
            workspace.forget()

    def decode(self, call: AttentionCall) -> None:
        """Write the rows of the decode tokens, padded ones included."""
        metadata = call.metadata
        layer_type = layer_type_of(call)
        plan = metadata.plans.get(layer_type)
        if plan is None:  # of a type that the builder's model has not, or of an object made by hand
            plan = TilePlan(layer_type)
        self._paged_on(call.q.device).attend(
            call,
            "decode",
            slice(0, metadata.num_decode_tokens),
            metadata.decode_swa_indices,
            metadata.decode_swa_lens,
            plan,
            layer_type,
        )

    def prefill(self, call: AttentionCall) -> None:
        """Write the rows of the prefill tokens, padded ones included."""
        metadata = call.metadata
        if metadata.prefill_swa_indices is None or metadata.prefill_swa_lens is None:
            return
        if gathers(call):
            self._gathered_on(call.q.device).attend(call, self._chunk_size)
            return
        layer_type = layer_type_of(call)
        self._paged_on(call.q.device).attend(
            call,
            "direct",
            slice(metadata.num_decode_tokens, metadata.num_tokens),
            metadata.prefill_swa_indices,
            metadata.prefill_swa_lens,
            self._prefill_plan(call, layer_type, metadata.prefill_swa_lens),
            layer_type,
        )

    def _prefill_plan(self, call: AttentionCall, layer_type: LayerType, lens: torch.Tensor) -> TilePlan:
        """The plan of a step's prefill tokens, which share it among layers of a type as decode tokens do theirs."""
        step = call.metadata.generation, lens.data_ptr()
        known = self._prefill_plans.get((call.q.device, layer_type))
        if known is not None and known[0] == step:
            return known[1]
        plan = TilePlan(layer_type)
        self._prefill_plans[call.q.device, layer_type] = (step, plan)
        return plan

    def _arch(self, device: torch.device | None) -> str | None:
        return self._target.arch if self._target is not None else self._finder.capability(device)

    def _find(self, arch: str | None) -> Found:
        found = self._found.get(arch)
        if found is None:
            found = self._found[arch] = find_flashmla(arch, self._finder)
        return found

    def _chosen(self, device: torch.device) -> tuple[FlashMLABuild, str]:
        arch = self._arch(device)
        found = self._find(arch)
        if found.build is None or arch is None:
            raise RuntimeError("FlashMLA is used on a device that it does not support")
        return found.build, arch

    def _workspace(self, device: torch.device) -> Workspace:
        return self._workspaces.setdefault(device, Workspace(device))

    def _paged_on(self, device: torch.device) -> PagedAttention:
        found = self._paged.get(device)
        if found is None:
            found = PagedAttention(*self._chosen(device), self._workspace(device), self._load_tools())
            self._paged[device] = found
        return found

    def _gathered_on(self, device: torch.device) -> GatheredPrefill:
        found = self._gathered.get(device)
        if found is None:
            found = GatheredPrefill(*self._chosen(device), self._workspace(device), self._load_tools())
            self._gathered[device] = found
        return found


def _dialect_reasons(layouts: Sequence[PageLayout]) -> list[str]:
    wrong = [layout for layout in layouts if layout.dialect not in (None, Dialect.OCP)]
    return [f"{layout.name} is in the {layout.dialect} dialect; it reads ocp" for layout in wrong]
