"""What of vLLM this package relies on, written down as data and checked before anything is replaced.

vLLM has no interface for replacing a metadata builder's result, so the release it was read from is the interface: the
supported series, the names that are called or replaced, every field that vLLM's attention reads of the metadata, and
the builders that are known. A vLLM that differs in any of them is refused with what differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

from swa_backend.integrations.vllm.readers import READ_BY


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SERIES = ("0.33",)
"""Release series of vLLM that this package was made for and tried with."""

SPARSE_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
BACKEND = "vllm.v1.attention.backend"

ATTENTION_CLASSES: Mapping[str, str] = {
    "vllm.models.deepseek_v4.nvidia.flashmla": "DeepseekV4FlashMLAAttention",
    "vllm.models.deepseek_v4.amd.rocm": "DeepseekV4ROCMAiterMLAAttention",
}
"""Attention classes whose ``forward_mqa`` mode ``attention`` replaces, by module."""

STEP_FUNCTIONS: Mapping[str, str] = {
    "vllm.v1.worker.gpu.attn_utils": "build_attn_metadata",
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._build_attention_metadata",
}
"""Functions that call the builder of every cache group for one batch, of the second and the first model runner."""

BUILD_PARAMETERS = ("self", "common_prefix_len", "common_attn_metadata", "fast_build", "replay_start")

BUILDERS: Mapping[str, str] = {
    "vllm.v1.attention.backends.mla.sparse_swa.DeepseekSparseSWAMetadataBuilder": "dense",
    "vllm.models.deepseek_v4.nvidia.flashmla.DeepseekSparseSWAFlashMLAMetadataBuilder": "dense",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse.DeepseekSparseSWAFlashInferMetadataBuilder": "dense",
    "vllm.models.deepseek_v4.cpu.cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder": "dense",
    "vllm.models.deepseek_v4.amd.rocm.DeepseekV4ROCMAiterSparseSWAMetadataBuilder": "ragged",
    "vllm.models.deepseek_v41.sparse_mla.DeepseekV41SparseSWAMetadataBuilder": "dense",
    "vllm.models.deepseek_v41.nvidia.flashmla.DeepseekSparseSWAFlashMLAMetadataBuilder": "dense",
    "vllm.models.deepseek_v41.nvidia.flashinfer_sparse.DeepseekSparseSWAFlashInferMetadataBuilder": "dense",
    "vllm.models.deepseek_v41.amd.rocm.DeepseekV41ROCMAiterSparseSWAMetadataBuilder": "ragged",
}
"""Builders that can be replaced. What a ``dense`` one adds to the base class is kept; a ``ragged`` one only adds the
ragged copies of the rows, which this library's launch makes itself."""

BATCH_FIELDS = _names(
    "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len "
    "block_table_tensor slot_mapping causal seq_lens_cpu_upper_bound mm_req_doc_ranges"
)
"""What this package reads of vLLM's ``CommonAttentionMetadata``."""

BUILDER_ATTRIBUTES = _names(
    "block_size max_model_len max_num_batched_tokens num_speculative_tokens decode_threshold window_size "
    "max_image_tokens is_dspark noncausal_index_width"
)
"""What vLLM's own constructor derives from its configuration and this package takes over."""

METADATA_FIELDS = _names(
    "block_table slot_mapping block_size seq_lens query_start_loc query_start_loc_cpu is_valid_token "
    "token_to_req_indices decode_swa_indices decode_swa_lens decode_swa_width prefill_swa_indices "
    "prefill_swa_lens prefill_left_visible prefill_right_visible replay_start cache_slot_mapping "
    "cache_positions num_decodes num_prefills num_decode_tokens num_prefill_tokens max_decode_query_len "
    "flashinfer_decode_topk_lens flashinfer_decode_seq_lens prefill_seq_lens prefill_seq_lens_cpu "
    "prefill_gather_lens prefill_query_lens_cpu prefill_window_size prefill_max_model_len "
    "prefill_max_num_batched_tokens tile_sched_swaonly tile_sched_c4a tile_sched_c128a tile_sched_c1a "
    "tile_sched_c2a flashinfer_sparse_index_cache"
)
"""Every field of vLLM's ``DeepseekSparseSWAMetadata``. One more would be a field that nothing here fills."""

FILLED_BY_VLLM = _names(
    "cache_slot_mapping cache_positions flashinfer_decode_topk_lens flashinfer_decode_seq_lens "
    "flashinfer_sparse_index_cache"
)
"""Fields that vLLM's own code fills later in a step; a build hands them over empty."""

RAGGED_FIELDS = _names(
    "decode_swa_ragged_indices decode_swa_ragged_indptr prefill_swa_ragged_indices prefill_swa_ragged_indptr"
)
"""Fields that the metadata of a ``ragged`` builder has besides."""


def version_reasons(version: str) -> list[str]:
    """Why this release of vLLM is not one that the package was made for; empty when it is."""
    if any(version == series or version.startswith(f"{series}.") for series in SERIES):
        return []
    return [f"vLLM {version} is installed; this plugin was made for {', '.join(f'{series}.x' for series in SERIES)}"]


def surface_reasons(sparse_swa: ModuleType, backend: ModuleType) -> list[str]:
    """What is missing from, or was added to, the parts of vLLM that mode ``metadata`` relies on.

    Args:
        sparse_swa: vLLM's module of that name.
        backend: vLLM's module with the base classes of builders and batches.
    """
    return [*_missing(sparse_swa), *_differing(sparse_swa), *_batch_reasons(backend)]


def _missing(sparse_swa: ModuleType) -> Iterator[str]:
    for path in (
        "DeepseekV4SWACache.get_attn_backend",
        "DeepseekSparseSWABackend.get_builder_cls",
        "DeepseekSparseSWAMetadata.get_prefill_chunk_plan",
        "DeepseekSparseSWAMetadataBuilder.build",
        "DeepseekSparseSWAMetadataBuilder.build_tile_scheduler",
        "DeepseekSparseSWAMetadataBuilder.update_draft_decode_metadata",
        "get_mla_metadata",
    ):
        if find(sparse_swa, path) is None:
            yield f"{sparse_swa.__name__} has no {path}"


def _differing(sparse_swa: ModuleType) -> Iterator[str]:
    metadata = getattr(sparse_swa, "DeepseekSparseSWAMetadata", None)
    if metadata is not None:
        found = {one.name for one in fields(metadata)}
        if gone := METADATA_FIELDS - found:
            yield f"DeepseekSparseSWAMetadata has no {', '.join(sorted(gone))}"
        if new := found - METADATA_FIELDS:
            yield f"DeepseekSparseSWAMetadata has {', '.join(sorted(new))}, which nothing here fills"
        for module, names in READ_BY.items():
            if unknown := {name for name in names.split() if not hasattr(metadata, name)} - found - RAGGED_FIELDS:
                yield f"{module} reads {', '.join(sorted(unknown))}, which the metadata has not"
    build = find(sparse_swa, "DeepseekSparseSWAMetadataBuilder.build")
    if build is not None and (taken := tuple(inspect.signature(build).parameters)) != BUILD_PARAMETERS:
        yield f"the builder's build takes {', '.join(taken)}, not {', '.join(BUILD_PARAMETERS)}"


def _batch_reasons(backend: ModuleType) -> Iterator[str]:
    if find(backend, "AttentionMetadataBuilder") is None:
        yield f"{backend.__name__} has no AttentionMetadataBuilder"
    batch = getattr(backend, "CommonAttentionMetadata", None)
    if batch is None:
        yield f"{backend.__name__} has no CommonAttentionMetadata"
    elif gone := set(BATCH_FIELDS) - {one.name for one in fields(batch)}:
        yield f"CommonAttentionMetadata has no {', '.join(sorted(gone))}"


def find(owner: object, path: str) -> Any:
    """The object at a dotted path below ``owner``, None if any part is missing."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
        if owner is None:
            return None
    return owner
