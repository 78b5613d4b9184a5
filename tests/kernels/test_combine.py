"""Combined prefill rows: the kernel and its plain PyTorch twin, each against hand values and a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.chunk_plan import PrefillChunk
from swa_backend.combine import CombineStep, CompressedRows, combined_stride
from swa_backend.kernels import combine as kernel
from swa_backend.reference import combine as reference

POISON = 77
Combine = Callable[[CombineStep], None]


@pytest.fixture(params=["kernel", "reference"])
def combine(request: pytest.FixtureRequest) -> Combine:
    return kernel.combine_rows if request.param == "kernel" else reference.combine_rows


def run(
    combine: Combine, device: torch.device, *, chunk: PrefillChunk, num_decodes: int, first_token: int,
    window_rows: Any, window_lens: list[int], requests: list[int], starts: list[int], seq_lens: list[int],
    gather_lens: list[int], valid: list[bool] | None = None, right: list[int] | None = None,
    topk: Any = None, table: Any = None, entries_per_page: int = 2, num_pages: int = 1000, ratio: int = 4,
    width: int | None = None,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(device)

    rows = ints(window_rows)
    compressed = None
    if table is not None:
        local = None if topk is None else ints(topk)
        compressed = CompressedRows(local, ints(table), entries_per_page, num_pages, ratio)
    longest = rows.shape[1] + (0 if table is None else chunk.compressed if topk is None else ints(topk).shape[1])
    width = width if width is not None else combined_stride(longest)
    tokens = len(requests)
    whole = torch.full((tokens, width + 4), POISON, dtype=torch.int32, device=device)
    lens = torch.full((tokens,), POISON, dtype=torch.int32, device=device)
    combine(
        CombineStep(
            chunk, num_decodes, first_token, rows, ints(window_lens), ints(requests),
            torch.tensor(valid if valid is not None else [True] * tokens, device=device), ints(starts), ints(seq_lens),
            ints(gather_lens), None if right is None else ints(right), compressed, whole[:, :width], lens,
        )
    )  # fmt: skip
    assert (whole[:, width:] == POISON).all()
    return whole[:, :width].tolist(), lens.tolist()


def test_p4_rows_stay_16_byte_aligned() -> None:
    assert combined_stride(133 + 512) == 648
    assert combined_stride(192 + 512) == 192 + 512
    assert all(combined_stride(n) * 4 % 16 == 0 and n <= combined_stride(n) < n + 4 for n in range(1, 3000))


def test_by_hand(combine: Combine, device: torch.device) -> None:
    # One decode before it; two prefills of 2 and 1 tokens, the second with 8 tokens of context before it.
    # Each has a workspace of 6 rows: 2 for compressed entries, then those of the window.
    rows, lens = run(
        combine, device, chunk=PrefillChunk(0, 2, 2, 6), num_decodes=1, first_token=1,
        window_rows=[[40, -1, -1], [40, 41, -1], [-1, 70, 71]], window_lens=[1, 2, 3], requests=[1, 1, 2],
        starts=[0, 1, 3, 4], seq_lens=[9, 2, 9], gather_lens=[2, 3], topk=[[0, -1], [0, 1], [1, 0]],
        table=[[5, 5], [6, 6], [7, -1]], entries_per_page=1,
    )  # fmt: skip
    # The first request sees no complete entry yet. Of the second's entries 0 and 1, entry 1 has no page.
    assert rows == [
        [2, -1, -1, -1, -1, -1, -1, -1],
        [2, 3, -1, -1, -1, -1, -1, -1],
        [-1, 6 + 2 + 1, 6 + 2 + 2, 6 + 0, -1, -1, -1, -1],
    ]
    assert lens == [1, 2, 4]


def slow(
    chunk: PrefillChunk, num_decodes: int, first_token: int, window_rows: Any, window_lens: list[int],
    requests: list[int], starts: list[int], seq_lens: list[int], gather_lens: list[int], valid: list[bool],
    right: list[int] | None, topk: Any, table: Any, entries_per_page: int, num_pages: int, ratio: int, width: int,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """One entry at a time, from the description."""
    rows, lens = [], []
    for token, request in enumerate(requests):
        row: list[int] = []
        prefill = request - num_decodes
        if valid[token] and chunk.first <= prefill < chunk.end:
            query_len = starts[request + 1] - starts[request]
            position = seq_lens[request] - query_len + first_token + token - starts[request]
            base = (prefill - chunk.first) * chunk.width
            end = min(position + (right[token] if right else 0) + 1, seq_lens[request])
            first_gathered = seq_lens[request] - gather_lens[prefill]
            for i in range(window_lens[token]):
                at = end - window_lens[token] + i
                row.append(base + chunk.compressed + at - first_gathered if window_rows[token][i] >= 0 else -1)
            if table is not None:
                wanted = range(chunk.compressed) if topk is None else topk[token]
                for entry in wanted:
                    if not 0 <= entry < min((position + 1) // ratio, chunk.compressed):
                        continue
                    column = entry // entries_per_page
                    if column < len(table[request]) and 0 <= table[request][column] < num_pages:
                        row.append(base + entry)
        rows.append(row + [-1] * (width - len(row)))
        lens.append(len(row))
    return rows, lens


@pytest.mark.parametrize("kind", ["none", "listed", "every"])
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_loop(combine: Combine, device: torch.device, kind: str, images: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    window, entries_per_page, num_decodes = 100, int(rng.choice([1, 2, 16, 48])), 2
    queries = np.array([1, 1, 3, 0, 4, 2, 5])
    seq_lens = queries + rng.integers(0, 900, 7)
    starts = np.concatenate([[0], queries.cumsum()])
    ratio = int(rng.choice([2, 4]))
    first, end = 1, 4  # the prefills of 0, 4 and 2 tokens
    low, high = int(starts[num_decodes + first]), int(starts[num_decodes + end])
    requests = np.repeat(np.arange(7), queries)[low:high]
    requests[-1] = num_decodes + end  # a token of the next chunk
    tokens = len(requests)
    gathered = np.minimum(seq_lens, queries + window - 1)[num_decodes:]
    compressed = int(seq_lens.max()) // ratio
    columns = compressed // entries_per_page + 1
    case: dict[str, Any] = {
        "chunk": PrefillChunk(first, end, compressed, compressed + int(gathered.max())),
        "num_decodes": num_decodes,
        "first_token": low,
        "window_rows": rng.integers(-1, 5, (tokens, window)).tolist(),
        "window_lens": rng.integers(0, window + 1, tokens).tolist(),
        "requests": requests.tolist(),
        "starts": starts.tolist(),
        "seq_lens": seq_lens.tolist(),
        "gather_lens": gathered.tolist(),
        "valid": [token != 2 for token in range(tokens)],
        "right": rng.integers(0, 9, tokens).tolist() if images else None,
        "topk": rng.integers(-9, compressed + 9, (tokens, 300)).tolist() if kind == "listed" else None,
        "table": None if kind == "none" else rng.integers(-1, 12, (7, columns)).tolist(),
        "entries_per_page": entries_per_page,
        "num_pages": 11 if seed else 12,
        "ratio": ratio,
        "width": combined_stride(window + (0 if kind == "none" else 300 if kind == "listed" else compressed)),
    }
    if kind == "listed" and seed == 3:  # an indexer's usual row: found ones first
        case["topk"] = np.where(np.arange(300) < rng.integers(0, 300, (tokens, 1)), 0, -1).tolist()
    assert run(combine, device, **case) == slow(**case)


def test_p3_no_token_is_no_work(combine: Combine, device: torch.device) -> None:
    rows, lens = run(
        combine, device, chunk=PrefillChunk(0, 1, 0, 4), num_decodes=0, first_token=0,
        window_rows=np.empty((0, 8)), window_lens=[], requests=[], starts=[0, 0], seq_lens=[0], gather_lens=[0],
    )  # fmt: skip
    assert (rows, lens) == ([], [])
