"""Attention providers by name beside the peer's own kernel, on the same rows, as captured graphs.

Decode: window rows of 128 keys, alone and beside rows of 512 to 8192 compressed keys. Prefill: window layers and top-k
layers beside the peer's gather, combine and attention. Every result is compared with the peer's before it is timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swa_backend.attention import DEFAULT_SCALE, attend
from swa_backend.backend import Backend
from swa_backend.bench.attention import WINDOW, _pages, _peer_decode, _peer_prefill, _Step
from swa_backend.bench.peer import load_peer
from swa_backend.bench.timing import COLD_BYTES, Timing, machine
from swa_backend.cache import CompressedCache
from swa_backend.layer_types import LayerType
from swa_backend.provider_choice import ATTENTION_VARIABLE, forced_provider
from swa_backend.write import write_kv

HEADS = (64, 128)
BATCHES = (1, 32, 128, 512)
EXTRA_KEYS = (0, 512, 1024, 8192)
POOL_ENTRIES = 1 << 19  # of the compressed cache: larger than any cache of a chip
PREFILL = (4, 2048, 4096)  # requests, their tokens, context
LEFT_OUT = ("reference", "flashmla")  # neither is compared with FlashMLA's kernel
KEY_BYTES = 584
_SAME = 4e-3  # relative difference of two bf16 results of the same attention
_IN_A_GRAPH, _REPLAYS = 10, 7


@dataclass(frozen=True, slots=True)
class Case:
    """One layer's attention: a call of ours, the peer's, and what they read and compute."""

    name: str
    ours: Callable[[], torch.Tensor]
    peer: Callable[[], torch.Tensor] | None
    bytes: float
    flops: float


def run(
    backend: Backend, device: torch.device, peer_folder: Path | None, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Time the providers ``names``, by default every one but those that are FlashMLA or the reference.

    ``gpu`` is the time of a call in a replayed graph, ``gpu_cold`` with other memory written before each call.
    """
    peer = None if peer_folder is None else load_peer(peer_folder)
    if names is None:
        forced = forced_provider()
        names = [forced] if forced else [one.name for one in backend.providers if one.name not in LEFT_OUT]
    rows = []
    for name in names:
        with _only(name):
            for case in _cases(backend, device, peer):
                rows.append(_row(f"{name}: {case.name}", case))
    return {"what": "providers", **machine(), "cases": rows}


@contextmanager
def _only(name: str) -> Iterator[None]:
    """While it lasts, builders take this provider or none."""
    before = os.environ.get(ATTENTION_VARIABLE)
    os.environ[ATTENTION_VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(ATTENTION_VARIABLE)
        if before is not None:
            os.environ[ATTENTION_VARIABLE] = before


def _row(name: str, case: Case) -> dict[str, Any]:
    if case.peer is not None:
        ours, theirs = case.ours().float(), case.peer().float()
        difference = float((ours - theirs).norm() / theirs.norm())
        if not difference <= _SAME:
            raise RuntimeError(f"{name}: the result differs from the peer's by {difference:.1e}; nothing was timed")
    row: dict[str, Any] = {"case": name}
    for who, call in (("ours", case.ours), ("peer", case.peer)):
        if call is not None:
            timing = time_graph(call)
            row[who] = {
                **timing.to_dict(),
                "terabytes_per_s": case.bytes / timing.gpu / 1e6,
                "teraflops": case.flops / timing.gpu / 1e6,
            }
    if "peer" in row:
        row["gpu_ratio"], row["host_ratio"] = (row["peer"][one] / row["ours"][one] for one in ("gpu", "host"))
    return row


def time_graph(call: Callable[[], Any]) -> Timing:
    """Host time of a call that is not captured; GPU time of a captured one, caches warm and cold."""
    other = torch.empty(COLD_BYTES // 8, dtype=torch.int64, device="cuda")
    host = []
    for _ in range(2 * _REPLAYS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_IN_A_GRAPH):
            call()
        host.append((time.perf_counter() - begin) / _IN_A_GRAPH * 1e6)
    host = host[_REPLAYS:]
    flush = other.bitwise_not_
    warm, cold, empty = (_replayed(calls) for calls in ((call,), (flush, call), (flush,)))
    return Timing(statistics.median(host), max(host), warm, 0.0, None, max(cold - empty, 0.0))


def _replayed(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of the calls, one after the other, in a graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_A_GRAPH):
            for call in calls:
                call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _IN_A_GRAPH)
    return statistics.median(times)


def _cases(backend: Backend, device: torch.device, peer: Any) -> Iterator[Case]:
    pool = _pool(backend, device)
    for heads in HEADS:
        for batch in BATCHES:
            step = _Step(backend, device, heads, batch, 1, 1024)
            for extra in EXTRA_KEYS:
                yield _decode_case(step, pool, extra, peer)
            del step
        step = _Step(backend, device, heads, *PREFILL)
        for kind, keys in ((LayerType.SWAONLY, WINDOW), (LayerType.C4A, WINDOW + 512)):
            yield Case(
                f"prefill {step.tokens}, h {heads}, {kind}", _ours(step, step.compressed(kind)),
                None if peer is None else _peer_prefill(step, kind, peer), *_work(step, keys, shared=True),
            )  # fmt: skip
        del step


def _work(step: _Step, keys: int, *, shared: bool = False) -> tuple[float, float]:
    """(bytes read and written, operations) of a step in which each token sees this many keys.

    Of prefill tokens, whose neighbours share nearly all window keys, each token's own key is counted once.
    """
    tokens = step.tokens
    moved = tokens * (1 if shared else keys) * KEY_BYTES + 4 * step.q.numel()
    return float(moved), 4.0 * tokens * step.heads * keys * 512


def _pool(backend: Backend, device: torch.device) -> CompressedCache:
    """A compressed cache full of keys, in pages of 64 entries."""
    cache = CompressedCache(4, "fp8_ds_mla", 256, "pool", None, backend)
    cache.bind_kv_cache(cache.allocate(POOL_ENTRIES // 64, device))
    for slots in torch.split(torch.arange(POOL_ENTRIES, device=device), 65536):
        write_kv(torch.randn(len(slots), 512, device=device).bfloat16(), cache, slots)
    return cache


def _decode_case(step: _Step, pool: CompressedCache, extra: int, peer: Any) -> Case:
    name = f"decode {step.tokens}, h {step.heads}, {WINDOW}" + (f" + {extra}" if extra else "") + " keys"
    compressed = None
    if extra:
        generator = torch.Generator(device=step.device).manual_seed(extra)
        rows = torch.randint(
            0, POOL_ENTRIES, (step.tokens, extra), generator=generator, device=step.device, dtype=torch.int32
        )
        compressed = pool, rows, torch.full((step.tokens,), extra, dtype=torch.int32, device=step.device)
    theirs = None
    if peer is not None:
        theirs = (
            _peer_decode(step, LayerType.SWAONLY, peer) if compressed is None else _two_caches(step, compressed, peer)
        )
    return Case(name, _ours(step, compressed), theirs, *_work(step, WINDOW + extra))


def _ours(step: _Step, compressed: Any) -> Callable[[], torch.Tensor]:
    # As if every context were long enough for the compressed rows.
    step.metadata.max_seq_len = max(step.metadata.max_seq_len, 0 if compressed is None else 4 * compressed[1].shape[1])

    def call() -> torch.Tensor:
        return attend(step.q, step.metadata, step.window, step.sink, compressed=compressed, out=step.out).out

    return call


def _two_caches(step: _Step, compressed: Any, peer: Any) -> Callable[[], torch.Tensor]:
    cache, rows, lens = compressed
    metadata, plan, out = step.metadata, peer.get_mla_metadata()[0], torch.empty_like(step.q).unsqueeze(1)

    def call() -> torch.Tensor:
        found: torch.Tensor = peer.flash_mla_with_kvcache(
            step.q.unsqueeze(1), _pages(step.window), None, None, 512, plan, softmax_scale=DEFAULT_SCALE,
            is_fp8_kvcache=True, indices=metadata.decode_swa_indices, topk_length=metadata.decode_swa_lens,
            attn_sink=step.sink, out=out, extra_k_cache=_pages(cache), extra_indices_in_kvcache=rows.unsqueeze(1),
            extra_topk_length=lens,
        )[0]  # fmt: skip
        return found.squeeze(1)

    return call
