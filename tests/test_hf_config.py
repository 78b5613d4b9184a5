"""Reading model configs: the released ones, both dialects, and everything that can be wrong with a file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swa_backend.config import BackendConfig, ImageMode, ModelConfig, packaged_models
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType, ModelVersion

CONFIGS = Path(__file__).parent / "golden" / "configs"
FILES = sorted(path.name for path in CONFIGS.glob("*.json"))
REQUIRED = [
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "sliding_window",
    "index_topk",
    "max_position_embeddings",
]
SWAONLY, C1A, C2A, C4A, C128A = LayerType


def raw(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((CONFIGS / f"deepseek-{name}.json").read_text())
    return parsed


def minimal(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_topk": 512,
        "max_position_embeddings": 4096,
        "compress_ratios": [0, 4, 128],
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


def refused(source: Any, *fragments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf_config(source)
    for fragment in fragments:
        assert fragment in str(caught.value)
    return caught.value


# The released files


@pytest.mark.parametrize("file", FILES)
def test_released_file(file: str) -> None:
    source = json.loads((CONFIGS / file).read_text())
    model = ModelConfig.from_hf_config(CONFIGS / file)
    assert model.name == file.removesuffix(".json")
    assert model.num_hidden_layers == source["num_hidden_layers"]
    assert model.num_heads == source["num_attention_heads"]
    assert (model.head_dim, model.rope_dim, model.window_size) == (512, 64, 128)
    assert model.index_topk == source["index_topk"]
    assert model.max_position_embeddings == 1_048_576
    assert model.dspark_block_size == source.get("dspark_block_size")
    assert len(model.trunk_layer_types) == model.num_hidden_layers
    assert set(model.layer_types[model.num_hidden_layers :]) <= {SWAONLY}
    if "compress_ratios" in source:
        assert model.compress_ratios == tuple(source["compress_ratios"])


def test_there_are_nine_files() -> None:
    assert len(FILES) == 9


@pytest.mark.parametrize(("name", "listed", "expected_by_keys"), [("v4-flash-0731", 46, 44), ("v4-pro-0813", 64, 62)])
def test_more_draft_layers_than_num_nextn_predict_layers(name: str, listed: int, expected_by_keys: int) -> None:
    source = raw(name)
    assert source["num_hidden_layers"] + source["num_nextn_predict_layers"] == expected_by_keys
    assert len(ModelConfig.from_hf_config(source).layer_types) == listed


def test_fewer_draft_layers_than_num_nextn_predict_layers() -> None:
    assert ModelConfig.from_hf_config(minimal(num_nextn_predict_layers=3)).compress_ratios == (0, 4, 128)


@pytest.mark.parametrize("name", ["v4-flash-dspark", "v4-pro-dspark"])
def test_draft_layers_without_num_nextn_predict_layers(name: str) -> None:
    source = raw(name)
    assert "num_nextn_predict_layers" not in source
    model = ModelConfig.from_hf_config(source)
    assert len(model.layer_types) == model.num_hidden_layers + 3


@pytest.mark.parametrize("name", ["v4-pro", "v4-pro-0813", "v4-pro-dspark"])
def test_pro_has_swaonly_in_its_draft_layers_alone(name: str) -> None:
    model = ModelConfig.from_hf_config(raw(name))
    assert set(model.trunk_layer_types) == {C4A, C128A}
    assert model.present_layer_types == (SWAONLY, C4A, C128A)
    assert model.ratios == (4, 128)


def test_ratio_1_is_c1a_in_v41() -> None:
    model = ModelConfig.from_hf_config(raw("v4.1-flash"))
    assert model.version is ModelVersion.V4_1
    assert model.layer_types[20] is C1A
    assert model.present_layer_types == (SWAONLY, C1A, C2A)
    assert model.ratios == (1, 2)
    assert model.kv_source_layer_ids == (2, 8, 14, 20)


def test_ratio_1_is_swaonly_in_v4() -> None:
    model = ModelConfig.from_hf_config(minimal(compress_ratios=[1, 4, 128]))
    assert model.layer_types == (SWAONLY, C4A, C128A)
    assert model.compress_ratios == (1, 4, 128)
    assert model.ratios == (4, 128)


def test_v4_vision_is_bidirectional() -> None:
    model = ModelConfig.from_hf_config(raw("v4-flash-vision-exp"))
    assert (model.image_mode, model.max_image_tokens) == (ImageMode.BIDIRECTIONAL, 384)


def test_v41_vision_stays_causal_whatever_its_max_image_tokens() -> None:
    source = raw("v4.1-flash")
    assert source["vision_config"]["max_image_tokens"] == 1024
    model = ModelConfig.from_hf_config(source)
    assert (model.image_mode, model.max_image_tokens) == (ImageMode.CAUSAL, 0)


def test_v41_vision_config_keys_are_not_the_text_models() -> None:
    model = ModelConfig.from_hf_config(raw("v4.1-flash"))
    assert (model.num_hidden_layers, model.num_heads) == (40, 64)


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro", "v4-transformers-dialect"])
def test_text_models_have_no_images(name: str) -> None:
    model = ModelConfig.from_hf_config(raw(name))
    assert (model.image_mode, model.max_image_tokens) == (ImageMode.NONE, 0)


# Required keys and their values


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("null", [False, True])
def test_missing_key_is_named_with_the_file(key: str, null: bool, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(minimal(**{key: None if null else ...})))
    assert refused(file, str(file)).field == key


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [0, -1, True, 64.0, "64", [64], float("nan"), float("inf"), 2**31])
def test_value_that_is_no_positive_int32_is_named_with_the_file(key: str, value: object, tmp_path: Path) -> None:
    assert refused(minimal(**{key: value}), "the given dict").field == key
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(minimal(**{key: value})))
    assert refused(file, str(file)).field == key


def test_integer_too_long_to_be_printed_or_parsed(tmp_path: Path) -> None:
    assert refused(minimal(sliding_window=10**5000)).field == "sliding_window"
    assert refused(minimal(compress_ratios=[0, 4, 10**5000])).field == "compress_ratios[2]"
    file = tmp_path / "broken.json"
    file.write_text('{"sliding_window": ' + "9" * 5000 + "}")
    refused(file, str(file))


def test_number_of_layers_is_bounded_before_anything_is_allocated() -> None:
    assert refused(minimal(num_hidden_layers=2**30, compress_ratios=...)).field == "num_hidden_layers"
    assert refused(minimal(num_nextn_predict_layers=2**30)).field == "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dspark_block_size", 0),
        ("dspark_block_size", "5"),
        ("num_nextn_predict_layers", -1),
        ("num_nextn_predict_layers", 1.0),
        ("kv_source_layer_ids", [3]),
        ("kv_source_layer_ids", [-1]),
        ("kv_source_layer_ids", [True]),
        ("kv_source_layer_ids", [1, 1]),
        ("kv_source_layer_ids", 1),
        ("vision_n_layers", -1),
        ("vision_n_layers", True),
        ("vision_config", [1]),
        ("text_config", "text"),
        ("compress_ratios", "044"),
        ("compress_ratios", {"0": 4}),
        ("compress_ratios", [0, 4]),
        ("compress_ratios", []),
    ],
)
def test_optional_key_with_a_wrong_value(key: str, value: object) -> None:
    assert refused(minimal(**{key: value})).field.startswith(key)


def test_rope_wider_than_the_head() -> None:
    assert refused(minimal(qk_rope_head_dim=513)).field == "qk_rope_head_dim"


@pytest.mark.parametrize("ratio", [3, 64, -4, True, None, 4.0, "4"])
def test_unsupported_ratio_names_ratio_layer_and_legal_set(ratio: object) -> None:
    error = refused(minimal(compress_ratios=[0, 4, ratio]), repr(ratio), "layer 2", "0, 1, 2, 4, 128")
    assert error.field == "compress_ratios[2]"


# Nested text keys


def test_text_config_is_read_like_the_top_level() -> None:
    source = raw("v4.1-flash")
    vision = source.pop("vision_config")
    nested = {"text_config": source, "vision_config": vision, "model_type": "deepseek_v41"}
    assert ModelConfig.from_hf_config(nested) == ModelConfig.from_hf_config(source | {"vision_config": vision})


def test_text_config_may_repeat_a_key_but_not_contradict_it() -> None:
    same = minimal(text_config={"sliding_window": 128, "compress_ratios": [0, 4, 128]})
    assert ModelConfig.from_hf_config(same).window_size == 128
    error = refused(minimal(text_config={"sliding_window": 64}), "128 at top level", "64 under text_config")
    assert error.field == "sliding_window"


# Model version


def test_architectures_stand_in_for_a_missing_model_type() -> None:
    source = minimal(model_type=..., architectures=["DeepseekV41ForCausalLM"])
    assert ModelConfig.from_hf_config(source).version is ModelVersion.V4_1


@pytest.mark.parametrize("model_type", ["deepseek_v3", "DeepSeek_V4", "", 4, ["deepseek_v4"], ...])
def test_unknown_model_type_names_the_legal_ones(model_type: object) -> None:
    assert refused(minimal(model_type=model_type), "deepseek_v4 or deepseek_v41").field == "model_type"


def test_known_architecture_does_not_excuse_an_unknown_model_type() -> None:
    refused(minimal(model_type="deepseek_v3", architectures=["DeepseekV4ForCausalLM"]), "deepseek_v3")


def test_clashing_versions_are_refused() -> None:
    refused(minimal(architectures=["DeepseekV41ForCausalLM"]), "deepseek_v4", "DeepseekV41ForCausalLM")
    refused(minimal(text_config={"model_type": "deepseek_v41"}), "deepseek_v41")


def test_foreign_architecture_beside_a_known_model_type_is_ignored() -> None:
    assert ModelConfig.from_hf_config(minimal(architectures=["DraftModel"])).version is ModelVersion.V4


# The Transformers dialect


def spread(types: list[Any], rates: Any, **changes: Any) -> dict[str, Any]:
    return minimal(compress_ratios=..., num_hidden_layers=len(types), layer_types=types, compress_rates=rates) | changes


def test_transformers_dialect_appends_draft_layers() -> None:
    model = ModelConfig.from_hf_config(raw("v4-transformers-dialect"))
    assert model.compress_ratios[:5] == (128, 128, 128, 4, 128)
    assert len(model.compress_ratios) == 44
    assert model.compress_ratios[-1] == 0
    assert set(model.trunk_layer_types) == {C4A, C128A}


def test_type_without_a_rate_is_a_window_layer() -> None:
    source = spread(["sliding_attention", "a", "b", "b"], {"a": 4, "b": None}, num_nextn_predict_layers=2)
    assert ModelConfig.from_hf_config(source).compress_ratios == (0, 4, 0, 0, 0, 0)


def test_rate_of_an_unused_type_does_not_matter() -> None:
    source = spread(["a", "window"], {"a": 4, "unused": 128, "odd": 7, "odder": "many"})
    assert ModelConfig.from_hf_config(source).compress_ratios == (4, 0)


def test_unsupported_rate_in_use_names_type_ratio_layer_and_legal_set() -> None:
    error = refused(spread(["window", "odd"], {"odd": 7}), "ratio 7", "layer 1", "0, 1, 2, 4, 128")
    assert error.field == "compress_rates['odd']"


@pytest.mark.parametrize("rate", [True, 4.0, "4", -4, [4]])
def test_rate_that_is_no_integer(rate: object) -> None:
    refused(spread(["a"], {"a": rate}), repr(rate))


@pytest.mark.parametrize("types", [["a", 4, "a"], "aaa", [["a"], "a", "a"], ["a", "a"], ["a"] * 4])
def test_layer_types_must_name_each_layer_of_the_trunk(types: Any) -> None:
    assert refused(spread(types, {"a": 4}, num_hidden_layers=3)).field == "layer_types"


def test_half_of_the_dialect_is_refused_where_layers_would_be_lost() -> None:
    assert refused(spread(["a"], ...) | {"compress_rates": {"a": 4}, "layer_types": None}).field == "layer_types"
    compressed = spread(["compressed_sparse_attention"], None)
    assert refused(compressed).field == "compress_rates"


def test_layer_types_of_windows_alone_need_no_rates() -> None:
    assert ModelConfig.from_hf_config(spread(["sliding_attention"], None)).layer_types == (SWAONLY,)


def test_both_dialects_must_agree_on_the_trunk() -> None:
    both = spread(["w", "a", "b"], {"a": 4, "b": 128}, num_nextn_predict_layers=1)
    model = ModelConfig.from_hf_config(both | {"compress_ratios": [1, 4, 128, 0, 0]})
    assert model.compress_ratios == (1, 4, 128, 0, 0)
    error = refused(both | {"compress_ratios": [0, 4, 4]}, "ratio 4 for layer 2", "128")
    assert error.field == "compress_ratios"


def test_ratio_0_and_1_agree_in_v4_but_not_in_v41() -> None:
    both = spread(["w"], {"w": 0}) | {"compress_ratios": [1]}
    assert ModelConfig.from_hf_config(both).layer_types == (SWAONLY,)
    refused(both | {"model_type": "deepseek_v41"}, "layer 0")


def test_neither_dialect_means_window_layers_alone() -> None:
    model = ModelConfig.from_hf_config(minimal(compress_ratios=..., num_nextn_predict_layers=2))
    assert model.layer_types == (SWAONLY,) * 5
    assert model.ratios == ()


# Images


def test_v4_vision_needs_its_largest_image() -> None:
    assert refused(minimal(vision_n_layers=32)).field == "vision_max_n_token"
    for value in (0, -1, True, 384.0):
        assert refused(minimal(vision_n_layers=32, vision_max_n_token=value)).field == "vision_max_n_token"


def test_v4_without_vision_layers_ignores_the_other_vision_keys() -> None:
    source = minimal(vision_n_layers=0, vision_max_n_token=384, vision_config={"num_hidden_layers": 1})
    assert ModelConfig.from_hf_config(source).image_mode is ImageMode.NONE


def test_v4_with_v41s_vision_keys_is_ambiguous() -> None:
    assert refused(minimal(vision_config={"num_hidden_layers": 32})).field == "vision_config"


def test_v41_without_vision_config_has_no_images() -> None:
    source = raw("v4.1-flash")
    del source["vision_config"]
    assert ModelConfig.from_hf_config(source).image_mode is ImageMode.NONE


# Files


def test_directory_with_config_json(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(minimal()))
    expected = ModelConfig.from_hf_config(folder / "config.json")
    assert expected.name == "My-Model"
    assert ModelConfig.from_hf_config(folder) == ModelConfig.from_hf_config(str(folder)) == expected


def test_name_of_a_dict() -> None:
    assert ModelConfig.from_hf_config(minimal()).name == "DeepSeek V4"
    assert ModelConfig.from_hf_config(minimal(_name_or_path="org/model")).name == "org/model"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 01}'])
def test_file_that_holds_no_json_object(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    refused(file, str(file))
    refused(tmp_path, str(file))


@pytest.mark.parametrize("source", ["nowhere.json", "", "x" * 5000, "a\0b", b"bytes", 5, None, ["config.json"]])
def test_source_that_is_no_file(source: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(source).field == "model config"


# Packaged models


def test_packaged_models() -> None:
    assert packaged_models() == ("V4-Flash", "V4-Pro", "V4-Flash-Vision-Exp", "V4.1-Flash")
    for name in packaged_models():
        model = ModelConfig.packaged(name)
        assert model.name == name
        assert ModelConfig.packaged(name.upper()) == ModelConfig.packaged(name.lower()) == model


@pytest.mark.parametrize("name", ["V4", "", None, 4, "../V4-Flash"])
def test_unknown_packaged_model_lists_the_names(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"V4-Flash, V4-Pro, V4-Flash-Vision-Exp, V4\.1-Flash"):
        ModelConfig.packaged(name)


# Whatever is done to a valid config, reading it raises ConfigError or nothing

SOURCES = [raw(name) for name in ("v4-flash-vision-exp", "v4.1-flash", "v4-transformers-dialect")]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([0, 1, 4, 128]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {key for source in SOURCES for key in source} | {"text_config", "compress_ratios", "layer_types", "compress_rates"}
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    source = copy.deepcopy(draw(st.sampled_from(SOURCES)))
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(KEYS))
        action = draw(st.sampled_from(["replace", "drop", "element", "nest"]))
        if action == "replace":
            source[key] = draw(JSON)
        elif action == "drop":
            source.pop(key, None)
        elif action == "nest":
            text = source.setdefault("text_config", {})
            if isinstance(text, dict):
                text[key] = source.pop(key, draw(JSON))
        elif isinstance(source.get(key), list) and source[key]:
            source[key][draw(st.integers(0, len(source[key]) - 1))] = draw(JSON)
    return source


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_reading_a_mutated_config_raises_nothing_but_config_error(source: dict[str, Any]) -> None:
    try:
        config = BackendConfig.from_hf_config(source, max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1)
    except ConfigError:
        return
    model = config.model
    assert len(model.layer_types) == len(model.compress_ratios) >= model.num_hidden_layers
    assert (model.max_image_tokens > 0) == (model.image_mode is ImageMode.BIDIRECTIONAL)
    assert hash(model) == hash(copy.deepcopy(model))
