"""Attention of one layer: ours through `attend`, beside the peer's own calls on the same caches and queries.

A layer's time is that of a layer inside a step: what a step does once for all layers of a type is done before. Every
case is compared with the peer's result first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swa_backend.attention import DEFAULT_SCALE, attend
from swa_backend.backend import Backend
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.bench.peer import load_peer
from swa_backend.bench.timing import Timing, compare, machine
from swa_backend.cache import CompressedCache, DeepseekV4SWACache, PagedCache
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig
from swa_backend.groups import CompressedGroup
from swa_backend.layer_types import LayerType, ModelVersion
from swa_backend.topk import map_topk
from swa_backend.write import write_kv

WINDOW, PAGE_TOKENS, COMPRESSED_PAGE_TOKENS, TOPK = 128, 64, 256, 512
PREFILLS, QUERY, CONTEXT = 4, 2048, 4096
HEADS = (64, 128)
BATCHES = (1, 32, 128, 512)
DECODE_CONTEXT = 4096
KINDS = (LayerType.SWAONLY, LayerType.C4A, LayerType.C128A)
# Ours over the peer's total, at most.
_TARGETS = {("prefill", LayerType.SWAONLY): 0.75, ("prefill", LayerType.C4A): 0.8}
_DECODE_TARGET = 1.03
_SAME = 4e-3  # relative difference of two bf16 results of the same attention


@dataclass(frozen=True, slots=True)
class Case:
    """One layer's attention.

    Attributes:
        name: name in the report.
        target: ours over the peer's GPU time, at most; None without one.
        ours: a call that returns [T, h, 512].
        peer: the peer's calls for the same work; None without a peer.
    """

    name: str
    target: float | None
    ours: Callable[[], torch.Tensor]
    peer: Callable[[], torch.Tensor] | None


def run(backend: Backend, device: torch.device, peer_folder: Path | None) -> dict[str, Any]:
    """Time every case; with a peer, after comparing both results. Inputs stay where they are: caches are warm."""
    peer = None if peer_folder is None else load_peer(peer_folder)
    rows = []
    for heads in HEADS:
        for requests, query, context in (
            *((batch, 1, DECODE_CONTEXT) for batch in BATCHES),
            (PREFILLS, QUERY, CONTEXT),
        ):
            for case in _cases(_Step(backend, device, heads, requests, query, context), peer):
                contenders: dict[str, Callable[[], Any]] = {"ours": case.ours}
                if case.peer is not None:
                    _require_same(case)
                    contenders["peer"] = case.peer
                rows.append(_row(case, compare(contenders)))
    return {"what": "attention", **machine(), "cases": rows}


def _row(case: Case, timings: dict[str, Timing]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, **{who: timing.to_dict() for who, timing in timings.items()}}
    if "peer" in timings:
        ours, theirs = timings["ours"], timings["peer"]
        row["host_ratio"], row["gpu_ratio"] = theirs.host / ours.host, theirs.gpu / ours.gpu
        if case.target is not None:
            row["gpu_target"], row["met"] = case.target * theirs.gpu, ours.gpu <= case.target * theirs.gpu
    return row


def _require_same(case: Case) -> None:
    """No time is reported for results that differ."""
    assert case.peer is not None
    ours, theirs = case.ours().float(), case.peer().float()
    difference = float((ours - theirs).norm() / theirs.norm())
    if not difference <= _SAME:
        raise RuntimeError(f"{case.name}: the result differs from the peer's by {difference:.1e}; nothing was timed")


class _Step:
    """A step of equal requests over full caches, with a layer of each type."""

    def __init__(
        self, backend: Backend, device: torch.device, heads: int, requests: int, query: int, context: int
    ) -> None:
        torch.manual_seed(0)
        self.device, self.heads = device, heads
        self.requests, self.query, self.context = requests, query, context
        self.tokens = requests * query
        model = ModelConfig(
            name="bench", version=ModelVersion.V4, num_hidden_layers=3, num_heads=heads, head_dim=512, rope_dim=64,
            window_size=WINDOW, index_topk=TOPK, max_position_embeddings=131072, compress_ratios=(1, 4, 128),
        )  # fmt: skip
        config = BackendConfig(
            model,
            SchedulerConfig(max_model_len=context, max_num_seqs=requests, max_num_batched_tokens=max(self.tokens, 1)),
            page_tokens=PAGE_TOKENS,
        )
        self.window = DeepseekV4SWACache(512, WINDOW, torch.uint8, "window", None, backend, PAGE_TOKENS)
        self.second = {
            kind: CompressedCache(kind.ratio, "fp8_ds_mla", COMPRESSED_PAGE_TOKENS, kind.value, None, backend)
            for kind in KINDS
            if kind.compressed
        }
        self.table = self._fill(self.window, context // PAGE_TOKENS)
        self.tables = {kind: self._fill(one, context // COMPRESSED_PAGE_TOKENS) for kind, one in self.second.items()}
        builder = backend.get_builder_cls()(
            self.window.get_kv_cache_spec(config), ["layers.0"], config, device, num_pages=self.window.pages.num_pages,
            compressed_groups=[
                CompressedGroup(kind.value, kind.ratio, COMPRESSED_PAGE_TOKENS, one.pages.num_pages)
                for kind, one in self.second.items()
            ],
        )  # fmt: skip
        starts = torch.arange(requests + 1, dtype=torch.int32) * query
        lens = torch.full((requests,), context, dtype=torch.int32)
        self.starts, self.seq_lens = starts.to(device), lens.to(device)
        positions = torch.arange(context - query, context, dtype=torch.int32, device=device)
        self.positions = positions.repeat(requests)
        page = self.table[:, (positions // PAGE_TOKENS).long()].long()
        slots = (page * PAGE_TOKENS + positions % PAGE_TOKENS).reshape(-1).contiguous()
        batch = CommonAttentionMetadata(
            query_start_loc=self.starts, query_start_loc_cpu=starts, seq_lens=self.seq_lens,
            seq_lens_cpu_upper_bound=lens, num_reqs=requests, num_actual_tokens=self.tokens, max_query_len=query,
            max_seq_len=context, block_table_tensor=self.table, slot_mapping=slots,
        )  # fmt: skip
        self.metadata = builder.build(
            0, batch, groups={kind.value: (table, slots) for kind, table in self.tables.items()}
        )
        self.q = torch.randn(self.tokens, heads, 512, device=device).bfloat16()
        self.sink = torch.linspace(-2, 2, heads, device=device)
        self.out = torch.empty_like(self.q)
        complete = (self.positions + 1) // 4
        first = (torch.rand(self.tokens, device=device) * complete).int()
        picks = first[:, None] + 7 * torch.arange(TOPK, dtype=torch.int32, device=device)
        self.topk = (picks % complete[:, None]).int().contiguous()

    def _fill(self, cache: PagedCache, columns: int) -> torch.Tensor:
        """Bind pages full of keys; the table [requests, columns] of them, scattered over the cache."""
        pages = self.requests * columns
        cache.bind_kv_cache(cache.allocate(pages, self.device))
        for slots in torch.split(torch.arange(cache.pages.num_slots, device=self.device), 65536):
            write_kv(torch.randn(len(slots), 512, device=self.device).bfloat16(), cache, slots)
        return torch.randperm(pages, device=self.device).int().view(self.requests, columns)

    def compressed(self, kind: LayerType) -> tuple[CompressedCache, torch.Tensor, torch.Tensor] | None:
        """The ``compressed`` argument of a layer."""
        if not kind.compressed:
            return None
        cache, group = self.second[kind], self.metadata.compressed[kind.value]
        if group.rows is not None and group.lens is not None:
            return cache, group.rows, group.lens
        slots, lens = map_topk(
            self.topk, self.metadata.token_to_req_indices, self.positions, self.tables[kind], cache.entries_per_page,
            self.metadata.is_valid_token, kind.ratio, cache.pages.num_pages, backend=cache.backend, distinct=True,
        )  # fmt: skip
        return cache, slots, lens


def _cases(step: _Step, peer: Any) -> Iterator[Case]:
    decodes = step.query == 1
    form = "decode" if decodes else "prefill"
    for kind in KINDS:
        name = f"{form} {step.tokens}, h {step.heads}, {kind}"
        theirs = None
        if peer is not None:
            theirs = _peer_decode(step, kind, peer) if decodes else _peer_prefill(step, kind, peer)
        target = _DECODE_TARGET if decodes else _TARGETS.get((form, kind)) if step.heads == HEADS[0] else None
        yield Case(name, target, _ours(step, kind), theirs)


def _ours(step: _Step, kind: LayerType) -> Callable[[], torch.Tensor]:
    compressed = step.compressed(kind)

    def call() -> torch.Tensor:
        return attend(step.q, step.metadata, step.window, step.sink, compressed=compressed, out=step.out).out

    return call


def _pages(cache: PagedCache) -> torch.Tensor:
    """[pages, entries, 1, bytes of an entry] as the peer's attention takes them."""
    pages = cache.pages
    return pages.data.view(pages.num_pages, pages.entries, 1, pages.layout.bytes_per_token)


def _peer_decode(step: _Step, kind: LayerType, peer: Any) -> Callable[[], torch.Tensor]:
    metadata, compressed = step.metadata, step.compressed(kind)
    plan, out = peer.get_mla_metadata()[0], torch.empty_like(step.q).unsqueeze(1)
    extra = {}
    if compressed is not None:
        cache, rows, lens = compressed
        extra = {
            "extra_k_cache": _pages(cache), "extra_indices_in_kvcache": rows.unsqueeze(1), "extra_topk_length": lens,
        }  # fmt: skip

    def call() -> torch.Tensor:
        found: torch.Tensor = peer.flash_mla_with_kvcache(
            step.q.unsqueeze(1), _pages(step.window), None, None, 512, plan, softmax_scale=DEFAULT_SCALE,
            is_fp8_kvcache=True, indices=metadata.decode_swa_indices, topk_length=metadata.decode_swa_lens,
            attn_sink=step.sink, out=out, **extra,
        )[0]  # fmt: skip
        return found.squeeze(1)

    return call


def _peer_prefill(step: _Step, kind: LayerType, peer: Any) -> Callable[[], torch.Tensor]:
    """Gather, combine, attend: what the peer does in each layer."""
    metadata = step.metadata
    entries = step.context // kind.ratio if kind.compressed else 0
    gathered = step.query + WINDOW - 1
    width = entries + gathered
    kv = torch.zeros(step.requests, width, 512, dtype=torch.bfloat16, device=step.device)
    out = torch.empty_like(step.q)
    topk, picked = step.topk, 0
    if kind is LayerType.C4A:
        picked = TOPK
    elif kind is LayerType.C128A:
        picked = 128
        every = torch.arange(picked, dtype=torch.int32, device=step.device)
        topk = every.where(every < ((step.positions + 1) // kind.ratio)[:, None], -1).contiguous()
    whole = {id(one): _rows_of_pages(one) for one in (step.window, *step.second.values())}
    lens = step.seq_lens // max(kind.ratio, 1)

    def call() -> torch.Tensor:
        if kind.compressed:
            cache = step.second[kind]
            peer.dequantize_and_gather_k_cache(
                kv, whole[id(cache)], lens, None, step.tables[kind], cache.pages.entries, 0
            )
        peer.dequantize_and_gather_k_cache(
            kv, whole[id(step.window)], step.seq_lens, metadata.prefill_gather_lens, step.table, PAGE_TOKENS, entries
        )
        rows, counts = peer.combine_topk_swa_indices(
            topk, step.starts, step.seq_lens, metadata.prefill_gather_lens, WINDOW, max(kind.ratio, 1), picked, width,
            entries,
        )  # fmt: skip
        found: torch.Tensor = peer.flash_mla_sparse_fwd(
            step.q, kv.view(-1, 1, 512), rows.unsqueeze(1), DEFAULT_SCALE, attn_sink=step.sink, topk_length=counts,
            out=out,
        )[0]  # fmt: skip
        return found

    return call


def _rows_of_pages(cache: PagedCache) -> torch.Tensor:
    """Pages as rows of bytes, padding included."""
    pages = cache.pages
    return pages.data.as_strided((pages.num_pages, pages.page_stride), (pages.page_stride, 1))
