"""Turns one step's batch into index metadata: persistent buffers, one call of the platform's operations, plans.

The class is the same on every platform; a platform package derives from it to say whether it wants ragged rows, and
`Backend.get_builder_cls` binds the descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from swa_backend.backend import Backend
from swa_backend.batch import CommonAttentionMetadata, check_batch, check_tensor
from swa_backend.buffers import CompressedGroupBuffers, StepBuffers, SwaGroupBuffers
from swa_backend.cache import KVCacheSpec
from swa_backend.config import BackendConfig
from swa_backend.errors import BatchError, ConfigError
from swa_backend.groups import CompressedGroup, SwaGroup
from swa_backend.image_spans import SpanUpload, check_spans, spans_in_step
from swa_backend.layer_types import LayerType
from swa_backend.metadata import NO_PLANS, CompressedGroupMetadata, DeepseekSparseSWAMetadata
from swa_backend.platform import require_device
from swa_backend.provider_choice import attention_shape, choose_provider
from swa_backend.split import Split, split_decodes_and_prefills
from swa_backend.step import BuildStep, CompressedGroupStep, RaggedRows, SwaGroupStep
from swa_backend.validation import validate_batch

MAX_SLOTS = 2**31
MAIN_GROUP = "main"

GroupInputs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class DeepseekSparseSWAMetadataBuilder:
    """Builds `DeepseekSparseSWAMetadata` for one sliding-window cache group and, if named, further groups.

    Args:
        kv_cache_spec: spec of the group's cache (`DeepseekV4SWACache.get_kv_cache_spec`).
        layer_names: layers that share the group; kept for the engine.
        config: settings that fix every capacity.
        device: where the engine's tensors live.
        num_pages: pages of the cache, if known; `set_num_pages` tells it later. Page numbers at or past it give -1.
        null_page: page number that stands for "no page" in the engine; validation reports it in a live window.
        compressed_groups: compressed cache groups that `build` gets through ``groups``.
        swa_groups: further sliding-window cache groups, likewise.

    Raises:
        ConfigError: a group is named twice, or the spec is not that of the model's window cache.
        BatchError: a cache has 2^31 slots or more.
        PlatformError: the device is not of the platform's type.
        ProviderError: no attention provider serves these layers.
    """

    backend: ClassVar[Backend]
    wants_ragged_rows: ClassVar[bool] = False
    supports_draft_decode_metadata_update: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: Sequence[str],
        config: BackendConfig,
        device: torch.device | str,
        num_pages: int | None = None,
        null_page: int | None = None,
        compressed_groups: Sequence[CompressedGroup] = (),
        swa_groups: Sequence[SwaGroup] = (),
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = tuple(layer_names)
        self.config = config
        self.device = torch.device(device)
        self.null_page = null_page
        require_device(self.device, self.backend.platform)
        _check_spec(kv_cache_spec, config)
        self.block_size = kv_cache_spec.block_size
        self.decode_threshold = config.decode_threshold
        self.shape = attention_shape(config, kv_cache_spec, self.backend, self.device)
        self.provider = choose_provider(self.backend, self.shape)

        main = SwaGroup(MAIN_GROUP, self.block_size, num_pages)
        self._swa_groups = (main, *(replace(g, page_tokens=g.page_tokens or self.block_size) for g in swa_groups))
        self._compressed_groups = tuple(compressed_groups)
        _check_names([g.name for g in (*self._swa_groups, *self._compressed_groups)])
        self._num_pages = {
            **{g.name: _page_limit(g.name, g.num_pages, g.page_tokens or 0) for g in self._swa_groups},
            **{g.name: _page_limit(g.name, g.num_pages, g.entries_per_page) for g in self._compressed_groups},
        }

        self._step_buffers = StepBuffers.allocate(config, self.device)
        self._swa_buffers = [
            SwaGroupBuffers.allocate(config, self.device, ragged=self.wants_ragged_rows) for _ in self._swa_groups
        ]
        self._compressed_buffers = [
            CompressedGroupBuffers.allocate(g, config, self.device) for g in self._compressed_groups
        ]
        bidirectional = config.max_image_tokens > 0
        self._upload_spans = (
            SpanUpload(config.scheduler.max_num_batched_tokens, self.device) if bidirectional else None
        )
        self._present_types: tuple[LayerType, ...] = config.model.present_layer_types
        self._generation = 0

    def set_num_pages(self, num_pages: int, group: str = MAIN_GROUP) -> None:
        """Tell how many pages a group's cache has, once it is bound.

        Raises:
            BatchError: the group is unknown, or the cache has 2^31 slots or more.
        """
        entries = {g.name: g.page_tokens or 0 for g in self._swa_groups}
        entries |= {g.name: g.entries_per_page for g in self._compressed_groups}
        if group not in entries:
            raise BatchError("group", found=repr(group), legal=sorted(entries), fix="Name a group of this builder.")
        self._num_pages[group] = _page_limit(group, num_pages, entries[group])

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        groups: GroupInputs | None = None,
    ) -> DeepseekSparseSWAMetadata:
        """Build the metadata of one step.

        Args:
            common_prefix_len: unused; engines pass it to every builder.
            common_attn_metadata: a `CommonAttentionMetadata`, or any object with its attribute names.
            fast_build: unused; there is one way to build.
            groups: for each further group of this builder its (block table [R, C] int32, slot mapping [T] int64).

        Raises:
            BatchError: the batch breaks a rule or exceeds a capacity; nothing was launched.
            ValidationError: in validation mode, a value breaks a rule.
        """
        batch = CommonAttentionMetadata.of(common_attn_metadata)
        scheduler = self.config.scheduler
        check_batch(
            batch,
            device=self.device,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
        )
        inputs = self._group_inputs(batch, groups)
        split = self._split(batch)
        if self.config.validate:
            validate_batch(batch, split, self.config, self._swa_groups, self._compressed_groups, inputs,
                           self._num_pages, self.null_page)
        self._generation += 1
        step = self._step(batch, split, inputs)
        if step.num_tokens:
            self.backend.operations.build(step)
        return self._metadata(batch, split, step)

    def update_draft_decode_metadata(self, metadata: DeepseekSparseSWAMetadata) -> None:
        """Derive a decode-only metadata object again after the engine advanced its lengths, slots or table in place.

        Device work only, on the same buffers: it can be captured. Split counts and host copies stay those of the
        build. Plans are fresh.

        Raises:
            BatchError: the metadata has prefills, or was not made by a builder.
        """
        step = metadata.step
        if metadata.num_prefills or step is None:
            raise BatchError(
                "metadata",
                found=f"{metadata.num_prefills} prefills" if step is not None else "an object without its build step",
                legal="decode-only metadata that build() returned",
                fix="Call build() for a step with prefills.",
            )
        self._generation += 1
        if step.num_tokens:
            self.backend.operations.build(step)
        for one in (metadata, *metadata.groups.values()):
            one.generation = self._generation
            one.plans = self._plans(one.num_decode_tokens)

    def _split(self, batch: CommonAttentionMetadata) -> Split:
        num_tokens = batch.num_actual_tokens if batch.num_reqs else 0
        if not batch.causal:
            self._check_draft_step(batch)
            return Split(batch.num_reqs, 0, num_tokens, 0)
        split = split_decodes_and_prefills(
            batch.query_start_loc_cpu, num_tokens, batch.max_query_len, self.decode_threshold
        )
        limit = self.config.scheduler.max_num_seqs * self.decode_threshold
        if split.num_decode_tokens > limit:
            raise BatchError(
                "num_actual_tokens",
                found=f"{split.num_decode_tokens} decode tokens",
                legal=f"at most max_num_seqs * decode threshold = {limit}",
                fix="Pad the step to no more than that, or construct the builder with a larger max_num_seqs.",
            )
        return split

    def _check_draft_step(self, batch: CommonAttentionMetadata) -> None:
        if not self.config.non_causal_width:
            raise BatchError(
                "causal",
                found=False,
                legal="True without DSpark",
                fix="Construct the builder with SpeculativeConfig(dspark=True) to build non-causal draft steps.",
            )
        limit = self.config.k
        longest = batch.max_query_len
        if longest > limit and batch.num_reqs:
            longest = int((batch.query_start_loc_cpu[1:] - batch.query_start_loc_cpu[:-1]).max())
        if longest > limit:
            raise BatchError(
                "query_start_loc_cpu",
                found=f"a request of {longest} tokens in a non-causal step",
                legal=f"at most num_speculative_tokens = {limit} tokens a request, decodes only",
                fix="Build prefills and longer extends in a causal step of their own.",
            )

    def _group_inputs(self, batch: CommonAttentionMetadata, groups: GroupInputs | None) -> GroupInputs:
        inputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
            MAIN_GROUP: (batch.block_table_tensor, batch.slot_mapping)
        }
        given = groups or {}
        expected = {g.name for g in (*self._swa_groups[1:], *self._compressed_groups)}
        if set(given) != expected:
            raise BatchError(
                "groups",
                found=sorted(given),
                legal=sorted(expected),
                fix="Pass (block_table, slot_mapping) for exactly the groups that the builder was constructed with.",
            )
        for name, pair in given.items():
            table, slots = pair
            check_tensor(f"groups[{name!r}] block table", table, torch.int32, (batch.num_reqs, -1), self.device)
            check_tensor(f"groups[{name!r}] slot mapping", slots, torch.int64, (batch.num_actual_tokens,), self.device)
            inputs[name] = (table, slots)
        return inputs

    def _step(self, batch: CommonAttentionMetadata, split: Split, inputs: GroupInputs) -> BuildStep:
        num_tokens = split.num_decode_tokens + split.num_prefill_tokens
        shared = self._step_buffers
        spans = self._spans(batch, split)
        return BuildStep(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            replay_start=batch.replay_start,
            spans=spans,
            num_reqs=batch.num_reqs,
            num_tokens=num_tokens,
            num_decodes=split.num_decodes,
            num_decode_tokens=split.num_decode_tokens,
            window=self.config.model.window_size,
            max_image_tokens=self.config.max_image_tokens,
            causal=batch.causal,
            token_to_req=shared.token_to_req[:num_tokens],
            left_visible=_rows(shared.left_visible, num_tokens) if spans is not None else None,
            right_visible=_rows(shared.right_visible, num_tokens) if spans is not None else None,
            prefill_gather_lens=shared.prefill_gather_lens[: split.num_prefills] if split.num_prefills else None,
            swa=tuple(
                self._swa_step(group, buffers, inputs[group.name], split, causal=batch.causal)
                for group, buffers in zip(self._swa_groups, self._swa_buffers, strict=True)
            ),
            compressed=tuple(
                CompressedGroupStep(
                    block_table=inputs[group.name][0],
                    slot_mapping=inputs[group.name][1][:num_tokens],
                    ratio=group.ratio,
                    entries_per_page=group.entries_per_page,
                    num_pages=self._num_pages[group.name],
                    compressed_slot_mapping=buffers.slot_mapping[:num_tokens],
                    rows=_rows(buffers.rows, num_tokens),
                    lens=_rows(buffers.lens, num_tokens),
                )
                for group, buffers in zip(self._compressed_groups, self._compressed_buffers, strict=True)
            ),
        )

    def _swa_step(
        self,
        group: SwaGroup,
        buffers: SwaGroupBuffers,
        inputs: tuple[torch.Tensor, torch.Tensor],
        split: Split,
        *,
        causal: bool,
    ) -> SwaGroupStep:
        decode, prefill = split.num_decode_tokens, split.num_prefill_tokens
        decode_indices = buffers.decode_indices
        if not causal and buffers.noncausal_indices is not None:
            decode_indices = buffers.noncausal_indices
        return SwaGroupStep(
            block_table=inputs[0],
            slot_mapping=inputs[1][: decode + prefill],
            page_tokens=group.page_tokens or self.block_size,
            num_pages=self._num_pages[group.name],
            is_valid_token=buffers.is_valid_token[: decode + prefill],
            decode_indices=decode_indices[:decode],
            decode_lens=buffers.decode_lens,
            prefill_indices=buffers.prefill_indices[:prefill] if split.num_prefills else None,
            prefill_lens=buffers.prefill_lens[:prefill] if split.num_prefills else None,
            decode_ragged=buffers.decode_ragged,
            prefill_ragged=buffers.prefill_ragged,
        )

    def _spans(self, batch: CommonAttentionMetadata, split: Split) -> torch.Tensor | None:
        """This step's spans on the device, or None when no prefill request has one that matters."""
        if self._upload_spans is None or not batch.mm_req_doc_ranges:
            return None
        check_spans(batch.mm_req_doc_ranges, batch.num_reqs, self.config.max_image_tokens)
        if not any(own and request >= split.num_decodes for request, own in batch.mm_req_doc_ranges.items()):
            return None
        seq_lens, query_lens, _ = self._prefill_host_lens(batch, split)
        prefixes = (seq_lens - query_lens).tolist()
        return self._upload_spans(
            spans_in_step(batch.mm_req_doc_ranges, split.num_decodes, prefixes, seq_lens.tolist())
        )

    def _prefill_host_lens(
        self, batch: CommonAttentionMetadata, split: Split
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Host [num_prefills] int32 tensors: sequence lengths, query lengths, replay starts where known."""
        first = split.num_decodes
        query_lens = batch.query_start_loc_cpu[first + 1 :] - batch.query_start_loc_cpu[first:-1]
        seq_lens, replay = batch.seq_lens_cpu_upper_bound, batch.replay_start_cpu
        if self.device.type == "cpu":  # the device tensors are host tensors
            seq_lens = batch.seq_lens if seq_lens is None else seq_lens
            replay = batch.replay_start if replay is None else replay
        if seq_lens is None:
            raise BatchError(
                "seq_lens_cpu_upper_bound",
                found=None,
                legal="a host int32 tensor of shape (num_reqs,), exact for prefills",
                fix="Pass it with every batch that has prefills; the device is never read back.",
            )
        return seq_lens[first:], query_lens, None if replay is None else replay[first:]

    def _plans(self, num_decode_tokens: int) -> Mapping[LayerType, Any]:
        if not num_decode_tokens:
            return NO_PLANS
        return {**NO_PLANS, **self.backend.scheduler.fresh_plans(self._present_types)}

    def _metadata(self, batch: CommonAttentionMetadata, split: Split, step: BuildStep) -> DeepseekSparseSWAMetadata:
        config = self.config
        common: dict[str, Any] = {
            "seq_lens": batch.seq_lens,
            "query_start_loc": batch.query_start_loc,
            "query_start_loc_cpu": batch.query_start_loc_cpu,
            "token_to_req_indices": step.token_to_req,
            "window_size": config.model.window_size,
            "causal": batch.causal,
            **split._asdict(),
            "max_decode_query_len": min(batch.max_query_len, self.decode_threshold),
            "replay_start": (
                batch.replay_start if batch.replay_start is not None else self._step_buffers.no_replay[: batch.num_reqs]
            ),
            "provider": self.provider,
            "shape": self.shape,
            "validate": config.validate,
            "prefill_left_visible": step.left_visible,
            "prefill_right_visible": step.right_visible,
            "generation": self._generation,
            "step": step,
        }
        if split.num_prefills:
            seq_lens_cpu, query_lens_cpu, replay_cpu = self._prefill_host_lens(batch, split)
            common |= {
                "prefill_seq_lens": batch.seq_lens[split.num_decodes :],
                "prefill_seq_lens_cpu": seq_lens_cpu,
                "prefill_query_lens_cpu": query_lens_cpu,
                "prefill_gather_lens": step.prefill_gather_lens,
                "prefill_replay_start_cpu": replay_cpu,
                "prefill_window_size": config.model.window_size,
                "prefill_max_model_len": config.scheduler.max_model_len,
                "prefill_max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            }
        main, *others = (self._swa_metadata(group, common, split) for group in step.swa)
        main.compressed = {
            group.name: CompressedGroupMetadata(
                name=group.name,
                ratio=group.ratio,
                block_table=built.block_table,
                page_tokens=group.page_tokens,
                entries_per_page=group.entries_per_page,
                compressed_slot_mapping=built.compressed_slot_mapping,
                rows=built.rows,
                lens=built.lens,
            )
            for group, built in zip(self._compressed_groups, step.compressed, strict=True)
        }
        main.groups = {group.name: one for group, one in zip(self._swa_groups[1:], others, strict=True)}
        return main

    def _swa_metadata(self, group: SwaGroupStep, common: dict[str, Any], split: Split) -> DeepseekSparseSWAMetadata:
        decode = split.num_decode_tokens
        decode_ragged = _handed_out(group.decode_ragged, decode, group.decode_indices.shape[1])
        prefill_ragged = (None, None)
        if group.prefill_indices is not None:
            prefill_ragged = _handed_out(group.prefill_ragged, *group.prefill_indices.shape)
        return DeepseekSparseSWAMetadata(
            block_table=group.block_table,
            slot_mapping=group.slot_mapping,
            block_size=group.page_tokens,
            is_valid_token=group.is_valid_token,
            decode_swa_indices=group.decode_indices.unsqueeze(1),
            decode_swa_lens=group.decode_lens[:decode],
            decode_swa_width=group.decode_indices.shape[1],
            prefill_swa_indices=None if group.prefill_indices is None else group.prefill_indices.unsqueeze(1),
            prefill_swa_lens=group.prefill_lens,
            decode_swa_ragged_indices=decode_ragged[0],
            decode_swa_ragged_indptr=decode_ragged[1],
            prefill_swa_ragged_indices=prefill_ragged[0],
            prefill_swa_ragged_indptr=prefill_ragged[1],
            plans=self._plans(decode),
            **common,
        )


def _rows(buffer: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if buffer is None else buffer[:rows]


def _handed_out(ragged: RaggedRows | None, rows: int, width: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Views that span every entry the rows could have; how many there are is only known on the device."""
    if ragged is None:
        return None, None
    return ragged.indices[: rows * width], ragged.indptr[: rows + 1]


def _page_limit(group: str, num_pages: int | None, page_entries: int) -> int:
    """Pages of a group, or the most that leave every slot in int32."""
    if num_pages is None:
        return (MAX_SLOTS - 1) // page_entries
    if not isinstance(num_pages, int) or num_pages < 0 or num_pages * page_entries >= MAX_SLOTS:
        raise BatchError(
            f"num_pages of group {group!r}",
            found=f"{num_pages} pages of {page_entries} entries",
            legal=f"an int >= 0, fewer than {MAX_SLOTS} slots in all",
            fix="Split the cache: slots are int32 indices on the device.",
        )
    return num_pages


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise ConfigError(
            "groups", found=names, legal=f"names that differ, none {MAIN_GROUP!r}", fix="Rename a cache group."
        )


def _check_spec(spec: KVCacheSpec, config: BackendConfig) -> None:
    window = config.model.window_size
    if spec.sliding_window != window:
        raise ConfigError(
            "kv_cache_spec.sliding_window",
            found=spec.sliding_window,
            legal=f"the model's window of {window} tokens",
            fix="Pass the spec of a DeepseekV4SWACache made for this model.",
        )
