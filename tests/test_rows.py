"""Index rows against hand-written cases and a slow independent oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.errors import BatchError
from swa_backend.groups import CompressedGroup, SwaGroup
from tests.oracle_rows import rows_of, slot_of
from tests.support import Batch, make_builder, make_config

TABLE = [7, 3, 9]


def build(batch: Batch, *, num_pages: int | None = None, ragged: bool = False, **config: Any) -> Any:
    return make_builder(make_config(**config), num_pages=num_pages, ragged=ragged).build(0, batch.metadata())


def decode_row(metadata: Any, token: int) -> list[int]:
    return metadata.decode_swa_indices[token, 0].tolist()


def prefill_row(metadata: Any, token: int) -> list[int]:
    return metadata.prefill_swa_indices[token, 0].tolist()


def slots(first: int, last: int, table: list[int] = TABLE, page_tokens: int = 64) -> list[int]:
    return [slot_of(table, position, page_tokens) for position in range(first, last + 1)]


def test_r1_one_decode_across_three_pages() -> None:
    metadata = build(Batch([1], [130], table=[TABLE]))
    row = decode_row(metadata, 0)
    assert metadata.decode_swa_lens.tolist() == [128]
    assert row[:2] == [450, 451]
    assert row[61:64] == [511, 192, 193]
    assert row[-3:] == [255, 576, 577]


def test_r2_multi_token_decode() -> None:
    metadata = build(Batch([3], [130], table=[TABLE]), k=2)
    assert metadata.num_decode_tokens == 3
    assert metadata.decode_swa_lens.tolist() == [128, 128, 128]
    assert [decode_row(metadata, token)[0] for token in range(3)] == [448, 449, 450]
    assert [decode_row(metadata, token)[-1] for token in range(3)] == [255, 576, 577]


def test_r3_short_context() -> None:
    metadata = build(Batch([1], [5], table=[[5]]))
    assert decode_row(metadata, 0) == [320, 321, 322, 323, 324] + [-1] * 123
    assert metadata.decode_swa_lens.tolist() == [5]


@pytest.mark.parametrize("page", [-5, 2**31 - 1, 7])
def test_r4_a_padded_token_has_no_row_whatever_its_table_holds(page: int) -> None:
    metadata = build(Batch([1, 1], [130, 130], table=[[page] * 3, TABLE], slots=[-1, 577]))
    assert decode_row(metadata, 0) == [-1] * 128
    assert metadata.decode_swa_lens.tolist() == [0, 128]
    assert metadata.is_valid_token.tolist() == [False, True]
    assert decode_row(metadata, 1) == slots(2, 129)


def test_r4_padding_past_the_last_request() -> None:
    metadata = build(Batch([1], [130], table=[TABLE], slots=[577, -1, 5]), max_num_seqs=64)
    assert metadata.token_to_req_indices.tolist() == [0, 0, 0]
    assert metadata.is_valid_token.tolist() == [True, False, False]
    assert metadata.decode_swa_lens.tolist() == [128, 0, 0]


@pytest.mark.parametrize(("prefix", "expected"), [(200, range(72, 205)), (40, range(45))], ids=["R5", "R6"])
def test_r5_r6_a_draft_block_sees_the_window_before_it_and_itself(prefix: int, expected: range) -> None:
    table = [7, 3, 9, 4]
    metadata = build(Batch([5], [prefix + 5], table=[table], causal=False), k=5, dspark=True)
    assert metadata.decode_swa_width == 192
    assert metadata.window_size == 128
    assert metadata.decode_swa_lens.tolist() == [len(expected)] * 5
    for token in range(5):
        row = decode_row(metadata, token)
        assert row[: len(expected)] == slots(expected[0], expected[-1], table)
        assert row[len(expected) :] == [-1] * (192 - len(expected))


def test_r7_image_span() -> None:
    metadata = build(Batch([450], [450], spans={0: [(100, 400)]}, table=[list(range(8))]), max_image_tokens=384, k=0)
    assert metadata.prefill_swa_indices.shape == (450, 1, 512)
    for position, first, length in [(100, 0, 401), (250, 100, 301), (400, 100, 301), (401, 274, 128), (99, 0, 100)]:
        assert metadata.prefill_swa_lens[position] == length
        assert prefill_row(metadata, position)[:length] == list(range(first, first + length))
        assert set(prefill_row(metadata, position)[length:]) <= {-1}
    assert metadata.prefill_left_visible[[99, 100, 250, 400, 401]].tolist() == [0, 0, 150, 300, 0]
    assert metadata.prefill_right_visible[[99, 100, 250, 400, 401]].tolist() == [0, 300, 150, 0, 0]


def test_r8_replayed_prefix() -> None:
    """Prefix hit at 512, the last 128 of it replayed: nothing before 384 is in the cache."""
    batch = Batch([138], [522], replay=[384], table=[list(range(10, 20))])
    metadata = build(batch)
    assert metadata.prefill_swa_lens[0] == 1
    assert metadata.prefill_swa_lens[511 - 384] == 128
    first = [slot_of(list(range(10, 20)), 384, 64)]
    assert all(min(row[row >= 0]) >= first[0] for row in metadata.prefill_swa_indices[:, 0])
    assert metadata.prefill_gather_lens.tolist() == [138]


def test_r8_a_decode_behind_a_replayed_prefix_stops_there_too() -> None:
    metadata = build(Batch([1, 2], [522, 300], replay=[450, 0], table=[list(range(9)), list(range(9, 18))]), k=1)
    assert metadata.decode_swa_lens.tolist() == [72, 128, 128]
    assert decode_row(metadata, 0)[:72] == list(range(450, 522))
    assert decode_row(metadata, 1)[0] == 9 * 64 + 171


def test_r9_missing_page_leaves_holes_in_place() -> None:
    metadata = build(Batch([1], [130], table=[[7, -1, 9]], slots=[577]))
    row = decode_row(metadata, 0)
    assert metadata.decode_swa_lens.tolist() == [128]
    assert row[:62] == list(range(450, 512))
    assert row[62:126] == [-1] * 64
    assert row[126:] == [576, 577]


def test_c8_pages_past_the_cache_are_no_entries() -> None:
    metadata = build(Batch([1], [130], table=[TABLE]), num_pages=9)
    row = decode_row(metadata, 0)
    assert row[-2:] == [-1, -1]
    assert row[:126] == slots(2, 127)


def test_a_table_too_narrow_never_reads_the_next_row() -> None:
    wide = torch.full((2, 16), 5, dtype=torch.int32)
    batch = Batch([1, 1], [130, 130], table=[[7, 3], [7, 3]], slots=[0, 1]).metadata()
    wide[:, :2] = batch.block_table_tensor
    batch.block_table_tensor = wide[:, :2]
    metadata = make_builder(make_config()).build(0, batch)
    for token in range(2):
        assert decode_row(metadata, token) == [*slots(2, 127), -1, -1]


def test_p5_resume_inside_an_image_span() -> None:
    batch = Batch([150], [450], spans={0: [(100, 400)]}, table=[list(range(8))])
    metadata = build(batch, max_image_tokens=384)
    live = metadata.prefill_swa_indices[metadata.prefill_swa_indices >= 0]
    assert int(live.min()) == 173
    assert metadata.prefill_gather_lens.tolist() == [277]


def test_v1_causal_images_are_ignored() -> None:
    plain = Batch([2100], [4000], table=[list(range(63))])
    marked = Batch([2100], [4000], table=[list(range(63))], spans={0: [(1900, 3947)]})
    sizes = {"max_num_batched_tokens": 2100, "max_image_tokens": 0}
    expected = build(plain, **sizes)
    found = build(marked, **sizes)
    assert found.prefill_left_visible is None
    assert torch.equal(found.prefill_swa_indices, expected.prefill_swa_indices)
    assert prefill_row(found, 0) == list(range(1773, 1901))


def test_v2_span_longer_than_allowed_is_refused() -> None:
    with pytest.raises(BatchError, match=r"mm_req_doc_ranges\[0\].*\[0, 2047\]"):
        build(Batch([10], [10], spans={0: [(0, 2047)]}), max_image_tokens=384)


@pytest.mark.parametrize("spans", [{0: [(5, 4)]}, {0: [(0, 9), (9, 12)]}, {3: [(0, 1)]}, {0: [(-2, 3)]}])
def test_spans_that_mean_nothing_are_refused(spans: dict[int, list[tuple[int, int]]]) -> None:
    with pytest.raises(BatchError, match="mm_req_doc_ranges"):
        build(Batch([20], [20], spans=spans), max_image_tokens=384)


def test_rows_of_a_vision_model_without_spans_are_the_causal_ones_padded() -> None:
    metadata = build(Batch([1, 40], [90, 70]), max_image_tokens=64)
    text = build(Batch([1, 40], [90, 70]))
    assert metadata.prefill_left_visible is None
    assert torch.equal(metadata.prefill_swa_indices[..., :128], text.prefill_swa_indices)
    assert set(metadata.prefill_swa_indices[..., 128:].unique().tolist()) == {-1}


def test_s7_non_causal_needs_dspark() -> None:
    with pytest.raises(BatchError, match="causal"):
        build(Batch([5], [205], causal=False), k=5)


@pytest.mark.parametrize("queries", [[6], [5, 6], [200]])
def test_non_causal_step_with_a_longer_request_is_refused(queries: list[int]) -> None:
    with pytest.raises(BatchError, match="non-causal"):
        build(Batch(queries, [q + 100 for q in queries], causal=False), k=5, dspark=True)


def test_a_padded_maximum_does_not_make_a_draft_step_too_long() -> None:
    """``max_query_len`` may be larger than any query; what counts is each request's own length."""
    batch = Batch([5, 3], [205, 40], causal=False).metadata()
    expected = make_builder(make_config(k=5, dspark=True)).build(0, batch).decode_swa_indices
    batch.max_query_len = 64
    assert torch.equal(make_builder(make_config(k=5, dspark=True)).build(0, batch).decode_swa_indices, expected)


@pytest.mark.parametrize(("k", "width"), [(7, 192), (65, 256)])
def test_s2_draft_width_travels_with_the_metadata(k: int, width: int) -> None:
    metadata = build(Batch([k] * 7, [300 + k] * 7, causal=False), k=k, dspark=True)
    assert metadata.decode_swa_width == width
    assert metadata.decode_swa_indices.shape == (7 * k, 1, width)


def test_s3_window_and_width_are_different_fields() -> None:
    metadata = build(Batch([5], [205], causal=False), k=5, dspark=True)
    assert (metadata.window_size, metadata.decode_swa_width) == (128, 192)
    assert metadata.decode_swa_lens.tolist() == [133] * 5


def test_lens_past_the_decode_tokens_are_zero() -> None:
    builder = make_builder(make_config())
    builder.build(0, Batch([1] * 9, [200] * 9).metadata())
    metadata = builder.build(0, Batch([1] * 3, [200] * 3).metadata())
    whole = torch.as_strided(metadata.decode_swa_lens, (1024,), (1,))
    assert whole[:3].tolist() == [128] * 3
    assert not whole[3:].any()


RANDOM = st.randoms(use_true_random=False)


@settings(max_examples=120, deadline=None)
@given(
    rng=RANDOM,
    window=st.sampled_from([1, 3, 16, 128]),
    page_tokens=st.sampled_from([32, 64, 96]),
    k=st.integers(0, 4),
    images=st.booleans(),
    causal=st.booleans(),
    holes=st.booleans(),
)
def test_rows_equal_the_slow_oracle(
    rng: Any, window: int, page_tokens: int, k: int, images: bool, causal: bool, holes: bool
) -> None:
    """Every mix: decodes, extends, prefills, invalid tokens, missing pages, replay, images, drafts."""
    dspark = not causal
    k = max(k, 1) if dspark else k
    threshold = 1 + k
    num_reqs = rng.randint(1, 6)
    limit = k if dspark else rng.choice([threshold, 40])
    queries = sorted((rng.randint(0, limit) for _ in range(num_reqs)), key=lambda q: q > threshold)
    if not sum(queries):
        queries[0] = 1
    seqs = [q + rng.choice([0, rng.randint(0, 3 * window), rng.randint(0, 300)]) for q in queries]
    columns = max(-(-seq // page_tokens) for seq in seqs) + rng.randint(0, 2)
    num_pages = num_reqs * columns + 3
    pages = rng.sample(range(num_pages), num_reqs * columns)
    if holes:
        pages = [rng.choice([page, page, page, -1, num_pages, 2**30]) for page in pages]
    table = [pages[r * columns : (r + 1) * columns] for r in range(num_reqs)]
    replay = [rng.randint(0, seq - q) for q, seq in zip(queries, seqs, strict=True)] if rng.random() < 0.4 else None
    cap = 24 if images and causal else 0
    spans: dict[int, list[tuple[int, int]]] = {}
    if cap:
        for request, seq in enumerate(seqs):
            at = rng.randint(0, 20)
            while at < seq and rng.random() < 0.8:
                length = rng.randint(1, cap)
                spans.setdefault(request, []).append((at, at + length - 1))
                at += length + rng.randint(0, 10)
    slot_mapping = [rng.choice([5, 5, 5, 5, -1, -7]) for _ in range(sum(queries))]
    slot_mapping += [rng.choice([-1, 3]) for _ in range(rng.choice([0, 0, 4]))]
    batch = Batch(
        queries, seqs, page_tokens, table=table, slots=slot_mapping, causal=causal, spans=spans, replay=replay
    )
    config = make_config(window=window, page_tokens=page_tokens, k=k, dspark=dspark, max_image_tokens=cap)
    builder = make_builder(config, num_pages=num_pages, ragged=True)
    for buffer in (builder._buffers.decode_indices, builder._buffers.prefill_indices, builder._buffers.decode_lens):
        buffer.fill_(77)  # what an earlier step left behind must never show
    metadata = builder.build(0, batch.metadata())
    split = metadata.num_decode_tokens
    expected = rows_of(
        queries,
        seqs,
        table,
        slot_mapping,
        num_decode_tokens=split,
        window=window,
        page_tokens=page_tokens,
        num_pages=num_pages,
        causal=causal,
        replay=replay if causal else None,
        spans=spans,
        max_image_tokens=cap,
    )
    assert metadata.is_valid_token.tolist() == [token.valid and token.position >= 0 for token in expected]
    assert metadata.token_to_req_indices.tolist() == [token.request for token in expected]
    ragged: dict[str, list[int]] = {"decode": [], "prefill": []}
    for at, token in enumerate(expected):
        part, row_at = ("decode", at) if at < split else ("prefill", at - split)
        row = getattr(metadata, f"{part}_swa_indices")[row_at, 0].tolist()
        assert getattr(metadata, f"{part}_swa_lens")[row_at] == len(token.row)
        assert row == token.row + [-1] * (len(row) - len(token.row))
        ragged[part] += [slot for slot in token.row if slot >= 0]
        if metadata.prefill_left_visible is not None and part == "prefill":
            assert metadata.prefill_left_visible[at] == token.left
            assert metadata.prefill_right_visible[at] == token.right
    for part in ("decode", "prefill"):
        indptr = getattr(metadata, f"{part}_swa_ragged_indptr")
        if indptr is not None and len(indptr) > 1:
            assert getattr(metadata, f"{part}_swa_ragged_indices")[: indptr[-1]].tolist() == ragged[part]


def test_s9_ragged_capacity_of_a_full_draft_step() -> None:
    config = make_config(k=5, dspark=True, max_num_batched_tokens=320)
    metadata = make_builder(config, ragged=True).build(0, Batch([5] * 64, [205] * 64, causal=False).metadata())
    assert metadata.decode_swa_ragged_indices.shape == (320 * 192,)
    assert metadata.decode_swa_ragged_indptr.tolist() == [133 * row for row in range(321)]


def test_g4_padded_rows_repeat_the_last_indptr() -> None:
    queries = [1] * 342
    batch = Batch(queries, [200] * 342, padding=10)
    metadata = build(batch, ragged=True, max_num_seqs=352)
    indptr = metadata.decode_swa_ragged_indptr
    assert indptr.shape == (353,)
    assert indptr[342:].tolist() == [342 * 128] * 11
    assert not metadata.decode_swa_lens[342:].any()


def test_compressed_groups_and_further_window_groups_in_one_build() -> None:
    queries, seqs = [1, 1, 300], [129, 8, 300]
    batch = Batch(queries, seqs)
    total = sum(queries)
    table4 = torch.arange(3 * 8, dtype=torch.int32).reshape(3, 8)
    table128 = (torch.arange(3 * 8, dtype=torch.int32) * 2).reshape(3, 8)
    other = Batch(queries, seqs, page_tokens=32)
    own_slots = batch.slot_mapping()
    builder = make_builder(
        make_config(),
        compressed_groups=(CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256)),
        swa_groups=(SwaGroup("other", page_tokens=32),),
    )
    groups = {
        "c4a": (table4, own_slots),
        "c128a": (table128, own_slots),
        "other": (other.block_table(), other.slot_mapping()),
    }
    metadata = builder.build(0, batch.metadata(), groups=groups)

    positions = [seq - query + i for query, seq in zip(queries, seqs, strict=True) for i in range(query)]
    requests = [r for r, query in enumerate(queries) for _ in range(query)]
    for name, ratio, table, epp in (("c4a", 4, table4, 64), ("c128a", 128, table128, 2)):
        expected = [
            slot_of(table[r].tolist(), p // ratio, epp) if (p + 1) % ratio == 0 else -1
            for r, p in zip(requests, positions, strict=True)
        ]
        assert metadata.compressed[name].compressed_slot_mapping.tolist() == expected
        assert any(slot >= 0 for slot in expected)
    c128a = metadata.compressed["c128a"]
    assert metadata.compressed["c4a"].rows is None
    assert c128a.rows.shape == (total, 64)
    for token, (r, p) in enumerate(zip(requests, positions, strict=True)):
        count = (p + 1) // 128
        assert c128a.lens[token] == count
        assert c128a.rows[token, :count].tolist() == [slot_of(table128[r].tolist(), e, 2) for e in range(count)]

    alone = make_builder(make_config(page_tokens=32)).build(0, other.metadata())
    assert torch.equal(metadata.groups["other"].decode_swa_indices, alone.decode_swa_indices)
    assert torch.equal(metadata.groups["other"].prefill_swa_indices, alone.prefill_swa_indices)
    assert metadata.groups["other"].block_size == 32
    with pytest.raises(BatchError, match="groups"):
        builder.build(0, batch.metadata())


def test_invalid_tokens_have_no_compressed_entries() -> None:
    builder = make_builder(make_config(), compressed_groups=(CompressedGroup("c128a", 128, 256),))
    batch = Batch([1, 1], [128, 256], slots=[-1, 9])
    table = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    metadata = builder.build(0, batch.metadata(), groups={"c128a": (table, batch.slot_mapping())})
    assert metadata.compressed["c128a"].lens.tolist() == [0, 2]
    assert metadata.compressed["c128a"].compressed_slot_mapping.tolist() == [-1, 15]
    assert metadata.compressed["c128a"].rows[1, :2].tolist() == [14, 15]


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]], ids=["no request", "no token"])
def test_empty_batches_give_empty_metadata(lengths: list[int]) -> None:
    batch = Batch(lengths, lengths)
    metadata = build(batch)
    assert metadata.num_tokens == 0
    assert metadata.decode_swa_indices.shape == (0, 1, 128)
    assert metadata.prefill_swa_indices is None
    assert metadata.get_prefill_chunk_plan(4, 4) == []


def test_g9_random_drains_never_leave_the_cache() -> None:
    """Captured-graph style: fixed R, lengths and validity changed in place, updated again and again."""
    rng = np.random.default_rng(0)
    num_pages = 40
    batch = Batch([2] * 8, [300] * 8, table=rng.integers(0, num_pages, (8, 6)).tolist(), slots=[0] * 16).metadata()
    builder = make_builder(make_config(k=1), num_pages=num_pages)
    metadata = builder.build(0, batch)
    pointer = metadata.decode_swa_indices.data_ptr()
    for _ in range(500):
        batch.seq_lens.copy_(torch.from_numpy(rng.integers(0, 400, 8).astype(np.int32)))
        batch.slot_mapping.copy_(torch.from_numpy(rng.integers(-1, 2, 16)))
        batch.block_table_tensor.copy_(torch.from_numpy(rng.integers(-3, num_pages + 9, (8, 6)).astype(np.int32)))
        builder.update_draft_decode_metadata(metadata)
        rows = metadata.decode_swa_indices
        assert int(rows.min()) >= -1
        assert int(rows.max()) < num_pages * 64
        assert int(metadata.decode_swa_lens.max()) <= 128
        assert metadata.decode_swa_indices.data_ptr() == pointer


def test_capture_build_reads_query_lengths_on_the_device() -> None:
    """Host copies of a padded graph say nothing: what each request has is in the device tensors alone."""
    real = Batch([2, 0, 1, 2], [100, 40, 7, 300], padding=3)
    batch = real.metadata()
    builder = make_builder(make_config(k=1, max_num_seqs=4))
    expected = make_builder(make_config(k=1, max_num_seqs=4)).build(0, batch)
    batch.query_start_loc_cpu = torch.full((5,), 9999, dtype=torch.int32)
    batch.max_query_len = 9999
    found = builder.capture_build(4, 8, batch)
    assert found.decode_swa_indices.shape == (8, 1, 128)
    assert found.max_decode_query_len == 2
    assert torch.equal(found.decode_swa_indices, expected.decode_swa_indices)
    assert torch.equal(found.token_to_req_indices, expected.token_to_req_indices)
    assert found.is_valid_token.tolist() == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "field"), [(3, 8, "num_reqs"), (4, 9, "num_actual_tokens"), (2, 8, "num_reqs")]
)
def test_capture_build_of_another_shape_is_refused(num_reqs: int, num_tokens: int, field: str) -> None:
    batch = Batch([2, 2, 2, 2], [100, 40, 7, 300]).metadata()
    with pytest.raises(BatchError, match=field):
        make_builder(make_config(k=1)).capture_build(num_reqs, num_tokens, batch)


def test_capture_build_of_prefills_or_drafts_is_refused() -> None:
    builder = make_builder(make_config(k=1, dspark=True))
    with pytest.raises(BatchError, match="tokens a request"):
        builder.capture_build(1, 9, Batch([9], [9]).metadata())
    with pytest.raises(BatchError, match="non-causal"):
        builder.capture_build(1, 1, Batch([1], [9], causal=False).metadata())
