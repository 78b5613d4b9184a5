"""Device memory that FlashMLA's calls share: reserved from the configuration, so that no step allocates."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from swa_backend._math import cdiv, ceil_to
from swa_backend.chunk_plan import workspace_bytes
from swa_backend.layer_types import LayerType
from swa_platform_cuda.flashmla_build import DECODE_WIDTH_MULTIPLE, HEAD_DIM, PREFILL_WIDTH_MULTIPLE

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

PADDED_TOKENS = 1024
"""Prefill tokens whose heads are padded at a time."""

DIRECT_TOKENS = 64
"""Prefill tokens of a step up to which layers with a second cache read pages directly: see `flashmla_provider`."""

MOST_VIEWS = 4096  # kept at a time: making one costs a layer's call two tensor operations


class Workspace:
    """Named buffers on one device. Layers run one after the other, so all of them use the same ones.

    A buffer only ever grows, and what it outgrew is kept: a captured graph may still write there.

    Attributes:
        changes: how often a buffer was given other contents to hold; while it stays, so do they.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.changes = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []
        self._contents: dict[str, object] = {}
        self._kept: dict[str, object] = {}
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A contiguous tensor at the start of a buffer, which holds what its last user left there, zeros at first."""
        found = self._views.get((name, shape))
        if found is not None:
            return found
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            if buffer is not None:
                self._outgrown.append(buffer)
                self._contents.pop(name, None)
                self.changes += 1
                self._views.clear()
            buffer = self._buffers[name] = torch.zeros(size, dtype=dtype, device=self.device)
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        found = self._views[name, shape] = buffer[:size].view(shape)
        return found

    def holds(self, name: str, contents: object, kept: object = None) -> bool:
        """Whether a buffer was last filled with these contents; if not, it is about to be.

        What the contents name by identity alone stays alive for as long: it is ``kept``.
        """
        if self._contents.get(name) == contents:
            return True
        self._contents[name] = contents
        self._kept[name] = kept
        self.changes += 1
        return False

    def forget(self) -> None:
        """No buffer holds what it was said to: a launch that was to fill one has failed."""
        self._contents.clear()
        self._kept.clear()
        self.changes += 1

    def reserve(self, config: BackendConfig, heads: int, prefill_heads: int) -> None:
        """Allocate what the steps of a configuration take; a row wider than the indexer's picks grows it later."""
        tokens = config.scheduler.max_num_batched_tokens
        decodes = min(tokens, config.scheduler.max_num_seqs * config.decode_threshold)
        layers = config.model.present_layer_types
        picked = config.model.index_topk if any(layer.indexed for layer in layers) else 0
        full = cdiv(config.scheduler.max_model_len, LayerType.C128A.ratio) if LayerType.C128A in layers else 0
        direct = min(tokens, DIRECT_TOKENS)
        for kind, most, window in (
            ("decode", decodes, config.max_decode_width),
            ("direct", direct, config.prefill_width),
        ):
            self.take(f"{kind} window rows", most, ceil_to(window, DECODE_WIDTH_MULTIPLE))
            self.take(f"{kind} window lens", most)
            for name, width in (("picked", picked), ("complete", full)):
                if width:
                    self.take(f"{kind} {name} rows", most, ceil_to(width, DECODE_WIDTH_MULTIPLE))
                    self.take(f"{kind} {name} lens", most)
            if picked:
                self.take(f"{kind} most entries", most)
        for name, width in (("window", 0), ("picked", picked), ("complete", full)):
            if width or name == "window":
                self.take(f"prefill {name} rows", tokens, ceil_to(config.prefill_width + width, PREFILL_WIDTH_MULTIPLE))
                self.take(f"prefill {name} lens", tokens)
        if picked:
            self.take("local entries", tokens, picked)
        for layer in layers:
            if layer.compressed:
                self.take(f"entry lens of ratio {layer.ratio}", config.scheduler.max_num_seqs)
        self.take("tidied prefill rows", tokens, config.prefill_width)
        self.take("tidied prefill lens", tokens)
        self.take("kv", workspace_bytes(config) // (2 * HEAD_DIM), 1, HEAD_DIM, dtype=torch.bfloat16)
        for name, rows, padded in (
            ("decode", decodes, heads),
            ("direct", direct, heads),
            ("prefill", PADDED_TOKENS, prefill_heads),
        ):
            if padded != config.num_heads:
                self.take(f"sinks of {padded}", padded, dtype=torch.float32)
                self.take(f"{name} q", rows, padded, HEAD_DIM, dtype=torch.bfloat16)
                self.take(f"{name} out", rows, padded, HEAD_DIM, dtype=torch.bfloat16)
