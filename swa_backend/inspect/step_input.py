"""One step as it goes into a builder, whether it came from a file or from a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from swa_backend.batch import CommonAttentionMetadata
from swa_backend.config import BackendConfig
from swa_backend.layer_types import LayerType

COMPRESSED_PAGE_TOKENS = 256
"""Tokens that a page of a compressed cache stands for unless something else is said."""


@dataclass(frozen=True, slots=True)
class CompressedInput:
    """The compressed cache group of one layer type.

    Attributes:
        page_tokens: tokens that a page stands for.
        num_pages: pages of the cache, None if not known.
        table: [R, C] int32 page numbers, host.
        slots: [T] int64 slot of each token counted in tokens, host; negative for padding.
        picks: [T, K] int32 entries that the indexer picked for each token, or -1; None if not known.
    """

    page_tokens: int
    num_pages: int | None
    table: torch.Tensor
    slots: torch.Tensor
    picks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step.

    Attributes:
        source: where it came from, for the reader.
        config: the library's configuration.
        batch: the window group's view, every tensor on the host.
        num_pages: pages of the window cache, None if not known.
        compressed: the group of each layer type that has a compressed cache.
    """

    source: str
    config: BackendConfig
    batch: CommonAttentionMetadata
    num_pages: int | None = None
    compressed: Mapping[LayerType, CompressedInput] = field(default_factory=dict)
