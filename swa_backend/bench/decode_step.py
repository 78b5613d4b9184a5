"""A whole V4-Flash decode step through the calls that an engine makes, with caches full of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swa_backend.attention import attend
from swa_backend.backend import Backend
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.cache import CompressedCache, DeepseekV4SWACache, PagedCache
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig
from swa_backend.groups import CompressedGroup
from swa_backend.layer_types import LayerType, classify_layer
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.topk import map_topk
from swa_backend.write import write_kv

CONTEXT = 4096
PAGE_TOKENS, COMPRESSED_PAGE_TOKENS = 64, 256


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its kind, its caches and its sinks [h] float32."""

    kind: LayerType
    window: DeepseekV4SWACache
    second: CompressedCache | None
    sink: torch.Tensor


class DecodeStep:
    """One token of each of R requests through every layer of V4-Flash's trunk.

    The tensors of a step stay where they are, `change` gives them other contents, so that a captured step can be
    replayed with them. Window pages hold different keys in every layer.

    Args:
        backend: the platform.
        device: where everything lives.
        requests: R.
        context: tokens of the longest request.
        layers: how many of the model's layers; None = all 43.
    """

    def __init__(
        self,
        backend: Backend,
        device: torch.device,
        requests: int,
        context: int = CONTEXT,
        layers: int | None = None,
    ) -> None:
        self.backend, self.device, self.requests, self.context = backend, device, requests, context
        model = ModelConfig.packaged("V4-Flash")
        self.config = BackendConfig(
            model, SchedulerConfig(context, requests, max(requests, 1)), page_tokens=PAGE_TOKENS
        )
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.table = self._table(PAGE_TOKENS)
        trunk = model.compress_ratios[: model.num_hidden_layers][:layers]
        self.kinds = tuple(classify_layer(ratio, model.version, number) for number, ratio in enumerate(trunk))
        self.tables = {
            kind: self._table(COMPRESSED_PAGE_TOKENS) for kind in dict.fromkeys(self.kinds) if kind.compressed
        }
        self.layers = tuple(self._layer(number, kind) for number, kind in enumerate(self.kinds))
        self.builder = backend.get_builder_cls()(
            self.layers[0].window.get_kv_cache_spec(self.config), [layer.window.prefix for layer in self.layers],
            self.config, device, num_pages=self.layers[0].window.pages.num_pages,
            compressed_groups=[
                CompressedGroup(kind.value, kind.ratio, COMPRESSED_PAGE_TOKENS, int(table.numel()))
                for kind, table in self.tables.items()
            ],
        )  # fmt: skip
        heads, picked = self.config.num_heads, model.index_topk

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.q = zeros(requests, heads, 512, dtype=torch.bfloat16)
        self.k = zeros(requests, 512, dtype=torch.bfloat16)
        self.starts = zeros(requests + 1, dtype=torch.int32)
        self.seq_lens = zeros(requests, dtype=torch.int32)
        self.positions = zeros(requests, dtype=torch.int64)
        self.slots = zeros(requests, dtype=torch.int64)
        self.picks = zeros(requests, picked, dtype=torch.int32)
        self.rows, self.lens = zeros(requests, picked, dtype=torch.int32), zeros(requests, dtype=torch.int32)
        self.out = zeros(len(self.layers), requests, heads, 512, dtype=torch.bfloat16)
        self.change([context] * requests, 0)

    def _table(self, page_tokens: int) -> torch.Tensor:
        """[R, C] int32: every page of a cache once, scattered."""
        columns = self.context // page_tokens
        order = torch.randperm(self.requests * columns, generator=self.generator, device=self.device)
        return order.int().view(self.requests, columns)

    def _layer(self, number: int, kind: LayerType) -> Layer:
        window = DeepseekV4SWACache(512, 128, torch.uint8, f"layers.{number}", None, self.backend, PAGE_TOKENS)
        self._fill(window, self.table.numel())
        second = None
        if kind.compressed:
            second = CompressedCache(
                kind.ratio, "fp8_ds_mla", COMPRESSED_PAGE_TOKENS, f"layers.{number}.second", None, self.backend
            )
            self._fill(second, self.tables[kind].numel())
        sink = torch.randn(self.config.num_heads, generator=self.generator, device=self.device)
        return Layer(kind, window, second, sink)

    def _fill(self, cache: PagedCache, pages: int) -> None:
        """Bind pages full of keys: a few thousand different ones, as many times as it takes."""
        cache.bind_kv_cache(cache.allocate(pages, self.device))
        keys = torch.randn(4096, 512, generator=self.generator, device=self.device).bfloat16()
        for slots in torch.split(torch.arange(cache.pages.num_slots, device=self.device), len(keys)):
            write_kv(keys[: len(slots)], cache, slots)

    def change(self, lens: Sequence[int], seed: int) -> None:
        """Live requests of these context lengths, at most R and each at most ``context``; the others are padding."""
        live, host = len(lens), torch.Generator().manual_seed(seed)
        seq_lens = torch.tensor([*lens, *[0] * (self.requests - live)], dtype=torch.int32)
        positions = (seq_lens.long() - 1).clamp(min=0)
        page = self.table.cpu()[torch.arange(self.requests), positions // PAGE_TOKENS].long()
        slots = page * PAGE_TOKENS + positions % PAGE_TOKENS
        slots[live:] = -1
        width = self.picks.shape[1]
        picks = torch.full((self.requests, width), -1, dtype=torch.int32)
        for request, count in enumerate((seq_lens // LayerType.C4A.ratio).tolist()):
            order = torch.randperm(count, generator=host)[:width]
            picks[request, : len(order)] = order.int()
        self.seq_lens.copy_(seq_lens)
        self.starts.copy_(torch.arange(self.requests + 1).clamp(max=live))
        self.positions.copy_(positions)
        self.slots.copy_(slots)
        self.picks.copy_(picks)
        self.q.copy_(torch.randn(self.q.shape, generator=host))
        self.k.copy_(torch.randn(self.k.shape, generator=host))
        self.host_lens = list(lens)

    def build(self) -> DeepseekSparseSWAMetadata:
        """The step's metadata, in the form that may be captured."""
        requests = self.requests
        batch = CommonAttentionMetadata(
            query_start_loc=self.starts, query_start_loc_cpu=torch.arange(requests + 1, dtype=torch.int32),
            seq_lens=self.seq_lens, num_reqs=requests, num_actual_tokens=requests, max_query_len=1,
            max_seq_len=self.context, block_table_tensor=self.table, slot_mapping=self.slots,
        )  # fmt: skip
        groups = {kind.value: (table, self.slots) for kind, table in self.tables.items()}
        return self.builder.capture_build(requests, requests, batch, groups)

    def run(self) -> torch.Tensor:
        """The whole step; outputs [layers, R, h, 512] bf16."""
        metadata = self.build()
        for number, layer in enumerate(self.layers):
            write_kv(self.k, layer.window, self.slots)
            self.attend(number, metadata)
        return self.out

    def attend(self, number: int, metadata: DeepseekSparseSWAMetadata) -> None:
        """One layer's attention, top-k mapping included, into ``out[number]``."""
        layer = self.layers[number]
        second = self._compressed(layer, metadata)
        attend(self.q, metadata, layer.window, layer.sink, compressed=second, out=self.out[number])

    def _compressed(
        self, layer: Layer, metadata: DeepseekSparseSWAMetadata
    ) -> tuple[CompressedCache, torch.Tensor, torch.Tensor] | None:
        if layer.second is None:
            return None
        group = metadata.compressed[layer.kind.value]
        if group.rows is not None and group.lens is not None:
            return layer.second, group.rows, group.lens
        slots, lens = map_topk(
            self.picks, metadata.token_to_req_indices, self.positions, group.block_table, group.entries_per_page,
            metadata.is_valid_token, group.ratio, layer.second.pages.num_pages, out=(self.rows, self.lens),
            backend=self.backend, distinct=True,
        )  # fmt: skip
        return layer.second, slots, lens
