"""Prefill over gathered keys: a chunk of requests at a time is dequantised to one bf16 workspace and attended to there.

Every key is dequantised once for all tokens of its request, where the paged kernel does it again for each of them.
Index rows that are the same for all layers of a type are combined once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from swa_backend._math import ceil_to
from swa_backend.capture import capture_id
from swa_backend.combine import CombineStep, CompressedRows
from swa_backend.row_marks import version_of
from swa_platform_cuda.flashmla_build import HEAD_DIM, PREFILL_WIDTH_MULTIPLE, FlashMLABuild
from swa_platform_cuda.flashmla_forms import bulk_copies, padded_heads, padded_sink, write_lse
from swa_platform_cuda.flashmla_workspace import PADDED_TOKENS, Workspace

if TYPE_CHECKING:
    from swa_backend.chunk_plan import PrefillChunk
    from swa_backend.metadata import CompressedGroupMetadata, DeepseekSparseSWAMetadata
    from swa_backend.provider import AttentionCall
    from swa_platform_cuda.flashmla_provider import RowTools


class _Part(NamedTuple):
    """A chunk, and its tokens counted from the first of the batch."""

    chunk: PrefillChunk
    first: int
    end: int


def _step(metadata: DeepseekSparseSWAMetadata) -> tuple[int, int]:
    """Tells a step from any other, those of other builders included."""
    return metadata.generation, metadata.token_to_req_indices.data_ptr()


def group_of(call: AttentionCall) -> CompressedGroupMetadata | None:
    """The one compressed group of the step that a call's second cache can belong to, None if that is not clear."""
    second = call.compressed
    if second is None:
        return None
    groups = [
        group
        for group in call.metadata.compressed.values()
        if (group.ratio, group.entries_per_page) == (second.ratio, second.pages.entries)
    ]
    return groups[0] if len(groups) == 1 else None


class GatheredPrefill:
    """Calls of the prefill kernel.

    Args:
        build: whose kernel.
        arch: compute capability of the device.
        workspace: where keys, rows, and queries and outputs with more heads than were given, are put.
        tools: gathering and combining.
    """

    def __init__(self, build: FlashMLABuild, arch: str, workspace: Workspace, tools: RowTools) -> None:
        self._build = build
        self._legal_heads = build.prefill_heads[arch]
        self._workspace = workspace
        self._tools = tools

    def attend(self, call: AttentionCall, chunk_size: int) -> None:
        """Write the rows of all prefill tokens; those that no chunk covers are padding, and zero.

        The call must have no second cache, or one whose group is known (`group_of`). Its rows may then name entries of
        the token's own request alone, of those that are complete: others are skipped.

        Args:
            call: the layer's call.
            chunk_size: requests of the longest context that the workspace holds.
        """
        metadata, group = call.metadata, group_of(call)
        ratio = 0 if group is None else group.ratio
        plan = metadata.get_prefill_chunk_plan(ratio, chunk_size, has_compressed=group is not None)
        starts, decodes = metadata.query_start_loc_cpu, metadata.num_decodes
        parts = [_Part(chunk, int(starts[decodes + chunk.first]), int(starts[decodes + chunk.end])) for chunk in plan]
        rows, lens = self._rows(call, group, parts)
        for part in parts:
            kv = self._gather(call, group, part.chunk)
            own = slice(part.first - metadata.num_decode_tokens, part.end - metadata.num_decode_tokens)
            self._launch(call, slice(part.first, part.end), kv, rows[own], lens[own])
        covered = parts[-1].end if parts else metadata.num_decode_tokens
        if covered < metadata.num_tokens:
            call.out[covered:].zero_()
            if call.lse is not None:
                call.lse[covered:].fill_(-torch.inf)

    def _rows(
        self, call: AttentionCall, group: CompressedGroupMetadata | None, parts: list[_Part]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [Tp, 1, width], lens [Tp]) of the workspace that each prefill token sees."""
        metadata, second = call.metadata, call.compressed
        window, window_lens = metadata.prefill_swa_indices, metadata.prefill_swa_lens
        gather_lens = metadata.prefill_gather_lens
        assert window is not None and window_lens is not None and gather_lens is not None  # noqa: PT018
        tokens = metadata.num_prefill_tokens
        columns = window.shape[2] if metadata.prefill_right_visible is not None else metadata.window_size
        kind, more, local = "window", 0, None
        if second is not None and group is not None:
            complete = second.built is not None
            kind = "complete" if complete else "picked"
            if complete:
                more = max((part.chunk.compressed for part in parts), default=0)
            else:
                more = second.rows.shape[1]
                local = self._local_entries(call, group)
        width = ceil_to(columns + more, PREFILL_WIDTH_MULTIPLE)
        out_rows = self._workspace.take(f"prefill {kind} rows", tokens, width)
        out_lens = self._workspace.take(f"prefill {kind} lens", tokens)
        contents = (
            "gathered", metadata.generation, tokens, width, call.capture,
            *((one.data_ptr(), version_of(one)) for one in (window, window_lens)),
            second and second.pages.num_pages,
        )  # fmt: skip
        if self._workspace.holds(f"prefill {kind} rows", contents) and local is None:
            return out_rows.unsqueeze(1), out_lens
        # Combining knows -1 alone; of a slot outside the cache it would make a row of the workspace.
        tidied = self._workspace.take("tidied prefill rows", tokens, columns)
        tidied_lens = self._workspace.take("tidied prefill lens", tokens)
        valid = metadata.is_valid_token[metadata.num_decode_tokens :]
        tidy_contents = ("tidied", *contents[1:], call.pages.num_slots)
        if not self._workspace.holds("tidied prefill rows", tidy_contents):
            self._tools.tidy_rows(window[:, 0, :columns], window_lens, valid, call.pages.num_slots, tidied, tidied_lens)
        visible = metadata.prefill_right_visible
        for part in parts:
            both = slice(part.first, part.end)
            own = slice(part.first - metadata.num_decode_tokens, part.end - metadata.num_decode_tokens)
            compressed = None
            if second is not None and group is not None:
                compressed = CompressedRows(
                    None if local is None else local[own], group.block_table, group.entries_per_page,
                    second.pages.num_pages, group.ratio,
                )  # fmt: skip
            self._tools.combine_rows(
                CombineStep(
                    part.chunk, metadata.num_decodes, part.first, tidied[own], tidied_lens[own],
                    metadata.token_to_req_indices[both], metadata.is_valid_token[both], metadata.query_start_loc,
                    metadata.seq_lens, gather_lens, None if visible is None else visible[both], compressed,
                    out_rows[own], out_lens[own],
                )
            )  # fmt: skip
        return out_rows.unsqueeze(1), out_lens

    def _local_entries(self, call: AttentionCall, group: CompressedGroupMetadata) -> torch.Tensor:
        """[Tp, K] int32: the entries of each prefill token's request that its compressed row names, -1 for none."""
        metadata, second = call.metadata, call.compressed
        assert second is not None
        own = slice(metadata.num_decode_tokens, metadata.num_tokens)
        rows = second.rows[own]
        name = f"columns of {group.name}"
        columns = self._workspace.take(name, second.pages.num_pages)
        contents = (*_step(metadata), group.block_table.data_ptr(), call.capture, second.pages.num_pages)
        if not self._workspace.holds(name, contents):
            self._tools.mark_columns(
                group.block_table[metadata.num_decodes :], metadata.seq_lens[metadata.num_decodes :], group.ratio,
                group.entries_per_page, columns,
            )  # fmt: skip
        local = self._workspace.take("local entries", *rows.shape)
        self._tools.entries_of_slots(
            rows, second.lens[own], metadata.token_to_req_indices[own], group.block_table, columns,
            group.entries_per_page, local,
        )  # fmt: skip
        return local

    def _gather(self, call: AttentionCall, group: CompressedGroupMetadata | None, chunk: PrefillChunk) -> torch.Tensor:
        """The workspace [requests * rows of each, 1, 512] bf16 with the keys of a chunk."""
        metadata, second = call.metadata, call.compressed
        requests = slice(metadata.num_decodes + chunk.first, metadata.num_decodes + chunk.end)
        count = chunk.end - chunk.first
        kv = self._workspace.take("kv", count * chunk.width, 1, HEAD_DIM, dtype=torch.bfloat16)
        by_request = kv.view(count, chunk.width, HEAD_DIM)
        gather_lens = metadata.prefill_gather_lens
        assert gather_lens is not None
        seq_lens = metadata.seq_lens[requests]
        gather = self._tools.operations.gather_kv
        gather(
            call.pages, metadata.block_table[requests], seq_lens, gather_lens[chunk.first : chunk.end], by_request,
            chunk.compressed,
        )  # fmt: skip
        if second is not None and group is not None and chunk.compressed:
            lens = self._entry_lens(metadata, group)[requests]
            gather(second.pages, group.block_table[requests], lens, None, by_request, 0)
        return kv

    def _entry_lens(self, metadata: DeepseekSparseSWAMetadata, group: CompressedGroupMetadata) -> torch.Tensor:
        """[R] int32 complete entries of each request, computed once a step."""
        name = f"entry lens of ratio {group.ratio}"
        lens = self._workspace.take(name, metadata.seq_lens.shape[0])
        contents = (*_step(metadata), capture_id(lens))
        if not self._workspace.holds(name, contents):
            torch.div(metadata.seq_lens, group.ratio, rounding_mode="floor", out=lens)
        return lens

    def _launch(
        self, call: AttentionCall, tokens: slice, kv: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor
    ) -> None:
        given = call.q.shape[1]
        heads = padded_heads(given, self._legal_heads)
        sink = padded_sink(call.attn_sink, heads, self._workspace)
        fits = heads == given and bulk_copies(call.q[tokens])
        direct = self._build.takes_out and heads == given and call.out.is_contiguous() and bulk_copies(call.out)
        step = tokens.stop - tokens.start if fits and direct else PADDED_TOKENS
        for first in range(tokens.start, tokens.stop, step):
            some = slice(first, min(first + step, tokens.stop))
            own = slice(some.start - tokens.start, some.stop - tokens.start)
            q, out = call.q[some], call.out[some]
            if not fits:
                padded = self._workspace.take("prefill q", q.shape[0], heads, HEAD_DIM, dtype=torch.bfloat16)
                padded[:, :given].copy_(q)
                q = padded
            into = out if direct else None
            if self._build.takes_out and not direct:
                into = self._workspace.take("prefill out", q.shape[0], heads, HEAD_DIM, dtype=torch.bfloat16)
            result, lse = self._build.prefill(q, kv, rows[own], lens[own], sink, call.scale, into)
            if not direct:
                out.copy_(result[:, :given])
            if call.lse is not None:
                write_lse(lse[:, :given], call.lse[some])
