"""The metadata build of three batches: host time, GPU time and launches of ours and of the peer's builder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swa_backend._math import cdiv
from swa_backend.backend import Backend
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.bench.peer import load_peer
from swa_backend.bench.timing import Timing, compare, machine
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig

WINDOW, PAGE_TOKENS = 128, 64
MAX_MODEL_LEN, MAX_TOKENS, MAX_SEQS = 131072, 8192, 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A batch by its lengths."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


_CONTEXTS = tuple(1000 + 37 * i for i in range(512))
CASES = (
    Case("decode 64", (1,) * 64, _CONTEXTS[:64]),
    Case("decode 512", (1,) * 512, _CONTEXTS),
    Case("64 decodes + 2 x 2048 prefill", (*(1,) * 64, 2048, 2048), (*_CONTEXTS[:64], 4096, 3000)),
)
_COMPARED = ("decode_swa_indices", "decode_swa_lens", "prefill_swa_indices", "prefill_swa_lens", "token_to_req_indices")


def run(backend: Backend, device: torch.device, peer_folder: Path | None) -> dict[str, Any]:
    """Time every case; with a peer, after comparing both results."""
    builder = _builder(backend, device)
    peer = None if peer_folder is None else load_peer(peer_folder)
    rows = []
    for case in CASES:
        table, slots = _pages(case)
        batch = _batch(case, table, slots, device)
        contenders = {"ours": lambda batch=batch: builder.build(0, batch)}
        if peer is not None:
            theirs = peer.make_builder(
                WINDOW,
                PAGE_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=MAX_TOKENS,
                max_num_seqs=MAX_SEQS,
            )
            common = peer.common_metadata(list(case.query_lens), list(case.seq_lens), table, slots)

            def build(theirs: Any = theirs, common: Any = common) -> Any:
                common._token_to_req_indices_cache = None  # a step's batch is a new one
                return theirs.build(0, common)

            _same(builder.build(0, batch), build())
            contenders["peer"] = build
        rows.append(_row(case.name, compare(contenders)))
    return {"what": "metadata", **machine(), "cases": rows}


def _row(name: str, timings: dict[str, Timing]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, **{who: timing.to_dict() for who, timing in timings.items()}}
    if "peer" in timings:
        ours, peer = timings["ours"], timings["peer"]
        row["host_ratio"], row["gpu_ratio"] = peer.host / ours.host, peer.gpu / ours.gpu
    return row


def _builder(backend: Backend, device: torch.device) -> DeepseekSparseSWAMetadataBuilder:
    scheduler = SchedulerConfig(MAX_MODEL_LEN, MAX_SEQS, MAX_TOKENS)
    config = BackendConfig(ModelConfig.packaged("V4-Flash"), scheduler, page_tokens=PAGE_TOKENS)
    cache = DeepseekV4SWACache(512, WINDOW, torch.uint8, "bench", None, backend_cls=backend, block_size=PAGE_TOKENS)
    return backend.get_builder_cls()(cache.get_kv_cache_spec(config), ["bench"], config, device)


def _pages(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table [R, C] and slots [T]; pages scattered over the cache."""
    generator = torch.Generator().manual_seed(0)
    columns = cdiv(max(case.seq_lens), PAGE_TOKENS)
    count = len(case.seq_lens) * columns
    table = torch.randperm(count, generator=generator, dtype=torch.int32).view(len(case.seq_lens), columns)
    slots = [
        int(table[request, position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS
        for request, (query, seq) in enumerate(zip(case.query_lens, case.seq_lens, strict=True))
        for position in range(seq - query, seq)
    ]
    return table, torch.tensor(slots, dtype=torch.int64)


def _batch(case: Case, table: torch.Tensor, slots: torch.Tensor, device: torch.device) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *case.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device),
        num_reqs=len(case.query_lens),
        num_actual_tokens=len(slots),
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device),
        seq_lens_cpu_upper_bound=lens,
    )


def _same(ours: Any, theirs: Any) -> None:
    """No time is reported for results that differ."""
    for name in _COMPARED:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if (mine is None) != (other is None) or (mine is not None and not torch.equal(mine, other.view(mine.shape))):
            raise RuntimeError(f"{name} differs from the peer's; nothing was timed")
