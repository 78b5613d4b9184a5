"""The configuration classes: what they derive, and what they refuse."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from swa_backend.config import (
    BackendConfig,
    ImageMode,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType, ModelVersion

MODEL = ModelConfig("test", ModelVersion.V4, 3, 64, 512, 64, 128, 512, 4096, (1, 4, 128))
SCHEDULER = SchedulerConfig(max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512)


@pytest.fixture(autouse=True)
def _no_validate_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)


def backend(model: ModelConfig = MODEL, **changes: Any) -> BackendConfig:
    return BackendConfig(**({"model": model, "scheduler": SCHEDULER} | changes))


def refused(build: Any, field: str, *fragments: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field
    for fragment in fragments:
        assert fragment in str(caught.value)


# ModelConfig


def test_layer_types_are_derived_in_order() -> None:
    model = replace(MODEL, compress_ratios=(128, 4, 4, 0, 2))
    swaonly, _, c2a, c4a, c128a = LayerType
    assert model.layer_types == (c128a, c4a, c4a, swaonly, c2a)
    assert model.trunk_layer_types == (c128a, c4a, c4a)
    assert model.present_layer_types == (swaonly, c2a, c4a, c128a)
    assert model.ratios == (2, 4, 128)


def test_lists_and_plain_strings_are_normalised_and_hashable() -> None:
    model = ModelConfig("test", "v4", 3, 64, 512, 64, 128, 512, 4096, [1, 4, 128], image_mode="none")  # type: ignore[arg-type]
    assert model == MODEL
    assert hash(model) == hash(MODEL)
    assert model.version is ModelVersion.V4
    assert model.image_mode is ImageMode.NONE


def test_a_bool_ratio_is_refused_even_after_an_equal_legal_one() -> None:
    refused(lambda: replace(MODEL, compress_ratios=(True, 4, 128)), "compress_ratios[0]", "True")


@pytest.mark.parametrize("config", [MODEL, SCHEDULER, SpeculativeConfig(3), BackendConfig(MODEL, SCHEDULER)])
def test_configs_are_frozen_and_can_be_pickled(config: Any) -> None:
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, "other")


def test_pickled_model_keeps_its_layer_types() -> None:
    assert pickle.loads(pickle.dumps(MODEL)).layer_types == MODEL.layer_types


@pytest.mark.parametrize("window", [1, 16, 64, 128, 512])
def test_any_positive_window(window: int) -> None:
    assert backend(replace(MODEL, window_size=window)).causal_decode_width == window


@pytest.mark.parametrize(
    ("mode", "tokens", "legal"),
    [
        ("none", 0, True),
        ("none", 1, False),
        ("causal", 0, True),
        ("causal", 384, False),
        ("bidirectional", 384, True),
        ("bidirectional", 0, False),
        ("bidirectional", -1, False),
        ("bidirectional", True, False),
    ],
)
def test_image_mode_and_largest_image_must_fit(mode: str, tokens: int, legal: bool) -> None:
    def build() -> ModelConfig:
        return replace(MODEL, image_mode=ImageMode(mode), max_image_tokens=tokens)

    if legal:
        assert backend(build()).prefill_width == 128 + tokens
    else:
        refused(build, "max_image_tokens")


@pytest.mark.parametrize(
    ("field", "value"),
    [("image_mode", "sideways"), ("version", "v5"), ("version", None), ("name", 5), ("kv_source_layer_ids", "12")],
)
def test_model_field_of_a_wrong_kind(field: str, value: Any) -> None:
    refused(lambda: replace(MODEL, **{field: value}), field)


def test_kv_source_layers() -> None:
    assert replace(MODEL, kv_source_layer_ids=[1, 2]).kv_source_layer_ids == (1, 2)  # type: ignore[arg-type]
    refused(lambda: replace(MODEL, kv_source_layer_ids=(0, 3)), "kv_source_layer_ids[1]", "3", "0 to 2")


# SpeculativeConfig and SchedulerConfig

NOT_POSITIVE = [0, -1, True, 1.0, "1", None, float("nan"), 2**31]


@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_limits_are_positive_integers(value: Any) -> None:
    refused(lambda: SpeculativeConfig(value), "num_speculative_tokens")
    for field in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        refused(lambda field=field: replace(SCHEDULER, **{field: value}), field)


@pytest.mark.parametrize("field", ["parallel_drafting", "dspark"])
def test_switches_are_bools(field: str) -> None:
    refused(lambda: SpeculativeConfig(3, **{field: 1}), field)


# BackendConfig: what is derived


def test_without_speculation() -> None:
    config = backend()
    assert (config.k, config.dspark, config.decode_threshold) == (0, False, 1)
    assert (config.causal_decode_width, config.non_causal_width, config.max_decode_width) == (128, 0, 128)
    assert (config.prefill_width, config.max_image_tokens) == (128, 0)


@pytest.mark.parametrize(("k", "parallel", "threshold"), [(1, False, 2), (5, False, 6), (5, True, 11), (65, True, 131)])
def test_decode_threshold(k: int, parallel: bool, threshold: int) -> None:
    config = backend(speculative=SpeculativeConfig(k, parallel_drafting=parallel))
    assert (config.k, config.decode_threshold) == (k, threshold)
    assert config.non_causal_width == 0


@pytest.mark.parametrize(
    ("window", "k", "width"), [(128, 5, 192), (128, 7, 192), (128, 64, 192), (128, 65, 256), (64, 3, 128), (16, 3, 64)]
)
def test_non_causal_width_of_dspark(window: int, k: int, width: int) -> None:
    model = replace(MODEL, window_size=window)
    config = backend(model, speculative=SpeculativeConfig(k, dspark=True))
    assert config.dspark
    assert config.causal_decode_width == window
    assert config.non_causal_width == config.max_decode_width == width


def test_dspark_takes_any_k_with_and_without_a_block_size_of_the_model() -> None:
    for block in (None, 5):
        model = replace(MODEL, dspark_block_size=block)
        for k in (1, 5, 7):
            assert backend(model, speculative=SpeculativeConfig(k, dspark=True)).k == k


def test_prefill_rows_have_room_for_an_image() -> None:
    config = backend(replace(MODEL, image_mode=ImageMode.BIDIRECTIONAL, max_image_tokens=384))
    assert (config.max_image_tokens, config.prefill_width, config.max_decode_width) == (384, 512, 128)


@pytest.mark.parametrize(("version", "layout"), [("v4", "fp8_ds_mla"), ("v4.1", "fp8_ds_mla_v41")])
def test_compressed_layout_is_the_versions_unless_given(version: str, layout: str) -> None:
    model = replace(MODEL, version=ModelVersion(version))
    config = backend(model)
    assert (config.cache_layout, config.compressed_layout) == ("fp8_ds_mla", layout)
    assert backend(model, compressed_layout="fp4_ds_mla_v41").compressed_layout == "fp4_ds_mla_v41"


def test_from_hf_config_passes_everything_on() -> None:
    settings: dict[str, Any] = {
        "speculative": SpeculativeConfig(5, dspark=True),
        "tensor_parallel_size": 8,
        "page_tokens": 256,
        "cache_layout": "bf16",
        "compressed_layout": "fp4_ds_mla_v41",
        "prefill_chunk_size": 2,
        "batch_invariant": True,
        "validate": True,
    }
    source = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 1,
        "num_attention_heads": 128,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_topk": 1024,
        "max_position_embeddings": 8192,
    }
    limits = {"max_model_len": 8192, "max_num_seqs": 7, "max_num_batched_tokens": 99}
    config = BackendConfig.from_hf_config(source, **limits, **settings)
    assert config.model == ModelConfig.from_hf_config(source)
    assert config.scheduler == SchedulerConfig(**limits)
    assert {name: getattr(config, name) for name in settings} == settings
    assert config.num_heads == 16
    assert BackendConfig.from_hf_config(source, **limits) == BackendConfig(config.model, config.scheduler)


# BackendConfig: what is refused


@pytest.mark.parametrize("page", [32, 64, 96, 256, 1024])
def test_pages_of_a_multiple_of_32_tokens(page: int) -> None:
    assert backend(page_tokens=page).page_tokens == page


@pytest.mark.parametrize("page", [16, 48, 100, 0, -32, 64.0, True, "64", None])
def test_other_page_sizes_are_refused_with_legal_values(page: Any) -> None:
    refused(lambda: backend(page_tokens=page), "page_tokens", repr(page))


def test_refused_page_size_says_what_is_legal_and_why() -> None:
    refused(lambda: backend(page_tokens=100), "page_tokens", "32, 64, 96", "kernels read", "multiples of 32")


@pytest.mark.parametrize(("heads", "ranks", "per_rank"), [(64, 1, 64), (128, 1, 128), (129, 3, 43), (1024, 8, 128)])
def test_heads_of_a_rank(heads: int, ranks: int, per_rank: int) -> None:
    assert backend(replace(MODEL, num_heads=heads), tensor_parallel_size=ranks).num_heads == per_rank


def test_heads_that_no_kernel_takes() -> None:
    for heads, ranks in ((129, 1), (1024, 4)):
        model = replace(MODEL, num_heads=heads)
        refused(lambda model=model, ranks=ranks: backend(model, tensor_parallel_size=ranks), "num_heads", "128")


@pytest.mark.parametrize("ranks", [3, 128, *NOT_POSITIVE])
def test_ranks_must_share_the_heads_evenly(ranks: Any) -> None:
    refused(lambda: backend(tensor_parallel_size=ranks), "tensor_parallel_size")


@pytest.mark.parametrize("name", ["", "fp8", "FP8_DS_MLA", None, 584, ["bf16"]])
def test_unknown_layout_lists_the_known_ones(name: Any) -> None:
    refused(lambda: backend(cache_layout=name), "cache_layout", "fp8_ds_mla, fp8_ds_mla_v41")
    if name is not None:
        refused(lambda: backend(compressed_layout=name), "compressed_layout", "fp4_ds_mla_v41")


def test_read_only_layout_cannot_hold_the_window() -> None:
    with pytest.raises(ConfigError) as caught:
        backend(cache_layout="fp4_ds_mla_v41")
    assert caught.value.field == "cache_layout"
    assert "fp4_ds_mla_v41" not in str(caught.value.legal)


def test_head_dim_that_no_layout_holds() -> None:
    for layout in ("fp8_ds_mla", "bf16"):
        model = replace(MODEL, head_dim=576)
        refused(lambda model=model, layout=layout: backend(model, cache_layout=layout), "head_dim", "576", "512 values")


def test_rope_dim_that_packed_layouts_do_not_split() -> None:
    model = replace(MODEL, rope_dim=32)
    refused(lambda: backend(model), "rope_dim", "qk_rope_head_dim", "448", "64", "fp8_ds_mla")
    refused(lambda: backend(model, cache_layout="bf16"), "rope_dim", "fp8_ds_mla")
    assert backend(model, cache_layout="bf16", compressed_layout="bf16").model.rope_dim == 32


def test_context_longer_than_the_model_was_made_for() -> None:
    scheduler = replace(SCHEDULER, max_model_len=4097)
    refused(lambda: backend(scheduler=scheduler), "max_model_len", "4097", "4096")


def test_more_index_entries_than_int32_offsets_reach() -> None:
    entries = 2**31 - 1
    legal = replace(SCHEDULER, max_num_batched_tokens=entries // 192)
    speculative = SpeculativeConfig(5, dspark=True)
    backend(scheduler=legal, speculative=speculative)
    beyond = replace(SCHEDULER, max_num_batched_tokens=entries // 192 + 1)
    refused(lambda: backend(scheduler=beyond, speculative=speculative), "max_num_batched_tokens", "192", "int32")
    backend(scheduler=beyond)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", None),
        ("model", {"head_dim": 512}),
        ("scheduler", (1, 2, 3)),
        ("speculative", 3),
        ("prefill_chunk_size", 0),
        ("prefill_chunk_size", 4.0),
        ("batch_invariant", 1),
        ("validate", "yes"),
        ("validate", None),
    ],
)
def test_backend_field_of_a_wrong_kind(field: str, value: Any) -> None:
    refused(lambda: backend(**{field: value}), field)


# Validation mode from the environment


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), ("", False)])
def test_environment_turns_validation_on(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv("SWA_BACKEND_VALIDATE", text)
    assert backend().validate is on
    assert backend(validate=True).validate


@pytest.mark.parametrize("text", ["true", "2", " 1", "yes"])
def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SWA_BACKEND_VALIDATE", text)
    refused(backend, "SWA_BACKEND_VALIDATE", text, "1 (on)")
