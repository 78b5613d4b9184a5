"""Cache write, gather, top-k mapping and combined prefill rows: ours beside the peer's kernels, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swa_backend.backend import Backend
from swa_backend.bench.peer import load_peer
from swa_backend.bench.timing import Timing, compare, machine
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.chunk_plan import PrefillChunk
from swa_backend.combine import CombineStep, CompressedRows, combined_stride
from swa_backend.write import gather_kv, write_kv

WINDOW, PAGE_TOKENS, TOPK, RATIO = 128, 64, 512, 4
REQUESTS, QUERY, CONTEXT = 4, 2048, 4096
TOKENS = REQUESTS * QUERY
ENTRIES_PER_PAGE = PAGE_TOKENS // RATIO
_TARGETS = {"write 8192": 7.0, "gather 8192": 15.0, "combine 8192": 10.0}


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape.

    Attributes:
        name: name in the report.
        bytes: what has to move at least, once each way.
        ours: a call.
        peer: the peer's call for the same work; None where it has none or there is no peer.
        check: raises when the two give different results.
    """

    name: str
    bytes: int
    ours: Callable[[], Any]
    peer: Callable[[], Any] | None
    check: Callable[[], None]


def run(backend: Backend, device: torch.device, peer_folder: Path | None) -> dict[str, Any]:
    """Time every case; with a peer, after comparing both results. Inputs stay where they are: caches are warm."""
    peer = None if peer_folder is None else load_peer(peer_folder)
    rows = []
    for case in _cases(backend, device, peer):
        contenders = {"ours": case.ours}
        if case.peer is not None:
            case.check()
            contenders["peer"] = case.peer
        rows.append(_row(case, compare(contenders)))
    return {"what": "cache", **machine(), "cases": rows}


def _row(case: Case, timings: dict[str, Timing]) -> dict[str, Any]:
    ours = timings["ours"]
    row: dict[str, Any] = {"case": case.name, **{who: timing.to_dict() for who, timing in timings.items()}}
    row["bytes"], row["gigabytes_a_second"] = case.bytes, case.bytes / ours.gpu / 1e3
    if case.name in _TARGETS:
        row["gpu_target"], row["met"] = _TARGETS[case.name], ours.gpu <= _TARGETS[case.name]
    if "peer" in timings:
        row["host_ratio"], row["gpu_ratio"] = timings["peer"].host / ours.host, timings["peer"].gpu / ours.gpu
    return row


def _cases(backend: Backend, device: torch.device, peer: Any) -> Iterator[Case]:
    torch.manual_seed(0)
    pages = REQUESTS * CONTEXT // PAGE_TOKENS
    cache = DeepseekV4SWACache(512, WINDOW, torch.uint8, "bench", None, backend, PAGE_TOKENS)
    cache.bind_kv_cache(cache.allocate(pages, device))
    table = torch.randperm(pages, device=device).int().view(REQUESTS, -1)  # pages scattered over the cache
    k = torch.randn(REQUESTS * CONTEXT, 512, device=device).bfloat16()
    position = torch.arange(CONTEXT, device=device)
    slots = (table[:, position // PAGE_TOKENS].long() * PAGE_TOKENS + position % PAGE_TOKENS).contiguous()
    write_kv(k, cache, slots.view(-1))
    new = slots[:, CONTEXT - QUERY :].reshape(-1)
    for tokens in (64, 512, TOKENS):
        yield _write_case(tokens, k, cache, new[:: TOKENS // tokens] if tokens < TOKENS else new, peer)
    yield _gather_case(cache, table, peer)
    yield from _index_cases(backend, device, table, peer)


def _write_case(tokens: int, k: torch.Tensor, cache: DeepseekV4SWACache, slots: torch.Tensor, peer: Any) -> Case:
    slots = slots.contiguous()
    theirs = torch.zeros_like(cache.pages.data.as_strided(*_whole(cache)))
    pages = theirs.shape[0]

    def call_peer() -> None:
        peer.quantize_and_insert_k_cache(k, theirs, slots, PAGE_TOKENS)

    def check() -> None:
        other = DeepseekV4SWACache(512, WINDOW, torch.uint8, "check", None, cache.backend, PAGE_TOKENS)
        other.bind_kv_cache(other.allocate(pages, theirs.device))
        write_kv(k, other, slots)
        call_peer()
        _require(f"write {tokens}", torch.equal(other.pages.data, theirs[:, : other.pages.data.shape[1]]))

    return Case(
        f"write {tokens}", tokens * (1024 + 584 + 8), lambda: write_kv(k, cache, slots),
        None if peer is None else call_peer, check,
    )  # fmt: skip


def _whole(cache: DeepseekV4SWACache) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides of a cache's pages as rows of bytes, padding included."""
    stride = cache.pages.page_stride
    return (cache.pages.num_pages, stride), (stride, 1)


def _gather_case(cache: DeepseekV4SWACache, table: torch.Tensor, peer: Any) -> Case:
    device = table.device
    seq_lens = torch.full((REQUESTS,), CONTEXT, dtype=torch.int32, device=device)
    lens = torch.full((REQUESTS,), QUERY, dtype=torch.int32, device=device)
    out, theirs = (torch.zeros(REQUESTS, QUERY + 64, 512, dtype=torch.bfloat16, device=device) for _ in range(2))
    whole = cache.pages.data.as_strided(*_whole(cache))

    def call() -> None:
        gather_kv(cache, table, seq_lens, lens, out, 64)

    def call_peer() -> None:
        peer.dequantize_and_gather_k_cache(theirs, whole, seq_lens, lens, table, PAGE_TOKENS, 64)

    def check() -> None:
        call()
        call_peer()
        _require("gather", torch.equal(out, theirs))

    return Case(f"gather {TOKENS}", TOKENS * (584 + 1024), call, None if peer is None else call_peer, check)


def _index_cases(backend: Backend, device: torch.device, window_table: torch.Tensor, peer: Any) -> Iterator[Case]:
    """Top-k mapping and combined rows of a prefill of four requests, each with as much context before it."""
    number = torch.arange(REQUESTS, dtype=torch.int32, device=device)
    requests = number.repeat_interleave(QUERY)
    positions = (CONTEXT - QUERY + torch.arange(QUERY, dtype=torch.int32, device=device)).repeat(REQUESTS)
    starts = torch.arange(0, TOKENS + 1, QUERY, dtype=torch.int32, device=device)
    seq_lens = torch.full((REQUESTS,), CONTEXT, dtype=torch.int32, device=device)
    gather_lens = torch.full((REQUESTS,), QUERY + WINDOW - 1, dtype=torch.int32, device=device)
    complete = (positions + 1) // RATIO
    # Every token sees 512 of its complete entries, which differ and come in no order.
    first = torch.rand(TOKENS, device=device) * complete
    topk = ((first.int()[:, None] + 7 * torch.arange(TOPK, dtype=torch.int32, device=device)) % complete[:, None]).int()
    topk = topk.where(topk >= 0, -1).contiguous()
    columns = CONTEXT // PAGE_TOKENS
    pages = REQUESTS * columns
    table = torch.randperm(pages, device=device).int().view(REQUESTS, columns)
    valid = torch.ones(TOKENS, dtype=torch.bool, device=device)
    slots, lens = torch.empty_like(topk), torch.empty_like(requests)

    def map_ours() -> None:
        backend.operations.map_topk(
            topk, requests, positions, table, ENTRIES_PER_PAGE, valid, RATIO, pages, slots, lens
        )

    def map_peer() -> Any:
        return peer.compute_global_topk_indices_and_lens(topk, requests, table, ENTRIES_PER_PAGE, valid)

    def check_map() -> None:
        map_ours()
        found, counts = map_peer()
        _require("map_topk", torch.equal(slots, found.view(slots.shape)) and torch.equal(lens, counts.view(-1)))

    yield Case(
        f"map_topk {TOKENS}", TOKENS * (2 * TOPK * 4 + 4), map_ours, None if peer is None else map_peer, check_map
    )

    compressed = CONTEXT // RATIO
    chunk = PrefillChunk(0, REQUESTS, compressed, compressed + QUERY + WINDOW - 1)
    seen = positions[:, None] - (WINDOW - 1) + torch.arange(WINDOW, dtype=torch.int32, device=device)
    page = window_table[requests[:, None], (seen // PAGE_TOKENS).long()]
    rows = torch.empty(TOKENS, combined_stride(WINDOW + TOPK), dtype=torch.int32, device=device)
    step = CombineStep(
        chunk=chunk,
        num_decodes=0,
        first_token=0,
        window_rows=page * PAGE_TOKENS + seen % PAGE_TOKENS,
        window_lens=torch.full_like(requests, WINDOW),
        token_to_req=requests,
        is_valid=valid,
        query_start_loc=starts,
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        right_visible=None,
        compressed=CompressedRows(topk, table, ENTRIES_PER_PAGE, pages, RATIO),
        out_rows=rows,
        out_lens=lens,
    )

    def combine_ours() -> None:
        from swa_backend.kernels.combine import combine_rows

        combine_rows(step)

    def combine_peer() -> Any:
        return peer.combine_topk_swa_indices(
            topk, starts, seq_lens, gather_lens, WINDOW, RATIO, TOPK, chunk.width, chunk.compressed
        )

    def check_combine() -> None:
        combine_ours()
        found, counts = combine_peer()
        # The peer puts compressed entries first, and pads to another width.
        mine, other = rows.sort(dim=1).values[:, -(WINDOW + TOPK) :], found.view(TOKENS, -1).sort(dim=1).values
        _require("combine", torch.equal(mine, other[:, -(WINDOW + TOPK) :]) and torch.equal(lens, counts.view(-1)))

    yield Case(
        f"combine {TOKENS}",
        TOKENS * ((TOPK + WINDOW) * 8 + 4),
        combine_ours,
        None if peer is None else combine_peer,
        check_combine,
    )


def _require(name: str, same: bool) -> None:
    """No time is reported for results that differ."""
    if not same:
        raise RuntimeError(f"{name}: the result differs from the peer's; nothing was timed")
