"""Classification of layers per model version."""

from __future__ import annotations

import pytest

from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType, ModelVersion, classify_layer


@pytest.mark.parametrize(
    ("version", "ratio", "expected"),
    [
        ("v4", 0, "swaonly"),
        ("v4", 1, "swaonly"),
        ("v4", 2, "c2a"),
        ("v4", 4, "c4a"),
        ("v4", 128, "c128a"),
        ("v4.1", 0, "swaonly"),
        ("v4.1", 1, "c1a"),
        ("v4.1", 2, "c2a"),
        ("v4.1", 4, "c4a"),
        ("v4.1", 128, "c128a"),
    ],
)
def test_classification_table(version: str, ratio: int, expected: str) -> None:
    kind = classify_layer(ratio, ModelVersion(version), 7)
    assert kind is LayerType(expected)
    assert kind.compressed == (expected != "swaonly")
    assert kind.ratio == (ratio if kind.compressed else 0)


@pytest.mark.parametrize("version", list(ModelVersion))
@pytest.mark.parametrize("ratio", [3, 8, 64, 127, 256, -1, 2**70, True, 4.0, "4", None, float("nan"), [4]])
def test_other_ratios_are_refused_with_ratio_layer_and_legal_set(version: ModelVersion, ratio: object) -> None:
    with pytest.raises(ConfigError) as caught:
        classify_layer(ratio, version, 17)  # type: ignore[arg-type]
    message = str(caught.value)
    assert repr(ratio) in message
    assert "layer 17" in message
    assert "0, 1, 2, 4, 128" in message
    assert version in message


def test_unknown_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'v5'.*'v4', 'v4\.1'"):
        classify_layer(4, "v5", 0)  # type: ignore[arg-type]


def test_what_an_indexer_picks() -> None:
    assert {kind for kind in LayerType if kind.indexed} == {LayerType.C1A, LayerType.C2A, LayerType.C4A}
    assert [kind.ratio for kind in LayerType] == [0, 1, 2, 4, 128]
