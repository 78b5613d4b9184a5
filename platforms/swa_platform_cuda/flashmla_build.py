"""One FlashMLA build behind one interface: what it reads on which chip, and how its two kernels are called.

Builds come in two forms: operators that a compiled library registers with torch, and Python packages around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

HEAD_DIM = 512
DECODE_HEADS = (64, 128)
DECODE_WIDTH_MULTIPLE = 64
PREFILL_WIDTH_MULTIPLE = 128


class Decode(Protocol):
    """Attention of b tokens over one or two paged caches."""

    def __call__(
        self,
        q: torch.Tensor,  # [b, 1, h, 512] bf16
        cache: torch.Tensor,  # [pages, entries of a page, 1, bytes of an entry] uint8
        rows: torch.Tensor,  # [b, 1, width] int32 slots, -1 = none, width a multiple of 64
        lens: torch.Tensor,  # [b] int32
        extra_cache: torch.Tensor | None,  # the same of the second cache, or three times None
        extra_rows: torch.Tensor | None,
        extra_lens: torch.Tensor | None,
        sink: torch.Tensor,  # [h] float32
        scale: float,
        plan: Any,  # what `new_plan` made; filled by the first call
        out: torch.Tensor | None,  # [b, 1, h, 512] bf16
        batch_invariant: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse [b, h, 1] float32: natural, without the sink, +inf for an empty row)."""


class Prefill(Protocol):
    """Attention of t tokens over rows of one bf16 workspace."""

    def __call__(
        self,
        q: torch.Tensor,  # [t, h, 512] bf16
        kv: torch.Tensor,  # [n, 1, 512] bf16
        rows: torch.Tensor,  # [t, 1, width] int32, width a multiple of 128
        lens: torch.Tensor,  # [t] int32
        sink: torch.Tensor,  # [h] float32
        scale: float,
        out: torch.Tensor | None,  # [t, h, 512] bf16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse [t, h] float32, as `Decode` gives it)."""


@dataclass(frozen=True)
class FlashMLABuild:
    """A build that was recognised.

    Attributes:
        origin: where it comes from, for reports.
        pairs: by compute capability the (window layout, compressed layout) names that its decode kernel reads together.
        prefill_heads: by compute capability the head counts that its prefill kernel takes as they are.
        takes_out: whether both kernels write to a tensor that they are given.
        batch_invariant: compute capabilities on which keys need not be split by batch.
        new_plan: makes an empty tile plan.
    """

    origin: str
    pairs: Mapping[str, frozenset[tuple[str, str]]]
    prefill_heads: Mapping[str, tuple[int, ...]]
    takes_out: bool
    batch_invariant: frozenset[str]
    new_plan: Callable[[], Any]
    decode: Decode
    prefill: Prefill


class OperatorPlan:
    """The two tensors that the decode operator makes of the lengths when it is given none."""

    __slots__ = ("num_splits", "tiles")

    def __init__(self) -> None:
        self.tiles: torch.Tensor | None = None
        self.num_splits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Operators:
    """The kernels as torch operators."""

    decode_op: Callable[..., Any]
    prefill_op: Callable[..., Any]
    takes_out: bool
    takes_invariant: bool

    def decode(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        extra_cache: torch.Tensor | None,
        extra_rows: torch.Tensor | None,
        extra_lens: torch.Tensor | None,
        sink: torch.Tensor,
        scale: float,
        plan: OperatorPlan,
        out: torch.Tensor | None,
        batch_invariant: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Decode`."""
        more: tuple[Any, ...] = (out,) if self.takes_out else ()
        if self.takes_invariant:
            more = (*more, batch_invariant)
        result, lse, plan.tiles, plan.num_splits = self.decode_op(
            q, cache, rows, lens, sink, plan.tiles, plan.num_splits, extra_cache, extra_rows, extra_lens, HEAD_DIM,
            scale, *more,
        )  # fmt: skip
        return result, lse

    def prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        sink: torch.Tensor,
        scale: float,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Prefill`."""
        more = (out,) if self.takes_out else ()
        result, _, lse = self.prefill_op(q, kv, rows, scale, HEAD_DIM, sink, lens, *more)
        return result, lse


@dataclass(frozen=True, slots=True)
class Package:
    """The kernels as functions of a Python package."""

    decode_function: Callable[..., Any]
    prefill_function: Callable[..., Any]
    metadata_function: Callable[[], Any]
    takes_out: bool
    takes_invariant: bool

    def new_plan(self) -> Any:
        """The package's own empty plan."""
        return self.metadata_function()[0]

    def decode(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        extra_cache: torch.Tensor | None,
        extra_rows: torch.Tensor | None,
        extra_lens: torch.Tensor | None,
        sink: torch.Tensor,
        scale: float,
        plan: Any,
        out: torch.Tensor | None,
        batch_invariant: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Decode`."""
        more: dict[str, Any] = {"out": out} if self.takes_out else {}
        if self.takes_invariant:
            more["enable_batch_invariant"] = batch_invariant
        result, lse = self.decode_function(
            q, cache, None, None, HEAD_DIM, plan, softmax_scale=scale, is_fp8_kvcache=True, indices=rows,
            attn_sink=sink, extra_k_cache=extra_cache, extra_indices_in_kvcache=extra_rows, topk_length=lens,
            extra_topk_length=extra_lens, **more,
        )  # fmt: skip
        return result, lse

    def prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        sink: torch.Tensor,
        scale: float,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Prefill`."""
        more: dict[str, Any] = {"out": out} if self.takes_out else {}
        result, _, lse, *_ = self.prefill_function(
            q, kv, rows, scale, HEAD_DIM, attn_sink=sink, topk_length=lens, **more
        )
        return result, lse
