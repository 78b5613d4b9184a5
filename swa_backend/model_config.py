"""What the library must know about a model's attention."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from swa_backend._checks import INT32_MAX, require_enum, require_int, require_type, show
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType, ModelVersion, classify_layer

MAX_LAYERS = 4096
"""More layers than this are taken for a mistake, before a tuple of that length is made."""


class ImageMode(StrEnum):
    """How the tokens of an image see each other: a model without images, in both directions, or like text."""

    NONE = "none"
    BIDIRECTIONAL = "bidirectional"
    CAUSAL = "causal"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The attention of one model.

    Attributes:
        name: how reports call the model.
        version: model version.
        num_hidden_layers: layers of the trunk, draft layers not counted.
        num_heads: query heads of the whole model.
        head_dim: values of a query head, and of the one key and value head that all of them share.
        rope_dim: trailing values of a head that carry the position.
        window_size: W, tokens that a sliding window spans, the token itself included.
        index_topk: compressed entries that an indexer picks for a token at most.
        max_position_embeddings: tokens of the longest context that the model was made for.
        compress_ratios: compression ratio of each layer: the trunk's, then those of the draft layers that are listed.
        image_mode: how image tokens see each other.
        max_image_tokens: tokens of the longest image span; 0 unless images are bidirectional.
        dspark_block_size: tokens of the model's own non-causal draft block, None if it has none.
        kv_source_layer_ids: layers that make the compressed entries other layers share; empty if each makes its own.
        layer_types: kind of each layer of ``compress_ratios``; derived.

    Raises:
        ConfigError: a value is out of range, or contradicts another.
    """

    name: str
    version: ModelVersion
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    window_size: int
    index_topk: int
    max_position_embeddings: int
    compress_ratios: tuple[int, ...]
    image_mode: ImageMode = ImageMode.NONE
    max_image_tokens: int = 0
    dspark_block_size: int | None = None
    kv_source_layer_ids: tuple[int, ...] = ()
    layer_types: tuple[LayerType, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_type("name", self.name, str)
        object.__setattr__(self, "version", require_enum("version", self.version, ModelVersion))
        object.__setattr__(self, "image_mode", require_enum("image_mode", self.image_mode, ImageMode))
        require_int("num_hidden_layers", self.num_hidden_layers, maximum=MAX_LAYERS)
        for name in ("num_heads", "head_dim", "window_size", "index_topk", "max_position_embeddings"):
            require_int(name, getattr(self, name))
        require_int("rope_dim", self.rope_dim, maximum=self.head_dim)
        if self.dspark_block_size is not None:
            require_int("dspark_block_size", self.dspark_block_size)
        self._check_images()
        self._check_layers()

    def _check_images(self) -> None:
        bidirectional = self.image_mode is ImageMode.BIDIRECTIONAL
        require_int(
            "max_image_tokens",
            self.max_image_tokens,
            minimum=1 if bidirectional else 0,
            maximum=INT32_MAX if bidirectional else 0,
            fix="Give the longest image span for bidirectional images, and 0 for causal images or none.",
        )

    def _check_layers(self) -> None:
        ratios = _as_tuple("compress_ratios", self.compress_ratios)
        if len(ratios) < self.num_hidden_layers:
            raise ConfigError(
                "compress_ratios",
                found=f"{len(ratios)} entries for {self.num_hidden_layers} layers",
                legal="an entry for each of num_hidden_layers, and any number of draft layers after them",
                fix="Correct num_hidden_layers, or list the missing layers.",
            )
        kinds = tuple(classify_layer(ratio, self.version, layer) for layer, ratio in enumerate(ratios))
        sources = _as_tuple("kv_source_layer_ids", self.kv_source_layer_ids)
        for i, source in enumerate(sources):
            require_int(f"kv_source_layer_ids[{i}]", source, minimum=0, maximum=len(ratios) - 1)
        if len(set(sources)) != len(sources):
            raise ConfigError(
                "kv_source_layer_ids", found=show(sources), legal="each layer once", fix="Remove the repeated layer."
            )
        object.__setattr__(self, "compress_ratios", ratios)
        object.__setattr__(self, "kv_source_layer_ids", sources)
        object.__setattr__(self, "layer_types", kinds)

    @property
    def trunk_layer_types(self) -> tuple[LayerType, ...]:
        """Kind of each layer of the trunk, draft layers left out."""
        return self.layer_types[: self.num_hidden_layers]

    @property
    def present_layer_types(self) -> tuple[LayerType, ...]:
        """Kinds that any layer of the model has, draft layers included, each once, in the order of `LayerType`."""
        return tuple(kind for kind in LayerType if kind in self.layer_types)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios of the compressed caches that the model has, ascending, each once."""
        return tuple(sorted(kind.ratio for kind in self.present_layer_types if kind.compressed))

    @classmethod
    def from_hf_config(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face model config.

        Args:
            source: a JSON file, a directory that holds ``config.json``, or the parsed config.

        Raises:
            ConfigError: not readable, or a key is missing, contradictory or out of range; names the key and the file.
        """
        from swa_backend.hf_config import read_model_config

        return read_model_config(source)

    @classmethod
    def packaged(cls, name: str) -> ModelConfig:
        """A model whose config comes with the library, by its name in any case; see `packaged_models`.

        Raises:
            ConfigError: no such model is packaged.
        """
        from swa_backend.hf_config import read_packaged_config

        return read_packaged_config(name)


def packaged_models() -> tuple[str, ...]:
    """Names of the models whose configs come with the library."""
    from swa_backend.hf_config import PACKAGED

    return tuple(PACKAGED)


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(value)
    raise ConfigError(name, found=show(value), legal="a list of integers", fix=f"Pass {name} as a tuple or list.")
