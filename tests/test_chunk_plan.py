"""Prefill chunks: field cases P1 and P2, and the properties that make the workspace safe."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.chunk_plan import plan_prefill_chunks, workspace_bytes, workspace_rows
from swa_backend.errors import BatchError
from swa_backend.layer_types import ModelVersion
from tests.support import Batch, make_builder, make_config


@pytest.mark.parametrize("ratio", [0, 1, 4, 128])
def test_p1_no_chunk_is_empty(ratio: int) -> None:
    config = make_config(max_model_len=1024, max_num_batched_tokens=64)
    metadata = make_builder(config).build(0, Batch([10] + [0] * 7, [1024] + [0] * 7).metadata())
    plan = metadata.get_prefill_chunk_plan(ratio, 4)
    compressed = 1024 // ratio if ratio > 1 else 0
    assert plan == [(0, 1, compressed, compressed + 137)]


def test_p1_an_all_zero_batch_has_an_empty_plan() -> None:
    assert plan_prefill_chunks([0] * 8, [0] * 8, [0] * 8, 4, 1000, has_compressed=True) == []


def test_zero_token_requests_close_a_chunk() -> None:
    plan = plan_prefill_chunks([5, 0, 5, 5], [5, 100, 5, 5], [5, 99, 5, 5], 4, 1000, has_compressed=True)
    assert plan == [(0, 1, 1, 6), (2, 4, 1, 6)]


@pytest.mark.parametrize(("ratio", "size"), [(0, 4), (-1, 4), (4, 0), (4, -1), (4.0, 4), (4, True)])
def test_numbers_that_no_layer_or_workspace_has(ratio: Any, size: Any) -> None:
    """A ratio of 0 is right where nothing is compressed, and nowhere else."""
    metadata = make_builder(make_config()).build(0, Batch([50], [500]).metadata())
    with pytest.raises(BatchError, match=r"compress_ratio|prefill_chunk_size"):
        metadata.get_prefill_chunk_plan(ratio, size, True)
    assert metadata.get_prefill_chunk_plan(0, 4, False) == metadata.get_prefill_chunk_plan(0, 4) == [(0, 1, 0, 177)]


def test_a_request_longer_than_the_configuration_is_refused() -> None:
    with pytest.raises(BatchError, match="prefill request 1"):
        plan_prefill_chunks([5, 5], [5, 9000], [5, 5], 4, 100, has_compressed=True)


def test_equality_with_the_budget_is_allowed() -> None:
    assert plan_prefill_chunks([5, 5], [5, 5], [5, 5], 1, 10, has_compressed=False) == [(0, 2, 0, 5)]
    assert len(plan_prefill_chunks([5, 5], [5, 5], [5, 5], 1, 9, has_compressed=False)) == 2


def test_the_plan_is_computed_once_per_step() -> None:
    metadata = make_builder(make_config()).build(0, Batch([50, 60], [500, 700]).metadata())
    assert metadata.get_prefill_chunk_plan(4, 4) is metadata.get_prefill_chunk_plan(4, 4, True)
    assert metadata.get_prefill_chunk_plan(4, 4) is not metadata.get_prefill_chunk_plan(4, 4, False)


def test_replay_makes_the_gathered_part_smaller() -> None:
    metadata = make_builder(make_config()).build(0, Batch([50], [500], replay=[440]).metadata())
    assert metadata.prefill_gather_lens.tolist() == [60]
    assert metadata.get_prefill_chunk_plan(0, 4) == [(0, 1, 0, 60)]


def test_p2_workspace_bounds_a_chunked_prefill_of_the_longest_request() -> None:
    config = make_config(max_model_len=8192, max_num_batched_tokens=512, compress_ratios=(0, 4, 128))
    bound = workspace_bytes(config)
    builder = make_builder(config)
    builder.build(0, Batch([2], [2]).metadata())
    position, largest = 0, 0
    while position < 8191:
        query = min(512, 8191 - position)
        position += query
        metadata = builder.build(0, Batch([query], [position]).metadata())
        for ratio in (0, 4, 128):
            for chunk in metadata.get_prefill_chunk_plan(ratio, config.prefill_chunk_size):
                largest = max(largest, (chunk.end - chunk.first) * chunk.width * 512 * 2)
    assert 0 < largest <= bound


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_workspace_bytes_bounds_every_legal_batch(data: st.DataObject) -> None:
    """Requests of any legal lengths, built as a step: no chunk of any ratio of the model needs more."""
    draw = data.draw
    version = draw(st.sampled_from(ModelVersion))
    ratios = draw(st.lists(st.sampled_from([0, 1, 2, 4, 128]), min_size=1, max_size=3))
    longest, tokens = draw(st.integers(1, 700)), draw(st.integers(1, 96))
    config = make_config(
        window=draw(st.sampled_from([1, 16, 128])),
        version=version,
        compress_ratios=ratios,
        max_model_len=longest,
        max_num_batched_tokens=tokens,
        max_num_seqs=8,
        max_image_tokens=draw(st.sampled_from([0, 24])) if version is ModelVersion.V4 else 0,
        prefill_chunk_size=draw(st.integers(1, 4)),
    )
    queries, seqs, left = [], [], tokens
    for _ in range(draw(st.integers(1, 8))):
        query = draw(st.integers(0, min(left, longest)))
        left -= query
        queries.append(query)
        seqs.append(draw(st.sampled_from([query, longest, (query + longest) // 2])))
    metadata = make_builder(config).build(0, Batch(queries, seqs).metadata())
    bound = workspace_bytes(config)
    covered = set()
    for ratio in ratios:
        compressed = ratio > 1 or (ratio == 1 and version is ModelVersion.V4_1)
        for chunk in metadata.get_prefill_chunk_plan(ratio, config.prefill_chunk_size, compressed):
            requests = range(metadata.num_decodes + chunk.first, metadata.num_decodes + chunk.end)
            assert chunk.compressed >= max(seqs[r] // ratio if compressed else 0 for r in requests)
            assert chunk.width >= chunk.compressed + max(metadata.prefill_gather_lens[chunk.first : chunk.end].tolist())
            assert (chunk.end - chunk.first) * chunk.width * 512 * 2 <= bound
            covered |= set(requests)
    assert covered == {r for r in range(metadata.num_decodes, len(queries)) if queries[r]}


@pytest.mark.parametrize(("ratio", "longest", "rows"), [(4, 8, 2), (4, 9, 3), (128, 1, 1), (128, 8192, 64), (1, 9, 9)])
def test_budget_by_hand(ratio: int, longest: int, rows: int) -> None:
    """The last entry of a context counts although it is not complete."""
    sizes = {"window": 16, "max_model_len": longest, "max_num_batched_tokens": 5}
    assert workspace_rows(ratio, 3, has_compressed=True, **sizes) == 3 * (rows + 16 + 5)
    assert workspace_rows(ratio, 3, has_compressed=False, **sizes) == 3 * (16 + 5)


def test_workspace_bytes_is_reached() -> None:
    """A bound no larger than needed: as many requests of the longest context as the chunk size says, almost."""
    config = make_config(max_model_len=8192, max_num_batched_tokens=64, compress_ratios=(0, 4), prefill_chunk_size=1)
    metadata = make_builder(config).build(0, Batch([64], [8192]).metadata())
    [chunk] = metadata.get_prefill_chunk_plan(4, 1)
    assert chunk.width * 1024 == workspace_bytes(config) - 1024  # W - 1 tokens are gathered, W are budgeted


def test_workspace_counts_ratio_one_as_compressed_in_v41_only() -> None:
    sizes = {"compress_ratios": (0, 1), "max_model_len": 4096, "max_num_batched_tokens": 256}
    v4 = workspace_bytes(make_config(**sizes))
    v41 = workspace_bytes(make_config(version=ModelVersion.V4_1, **sizes))
    assert v4 == 4 * (128 + 256) * 1024
    assert v41 == 4 * (4096 + 128 + 256) * 1024


@settings(max_examples=200)
@given(
    requests=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 500)), max_size=12),
    ratio=st.sampled_from([1, 2, 4, 128]),
    chunk_size=st.integers(1, 4),
    has_compressed=st.booleans(),
    window=st.sampled_from([1, 16, 128]),
)
def test_every_query_token_once_and_never_past_the_budget(
    requests: list[tuple[int, int]], ratio: int, chunk_size: int, has_compressed: bool, window: int
) -> None:
    queries = [q for q, _ in requests]
    seqs = [q + prefix for q, prefix in requests]
    gathers = [q + min(prefix, window - 1) for q, prefix in requests]
    budget = workspace_rows(
        ratio,
        chunk_size,
        has_compressed=has_compressed,
        window=window,
        max_model_len=600,
        max_num_batched_tokens=64,
    )
    plan = plan_prefill_chunks(queries, seqs, gathers, ratio, budget, has_compressed=has_compressed)
    covered = [request for chunk in plan for request in range(chunk.first, chunk.end)]
    assert covered == [request for request, q in enumerate(queries) if q]
    for chunk in plan:
        members = range(chunk.first, chunk.end)
        assert chunk.compressed == max(seqs[r] // ratio for r in members) * has_compressed
        assert chunk.width == chunk.compressed + max(gathers[r] for r in members)
        assert len(members) * chunk.width <= budget
    for before, after in itertools.pairwise(plan):  # chunks are as large as they can be
        if before.end == after.first:
            members = range(before.first, after.first + 1)
            grown = max(seqs[r] // ratio for r in members) * has_compressed + max(gathers[r] for r in members)
            assert len(members) * grown > budget


def test_plan_needs_host_lengths_only() -> None:
    """The same plan whatever the device copy says: it is made on the host."""
    batch = Batch([50], [500]).metadata()
    metadata = make_builder(make_config()).build(0, batch)
    batch.seq_lens.fill_(7)
    assert metadata.get_prefill_chunk_plan(4, 4) == [(0, 1, 125, 125 + 177)]
    assert isinstance(metadata.prefill_seq_lens_cpu, torch.Tensor)
