"""The kinds of DeepSeek-V4 attention layers, and which kind a layer is.

Every layer attends to a sliding window. All kinds but ``swaonly`` also attend to a second, compressed cache in which
one entry stands for ``ratio`` consecutive tokens.

============  =====  ==============================================================
kind          ratio  compressed entries that a token sees
============  =====  ==============================================================
``swaonly``   0      none
``c1a``       1      those that an indexer picked for this token in this layer
``c2a``       2      the same
``c4a``       4      the same
``c128a``     128    all complete ones
============  =====  ==============================================================
"""

from __future__ import annotations

from enum import StrEnum

from swa_backend._checks import is_int, require_enum, show
from swa_backend.errors import ConfigError


class ModelVersion(StrEnum):
    """Generation of the model; it decides what a compression ratio of 1 means."""

    V4 = "v4"
    V4_1 = "v4.1"


class LayerType(StrEnum):
    """Kind of an attention layer."""

    SWAONLY = "swaonly"
    C1A = "c1a"
    C2A = "c2a"
    C4A = "c4a"
    C128A = "c128a"

    @property
    def ratio(self) -> int:
        """Tokens that one compressed entry stands for; 0 without a compressed cache."""
        return _RATIO[self]

    @property
    def compressed(self) -> bool:
        """True if the layer has a second, compressed cache."""
        return self is not LayerType.SWAONLY

    @property
    def indexed(self) -> bool:
        """True if an indexer picks the compressed entries of each token; False if every complete entry is seen."""
        return self in _INDEXED


_RATIO = {LayerType.SWAONLY: 0, LayerType.C1A: 1, LayerType.C2A: 2, LayerType.C4A: 4, LayerType.C128A: 128}
_INDEXED = frozenset({LayerType.C1A, LayerType.C2A, LayerType.C4A})

_BY_RATIO = {
    ModelVersion.V4_1: {ratio: layer_type for layer_type, ratio in _RATIO.items()},
    # V4 writes a layer without compression as 0 or as 1.
    ModelVersion.V4: {ratio: LayerType.SWAONLY if ratio <= 1 else kind for kind, ratio in _RATIO.items()},
}


def classify_layer(ratio: int, version: ModelVersion, layer: int) -> LayerType:
    """Kind of a layer.

    Args:
        ratio: the layer's compression ratio, as in a model config's ``compress_ratios``.
        version: model version.
        layer: number of the layer, for the error.

    Raises:
        ConfigError: the version has no layers of this ratio.
    """
    kinds = _BY_RATIO[require_enum("version", version, ModelVersion)]
    if not is_int(ratio) or ratio not in kinds:
        raise ConfigError(
            f"compress_ratios[{layer}]",
            found=f"ratio {show(ratio)} for layer {layer}",
            legal=f"{', '.join(map(str, kinds))} (model version {version})",
            fix="Correct the model config, or its model_type if it belongs to another version.",
        )
    return kinds[ratio]
