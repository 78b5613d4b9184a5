"""Compressed cache groups of a build: which slot a token's entry goes to, and the rows of ratio 128, by a slow rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.groups import CompressedGroup
from tests.oracle_rows import slot_of
from tests.support import Batch, make_builder, make_config

FORMS = [(1, 64), (2, 64), (4, 256), (4, 64), (128, 256), (128, 128), (128, 1024)]


@settings(max_examples=120, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    forms=st.lists(st.sampled_from(FORMS), min_size=1, max_size=4),
    causal=st.booleans(),
)
def test_slots_and_rows_equal_the_slow_rule(rng: Any, forms: list[tuple[int, int]], causal: bool) -> None:
    """Decodes and prefills, tokens without a slot, padding, tables with holes, wild pages or too few columns."""
    limit = 300 if causal else 3
    queries = sorted(rng.choice([0, 1, 2, rng.randint(0, limit)]) for _ in range(rng.randint(1, 5)))
    queries = [min(query, limit) for query in queries]
    seqs = [query + rng.choice([0, 125, 126, 127, 128, rng.randint(0, 700)]) for query in queries]
    tokens, padding = sum(queries), rng.choice([0, 3])
    groups, inputs = [], {}
    for number, (ratio, page_tokens) in enumerate(forms):
        num_pages = rng.choice([None, 40])
        groups.append(CompressedGroup(f"g{number}", ratio, page_tokens, num_pages))
        columns = rng.randint(0, 1 + max(seqs) // page_tokens)
        table = [[rng.choice([rng.randrange(45)] * 4 + [-1, -(2**31)]) for _ in range(columns)] for _ in queries]
        slots = [rng.choice([7, 7, 7, -1]) for _ in range(tokens)] + [rng.choice([-1, 7]) for _ in range(padding)]
        inputs[f"g{number}"] = (
            torch.tensor(table, dtype=torch.int32).reshape(len(queries), columns),
            torch.tensor(slots, dtype=torch.int64),
        )
    config = make_config(k=3, dspark=True, max_model_len=1024, max_num_batched_tokens=2000)
    builder = make_builder(config, compressed_groups=groups)
    for buffer in (builder._buffers.compressed_slots, builder._buffers.full_rows, builder._buffers.full_lens):
        buffer.fill_(77)  # what an earlier step left behind must never show
    batch = Batch(queries, seqs, causal=causal, padding=padding).metadata()
    metadata = builder.build(0, batch, groups=inputs)
    at = [(r, seq - query + i) for r, (query, seq) in enumerate(zip(queries, seqs, strict=True)) for i in range(query)]
    for group in groups:
        found, (table, slots) = metadata.compressed[group.name], inputs[group.name]
        pages = {"page_tokens": group.page_tokens // group.ratio, "num_pages": group.num_pages}
        if not tokens + padding:
            assert found.compressed_slot_mapping.numel() == 0
            continue
        expected, lens = [], []
        for t in range(tokens + padding):
            real = t < tokens and slots[t] >= 0
            request, position = at[t] if real else (0, -1)
            whole = real and (position + 1) % group.ratio == 0
            expected.append(slot_of(table[request].tolist(), position // group.ratio, **pages) if whole else -1)
            lens.append((position + 1) // group.ratio if real else 0)
        assert found.compressed_slot_mapping.tolist() == expected
        if group.ratio != 128:
            assert found.rows is found.lens is None
            continue
        assert found.rows.shape == (tokens + padding, 64)  # 1024 / 128 entries, in whole blocks
        assert found.lens.tolist() == lens
        for t, count in enumerate(lens):
            row = [slot_of(table[at[t][0]].tolist(), entry, **pages) for entry in range(count)] if count else []
            assert found.rows[t, :count].tolist() == row
            assert found.rows[t, count:].tolist() in ([77] * 64, [-1] * (64 - count))


@pytest.mark.parametrize(("longest", "width"), [(1, 64), (8192, 64), (8193, 128), (16384, 128), (1048576, 8192)])
def test_width_of_the_rows_of_ratio_128(longest: int, width: int) -> None:
    config = make_config(max_model_len=longest, max_num_batched_tokens=2)
    builder = make_builder(config, compressed_groups=(CompressedGroup("c128a", 128, 256),))
    batch = Batch([1], [longest])
    table = torch.arange(-(-longest // 256), dtype=torch.int32)[None]
    found = builder.build(0, batch.metadata(), groups={"c128a": (table, batch.slot_mapping())}).compressed["c128a"]
    assert found.rows.shape == (1, width)
    assert found.lens.tolist() == [longest // 128]
    assert found.rows[0, : longest // 128].tolist() == list(range(longest // 128))


def test_the_last_entry_of_the_longest_context_has_a_slot() -> None:
    """Position 1,048,575 completes entry 262,143 of ratio 4; with a page table one column short it has none."""
    config = make_config(max_model_len=1048576, max_num_batched_tokens=2, compress_ratios=(4,))
    builder = make_builder(config, compressed_groups=(CompressedGroup("c4a", 4, 256),))
    batch = Batch([1], [1048576])
    table = torch.arange(4096, dtype=torch.int32).flip(0)[None]
    for columns, slot in ((4096, 63), (4095, -1)):
        groups = {"c4a": (table[:, :columns], batch.slot_mapping())}
        assert builder.build(0, batch.metadata(), groups=groups).compressed["c4a"].compressed_slot_mapping == slot
