"""vLLM's settings and cache specs in this library's terms.

What a metadata build depends on is taken over from the attributes that vLLM's own builder constructor derives, not
derived a second time from vLLM's configuration: the two can then not disagree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from swa_backend._checks import show
from swa_backend.cache_layout import HEAD_DIM, LAYOUT_NAMES, Dialect, PageLayout, get_layout
from swa_backend.cache_spec import KVCacheSpec
from swa_backend.config import ROPE_DIM, BackendConfig, SchedulerConfig, SpeculativeConfig
from swa_backend.errors import ConfigError
from swa_backend.integrations.vllm.surface import BUILDER_ATTRIBUTES
from swa_backend.layer_types import ModelVersion
from swa_backend.model_config import ImageMode, ModelConfig
from swa_backend.platform import CacheRole

_PLAIN_LAYOUTS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_per_tensor"}


def window_config(builder: Any) -> BackendConfig:
    """The settings that a build of window rows depends on, as vLLM's constructor left them in ``builder``.

    Everything else of the model (layers, heads, compressed caches) is made up: the attention is vLLM's.

    Raises:
        ConfigError: a setting that this library cannot represent, or one that vLLM's constructor did not leave.
    """
    if missing := sorted(name for name in BUILDER_ATTRIBUTES if not hasattr(builder, name)):
        raise ConfigError(
            type(builder).__name__,
            found=f"no attribute {', '.join(missing)}",
            legal=", ".join(sorted(BUILDER_ATTRIBUTES)),
            fix="Unset SWA_BACKEND_VLLM: this vLLM keeps its settings in another way.",
        )
    model = ModelConfig(
        name="vLLM",
        version=ModelVersion.V4,
        num_hidden_layers=1,
        num_heads=1,
        head_dim=HEAD_DIM,
        rope_dim=ROPE_DIM,
        window_size=builder.window_size,
        index_topk=1,
        max_position_embeddings=builder.max_model_len,
        compress_ratios=(0,),
        image_mode=ImageMode.BIDIRECTIONAL if builder.max_image_tokens else ImageMode.NONE,
        max_image_tokens=builder.max_image_tokens,
    )
    tokens = builder.max_num_batched_tokens
    # A padded batch may have as many requests, or decodes, as it has tokens.
    requests = max(builder.vllm_config.scheduler_config.max_num_seqs, tokens)
    scheduler = SchedulerConfig(builder.max_model_len, requests, tokens)
    drafting = speculative(builder.num_speculative_tokens, builder.decode_threshold, builder.is_dspark)
    return _shared(BackendConfig(model, scheduler, speculative=drafting, page_tokens=builder.block_size))


def attention_config(engine: Any, heads: int, threshold: int, page_tokens: int, layout: PageLayout) -> BackendConfig:
    """The settings that attention depends on, for one rank.

    Args:
        engine: vLLM's ``VllmConfig``.
        heads: query heads of a layer's tensors on this rank, padding included.
        threshold: longest query that vLLM counts as a decode.
        page_tokens: tokens of a page of the sliding-window cache.
        layout: of that cache.

    Raises:
        ConfigError: a setting that this library cannot represent.
    """
    hf, scheduler = engine.model_config.hf_config, engine.scheduler_config
    model = ModelConfig.from_hf_config(hf.to_dict() if hasattr(hf, "to_dict") else vars(hf))
    length = engine.model_config.max_model_len
    model = replace(model, num_heads=heads, max_position_embeddings=max(length, model.max_position_embeddings))
    drafts = engine.speculative_config
    count = drafts.num_speculative_tokens if drafts is not None else 0
    # vLLM pads batches of decodes to the sizes of its graphs.
    padded = getattr(getattr(engine, "compilation_config", None), "max_cudagraph_capture_size", None) or 0
    tokens = scheduler.max_num_batched_tokens
    requests = max(scheduler.max_num_seqs, min(padded, tokens))
    return _shared(
        BackendConfig(
            model,
            SchedulerConfig(length, requests, tokens),
            speculative=speculative(count, threshold, drafts is not None and drafts.use_dspark()),
            page_tokens=page_tokens,
            cache_layout=layout.name,
            compressed_layout=layout.name,
        )
    )


def speculative(drafts: int | None, threshold: int, dspark: bool) -> SpeculativeConfig | None:
    """Speculative decoding, such that the decode threshold is vLLM's.

    Raises:
        ConfigError: the threshold follows from no setting of this library.
    """
    drafts = drafts or 0
    if not drafts and threshold == 1:
        return None
    both = threshold == 1 + 2 * drafts
    if not drafts or threshold not in (1 + drafts, 1 + 2 * drafts):
        raise ConfigError(
            "decode threshold",
            found=f"{threshold} with num_speculative_tokens {show(drafts)}",
            legal="1 + num_speculative_tokens, or twice as many drafts with parallel drafting",
            fix="Unset SWA_BACKEND_VLLM for this configuration.",
        )
    return SpeculativeConfig(drafts, parallel_drafting=both, dspark=dspark)


def check_width(builder: Any, config: BackendConfig) -> None:
    """Refuse a width of draft rows that is not the one of vLLM's own buffers.

    Raises:
        ConfigError: the widths differ.
    """
    if builder.noncausal_index_width != config.non_causal_width:
        raise ConfigError(
            "noncausal_index_width",
            found=builder.noncausal_index_width,
            legal=config.non_causal_width,
            fix="Unset SWA_BACKEND_VLLM: this vLLM pads draft rows in another way.",
        )


def cache_spec(spec: Any, config: BackendConfig, dialect: Dialect) -> KVCacheSpec:
    """The spec of a group's sliding-window cache.

    Args:
        spec: vLLM's ``SlidingWindowMLASpec``, or ``MLAAttentionSpec`` where it keeps whole contexts.
        config: this library's settings.
        dialect: fp8 dialect in which the cache is written here.

    Raises:
        ConfigError: the cache has a layout that this library does not know.
    """
    layout = layout_of(spec, dialect)
    return KVCacheSpec(CacheRole.SWA, layout, spec.block_size, spec.dtype, config.model.window_size)


def layout_of(spec: Any, dialect: Dialect) -> PageLayout:
    """The byte layout that vLLM's spec describes: by its dtype, or by the bytes of an entry of packed caches.

    Raises:
        ConfigError: there is none.
    """
    dtype, content = getattr(spec, "dtype", torch.uint8), getattr(spec, "state_content_bytes", None)
    if dtype in _PLAIN_LAYOUTS:
        return get_layout(_PLAIN_LAYOUTS[dtype], dialect)
    for name in LAYOUT_NAMES:
        layout = get_layout(name, dialect)
        if dtype == torch.uint8 and layout.packed and content == layout.bytes_per_token:
            return layout
    packed = [get_layout(name, dialect) for name in LAYOUT_NAMES]
    raise ConfigError(
        "kv_cache_spec",
        found=f"{dtype} with {content} bytes an entry",
        legal=f"{', '.join(map(str, _PLAIN_LAYOUTS))}, or torch.uint8 with "
        f"{', '.join(str(one.bytes_per_token) for one in packed if one.packed)} bytes",
        fix="Unset SWA_BACKEND_VLLM for this --kv-cache-dtype.",
    )


@cache
def _shared(config: BackendConfig) -> BackendConfig:
    """One object for equal settings, so that builders of one engine can tell at a glance that theirs are equal."""
    return config
