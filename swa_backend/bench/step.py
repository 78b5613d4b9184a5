"""A whole V4-Flash decode step: metadata once, then key write, top-k mapping and attention of all 43 layers.

Both sides run the same work on the same caches: ours through the calls an engine makes, the peer's through its builder
and kernels. Host time is that of an eager step; GPU time that of the step captured in a graph, which is how an engine
runs it. What the peer computes elsewhere (its rows of complete entries) it is given for free.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from swa_backend.attention import DEFAULT_SCALE
from swa_backend.backend import Backend
from swa_backend.bench.decode_step import COMPRESSED_PAGE_TOKENS, PAGE_TOKENS, DecodeStep, Layer
from swa_backend.bench.peer import load_peer
from swa_backend.bench.timing import Timing, machine, on_gpu
from swa_backend.cache import PagedCache

BATCHES = (1, 32, 128)
ROUNDS, CALLS, REPLAYS = 9, 3, 10  # few calls a round: the launch queue must not fill
_SAME = 4e-3  # relative difference of two bf16 results of the same attention


class PeerStep:
    """The same step by the peer's builder and kernels, on the caches of ours."""

    def __init__(self, ours: DecodeStep, peer: Any) -> None:
        self.ours, self.peer = ours, peer
        self.builder = peer.make_builder(
            128, PAGE_TOKENS, max_model_len=ours.context, max_num_batched_tokens=max(ours.requests, 1),
            max_num_seqs=ours.requests,
        )  # fmt: skip
        self.common = peer.common_metadata([1] * ours.requests, ours.host_lens, ours.table, ours.slots)
        self.out = torch.zeros_like(ours.out)
        self.complete = {
            name: (group.rows.unsqueeze(1), group.lens)
            for name, group in ours.build().compressed.items()
            if group.rows is not None and group.lens is not None
        }
        self.pages = {id(cache): _pages(cache) for cache in self._caches()}
        self.bytes = {id(layer.window): _whole_pages(layer.window) for layer in ours.layers}

    def _caches(self) -> Iterator[PagedCache]:
        for layer in self.ours.layers:
            yield layer.window
            if layer.second is not None:
                yield layer.second

    def run(self) -> torch.Tensor:
        """As `DecodeStep.run`."""
        ours, peer, common = self.ours, self.peer, self.common
        common._token_to_req_indices_cache = None  # a step's batch is a new one
        metadata = self.builder.build(0, common)
        for number, layer in enumerate(ours.layers):
            peer.quantize_and_insert_k_cache(ours.k, self.bytes[id(layer.window)], ours.slots, PAGE_TOKENS)
            extra: dict[str, torch.Tensor] = {}
            if layer.second is not None:
                rows, lens = self._second(layer, metadata)
                extra = {
                    "extra_k_cache": self.pages[id(layer.second)], "extra_indices_in_kvcache": rows,
                    "extra_topk_length": lens,
                }  # fmt: skip
            peer.flash_mla_with_kvcache(
                ours.q.unsqueeze(1), self.pages[id(layer.window)], None, None, 512,
                getattr(metadata, f"tile_sched_{layer.kind.value}"), softmax_scale=DEFAULT_SCALE, is_fp8_kvcache=True,
                indices=metadata.decode_swa_indices[: ours.requests],
                topk_length=metadata.decode_swa_lens[: ours.requests], attn_sink=layer.sink,
                out=self.out[number].unsqueeze(1), **extra,
            )  # fmt: skip
        return self.out

    def _second(self, layer: Layer, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.complete.get(layer.kind.value)
        if known is not None:
            return known
        ours = self.ours
        rows, lens = self.peer.compute_global_topk_indices_and_lens(
            ours.picks, metadata.token_to_req_indices[: ours.requests], ours.tables[layer.kind],
            COMPRESSED_PAGE_TOKENS // layer.kind.ratio, metadata.is_valid_token[: ours.requests],
        )  # fmt: skip
        return rows.unsqueeze(1), lens.view(-1)


def run(backend: Backend, device: torch.device, peer_folder: Path | None) -> dict[str, Any]:
    """Time the step of every batch size; with a peer, after comparing all outputs."""
    peer = None if peer_folder is None else load_peer(peer_folder)
    rows = []
    for requests in BATCHES:
        ours = DecodeStep(backend, device, requests)
        contenders: dict[str, Callable[[], torch.Tensor]] = {"ours": ours.run}
        if peer is not None:
            theirs = PeerStep(ours, peer)
            _require_same(ours.run(), theirs.run())
            contenders["peer"] = theirs.run
        timings = compare_steps(contenders)
        row: dict[str, Any] = {"case": f"{len(ours.layers)} layers, batch {requests}, {ours.builder.provider.name}"}
        row |= {who: timing.to_dict() for who, timing in timings.items()}
        if "peer" in timings:
            mine, other = timings["ours"], timings["peer"]
            row["host_ratio"], row["gpu_ratio"] = other.host / mine.host, other.gpu / mine.gpu
        rows.append(row)
    return {"what": "step", **machine(), "cases": rows}


def compare_steps(contenders: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
    """Host time of eager steps and GPU time of captured ones, in turns."""
    graphs = {}
    for name, step in contenders.items():
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(CALLS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            step()
        graphs[name].replay()
    torch.cuda.synchronize()
    host: dict[str, list[float]] = {name: [] for name in contenders}
    gpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, step in contenders.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                step()
            host[name].append((time.perf_counter() - begin) / CALLS * 1e6)
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            for _ in range(REPLAYS):
                graphs[name].replay()
            last.record()
            last.synchronize()
            gpu[name].append(first.elapsed_time(last) * 1e3 / REPLAYS)
    return {
        name: Timing(
            statistics.median(host[name]), _p90(host[name]), statistics.median(gpu[name]),
            on_gpu(step, CALLS)[1], _p90(gpu[name]),
        )
        for name, step in contenders.items()
    }  # fmt: skip


def _p90(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=10, method="inclusive")[-1]


def _require_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """No time is reported for results that differ."""
    mine, other = ours.float(), theirs.float()
    for number in range(len(mine)):
        difference = float((mine[number] - other[number]).norm() / other[number].norm())
        if not difference <= _SAME:
            raise RuntimeError(f"layer {number} differs from the peer's by {difference:.1e}; nothing was timed")


def _pages(cache: PagedCache) -> torch.Tensor:
    """[pages, entries, 1, bytes of an entry] as the peer's attention takes them."""
    pages = cache.pages
    return pages.data.view(pages.num_pages, pages.entries, 1, pages.layout.bytes_per_token)


def _whole_pages(cache: PagedCache) -> torch.Tensor:
    """Pages as rows of bytes, padding included, as the peer's write takes them."""
    pages = cache.pages
    return pages.data.as_strided((pages.num_pages, pages.page_stride), (pages.page_stride, 1))
