"""Metadata builders in the place of vLLM's: each derived from the class that it replaces.

The replacement goes in below what vLLM's own subclasses add and above their common base, so that graph support, the
decode threshold and fields that a subclass fills stay vLLM's, and the rows are built by this library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from swa_backend.batch import CommonAttentionMetadata
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.capture import capture_id
from swa_backend.config import BackendConfig
from swa_backend.errors import BatchError, ConfigError
from swa_backend.groups import SwaGroup
from swa_backend.integrations.vllm.engine import builder_class, first, keep_vllms, with_engine_attention
from swa_backend.integrations.vllm.metadata import MADE_BY, OURS, metadata_classes
from swa_backend.integrations.vllm.settings import cache_spec, check_width, window_config
from swa_backend.integrations.vllm.shared_step import SharedBatch, note, wrap_loops
from swa_backend.integrations.vllm.surface import BUILDERS
from swa_backend.integrations.vllm.warmup import warm_attention, warm_builds
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.platform import CacheRole
from swa_backend.registry import get_backend

if TYPE_CHECKING:
    from swa_backend.integrations.vllm.attention import VllmAttention

_OFF = "Unset SWA_BACKEND_VLLM for this model."


class Builds:
    """This library's builder for cache groups that vLLM builds for one batch.

    Args:
        members: vLLM's builders, one for each group, the first one's group being the main one.
    """

    def __init__(self, members: tuple[Any, ...]) -> None:
        main = members[0]
        if capture_id(torch.empty(0, device=main.device)):
            raise BatchError(
                "build",
                found="the first build of these cache groups inside a graph capture",
                legal="a build before it, in which the buffers are allocated",
                fix="Run a step of these groups before it is captured.",
            )
        names = [str(number) for number in range(1, len(members))]
        backend = main.swa_backend
        spec = cache_spec(main.kv_cache_spec, main.swa_config, backend.cache_dialect(CacheRole.SWA))
        self.builder: DeepseekSparseSWAMetadataBuilder = builder_class(backend, main.ragged)(
            spec,
            [name for member in members for name in member.layer_names],
            main.swa_config,
            main.device,
            swa_groups=[SwaGroup(name, one.block_size) for name, one in zip(names, members[1:], strict=True)],
        )
        self._max_model_len = main.max_model_len

    def launch(self, batch: SharedBatch) -> Callable[[], tuple[DeepseekSparseSWAMetadata, ...]]:
        """Build all groups in one launch; the function that is returned puts the metadata of each together."""
        commons = batch.commons
        taken = _batch(commons[0], batch.replay_start, self._max_model_len)
        launched: Any = self.builder.build(0, taken, groups=commons[1:])  # type: ignore[arg-type]  # see engine
        return partial(_of_each_group, launched)


def _of_each_group(assemble: Any) -> tuple[DeepseekSparseSWAMetadata, ...]:
    main: DeepseekSparseSWAMetadata = assemble()
    return (main, *main.groups.values())


def _batch(common: Any, replay_start: torch.Tensor | None, max_model_len: int) -> CommonAttentionMetadata:
    """vLLM's batch as this library takes it; what reaches past its requests or tokens is left out."""
    requests, tokens = common.num_reqs, common.num_actual_tokens
    starts, starts_cpu, lens = common.query_start_loc, common.query_start_loc_cpu, common.seq_lens
    return CommonAttentionMetadata(
        starts if starts.size(0) == requests + 1 else starts[: requests + 1],
        starts_cpu if starts_cpu.size(0) == requests + 1 else starts_cpu[: requests + 1],
        lens if lens.size(0) == requests else lens[:requests],
        requests,
        tokens,
        int(common.max_query_len),
        min(int(common.max_seq_len), max_model_len),  # vLLM's bound may count drafts past the end
        first(common.block_table_tensor, requests),
        first(common.slot_mapping, tokens),
        first(common.seq_lens_cpu_upper_bound, requests),
        common.causal,
        common.mm_req_doc_ranges,
        replay_start=first(replay_start, requests),
    )


def _replacing(base: Any, sparse_swa: ModuleType, attention: VllmAttention | None) -> type:
    """The class that goes in between vLLM's base class and its subclasses."""

    class SharedBuilds(base):  # type: ignore[misc]
        """Builds rows with this library; everything else is the class it is derived from."""

        ragged = False
        metadata_class: type = sparse_swa.DeepseekSparseSWAMetadata

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            _check_engine(vllm_config)
            # vLLM's constructor derives its settings, and allocates its buffers where that costs nothing.
            super().__init__(kv_cache_spec, layer_names, vllm_config, torch.device("meta"))
            for name, value in list(vars(self).items()):
                if isinstance(value, torch.Tensor) and value.is_meta:
                    delattr(self, name)
            self.device = device
            self.swa_config = window_config(self)
            check_width(self, self.swa_config)
            self.swa_backend = with_engine_attention(get_backend())
            if attention is not None:
                self._take_attention(attention)
            self.pending_cls = metadata_classes(self.metadata_class).pending
            self._builds: dict[tuple[Any, ...], Builds] = {}  # by the builders that are built together, this one first
            self._latest: tuple[list[Any], Builds] | None = None
            self._plan_fields: tuple[str, ...] | None = None
            self.group_kind = _kind(self.swa_config, self.ragged, device)
            warm_builds(self.swa_backend, self.swa_config, device, ragged=self.ragged)
            wrap_loops()

        def _take_attention(self, attention: VllmAttention) -> None:
            """Build for this library's attention, if the layers take it."""
            if not attention.serves(type(self)):
                keep_vllms(f"layers of {type(self).__bases__[0].__module__}", ("the plugin does not replace theirs",))
                return
            choice = attention.choose(self.vllm_config, self.kv_cache_spec, self.device)
            if choice.config is not None:
                self.swa_config, self.swa_backend = choice.config, get_backend()
                warm_attention(self.swa_backend, self.swa_config, self.device)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: Any,
            fast_build: bool = False,
            replay_start: torch.Tensor | None = None,
        ) -> Any:
            """The metadata of a step, as vLLM's own class returns it."""
            return note(self, common_attn_metadata, replay_start)

        def launch_together(self, batch: SharedBatch) -> Callable[[], tuple[DeepseekSparseSWAMetadata, ...]]:
            """Launch the build of a batch whose first builder this is."""
            return self._builds_of(batch).launch(batch)

        def _builds_of(self, batch: SharedBatch) -> Builds:
            if self._latest is not None and self._latest[0] == batch.builders:
                return self._latest[1]
            key = tuple(batch.builders)
            found = self._builds.get(key)
            if found is None:
                found = self._builds[key] = Builds(key)
            self._latest = batch.builders, found
            return found

        def fields_of(self, batch: SharedBatch, group: int) -> dict[str, Any]:
            """Every field of the object that was handed out for a group, whose builder this is."""
            ours, common = batch.ours(group), batch.commons[group]
            values: dict[str, Any] = {**ours.__dict__, **self._fresh_fields(ours.num_decode_tokens), OURS: ours}
            values[MADE_BY] = batch.builders[0]._builds_of(batch), batch.ours(0)
            values["slot_mapping"] = common.slot_mapping  # of buffers that are longer, all of them
            values["block_table"] = common.block_table_tensor
            return values

        def _fresh_fields(self, num_decode_tokens: int) -> dict[str, Any]:
            """Fields that vLLM fills later in the step, and empty FlashMLA plans where its kernels take them."""
            others: dict[str, Any] = {"flashinfer_sparse_index_cache": {}}
            if num_decode_tokens:
                names = self._plan_fields
                if names is None:
                    kinds = self.build_tile_scheduler(num_decode_tokens).items()
                    names = self._plan_fields = tuple(f"tile_sched_{kind}" for kind, plan in kinds if plan is not None)
                for name in names:
                    others[name] = sparse_swa.get_mla_metadata()[0]
            return others

        def update_draft_decode_metadata(self, metadata: Any) -> None:
            """Derive a decode-only step again after vLLM advanced its lengths and slots in place."""
            if metadata.num_decode_tokens == 0:
                return
            builds, main = getattr(metadata, MADE_BY, (None, None))
            if builds is None or not isinstance(main, DeepseekSparseSWAMetadata):
                raise BatchError(
                    "metadata",
                    found=f"a {type(metadata).__name__} that this builder did not make",
                    legal="what build() returned",
                    fix="Update a builder's metadata with that builder.",
                )
            builds.builder.update_draft_decode_metadata(main)
            metadata.flashinfer_sparse_index_cache.clear()
            for name, value in self._fresh_fields(metadata.num_decode_tokens).items():
                if name.startswith("tile_sched_"):
                    setattr(metadata, name, value)

    return SharedBuilds


@cache
def _kind(config: BackendConfig, ragged: bool, device: torch.device) -> object:
    """The same object for builders whose groups can be built together."""
    return object()


def _ragged(builder_cls: Any) -> type:
    """What goes above a subclass of vLLM's that only adds ragged copies: its own build is passed over."""

    class RaggedBuilds:
        ragged = True
        supports_draft_decode_metadata_update = True  # the update here derives the ragged rows again, too

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in ("decode_swa_ragged_indices_buffer", "decode_swa_ragged_indptr_buffer"):
                vars(self).pop(name, None)

        def build(self, *args: Any, **kwargs: Any) -> Any:
            return super(builder_cls, self).build(*args, **kwargs)  # type: ignore[misc]

    return RaggedBuilds


def _check_engine(vllm_config: Any) -> None:
    parallel = getattr(vllm_config, "parallel_config", None)
    ranks = getattr(parallel, "prefill_context_parallel_size", 1)
    if ranks > 1:
        raise ConfigError(
            "prefill_context_parallel_size", found=ranks, legal=1, fix="Unset SWA_BACKEND_VLLM, or this option."
        )
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    if speculative is not None and speculative.use_dspark() and not getattr(draft, "sample_from_anchor", True):
        raise ConfigError(
            "sample_from_anchor",
            found="False: a draft block of num_speculative_tokens + 1 tokens",
            legal="True: a block of num_speculative_tokens",
            fix=_OFF,
        )


class Replacements:
    """Replaces builders and window backends of one vLLM; the same answer for the same class.

    Args:
        sparse_swa: vLLM's module of that name.
        attention: the layers whose attention is this library's; None in mode ``metadata``.
    """

    def __init__(self, sparse_swa: ModuleType, attention: VllmAttention | None = None) -> None:
        self._base: type = sparse_swa.DeepseekSparseSWAMetadataBuilder
        self._own = _replacing(self._base, sparse_swa, attention)
        self._builders: dict[type, type] = {}
        self._backends: dict[type, type] = {}

    def builder(self, builder_cls: type) -> type:
        """The class that replaces one of vLLM's builders.

        Raises:
            ConfigError: it is none of those that are known.
        """
        found = self._builders.get(builder_cls)
        if found is None:
            found = self._builders[builder_cls] = self._derive(builder_cls)
        return found

    def _derive(self, builder_cls: type) -> type:
        name = f"{builder_cls.__module__}.{builder_cls.__qualname__}"
        kind = BUILDERS.get(name)
        if kind is None:
            raise ConfigError(
                "metadata builder",
                found=name,
                legal=", ".join(sorted(BUILDERS)),
                fix="Unset SWA_BACKEND_VLLM: this builder is not one that the plugin was made for.",
            )
        own = self._own
        members: dict[str, Any] = {"__module__": __name__, "__doc__": builder_cls.__doc__}
        bases: tuple[type, ...] = (own,) if builder_cls is self._base else (builder_cls, own)
        if kind == "ragged":
            beside = sys.modules[builder_cls.__module__]
            bases = (_ragged(builder_cls), *bases)
            members["metadata_class"] = getattr(beside, builder_cls.__name__.removesuffix("Builder"))
        return type(f"SwaBackend{builder_cls.__name__}", bases, members)

    def backend(self, backend_cls: type) -> type:
        """A window backend that differs from vLLM's in its builder alone."""
        found = self._backends.get(backend_cls)
        if found is None:
            builder_cls = self.builder(backend_cls.get_builder_cls())  # type: ignore[attr-defined]
            members = {"__module__": __name__, "get_builder_cls": staticmethod(lambda: builder_cls)}
            found = self._backends[backend_cls] = type(f"SwaBackend{backend_cls.__name__}", (backend_cls,), members)
        return found
