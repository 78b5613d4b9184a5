"""Index rows as FlashMLA takes them: the kernels and their plain twins against plain loops."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from swa_platform_cuda import flashmla_rows, flashmla_rows_reference

POISON = 77


@pytest.fixture(params=["kernel", "twin"])
def tools(request: pytest.FixtureRequest) -> ModuleType:
    return flashmla_rows if request.param == "kernel" else flashmla_rows_reference


def ints(values: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(device)


@pytest.mark.parametrize(("width", "padded"), [(1, 64), (100, 128), (128, 128), (300, 320), (512, 512)])
def test_s4_n1_c8_tidy_rows(tools: ModuleType, device: torch.device, width: int, padded: int) -> None:
    rng = np.random.default_rng(width)
    slots = 1000
    rows = rng.integers(-1, slots, (9, width + 5))
    wild = [slots, slots + 7, 2**31 - 1, -(2**31), -2]
    rows[rng.random(rows.shape) < 0.2] = rng.choice(wild)
    lens = [0, 1, width, width // 2, width + 1, 2**31 - 1, -5, width, 3]
    valid = [True] * 7 + [False, True]
    out = torch.full((9, padded + 3), POISON, dtype=torch.int32, device=device)
    out_lens = torch.full((9,), POISON, dtype=torch.int32, device=device)
    tools.tidy_rows(
        ints(rows, device)[:, :width], ints(lens, device), torch.tensor(valid, device=device), slots, out[:, :padded],
        out_lens,
    )  # fmt: skip
    for t in range(9):
        length = min(max(lens[t], 0), width) if valid[t] else 0
        kept = [int(slot) if 0 <= slot < slots else -1 for slot in rows[t, :length]]
        assert out[t].tolist() == kept + [-1] * (padded - length) + [POISON] * 3
        assert out_lens[t] == length


def test_tidy_rows_without_tokens(tools: ModuleType, device: torch.device) -> None:
    none = torch.zeros(0, 64, dtype=torch.int32, device=device)
    tools.tidy_rows(none, none[:, 0], none[:, 0].bool(), 5, none, none[:, 0])


@pytest.mark.parametrize("entries", [2, 16, 48, 64])
def test_slots_are_turned_back_to_the_entries_of_the_request(
    tools: ModuleType, device: torch.device, entries: int
) -> None:
    rng = np.random.default_rng(entries)
    pages, columns, requests = 40, 9, 3
    table = np.stack([rng.permutation(pages)[:columns] for _ in range(requests)])
    shared = table[0, [5, 1, 2, 8]]  # pages of another request, mostly in other columns
    table[2] = [*shared, *[page for page in rng.permutation(pages) if page not in shared][: columns - 4]]
    table[1, 7:] = [-1, pages + 3]
    seq_lens = [columns * entries * 4, 5 * entries * 4 + 3, 7 * entries * 4 - 1]
    known = torch.zeros(pages, dtype=torch.int32, device=device)
    stride = ints(np.concatenate([table, np.full((requests, 2), 5)], axis=1), device)[:, :columns]
    tools.mark_columns(stride, ints(seq_lens, device), 4, entries, known)
    for r in range(requests):
        for column in range(-(-(seq_lens[r] // 4) // entries)):
            page = table[r, column]
            if 0 <= page < pages:
                assert any(table[other, int(known[page])] == page for other in range(requests)), (
                    f"page {page} stands in column {int(known[page])} of no table"
                )

    tokens, width = 7, 300
    slots = rng.integers(-3, pages * entries, (tokens, width))
    slots[rng.random(slots.shape) < 0.1] = rng.choice([pages * entries, 2**31 - 1, -(2**31)])
    lens = [width, 0, 10, 2**31 - 1, -4, width - 1, 299]
    token_to_req = rng.integers(0, requests, tokens)
    for guess in (known, torch.full_like(known, -9), torch.full_like(known, 2**31 - 1), torch.zeros_like(known)):
        out = torch.full((tokens, width + 2), POISON, dtype=torch.int32, device=device)
        tools.entries_of_slots(
            ints(slots, device), ints(lens, device), ints(token_to_req, device), stride, guess, entries,
            out[:, :width],
        )  # fmt: skip
        for t in range(tokens):
            expected = []
            for i, slot in enumerate(slots[t]):
                row = table[token_to_req[t]].tolist()
                live = i < lens[t] and 0 <= slot < pages * entries and slot // entries in row
                expected.append(row.index(slot // entries) * entries + slot % entries if live else -1)
            assert out[t].tolist() == [*expected, POISON, POISON]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("tokens", [1, 128, 131])
def test_most_entries_of_distinct_picks(tools: ModuleType, device: torch.device, wide: bool, tokens: int) -> None:
    edges = [0, 2, 3, 4, 7, 2047, 2048, -1, -9, 2**31 - 1, *([2**40, -(2**40)] if wide else [])]
    positions = [edges[t % len(edges)] for t in range(tokens)]
    valid = [t % 5 != 4 for t in range(tokens)]
    out = torch.full((tokens + 1,), POISON, dtype=torch.int32, device=device)
    tools.entry_bounds(
        torch.tensor(positions, dtype=torch.int64 if wide else torch.int32, device=device),
        torch.tensor(valid, device=device), 4, 512, out[:tokens],
    )  # fmt: skip
    expected = [min(max((p + 1) // 4, 0), 512) if v else 0 for p, v in zip(positions, valid, strict=True)]
    assert out.tolist() == [*expected, POISON]
