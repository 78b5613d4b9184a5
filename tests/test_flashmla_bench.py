"""The attention bench compares before it times: its cases, made small, over fake kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.flashmla_fake")

from swa_backend.backend import Backend  # noqa: E402
from swa_backend.bench import attention as bench  # noqa: E402
from swa_backend.bench.timing import Timing  # noqa: E402
from swa_backend.pages import PageView  # noqa: E402
from swa_backend.reference.codec import gather_kv  # noqa: E402
from tests.flashmla_fake import FakeKernels, fake_backend  # noqa: E402


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    for name, value in {
        "QUERY": 20,
        "CONTEXT": 2560,
        "PREFILLS": 2,
        "HEADS": (64,),
        "BATCHES": (3,),
        "TOPK": 64,
    }.items():
        monkeypatch.setattr(bench, name, value)
    with fake_backend(tmp_path, FakeKernels()) as made:
        yield made


def peer_of(kernels: FakeKernels, caches: dict[int, PageView]) -> SimpleNamespace:
    """The peer's calls by their names, on the fake kernels."""

    def gather(out: Any, pages: Any, seq_lens: Any, lens: Any, table: Any, entries: int, offset: int) -> None:
        gather_kv(caches[pages.data_ptr()], table, seq_lens, lens, out, offset)

    def combine(topk: Any, starts: Any, seq_lens: Any, gather_lens: Any, window: int, ratio: int, picked: int,
                width: int, compressed: int) -> Any:  # fmt: skip
        rows, lens = torch.full((len(topk), 640), -1, dtype=torch.int32), torch.zeros(len(topk), dtype=torch.int32)
        for token, local in enumerate(topk.tolist()):
            request = int((starts[1:] <= token).sum())
            position = int(seq_lens[request]) - int(starts[request + 1]) + token
            row = [width * request + entry for entry in local[: min(picked, (position + 1) // ratio)]]
            first = position - window + 1 - int(seq_lens[request] - gather_lens[request])
            row += [width * request + compressed + first + i for i in range(window)]
            rows[token, : len(row)], lens[token] = torch.tensor(row, dtype=torch.int32), len(row)
        return rows, lens

    def decode(q: Any, cache: Any, table: Any, lens: Any, dim: int, plan: Any, **options: Any) -> Any:
        return kernels.decode(
            q, cache, options["indices"], options["topk_length"], options["attn_sink"], None, None,
            options.get("extra_k_cache"), options.get("extra_indices_in_kvcache"), options.get("extra_topk_length"),
            dim, options["softmax_scale"], options["out"],
        )  # fmt: skip

    def prefill(q: Any, kv: Any, rows: Any, scale: float, *, attn_sink: Any, topk_length: Any, out: Any) -> Any:
        return kernels.prefill(q, kv, rows, scale, 512, attn_sink, topk_length, out)

    return SimpleNamespace(
        get_mla_metadata=lambda: (None, None), flash_mla_with_kvcache=decode, flash_mla_sparse_fwd=prefill,
        dequantize_and_gather_k_cache=gather, combine_topk_swa_indices=combine,
    )  # fmt: skip


@pytest.mark.parametrize(("requests", "query"), [(3, 1), (2, 20)])
def test_every_case_is_compared_with_the_peer(backend: Backend, requests: int, query: int) -> None:
    step = bench._Step(backend, torch.device("cpu"), 64, requests, query, 2560)
    caches = {one.pages.data.data_ptr(): one.pages for one in (step.window, *step.second.values())}
    names = []
    for case in bench._cases(step, peer_of(FakeKernels(), caches)):
        bench._require_same(case)
        names.append(case.name)
        wrong = bench.Case(case.name, None, case.ours, lambda: torch.ones_like(step.q))
        with pytest.raises(RuntimeError, match="differs from the peer's"):
            bench._require_same(wrong)
    form = "decode 3" if query == 1 else "prefill 40"
    assert names == [f"{form}, h 64, {kind}" for kind in ("swaonly", "c4a", "c128a")]


def test_a_row_tells_whether_its_target_is_met() -> None:
    case = bench.Case("x", 0.75, lambda: torch.zeros(1), None)
    timings = {"ours": Timing(1.0, 1.0, 70.0, 1.0), "peer": Timing(2.0, 2.0, 100.0, 3.0)}
    row = bench._row(case, timings)
    assert (row["gpu_target"], row["met"], row["host_ratio"]) == (75.0, True, 2.0)
    timings["ours"] = Timing(1.0, 1.0, 76.0, 1.0)
    assert not bench._row(case, timings)["met"]
