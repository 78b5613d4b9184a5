"""What an attention provider is: a set of kernels that can answer whether it serves a shape, and run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from swa_backend.cache_layout import HEAD_DIM
from swa_backend.config import MAX_HEADS_PER_RANK

if TYPE_CHECKING:
    from swa_backend.cache_layout import PageLayout
    from swa_backend.config import BackendConfig
    from swa_backend.metadata import CompressedGroupMetadata, DeepseekSparseSWAMetadata
    from swa_backend.pages import PageView
    from swa_backend.row_marks import RowsMark


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a builder knows of its layers when it picks a provider."""

    num_heads: int
    head_dim: int
    swa_layout: PageLayout
    swa_page_tokens: int
    compressed_layouts: tuple[PageLayout, ...]
    decode_widths: tuple[int, ...]
    batch_invariant: bool
    device: torch.device | None = None


@dataclass(slots=True)  # not frozen, like the call: that would double what a layer's call costs the host here
class CompressedRows:
    """The second cache of a layer in a step: pages, tokens per entry, rows [T, K] int32 slots, lens [T] int32.

    Where rows come from is told to a provider that takes plans: ``built`` is the group of which they are the complete
    entries, as the builder made them, ``mark`` what `map_topk` left (`swa_backend.row_marks`). None and None: unknown.
    """

    pages: PageView
    ratio: int
    rows: torch.Tensor
    lens: torch.Tensor
    mark: RowsMark | None = None
    built: CompressedGroupMetadata | None = None


@dataclass(slots=True)
class AttentionCall:
    """One layer's attention over a whole batch, checked; token t is row t of every tensor."""

    q: torch.Tensor  # [T, h, 512] bf16
    out: torch.Tensor  # [T, h, 512] bf16, written in place
    lse: torch.Tensor | None  # [T, h] float32
    metadata: DeepseekSparseSWAMetadata
    pages: PageView
    attn_sink: torch.Tensor  # [h] float32
    scale: float
    compressed: CompressedRows | None
    capture: int = 0  # number of the graph capture that launches go to, for a provider that takes plans


def head_reasons(shape: AttentionShape) -> list[str]:
    """Reasons against the heads of a shape for kernels that take every head count and the one head size there is."""
    reasons: list[str] = []
    if not 1 <= shape.num_heads <= MAX_HEADS_PER_RANK:
        reasons.append(f"num_heads is {shape.num_heads}; it takes 1 to {MAX_HEADS_PER_RANK}")
    if shape.head_dim != HEAD_DIM:
        reasons.append(f"head_dim is {shape.head_dim}; it takes {HEAD_DIM}")
    return reasons


class AttentionProvider(Protocol):
    """Kernels behind one name. A class that derives from this inherits what is optional.

    Attributes:
        name: as in ``SWA_BACKEND_ATTENTION``.
        takes_plans: whether its decodes use the plans of the platform's tile scheduler; only then are any made.
    """

    name: str
    takes_plans: bool = False

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        """Every reason why the shape cannot be served; empty when it can."""

    def reserve(self, config: BackendConfig, device: torch.device) -> None:
        """Allocate what the steps of a configuration take on a device; called once by each builder.

        No call of `decode` or `prefill` may allocate device memory of its own.
        """
        return None  # not abstract: most kernels keep nothing

    def forget(self) -> None:
        """A call has raised: rely on nothing that it may have left half-done in memory kept from call to call."""
        return None  # not abstract: most kernels keep nothing

    def decode(self, call: AttentionCall) -> None:
        """Write the rows of the decode tokens, padded ones included."""

    def prefill(self, call: AttentionCall) -> None:
        """Write the rows of the prefill tokens, padded ones included."""
