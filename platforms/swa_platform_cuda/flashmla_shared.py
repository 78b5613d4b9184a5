"""What the layers of a type share in a step: cleaned rows, lengths, the tile plan. The first of them prepares it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swa_backend._math import ceil_to
from swa_backend.errors import ProviderError
from swa_backend.layer_types import LayerType
from swa_backend.row_marks import version_of
from swa_platform_cuda.flashmla_build import DECODE_WIDTH_MULTIPLE
from swa_platform_cuda.flashmla_forms import PADDED_HEADS
from swa_platform_cuda.flashmla_plan import PlanShape, TilePlan

if TYPE_CHECKING:
    from swa_backend.pages import PageView
    from swa_backend.provider import AttentionCall, CompressedRows
    from swa_platform_cuda.flashmla_build import FlashMLABuild
    from swa_platform_cuda.flashmla_provider import RowTools
    from swa_platform_cuda.flashmla_workspace import Workspace

_TYPE_OF_RATIO = {layer_type.ratio: layer_type for layer_type in LayerType if layer_type.compressed}


def layer_type_of(call: AttentionCall) -> LayerType:
    """What kind of layer a call is for.

    Raises:
        ProviderError: no layer has a second cache of this ratio.
    """
    if call.compressed is None:
        return LayerType.SWAONLY
    found = _TYPE_OF_RATIO.get(call.compressed.ratio)
    if found is None:
        raise ProviderError(
            "compressed[0].ratio",
            found=call.compressed.ratio,
            legal=sorted(_TYPE_OF_RATIO),
            fix="Pass the compressed cache of one of the model's layers.",
        )
    return found


class Shared:
    """What one layer prepared for itself and for those after it.

    Attributes:
        heads: heads that the kernel computes, padding included.
        rows: [n, 1, w] int32 window entries.
        lens: [n] int32.
        extra_rows: [n, 1, w] int32 second entries; None without any, or if each layer has its own.
        extra_lens: [n] int32, None without second entries.
        vendor_plan: the vendor's plan for these lengths.
        batch_invariant: whether a row's result may not depend on the others.
        last_rows: the last layer's own second entries as it gave them, and as the kernel took them.
    """

    __slots__ = (
        "_capture", "_changes", "_counted", "_entries", "_generation", "_given", "_heads", "_kept", "_pages", "_second",
        "_type", "_versions", "batch_invariant", "extra_lens", "extra_rows", "heads", "last_rows", "lens", "rows",
        "vendor_plan",
    )  # fmt: skip

    def __init__(
        self,
        call: AttentionCall,
        layer_type: LayerType,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        vendor_plan: Any,
        workspace: Workspace,
    ) -> None:
        metadata, pages = call.metadata, call.pages
        self.rows, self.lens, self.extra_rows, self.extra_lens = made
        self.heads = PADDED_HEADS[call.q.shape[1]]
        self.vendor_plan = vendor_plan
        self.last_rows: tuple[torch.Tensor, torch.Tensor] | None = None
        self.batch_invariant = metadata.shape is not None and metadata.shape.batch_invariant
        self._generation, self._pages, self._entries = metadata.generation, pages.num_pages, pages.entries
        self._type, self._heads, self._capture = layer_type, call.q.shape[1], call.capture
        self._given = given
        self._counted = not any(one.is_inference() for one in given)
        self._versions = sum(one._version for one in given) if self._counted else 0  # each only ever grows
        self._second = second_identity(call)
        # Alive, so that no other tensor can take the place of one that counts by identity.
        self._kept = call.compressed and (call.compressed.mark, call.compressed.built)
        self._changes = workspace.changes

    def serves(
        self,
        call: AttentionCall,
        layer_type: LayerType,
        rows: torch.Tensor,
        lens: torch.Tensor,
        workspace: Workspace,
    ) -> bool:
        """Whether a call may use it: the same step, kind, shapes and tensors, and nothing has changed since."""
        metadata, pages, given = call.metadata, call.pages, self._given
        if not (
            metadata.generation == self._generation
            and rows is given[0]
            and lens is given[1]
            and metadata.is_valid_token is given[2]
            and pages.entries == self._entries
            and pages.num_pages == self._pages
            and workspace.changes == self._changes
            and layer_type is self._type
            and call.q.shape[1] == self._heads
            and call.capture == self._capture
            and (not self._counted or self._versions == rows._version + lens._version + given[2]._version)
        ):
            return False
        if call.compressed is None:
            return True  # its layer type says that there was none before
        second = second_identity(call)
        return second is not None and second == self._second


def second_identity(call: AttentionCall) -> tuple[int, ...] | None:
    """Equal for second entries that layers may share lengths and plan of, None where no other call may.

    Tensors count by identity and by torch's count of their changes.
    """
    second = call.compressed
    if second is None:
        return ()
    pages, rows, mark = second.pages, second.rows, second.mark
    if mark is not None:
        if mark.distinct:
            return pages.entries, pages.num_pages, rows.shape[1], id(mark.positions), mark.positions_version
        return pages.entries, pages.num_pages, rows.shape[1], mark.number
    if second.built is not None:
        versions = version_of(rows) + version_of(second.lens)
        return pages.entries, pages.num_pages, rows.shape[1], id(second.built), versions
    return None


class Preparer:
    """Prepares what layers share.

    For entries that an indexer picked that takes in the plan only if they are known to be distinct (`RowsMark`): it is
    then made for the most that the positions allow, and rows hold -1 from their own length up to that. A plan for other
    picks serves the one mapping that it was made for, and rows of unknown origin are cleaned and planned for call by
    call, since nothing tells when they change.
    """

    def __init__(self, build: FlashMLABuild, workspace: Workspace, tools: RowTools) -> None:
        self._build = build
        self._workspace = workspace
        self._tools = tools

    def prepare(
        self,
        call: AttentionCall,
        layer_type: LayerType,
        kind: str,
        tokens: slice,
        rows: torch.Tensor,
        lens: torch.Tensor,
        plan: TilePlan,
    ) -> Shared:
        """For a call's tokens with these window rows; arguments as in `flashmla_paged.PagedAttention.attend`."""
        metadata, second = call.metadata, call.compressed
        valid = metadata.is_valid_token[tokens]
        planned, version = [lens], 0 if second_identity(call) is not None else None
        extra_width = None
        if second is not None:
            extra_width = ceil_to(second.rows.shape[1], DECODE_WIDTH_MULTIPLE)
            mark = second.mark
            planned.append(mark.positions if mark is not None and mark.distinct else second.lens)
            if mark is not None and not mark.distinct:
                version = mark.number
        shape = PlanShape(
            layer_type, valid.shape[0], 1, PADDED_HEADS[call.q.shape[1]], call.pages.entries,
            ceil_to(rows.shape[2], DECODE_WIDTH_MULTIPLE), None if second is None else second.pages.entries,
            extra_width,
        )  # fmt: skip
        vendor_plan = plan.use(
            self._build.new_plan, shape, metadata.generation, *planned, version=version, capture=call.capture
        )
        window = self.tidy(call, f"{kind} window", rows.squeeze(1), lens, valid, call.pages, once=True)
        extra = (None, None) if second is None else self._second(call, second, kind, tokens, valid)
        given = (rows, lens, metadata.is_valid_token)
        return Shared(call, layer_type, given, (*window, *extra), vendor_plan, self._workspace)

    def _second(
        self, call: AttentionCall, second: CompressedRows, kind: str, tokens: slice, valid: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(rows or None, lens): of the second entries what is the same for all layers."""
        mark, rows, lens = second.mark, second.rows[tokens], second.lens[tokens]
        if mark is None:
            name = f"{kind} {'picked' if second.built is None else 'complete'}"
            return self.tidy(call, name, rows, lens, valid, second.pages, once=second.built is not None)
        if not mark.distinct:
            return None, lens
        name, positions = f"{kind} most entries", mark.positions[tokens]
        most = self._workspace.take(name, positions.shape[0])
        width = ceil_to(rows.shape[1], DECODE_WIDTH_MULTIPLE)  # as the plan's shape has it
        contents = (
            call.metadata.generation, call.capture, mark.ratio, width, positions.shape[0], valid.data_ptr(),
            positions.data_ptr(), version_of(positions),
        )  # fmt: skip
        if not self._workspace.holds(name, contents, positions):
            self._tools.entry_bounds(positions, valid, mark.ratio, width, most)
        return None, most

    def tidy(
        self,
        call: AttentionCall,
        name: str,
        rows: torch.Tensor,
        lens: torch.Tensor,
        valid: torch.Tensor,
        pages: PageView,
        *,
        once: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [n, 1, padded width], lens [n]) without entries that the kernel must not see.

        Those that are the same for all layers of a step are made ``once``.
        """
        tokens, width = rows.shape
        out_rows = self._workspace.take(f"{name} rows", tokens, ceil_to(width, DECODE_WIDTH_MULTIPLE))
        out_lens = self._workspace.take(f"{name} lens", tokens)
        contents = (
            call.metadata.generation, tokens, width, pages.num_slots,
            call.capture, *((one.data_ptr(), version_of(one)) for one in (rows, lens, valid)),
        )  # fmt: skip
        if not once or not self._workspace.holds(f"{name} rows", contents):
            self._tools.tidy_rows(rows, lens, valid, pages.num_slots, out_rows, out_lens)
        return out_rows.unsqueeze(1), out_lens
