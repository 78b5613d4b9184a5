"""Turns one step's batch into index metadata: persistent buffers, one call of the platform's operations, plans.

The class is the same on every platform; a platform package derives from it to say whether it wants ragged rows, and
`Backend.get_builder_cls` binds the descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from swa_backend._checks import require_type
from swa_backend._math import cdiv
from swa_backend._memory import allocating
from swa_backend.backend import Backend
from swa_backend.batch import CommonAttentionMetadata, check_batch, check_tensor
from swa_backend.buffers import IndexBuffers
from swa_backend.cache_spec import KVCacheSpec
from swa_backend.capture import capture_id
from swa_backend.config import BackendConfig
from swa_backend.errors import BatchError, ConfigError
from swa_backend.groups import CompressedGroup, SwaGroup
from swa_backend.image_spans import SpanUpload, check_spans, spans_in_step
from swa_backend.layer_types import LayerType
from swa_backend.metadata import NO_PLANS, BuildCount, DeepseekSparseSWAMetadata
from swa_backend.metadata_assembly import MetadataAssembler, PrefillHostLens
from swa_backend.platform import require_device
from swa_backend.provider_choice import attention_shape, choose_provider
from swa_backend.split import Split, split_decodes_and_prefills
from swa_backend.step import BuildStep
from swa_backend.validation import ValueRules

MAIN_GROUP = "main"

GroupInputs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
StepInputs = tuple[tuple[torch.Tensor, torch.Tensor], ...]


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
        shares_scratch_with: a builder whose steps never run at the same time as this one's, on one stream and thread:
            the two then use the same scratch memory of attention. Without it each builder has its own.

    Raises:
        ConfigError: a group is named twice, the spec is not that of the model's window cache, or memory runs out.
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
        shares_scratch_with: DeepseekSparseSWAMetadataBuilder | None = None,
    ) -> None:
        require_type("kv_cache_spec", kv_cache_spec, KVCacheSpec)
        require_type("config", config, BackendConfig)
        for compressed_group in compressed_groups:
            require_type("compressed_groups", compressed_group, CompressedGroup)
        for swa_group in swa_groups:
            require_type("swa_groups", swa_group, SwaGroup)
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = tuple(layer_names)
        self.config = config
        self.device = require_device(device, self.backend.platform)
        self.null_page = null_page
        _check_spec(kv_cache_spec, config)
        self.block_size = kv_cache_spec.block_size
        self.decode_threshold = config.decode_threshold
        self.shape = attention_shape(config, kv_cache_spec, self.backend, self.device)
        platform, target = self.backend.platform, self.backend.target
        if shares_scratch_with is None:
            self._providers = tuple(platform.load_providers(target))
        else:
            require_type("shares_scratch_with", shares_scratch_with, DeepseekSparseSWAMetadataBuilder)
            self._providers = shares_scratch_with._providers
        self.provider = choose_provider(self.backend, self.shape, self._providers)

        main = SwaGroup(MAIN_GROUP, self.block_size, num_pages)
        further = [replace(g, page_tokens=g.page_tokens or self.block_size) for g in swa_groups]
        _check_names([MAIN_GROUP, *(g.name for g in further), *(g.name for g in compressed_groups)])
        scheduler = config.scheduler
        with allocating(
            ConfigError,
            "max_num_batched_tokens",
            f"buffers for {scheduler.max_num_batched_tokens} tokens a step, contexts of {scheduler.max_model_len}",
            "Lower max_num_batched_tokens or max_model_len, or leave more memory beside the caches.",
        ):
            self.provider.reserve(config, self.device)
            self._buffers = IndexBuffers.allocate(
                config, [main, *further], compressed_groups, self.device, ragged=self.wants_ragged_rows
            )
            self._build_indices = self.backend.operations.prepare_build(self._buffers)
        # In the order of the buffers; how errors call each group's inputs.
        self._further_groups = {pages.name: f"groups[{pages.name!r}]" for pages in self._buffers.groups[1:]}
        self._rules = ValueRules(config, self._buffers.groups, null_page)
        self._builds = BuildCount()
        self._assemble = MetadataAssembler(self._buffers, config, self.provider, self.shape, self._builds)
        self._upload_spans = (
            SpanUpload(config.scheduler.max_num_batched_tokens, self.device) if config.max_image_tokens else None
        )
        self._present_types: tuple[LayerType, ...] = config.model.present_layer_types

    def set_num_pages(self, num_pages: int, group: str = MAIN_GROUP) -> None:
        """Tell how many pages a group's cache has, once it is bound.

        Raises:
            BatchError: the group is unknown, or the cache has 2^31 slots or more.
        """
        self._buffers.set_num_pages(group, num_pages)

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
        check_batch(batch, device=self.device, scheduler=self.config.scheduler)
        inputs = self._group_inputs(batch, groups)
        split = self._split(batch)
        if self._validates(batch.query_start_loc):
            self._rules.check_batch(batch, split, inputs)
        return self._run(batch, split, inputs)

    def capture_build(
        self,
        num_reqs: int,
        num_tokens: int,
        common_attn_metadata: Any,
        groups: GroupInputs | None = None,
    ) -> DeepseekSparseSWAMetadata:
        """Record a causal decode-only build of fixed R and T in the graph that the engine is capturing.

        The engine owns the input tensors and changes their contents before each replay; which requests are real, and
        how long each query is, is read on the device. Host values of the batch are only used for shapes.

        Args:
            num_reqs: R, of the captured graph.
            num_tokens: T, of the captured graph.
            common_attn_metadata: batch whose device tensors have R + 1, R, [R, C] and T elements.
            groups: as in `build`.

        Raises:
            BatchError: a shape is another than R and T say, or the batch is not causal.
        """
        batch = CommonAttentionMetadata.of(common_attn_metadata)
        for field, value in (("num_reqs", num_reqs), ("num_actual_tokens", num_tokens)):
            if getattr(batch, field) != value:
                raise BatchError(
                    field,
                    found=repr(getattr(batch, field)),
                    legal=f"{value!r}, as the captured graph has, an int",
                    fix="Describe the padded batch of the graph, with slot -1 for tokens that are not real.",
                )
        longest = cdiv(num_tokens, num_reqs) if num_reqs else 0
        if longest > self.decode_threshold or not batch.causal:
            raise BatchError(
                "num_tokens",
                found=f"{longest} tokens a request" if batch.causal else "a non-causal batch",
                legal=f"causal decodes of at most {self.decode_threshold} tokens a request",
                fix="Capture decode steps; build the others with build().",
            )
        uniform = torch.arange(num_reqs + 1, dtype=torch.int32).mul_(longest).clamp_(max=num_tokens)
        batch = replace(batch, max_query_len=longest, query_start_loc_cpu=uniform)
        check_batch(batch, device=self.device, scheduler=self.config.scheduler)
        inputs = self._group_inputs(batch, groups)
        if self._validates(batch.query_start_loc):
            self._rules.check_device(batch, inputs, num_tokens, self.decode_threshold)
        metadata = self._run(batch, self._split(batch), inputs)
        for one in (metadata, *metadata.groups.values()):
            one.max_decode_query_len = self.decode_threshold  # what a replay brings is not known here
        return metadata

    def update_draft_decode_metadata(self, metadata: DeepseekSparseSWAMetadata) -> None:
        """Derive a decode-only metadata object again after the engine advanced its lengths, slots or table in place.

        Device work only, on the same buffers: it can be captured. Split counts and host copies stay those of the
        build. Plans are fresh.

        Raises:
            BatchError: the metadata has prefills, or was not made by a builder.
        """
        step = metadata.step if isinstance(metadata, DeepseekSparseSWAMetadata) else None
        if step is None or metadata.builds is not self._builds or metadata.num_prefills:
            raise BatchError(
                "metadata",
                found=(
                    f"{metadata.num_prefills} prefills"
                    if step is not None and metadata.builds is self._builds
                    else f"a {type(metadata).__name__} that this builder did not make"
                ),
                legal="decode-only metadata that build() of this builder returned",
                fix="Call build() for a step with prefills, and update a builder's metadata with that builder.",
            )
        if self._validates(step.query_start_loc):
            longest = step.max_query_len if step.causal else self.config.k
            self._rules.check_device(step, step.groups, step.num_tokens, longest)
        self._builds.advance()
        if step.num_tokens:
            self._build_indices(step)
        for one in (metadata, *metadata.groups.values()):
            one.generation = self._builds.value
        self._give_plans(metadata)

    def _validates(self, tensor: torch.Tensor) -> bool:
        """Whether values are checked now: in validation mode, but not while a graph is captured: that reads nothing."""
        return self.config.validate and not capture_id(tensor)

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

    def _group_inputs(self, batch: CommonAttentionMetadata, groups: GroupInputs | None) -> StepInputs:
        """(block table, slot mapping) of every group, in the order of the buffers."""
        further = self._further_groups
        if not further and not groups:
            return ((batch.block_table_tensor, batch.slot_mapping),)
        inputs = [(batch.block_table_tensor, batch.slot_mapping)]
        given = {} if groups is None else groups
        if not isinstance(given, Mapping) or given.keys() != further.keys():
            raise BatchError(
                "groups",
                found=sorted(given, key=str) if isinstance(given, Mapping) else type(given).__name__,
                legal=sorted(further),
                fix="Pass (block_table, slot_mapping) for exactly the groups that the builder was constructed with.",
            )
        for name, field in further.items():
            pair = given[name]
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise BatchError(
                    field, found=type(pair).__name__, legal="(block_table, slot_mapping)", fix="Pass the two tensors."
                )
            table, slots = pair
            check_tensor(f"{field} block table", table, torch.int32, (batch.num_reqs, -1), self.device)
            check_tensor(f"{field} slot mapping", slots, torch.int64, (batch.num_actual_tokens,), self.device)
            inputs.append((table, slots))
        return tuple(inputs)

    def _spans(
        self, batch: CommonAttentionMetadata, split: Split, prefill: PrefillHostLens | None
    ) -> torch.Tensor | None:
        """This step's spans on the device, or None when no prefill request has one that matters."""
        if self._upload_spans is None or not batch.mm_req_doc_ranges:
            return None
        check_spans(batch.mm_req_doc_ranges, batch.num_reqs, self.config.max_image_tokens)
        if prefill is None or not any(own and r >= split.num_decodes for r, own in batch.mm_req_doc_ranges.items()):
            return None
        prefixes, seq_lens = (prefill.seq_lens - prefill.query_lens).tolist(), prefill.seq_lens.tolist()
        return self._upload_spans(spans_in_step(batch.mm_req_doc_ranges, split.num_decodes, prefixes, seq_lens))

    def _prefill_host_lens(self, batch: CommonAttentionMetadata, split: Split) -> PrefillHostLens:
        first = split.num_decodes
        query_lens = batch.query_start_loc_cpu[first:].diff()
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
        return PrefillHostLens(seq_lens[first:], query_lens, None if replay is None else replay[first:])

    def _give_plans(self, metadata: DeepseekSparseSWAMetadata) -> None:
        """Fresh, empty plans for every sliding-window group of a step that decodes."""
        if self.provider.takes_plans and metadata.num_decode_tokens:
            for one in (metadata, *metadata.groups.values()):
                one.plans = {**NO_PLANS, **self.backend.scheduler.fresh_plans(self._present_types)}

    def _run(self, batch: CommonAttentionMetadata, split: Split, inputs: StepInputs) -> DeepseekSparseSWAMetadata:
        # Everything that may be refused comes before the launch.
        prefill = self._prefill_host_lens(batch, split) if split.num_prefills else None
        step = BuildStep(
            batch.query_start_loc,
            batch.seq_lens,
            batch.replay_start,
            self._spans(batch, split, prefill),
            inputs,
            batch.num_reqs,
            split.num_decode_tokens + split.num_prefill_tokens,
            split.num_decodes,
            split.num_decode_tokens,
            batch.max_query_len,
            batch.causal,
        )
        self._builds.advance()  # before the launch: if that fails, what the buffers held is gone all the same
        if step.num_tokens:
            self._build_indices(step)
        metadata = self._assemble(batch, split, step, prefill)
        self._give_plans(metadata)
        return metadata


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise ConfigError(
            "groups", found=names, legal=f"names that differ, none {MAIN_GROUP!r}", fix="Rename a cache group."
        )


def _check_spec(spec: KVCacheSpec, config: BackendConfig) -> None:
    """The window has to be the model's; page size and layout are the cache's own, whatever the configuration says."""
    window = config.model.window_size
    if spec.sliding_window != window:
        raise ConfigError(
            "kv_cache_spec.sliding_window",
            found=spec.sliding_window,
            legal=f"the model's window of {window} tokens",
            fix="Pass the spec of a DeepseekV4SWACache made for this model.",
        )
