"""From a model's name or file on the command line to its attention."""

from __future__ import annotations

from swa_backend.model_config import ModelConfig, packaged_models


def read_model(text: str) -> ModelConfig:
    """The packaged model of this name in any case, or the one whose config the file holds.

    Raises:
        ConfigError: neither.
    """
    names = {name.casefold() for name in packaged_models()}
    return ModelConfig.packaged(text) if text.casefold() in names else ModelConfig.from_hf_config(text)
