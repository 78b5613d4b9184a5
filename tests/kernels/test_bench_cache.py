"""The cache bench compares before it times: its cases, made small, against a stand-in for a peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.bench import cache as bench
from swa_backend.cli import main
from swa_backend.registry import get_backend
from tests.independent_codec import Pool
from tests.kernels.pools import bf16, bits_of


def pool_of(pages: torch.Tensor) -> Pool:
    return Pool(pages.cpu().numpy().ravel().copy(), "fp8_ds_mla", 64, len(pages), pages.shape[1])


def insert(k: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, page_tokens: int) -> None:
    pool = pool_of(pages)
    pool.write(bits_of(k), slots.tolist())
    pages.copy_(torch.from_numpy(pool.memory).view(pages.shape))


def gather(out: torch.Tensor, pages: torch.Tensor, seq_lens: torch.Tensor, lens: torch.Tensor, table: torch.Tensor,
           page_tokens: int, offset: int) -> None:  # fmt: skip
    bits = bits_of(out).copy()
    pool_of(pages).gather(table.cpu().numpy(), seq_lens.tolist(), lens.tolist(), bits, offset)
    out.copy_(bf16(bits, out.device))


def map_topk(topk: torch.Tensor, requests: torch.Tensor, table: torch.Tensor, entries: int, valid: torch.Tensor) -> Any:
    slots = table[requests.long()[:, None], (topk // entries).long()] * entries + topk % entries
    return slots, torch.full_like(requests, topk.shape[1])


def combine(topk: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor, gather_lens: torch.Tensor, window: int,
            ratio: int, width: int, rows: int, compressed: int) -> Any:  # fmt: skip
    """Compressed entries first, as the peer has them."""
    found = []
    for token, local in enumerate(topk.tolist()):
        request = int((starts[1:] <= token).sum())
        position = int(seq_lens[request]) - int(starts[request + 1]) + token
        first = position - window + 1 - int(seq_lens[request] - gather_lens[request])
        base = rows * request
        own = [base + entry for entry in local]
        found.append(own + [base + compressed + first + i for i in range(window)] + [-1] * 128)
    return torch.tensor(found, device=topk.device), torch.full((len(topk),), width + window, device=topk.device).int()


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[bench.Case]:
    for name, value in {"REQUESTS": 2, "QUERY": 32, "CONTEXT": 2560, "TOKENS": 64}.items():
        monkeypatch.setattr(bench, name, value)
    peer = SimpleNamespace(
        quantize_and_insert_k_cache=insert,
        dequantize_and_gather_k_cache=gather,
        compute_global_topk_indices_and_lens=map_topk,
        combine_topk_swa_indices=combine,
    )
    return list(bench._cases(get_backend("cpu"), torch.device("cpu"), peer))


def test_every_case_agrees_with_the_stand_in(cases: list[bench.Case]) -> None:
    assert {case.name.split()[0] for case in cases} == {"write", "gather", "map_topk", "combine"}
    for case in cases:
        assert case.bytes > 0
        case.ours()
        case.check()


def test_a_difference_is_not_timed(cases: list[bench.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *pair: real(*pair) and False)
    for case in cases:
        with pytest.raises(RuntimeError, match="differs from the peer's; nothing was timed"):
            case.check()


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--platform", "cpu"]) == 2
    assert "legal: a platform with a GPU" in capsys.readouterr().err
