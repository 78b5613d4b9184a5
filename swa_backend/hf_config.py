"""Reading the attention of a model from a Hugging Face config, in the dialects that are in use.

* Text keys stand at top level or under ``text_config``.
* Compression ratios stand in ``compress_ratios``, or are spread over ``layer_types`` and ``compress_rates``. The
  first may list draft layers after the trunk, fewer or more than ``num_nextn_predict_layers``; the second never does.
* V4 puts its vision keys at top level, V4.1 under ``vision_config``.

A key whose value is null counts as missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from swa_backend._checks import require_int, show
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType, ModelVersion, classify_layer
from swa_backend.model_config import MAX_LAYERS, ImageMode, ModelConfig

PACKAGED = {
    "V4-Flash": "deepseek-v4-flash.json",
    "V4-Pro": "deepseek-v4-pro.json",
    "V4-Flash-Vision-Exp": "deepseek-v4-flash-vision-exp.json",
    "V4.1-Flash": "deepseek-v4.1-flash.json",
}
"""Models that come with the library, and their files."""

_VERSION_BY_MODEL_TYPE = {"deepseek_v4": ModelVersion.V4, "deepseek_v41": ModelVersion.V4_1}
_VERSION_BY_ARCHITECTURE = {"DeepseekV4ForCausalLM": ModelVersion.V4, "DeepseekV41ForCausalLM": ModelVersion.V4_1}

_KEY_OF_FIELD = {
    "num_hidden_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "rope_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "index_topk": "index_topk",
    "max_position_embeddings": "max_position_embeddings",
}
"""Required keys, by the field of `ModelConfig` that they fill."""

# Layer types of the Transformers dialect that cannot be window layers.
_COMPRESSED_NAMES = ("compressed_sparse_attention", "heavily_compressed_attention")


def read_model_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
    """The attention of the model that ``source`` describes.

    Args:
        source: a JSON file, a directory that holds ``config.json``, or the parsed config.

    Raises:
        ConfigError: not readable, or a key is missing, contradictory or out of range; names the key and the file.
    """
    if isinstance(source, Mapping):
        return _read(source, "the given dict", None)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            "model config",
            found=type(source).__name__,
            legal="a JSON file, a directory that holds config.json, or a dict",
            fix="Pass the path, or the config as a dict (config.to_dict() of a Transformers config object).",
        )
    return _read(*_load(Path(os.fsdecode(source))))


def read_packaged_config(name: str) -> ModelConfig:
    """The packaged model of this name, in any case.

    Raises:
        ConfigError: no such model is packaged.
    """
    by_folded_name = {known.casefold(): known for known in PACKAGED}
    known = by_folded_name.get(name.casefold()) if isinstance(name, str) else None
    if known is None:
        raise ConfigError(
            "model",
            found=show(name),
            legal=", ".join(PACKAGED),
            fix="Pass one of these names, or read a config file with ModelConfig.from_hf_config(path).",
        )
    file = resources.files("swa_backend").joinpath("replay", "data", "models", PACKAGED[known])
    return _read(json.loads(file.read_text(encoding="utf-8")), f"the packaged {PACKAGED[known]}", known)


def _load(path: Path) -> tuple[Mapping[str, Any], str, str]:
    """The parsed file, where it was found, and the name of its model: its directory's or its own."""
    try:
        if path.is_dir():
            path = path / "config.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "model config",
            found=f"{_whole(path)}: {error.strerror or error}",
            legal="a readable JSON file, or a directory that holds config.json",
            fix="Correct the path.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "model config",
            found=f"{_whole(path)}: {error}",
            legal="a JSON object in UTF-8",
            fix="Correct or download the file again.",
        ) from error
    if not isinstance(raw, Mapping):
        raise ConfigError(
            "model config",
            found=f"{_whole(path)}: a JSON {type(raw).__name__}",
            legal="a JSON object",
            fix="Pass the model's config.json.",
        )
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    return raw, str(path), name


def _whole(path: Path) -> str:
    """A path in an error message is never cut: it is what the reader has to look at."""
    return repr(str(path))


def _read(raw: Mapping[str, Any], origin: str, name: str | None) -> ModelConfig:
    try:
        return _build(_Keys(raw), name)
    except ConfigError as error:
        # The checks name the field that they guard; the reader of the message looks for a key in a file.
        key = "vision_max_n_token" if error.field == "max_image_tokens" else _KEY_OF_FIELD.get(error.field, error.field)
        raise ConfigError(key, found=f"{error.found} in {origin}", legal=error.legal, fix=error.fix) from None


class _Keys:
    """Keys at top level and under ``text_config``, read as one set."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._top = raw
        self._text = _mapping("text_config", raw.get("text_config"))

    def both(self, key: str) -> list[Any]:
        """The values at top level and under ``text_config``, missing ones left out."""
        return [value for value in (self._top.get(key), self._text.get(key)) if value is not None]

    def get(self, key: str) -> Any:
        """The value, None if missing."""
        values = self.both(key)
        if len(values) == 2 and values[0] != values[1]:
            raise ConfigError(
                key,
                found=f"{show(values[0])} at top level and {show(values[1])} under text_config",
                legal="one value, or the same in both places",
                fix="Remove the wrong one.",
            )
        return values[0] if values else None

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(
                key,
                found="nothing",
                legal="an integer, at top level or under text_config",
                fix=f"Add {key} to the model config.",
            )
        return value


def _build(keys: _Keys, name: str | None) -> ModelConfig:
    version = _read_version(keys)
    fields = {field: keys.require(key) for field, key in _KEY_OF_FIELD.items()}
    layers = require_int("num_hidden_layers", fields["num_hidden_layers"], maximum=MAX_LAYERS)
    image_mode, max_image_tokens = _read_images(keys, version)
    if not name:
        own_name = keys.get("_name_or_path")
        name = own_name if isinstance(own_name, str) and own_name else f"DeepSeek {version.upper()}"
    sources = keys.get("kv_source_layer_ids")
    return ModelConfig(
        name=name,
        version=version,
        compress_ratios=_read_ratios(keys, version, layers),
        image_mode=image_mode,
        max_image_tokens=max_image_tokens,
        dspark_block_size=keys.get("dspark_block_size"),
        kv_source_layer_ids=() if sources is None else sources,
        **fields,
    )


def _read_version(keys: _Keys) -> ModelVersion:
    model_types = keys.both("model_type")
    architectures = [name for names in keys.both("architectures") if isinstance(names, (list, tuple)) for name in names]
    # A multimodal wrapper's own type may stand beside its text model's, so one known name is enough; two may not clash.
    versions = _known(_VERSION_BY_MODEL_TYPE, model_types)
    if versions or not model_types:
        versions |= _known(_VERSION_BY_ARCHITECTURE, architectures)
    if len(versions) == 1:
        return versions.pop()
    raise ConfigError(
        "model_type",
        found=", ".join(map(show, model_types + architectures)) or "nothing",
        legal=f"{' or '.join(_VERSION_BY_MODEL_TYPE)}; without a model_type, architectures with one of "
        f"{', '.join(_VERSION_BY_ARCHITECTURE)}",
        fix="Correct the name that is wrong." if versions else "Pass the config of a DeepSeek-V4 or V4.1 model.",
    )


def _known(versions: Mapping[str, ModelVersion], names: list[Any]) -> set[ModelVersion]:
    return {versions[name] for name in names if isinstance(name, str) and name in versions}


def _read_images(keys: _Keys, version: ModelVersion) -> tuple[ImageMode, Any]:
    nested = bool(_mapping("vision_config", keys.get("vision_config")))
    if version is ModelVersion.V4_1:
        # Its vision_config has a max_image_tokens too, which limits the image encoder, not what attention sees.
        return (ImageMode.CAUSAL if nested else ImageMode.NONE), 0
    vision_layers = keys.get("vision_n_layers")
    if vision_layers is None and nested:
        raise ConfigError(
            "vision_config",
            found="a vision_config without vision_n_layers",
            legal="vision_n_layers and vision_max_n_token beside the text keys, in a V4 model",
            fix="Add these two keys (vision_n_layers 0 for text only), or remove vision_config.",
        )
    if vision_layers is None or require_int("vision_n_layers", vision_layers, minimum=0) == 0:
        return ImageMode.NONE, 0
    return ImageMode.BIDIRECTIONAL, keys.require("vision_max_n_token")


def _read_ratios(keys: _Keys, version: ModelVersion, layers: int) -> Any:
    drafts = keys.get("num_nextn_predict_layers")
    drafts = 0 if drafts is None else require_int("num_nextn_predict_layers", drafts, minimum=0, maximum=MAX_LAYERS)
    listed = keys.get("compress_ratios")
    spread = _read_rates(keys, version, layers, required=listed is None)
    if listed is None:
        return ([0] * layers if spread is None else spread) + [0] * drafts
    if spread is not None and isinstance(listed, (list, tuple)):
        for layer, (ratio, rate) in enumerate(zip(listed, spread, strict=False)):
            if classify_layer(ratio, version, layer) is not classify_layer(rate, version, layer):
                raise ConfigError(
                    "compress_ratios",
                    found=f"ratio {ratio} for layer {layer}, but {rate} by layer_types and compress_rates",
                    legal="the same kind of layer by both, or only one of them",
                    fix="Remove the wrong one.",
                )
    return listed


def _read_rates(keys: _Keys, version: ModelVersion, layers: int, required: bool) -> list[int] | None:
    """Ratios of the trunk by ``layer_types`` and ``compress_rates``; None where the config does not use both."""
    types, rates = keys.get("layer_types"), keys.get("compress_rates")
    if types is None or rates is None:
        if required and (rates is not None or _names_compressed_layers(types)):
            missing = "layer_types" if types is None else "compress_rates"
            raise ConfigError(
                missing,
                found="nothing",
                legal="layer_types and compress_rates together, or compress_ratios",
                fix=f"Add {missing} to the model config.",
            )
        return None
    rates = _mapping("compress_rates", rates)
    if not isinstance(types, (list, tuple)) or not all(isinstance(kind, str) for kind in types):
        raise ConfigError("layer_types", found=show(types), legal="a list of names", fix="Name the type of each layer.")
    if len(types) != layers:
        raise ConfigError(
            "layer_types",
            found=f"{len(types)} entries for {layers} layers",
            legal="an entry for each of num_hidden_layers; draft layers are not listed",
            fix="Correct num_hidden_layers or the list.",
        )
    return [_rate(rates.get(kind), kind, version, layer) for layer, kind in enumerate(types)]


def _rate(rate: Any, kind: str, version: ModelVersion, layer: int) -> int:
    if rate is None:
        return LayerType.SWAONLY.ratio
    try:
        classify_layer(rate, version, layer)
    except ConfigError as error:
        raise ConfigError(f"compress_rates[{kind!r}]", found=error.found, legal=error.legal, fix=error.fix) from None
    return int(rate)


def _names_compressed_layers(types: Any) -> bool:
    return isinstance(types, (list, tuple)) and any(kind in types for kind in _COMPRESSED_NAMES)


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    raise ConfigError(key, found=show(value), legal="an object of keys", fix=f"Correct or remove {key}.")
