"""The model side of a replay: one layer of each type with its caches, fed with content and run through the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swa_backend.attention import attend
from swa_backend.backend import Backend
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.cache import CacheConfig, CompressedCache, DeepseekV4SWACache
from swa_backend.cache_layout import get_layout
from swa_backend.config import BackendConfig
from swa_backend.groups import CompressedGroup
from swa_backend.layer_types import LayerType
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.pages import element_dtype
from swa_backend.platform import CacheRole
from swa_backend.replay.blocks import GroupSpec
from swa_backend.replay.content import HEAD_DIM, Content, TopkChooser
from swa_backend.replay.history import Histories
from swa_backend.replay.packed_entries import PackedEntries
from swa_backend.replay.step import WINDOW_GROUP, Step
from swa_backend.topk import TopkSlots, map_topk
from swa_backend.write import write_kv

COMPRESSED_PAGE_TOKENS = 256  # 64 entries a page at ratio 4, 2 at ratio 128


@dataclass(frozen=True)
class Layer:
    """A layer: its type, its two caches, its sinks, and its indexer where it has one."""

    type: LayerType
    window: DeepseekV4SWACache
    compressed: CompressedCache | None
    attn_sink: torch.Tensor
    chooser: TopkChooser | None


def group_specs(layer_types: Sequence[LayerType], config: BackendConfig, num_pages: int) -> list[GroupSpec]:
    """Cache groups of the block manager: the window, which all layers share, and one for each compressed type."""
    window = GroupSpec(WINDOW_GROUP, config.page_tokens, num_pages, window=config.model.window_size)
    return [window] + [GroupSpec(kind.value, COMPRESSED_PAGE_TOKENS, num_pages) for kind in layer_types if kind.ratio]


class Layers:
    """One layer of each of ``layer_types`` and the builder that serves them."""

    def __init__(
        self,
        layer_types: Sequence[LayerType],
        config: BackendConfig,
        backend: Backend,
        content: Content,
        num_pages: int,
        seed: int,
    ) -> None:
        self.config = config
        self.backend = backend
        self.content = content
        self.device = content.device
        self._num_pages = num_pages
        writable = get_layout(config.compressed_layout).writable
        self._packed = None if writable else PackedEntries(seed, content.device)
        context = CacheConfig()
        self.layers = tuple(self._make_layer(kind, context, seed) for kind in layer_types)
        groups = [
            CompressedGroup(kind.value, kind.ratio, COMPRESSED_PAGE_TOKENS, num_pages)
            for kind in layer_types
            if kind.compressed
        ]
        spec = self.layers[0].window.get_kv_cache_spec(config)
        names = [layer.window.prefix for layer in self.layers]
        self.builder: DeepseekSparseSWAMetadataBuilder = backend.get_builder_cls()(
            spec, names, config, self.device, num_pages=num_pages, compressed_groups=groups
        )

    def _make_layer(self, kind: LayerType, context: CacheConfig, seed: int) -> Layer:
        layout = get_layout(self.config.cache_layout, self.backend.cache_dialect(CacheRole.SWA))
        window = DeepseekV4SWACache(
            HEAD_DIM,
            self.config.model.window_size,
            element_dtype(layout),
            f"{kind}.window",
            context,
            backend_cls=self.backend,
            block_size=self.config.page_tokens,
            layout=layout,
        )
        window.bind_kv_cache(window.allocate(self._num_pages, self.device))
        compressed = None
        if kind.compressed:
            compressed = CompressedCache(
                kind.ratio,
                self.config.compressed_layout,
                COMPRESSED_PAGE_TOKENS,
                f"{kind}.compressed",
                context,
                backend_cls=self.backend,
            )
            compressed.bind_kv_cache(compressed.allocate(self._num_pages, self.device))
        topk = self.config.model.index_topk
        chooser = TopkChooser(kind, topk, seed, self.device) if kind.indexed else None
        return Layer(kind, window, compressed, self.content.attn_sink(kind), chooser)

    def build(self, step: Step) -> DeepseekSparseSWAMetadata:
        """The step's metadata, through the one call that an engine makes."""
        return self.builder.build(0, step.batch, groups=step.groups)

    def write(self, step: Step, metadata: DeepseekSparseSWAMetadata, histories: Histories) -> None:
        """Write the step's keys to every layer's window cache, and the entries that it completes."""
        for layer in self.layers:
            rows = self.content.rows(step.keys, layer.type)
            write_kv(rows, layer.window, metadata.slot_mapping, validate=self.config.validate)
            if layer.compressed is not None:
                ratio = layer.type.ratio
                completes = np.flatnonzero((step.positions + 1) % ratio == 0)
                entry = entry_index(histories, step, ratio, completes)
                slots = metadata.compressed[layer.type.value].compressed_slot_mapping
                slots = slots[torch.from_numpy(completes).to(self.device)]
                self._write_entries(layer.type, layer.compressed, histories.entry_keys[ratio][entry], slots)

    def _write_entries(self, kind: LayerType, cache: CompressedCache, keys: np.ndarray, slots: torch.Tensor) -> None:
        if self._packed is not None:
            self._packed.write(keys, kind, cache, slots)
        else:
            write_kv(self.content.rows(keys, kind, entry=True), cache, slots, validate=self.config.validate)

    def choose(self, step: Step) -> dict[LayerType, torch.Tensor]:
        """Top-k picks [T, K] int32 of every layer that has an indexer."""
        return {
            layer.type: layer.chooser.choose(step.keys, (step.positions + 1) // layer.type.ratio)
            for layer in self.layers
            if layer.chooser is not None
        }

    def map_picks(
        self, layer: LayerType, picks: torch.Tensor, step: Step, metadata: DeepseekSparseSWAMetadata
    ) -> TopkSlots:
        """Slots of a layer's picks."""
        group = metadata.compressed[layer.value]
        return map_topk(
            picks,
            metadata.token_to_req_indices,
            torch.from_numpy(step.positions).to(self.device),
            group.block_table,
            group.entries_per_page,
            metadata.is_valid_token,
            group.ratio,
            num_pages=self._num_pages,
            backend=self.backend,
        )

    def attend(
        self, layer: Layer, step: Step, metadata: DeepseekSparseSWAMetadata, q: torch.Tensor, picked: TopkSlots | None
    ) -> torch.Tensor:
        """Attention output [T, heads, 512] of one layer; ``picked`` are the slots of an indexed layer's picks."""
        compressed = None
        if layer.compressed is not None:
            group = metadata.compressed[layer.type.value]
            rows, lens = picked if picked is not None else (group.rows, group.lens)
            if rows is None or lens is None:
                raise RuntimeError(f"the build made no rows for the layer type {layer.type}")
            compressed = (layer.compressed, rows, lens)
        return attend(q, metadata, layer.window, layer.attn_sink, compressed=compressed).out


def entry_index(histories: Histories, step: Step, ratio: int, tokens: np.ndarray) -> np.ndarray:
    """Where the keys of the entries that hold ``tokens`` [n] of the step lie in ``Histories.entry_keys[ratio]``."""
    index: np.ndarray = histories.entry_base[ratio][step.request_ids[tokens]] + step.positions[tokens] // ratio
    return index
