"""Steps that are captured once, replayed with other inputs, and run again without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from swa_backend.attention import attend
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.groups import CompressedGroup
from swa_backend.layer_types import LayerType
from swa_backend.registry import get_backend
from swa_backend.topk import map_topk
from swa_backend.write import write_kv as store_keys
from tests.support import make_config

T = TypeVar("T")


def capture(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a step, which ran once before, and what the step returned while it was captured."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


class Model:
    """A layer of each type over caches full of keys; `change` gives a step's inputs other values in place."""

    REQUESTS, MOST, HEADS, PICKED = 8, 8192, 64, 512

    def __init__(self) -> None:
        self.device = torch.device("cuda:0")
        self.backend = get_backend("cuda")
        config = make_config(
            num_heads=self.HEADS, max_model_len=self.MOST, max_num_seqs=self.REQUESTS, max_num_batched_tokens=64
        )
        self.cache = DeepseekV4SWACache(512, 128, torch.uint8, "window", None, self.backend, block_size=64)
        self.second = {
            ratio: CompressedCache(ratio, "fp8_ds_mla", 256, f"second{ratio}", None, self.backend) for ratio in (4, 128)
        }
        generator = torch.Generator(device=self.device).manual_seed(1)
        pages = {}
        for ratio, cache in ((1, self.cache), *self.second.items()):
            page_tokens = 64 if ratio == 1 else 256
            count = self.REQUESTS * (self.MOST // page_tokens)
            cache.bind_kv_cache(cache.allocate(count + 1, self.device))
            cache.pages.data.fill_(0xFF)
            order = torch.randperm(count, generator=generator, device=self.device).int() + 1
            pages[ratio] = order.view(self.REQUESTS, -1)
            slots = torch.arange(cache.pages.entries, cache.pages.num_slots, device=self.device)
            for some in slots.split(65536):
                k = torch.randn(len(some), 512, generator=generator, device=self.device).bfloat16()
                store_keys(k, cache, some)
        self.table, self.tables = pages[1], {ratio: pages[ratio] for ratio in self.second}
        self.builder = self.backend.get_builder_cls()(
            self.cache.get_kv_cache_spec(config), ["layers.0"], config, self.device,
            num_pages=self.cache.pages.num_pages,
            compressed_groups=[
                CompressedGroup(f"c{ratio}", ratio, 256, cache.pages.num_pages) for ratio, cache in self.second.items()
            ],
        )  # fmt: skip
        self.q = torch.randn(self.REQUESTS, self.HEADS, 512, generator=generator, device=self.device).bfloat16()
        self.k = torch.zeros(self.REQUESTS, 512, dtype=torch.bfloat16, device=self.device)
        self.sink = torch.linspace(-2, 2, self.HEADS, device=self.device)
        self.starts = torch.arange(self.REQUESTS + 1, dtype=torch.int32, device=self.device)
        self.seq_lens = torch.ones(self.REQUESTS, dtype=torch.int32, device=self.device)
        self.slots = torch.zeros(self.REQUESTS, dtype=torch.int64, device=self.device)
        self.picked = torch.zeros(self.REQUESTS, self.PICKED, dtype=torch.int32, device=self.device)
        self.out = [torch.zeros_like(self.q) for _ in LayerType]

    def change(self, seqs: list[int], seed: int) -> None:
        """Live requests of these lengths; the others are padding."""
        live, generator = len(seqs), torch.Generator().manual_seed(seed)
        lens = torch.tensor(seqs + [0] * (self.REQUESTS - live), dtype=torch.int32)
        self.seq_lens.copy_(lens)
        self.starts.copy_(torch.arange(self.REQUESTS + 1).clamp(max=live))
        position = (lens[:live] - 1).long()
        slots = self.table.cpu()[torch.arange(live), position // 64].long() * 64 + position % 64
        self.slots.copy_(torch.cat([slots, torch.full((self.REQUESTS - live,), -1)]))
        picked = [
            torch.nn.functional.pad(order := torch.randperm(max(int(n) // 4, 0), generator=generator)[: self.PICKED],
                                    (0, self.PICKED - len(order)), value=-1)
            for n in lens
        ]  # fmt: skip
        self.picked.copy_(torch.stack(picked))
        self.q.copy_(torch.randn(self.q.shape, generator=generator))
        self.k.copy_(torch.randn(self.k.shape, generator=generator))

    def step(self, layers: int = 1) -> tuple[Any, list[torch.Tensor]]:
        """Build, write and attend; (metadata, out and lse of each layer type)."""
        batch = CommonAttentionMetadata(
            query_start_loc=self.starts, query_start_loc_cpu=torch.arange(self.REQUESTS + 1, dtype=torch.int32),
            seq_lens=self.seq_lens, num_reqs=self.REQUESTS, num_actual_tokens=self.REQUESTS, max_query_len=1,
            max_seq_len=self.MOST, block_table_tensor=self.table, slot_mapping=self.slots,
        )  # fmt: skip
        groups = {f"c{ratio}": (table, self.slots) for ratio, table in self.tables.items()}
        metadata = self.builder.capture_build(self.REQUESTS, self.REQUESTS, batch, groups)
        store_keys(self.k, self.cache, self.slots)
        four = self.second[4]
        rows, lens = map_topk(
            self.picked, metadata.token_to_req_indices, self.seq_lens - 1, self.tables[4], four.entries_per_page,
            metadata.is_valid_token, 4, four.pages.num_pages, backend=self.backend,
        )  # fmt: skip
        complete = metadata.compressed["c128"]
        results = []
        for _ in range(layers):
            for out, second in zip(
                self.out,
                (None, (four, rows, lens), (self.second[128], complete.rows, complete.lens)),
                strict=False,
            ):
                results += attend(self.q, metadata, self.cache, self.sink, compressed=second, out=out, return_lse=True)
        return metadata, results


LENGTHS = {
    "g6 longer than captured": [130, 700, 5000, 8192, 64, 129, 4097, 257],
    "t3 three of eight": [300, 7000, 90],
    "g5 short": [1, 2, 3, 4, 5, 6, 7, 8],
    "g7 all padding": [],
    "g5 once more": [8000, 60, 900, 3, 511, 512, 513, 2048],
}


def check_replays(layers: int = 1) -> None:
    """A captured step of so many layers of each type equals an eager one bit for bit, whatever its inputs become."""
    model = Model()
    model.change([100] * 8, 0)
    graph, (_, captured) = capture(lambda: model.step(layers))
    for seed, (name, seqs) in enumerate(LENGTHS.items(), 1):
        model.change(seqs, seed)
        for one in captured:
            one.fill_(torch.nan)
        graph.replay()
        replayed = [one.clone() for one in captured]
        _, eager = model.step(layers)
        torch.cuda.synchronize()
        for number, (found, expected) in enumerate(zip(replayed, eager, strict=True)):
            assert torch.equal(found, expected), f"{name}: result {number} (out and lse of swaonly, c4a, c128a)"
        assert not replayed[0][len(seqs) :].any()
        assert torch.isfinite(replayed[0]).all()
        assert torch.isneginf(replayed[1][len(seqs) :]).all()
