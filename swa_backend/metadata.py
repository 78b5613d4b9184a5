"""What a build hands to the attention layers: indices, lengths, the decode/prefill border, plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from swa_backend.chunk_plan import PrefillChunk, plan_prefill_chunks, workspace_rows
from swa_backend.errors import BatchError
from swa_backend.layer_types import LayerType
from swa_backend.provider import AttentionProvider, AttentionShape
from swa_backend.step import BuildStep, next_number

NO_PLANS: Mapping[LayerType, Any] = dict.fromkeys(LayerType)


@dataclass(slots=True)
class BuildCount:
    """Number of a builder's latest build or update; one object, shared with all metadata of the builder.

    The numbers are those of `swa_backend.step.next_number`: what was made later has the larger one, whoever made it.
    """

    value: int = 0

    def advance(self) -> None:
        """Count a build."""
        self.value = next_number()


@dataclass
class CompressedGroupMetadata:
    """A compressed cache group in a step.

    Attributes:
        name: the group's name.
        ratio: tokens per entry.
        block_table: [R, C] int32, pages of the group, as given.
        page_tokens: tokens a page stands for.
        entries_per_page: ``page_tokens // ratio``.
        compressed_slot_mapping: [T] int64: slot of the entry that token t completes, else -1.
        rows: [T, width] int32 slots of every complete entry, oldest first, for groups in which all are visible
            (ratio 128); the part past ``lens`` means nothing. None for groups whose entries an indexer picks.
        lens: [T] int32 number of entries in each row, or None.
    """

    name: str
    ratio: int
    block_table: torch.Tensor
    page_tokens: int
    entries_per_page: int
    compressed_slot_mapping: torch.Tensor
    rows: torch.Tensor | None
    lens: torch.Tensor | None


@dataclass
class DeepseekSparseSWAMetadata:
    """One sliding-window cache group in a step.

    R requests, T tokens, the first Td of them decode tokens, Tp = T - Td prefill tokens. Every index is a slot
    (page * page size + offset) or -1. Tensors that the builder computes are views of its persistent buffers: the
    same addresses for its whole life, overwritten by the next build. Tensors that the engine gave are passed through.

    Attributes:
        block_table, slot_mapping, seq_lens, query_start_loc, query_start_loc_cpu: as given.
        block_size: tokens per page of this group's cache.
        is_valid_token: [T] bool: the token has a slot and belongs to a request.
        token_to_req_indices: [T] int32: request of each token, 0 for padding.
        decode_swa_indices: [Td, 1, decode_swa_width] int32, oldest first, packed to the left.
        decode_swa_lens: [Td] int32; the buffer behind it is zero past Td whenever Td > 0.
        decode_swa_width: row width of this step, the window or the non-causal width.
        prefill_swa_indices, prefill_swa_lens: [Tp, 1, window + max_image_tokens], [Tp] int32; None without prefills.
        prefill_left_visible, prefill_right_visible: [T] int32, how far a prefill token sees inside its image; None
            unless a prefill request has one.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: the split.
        max_decode_query_len: largest query length, limited to the decode threshold.
        max_seq_len: longest context as the batch says, perhaps too long; 0 if it is not known.
        prefill_seq_lens, prefill_seq_lens_cpu, prefill_gather_lens, prefill_query_lens_cpu: [num_prefills] int32 or
            None without prefills.
        prefill_window_size, prefill_max_model_len, prefill_max_num_batched_tokens: zero without prefills.
        replay_start: [R] int32, zeros when nothing replays.
        window_size: the logical window; never the width of a row.
        causal: False for a non-causal draft step.
        plans: layer type -> tile plan or None.
        compressed: group name -> compressed group.
        groups: group name -> further sliding-window group of the same step.
        decode_swa_ragged_indices, _indptr, prefill_swa_ragged_indices, _indptr: rows without gaps, where the platform
            wants them; [rows * width] and [rows + 1] int32.
        provider: attention kernels that the builder chose.
        shape: what the builder promised that provider; None in an object made by hand.
        validate: whether attention over this step checks values too.
        generation: number of the build or update that made this; plans carry it.
        builds: the builder's own count: once it has gone on, the buffers hold another step.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    is_valid_token: torch.Tensor
    token_to_req_indices: torch.Tensor
    decode_swa_indices: torch.Tensor
    decode_swa_lens: torch.Tensor
    decode_swa_width: int
    window_size: int
    causal: bool
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    max_decode_query_len: int
    replay_start: torch.Tensor
    provider: AttentionProvider
    prefill_swa_indices: torch.Tensor | None = None
    prefill_swa_lens: torch.Tensor | None = None
    prefill_left_visible: torch.Tensor | None = None
    prefill_right_visible: torch.Tensor | None = None
    prefill_seq_lens: torch.Tensor | None = None
    prefill_seq_lens_cpu: torch.Tensor | None = None
    prefill_gather_lens: torch.Tensor | None = None
    prefill_query_lens_cpu: torch.Tensor | None = None
    max_seq_len: int = 0
    prefill_window_size: int = 0
    prefill_max_model_len: int = 0
    prefill_max_num_batched_tokens: int = 0
    plans: Mapping[LayerType, Any] = field(default_factory=lambda: NO_PLANS)
    compressed: Mapping[str, CompressedGroupMetadata] = field(default_factory=dict)
    groups: Mapping[str, DeepseekSparseSWAMetadata] = field(default_factory=dict)
    decode_swa_ragged_indices: torch.Tensor | None = None
    decode_swa_ragged_indptr: torch.Tensor | None = None
    prefill_swa_ragged_indices: torch.Tensor | None = None
    prefill_swa_ragged_indptr: torch.Tensor | None = None
    shape: AttentionShape | None = None
    validate: bool = False
    generation: int = 0
    builds: BuildCount | None = field(default=None, repr=False)
    step: BuildStep | None = field(default=None, repr=False)  # what an in-place update runs again
    prefill_replay_start_cpu: torch.Tensor | None = field(default=None, repr=False)
    _chunk_plans: dict[tuple[int, int, bool], list[PrefillChunk]] = field(default_factory=dict, repr=False)

    def with_values(self, values: Mapping[str, Any], **others: Any) -> DeepseekSparseSWAMetadata:
        """A copy with other values of some attributes; unlike `dataclasses.replace` it costs a step next to nothing."""
        copied = object.__new__(DeepseekSparseSWAMetadata)
        copied.__dict__ = {**self.__dict__, **values, **others}
        return copied

    @property
    def is_overwritten(self) -> bool:
        """Whether a later build or update of the same builder has filled its buffers with another step."""
        return self.builds is not None and self.builds.value != self.generation

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def tile_sched_swaonly(self) -> Any:
        return self.plans[LayerType.SWAONLY]

    @property
    def tile_sched_c1a(self) -> Any:
        return self.plans[LayerType.C1A]

    @property
    def tile_sched_c2a(self) -> Any:
        return self.plans[LayerType.C2A]

    @property
    def tile_sched_c4a(self) -> Any:
        return self.plans[LayerType.C4A]

    @property
    def tile_sched_c128a(self) -> Any:
        return self.plans[LayerType.C128A]

    def get_prefill_chunk_plan(
        self, compress_ratio: int, prefill_chunk_size: int, has_compressed: bool | None = None
    ) -> list[PrefillChunk]:
        """Group the prefill requests for a workspace of bounded size; computed once per step and arguments.

        ``has_compressed`` defaults to ``compress_ratio > 1``; models whose ratio-1 layers have a second cache pass it.
        Without a host copy of ``replay_start`` a replayed prefix counts as gathered in full, which only makes the
        workspace larger than needed.

        Raises:
            BatchError: a number is no ratio or chunk size, or a request is longer than the configuration allows.
        """
        compressed = compress_ratio > 1 if has_compressed is None else has_compressed
        _require("compress_ratio", compress_ratio, 1 if compressed else 0)
        _require("prefill_chunk_size", prefill_chunk_size, 1)
        if self.prefill_seq_lens_cpu is None or self.prefill_query_lens_cpu is None:
            return []
        key = (compress_ratio, prefill_chunk_size, compressed)
        plan = self._chunk_plans.get(key)
        if plan is None:
            plan = self._chunk_plans[key] = self._plan_chunks(*key)
        return plan

    def _plan_chunks(self, ratio: int, prefill_chunk_size: int, has_compressed: bool) -> list[PrefillChunk]:
        if self.prefill_seq_lens_cpu is None or self.prefill_query_lens_cpu is None:
            return []
        query_lens = self.prefill_query_lens_cpu
        cached = self.prefill_seq_lens_cpu - query_lens
        if self.prefill_replay_start_cpu is not None:
            cached = cached - self.prefill_replay_start_cpu
        gather_lens = query_lens + cached.clamp(0, self.prefill_window_size - 1)
        return plan_prefill_chunks(
            query_lens.tolist(),
            self.prefill_seq_lens_cpu.tolist(),
            gather_lens.tolist(),
            ratio,
            workspace_rows(
                ratio,
                prefill_chunk_size,
                has_compressed=has_compressed,
                window=self.prefill_window_size,
                max_model_len=self.prefill_max_model_len,
                max_num_batched_tokens=self.prefill_max_num_batched_tokens,
            ),
            has_compressed=has_compressed,
        )


def _require(field: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise BatchError(
            field, found=repr(value), legal=f"an int >= {minimum}", fix="Pass the layer's ratio and the config's size."
        )
