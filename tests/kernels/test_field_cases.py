"""Failures that users of such backends reported, through the kernels: the reported input, the right result by hand.

Each test is named by its case. What a kernel's own tests hold as well is there: G1, G10 and S8 of top-k rows in
``test_topk``, G2, C1, C3 and C4 of writing in ``test_cache_write``, C1 and C8 of gathering in ``test_cache_gather``,
every code of C7 in ``test_fp8``, H1 in ``test_jit`` and ``test_warmup``. H3, H4 and the 10,000 replays of G5 and G9
need a GPU: ``tests/gpu``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.cache_layout import Dialect
from swa_backend.chunk_plan import PrefillChunk
from swa_backend.combine import CombineStep, CompressedRows, combined_stride
from swa_backend.errors import BatchError
from swa_backend.groups import CompressedGroup
from swa_backend.kernels.cache_gather import gather_kv
from swa_backend.kernels.cache_write import write_kv
from swa_backend.kernels.combine import combine_rows
from swa_backend.kernels.jit import stats
from swa_backend.kernels.topk import map_topk
from swa_backend.metadata import DeepseekSparseSWAMetadata
from tests.independent_codec import Array
from tests.kernels.on_device import CapturedBuild, assert_same, at_the_end, kernel_builder, tensors_of
from tests.kernels.pools import bf16, bits_of, make_twin, wild_keys
from tests.support import Batch, make_config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, at overflow and NaN
TABLE = [7, 3, 9]
NONE = -1


def build(device: torch.device, batch: Batch, *, ragged: bool = False, **config: Any) -> Any:
    builder = kernel_builder(make_config(**config), device, ragged=ragged)
    return builder.build(0, batch.metadata(str(device)))


def decode_row(metadata: DeepseekSparseSWAMetadata, token: int) -> list[int]:
    row: list[int] = metadata.decode_swa_indices[token, 0].tolist()
    return row


def prefill_row(metadata: DeepseekSparseSWAMetadata, position: int) -> list[int]:
    assert metadata.prefill_swa_indices is not None
    row: list[int] = metadata.prefill_swa_indices[position, 0].tolist()
    return row


def slots(first: int, last: int, table: list[int], page: int = 64) -> list[int]:
    """Slots of the positions from ``first`` to ``last``, both included; -1 where the table ends before."""
    columns = [position // page for position in range(first, last + 1)]
    return [
        table[column] * page + position % page if column < len(table) else NONE
        for column, position in zip(columns, range(first, last + 1), strict=True)
    ]


def padded(row: list[int], width: int) -> list[int]:
    return row + [NONE] * (width - len(row))


def finite_keys(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(1, 0x4400, (count, 512)).astype(np.uint16)


# Rows


@pytest.mark.parametrize("ragged", [False, True])
def test_r1_one_decode_across_three_pages(device: torch.device, ragged: bool) -> None:
    metadata = build(device, Batch([1], [130], table=[TABLE]), ragged=ragged)
    row = decode_row(metadata, 0)
    assert metadata.decode_swa_lens.tolist() == [128]
    assert (row[:2], row[61:64], row[-3:]) == ([450, 451], [511, 192, 193], [255, 576, 577])
    assert row == [*range(450, 512), *range(192, 256), 576, 577]
    if ragged:
        assert metadata.decode_swa_ragged_indptr.tolist() == [0, 128]
        assert metadata.decode_swa_ragged_indices[:128].tolist() == row


def test_r2_multi_token_decode(device: torch.device) -> None:
    metadata = build(device, Batch([3], [130], table=[TABLE]), k=2)
    assert metadata.num_decode_tokens == 3
    assert metadata.decode_swa_lens.tolist() == [128] * 3
    rows = [decode_row(metadata, token) for token in range(3)]
    assert [row[0] for row in rows] == [448, 449, 450]
    assert [row[-1] for row in rows] == [255, 576, 577]


def test_r3_short_context(device: torch.device) -> None:
    metadata = build(device, Batch([1], [5], table=[[5]]))
    assert metadata.decode_swa_lens.tolist() == [5]
    assert decode_row(metadata, 0) == [320, 321, 322, 323, 324] + [NONE] * 123


@pytest.mark.parametrize("page", [-5, 2**31 - 1, 7])
@pytest.mark.parametrize("ragged", [False, True])
def test_r4_a_padded_token_reads_no_table(device: torch.device, page: int, ragged: bool) -> None:
    """Its request's pages may be anything; a table that was read would show in the row."""
    case = Batch([1, 1, 40], [130, 130, 170], table=[[page] * 3, TABLE, TABLE], slots=[-1, 577, *[-1] * 39, 609, 3])
    metadata = build(device, case, ragged=ragged)
    assert metadata.is_valid_token.tolist() == [False, True, *[False] * 39, True, False]
    assert metadata.decode_swa_lens.tolist() == [0, 128]
    assert decode_row(metadata, 0) == [NONE] * 128
    assert decode_row(metadata, 1) == slots(2, 129, TABLE)
    assert metadata.prefill_swa_lens.tolist() == [*[0] * 39, 128, 0]
    assert prefill_row(metadata, 39) == slots(42, 169, TABLE)
    assert (metadata.prefill_swa_indices[[*range(39), 40]] == NONE).all()
    if ragged:
        assert metadata.decode_swa_ragged_indptr.tolist() == [0, 0, 128]
        assert metadata.prefill_swa_ragged_indptr.tolist() == [*[0] * 40, 128, 128]


@pytest.mark.parametrize(("prefix", "first", "length"), [(200, 72, 133), (40, 0, 45)], ids=["r5", "r6"])
@pytest.mark.parametrize("ragged", [False, True])
def test_r5_r6_draft_blocks(device: torch.device, prefix: int, first: int, length: int, ragged: bool) -> None:
    table = [7, 3, 9, 4]
    case = Batch([5], [prefix + 5], table=[table], causal=False)
    metadata = build(device, case, ragged=ragged, k=5, dspark=True)
    right = slots(first, prefix + 4, table)
    assert len(right) == length
    assert metadata.decode_swa_width == 192
    assert metadata.decode_swa_lens.tolist() == [length] * 5
    assert [decode_row(metadata, token) for token in range(5)] == [padded(right, 192)] * 5
    if ragged:
        assert metadata.decode_swa_ragged_indptr.tolist() == [length * i for i in range(6)]
        assert metadata.decode_swa_ragged_indices[: 5 * length].tolist() == right * 5


def test_non_causal_draft_ignores_replay_start(device: torch.device) -> None:
    table = [7, 3, 9, 4]
    case = Batch([5], [205], table=[table], causal=False, replay=[190])
    metadata = build(device, case, k=5, dspark=True)
    assert decode_row(metadata, 4) == padded(slots(72, 204, table), 192)


def test_r7_image_span(device: torch.device) -> None:
    table = [9, 2, 3, 11, 5, 6, 7]
    case = Batch([402], [402], spans={0: [(100, 400)]}, table=[table])
    metadata = build(device, case, max_image_tokens=384)
    assert metadata.prefill_swa_indices.shape == (402, 1, 512)
    right = [(100, 0, 400, 401), (250, 100, 400, 301), (400, 100, 400, 301), (401, 274, 401, 128)]
    for position, first, last, length in right:
        assert metadata.prefill_swa_lens[position] == length
        assert prefill_row(metadata, position) == padded(slots(first, last, table), 512)
    assert metadata.prefill_left_visible[[99, 100, 250, 400, 401]].tolist() == [0, 0, 150, 300, 0]
    assert metadata.prefill_right_visible[[99, 100, 250, 400, 401]].tolist() == [0, 300, 150, 0, 0]


@pytest.mark.parametrize("ragged", [False, True])
def test_r8_replayed_prefix(device: torch.device, ragged: bool) -> None:
    """A prefix hit at 512 of which the last 128 tokens are replayed, and 10 more: nothing lies before 384."""
    table = [90, 91, 92, 93, 94, 95, 16, 27, 18]  # pages 90 to 95 hold positions before 384
    metadata = build(device, Batch([138], [522], replay=[384], table=[table]), ragged=ragged)
    assert metadata.prefill_swa_lens[0] == 1
    assert prefill_row(metadata, 0) == padded([16 * 64], 128)
    assert metadata.prefill_swa_lens[511 - 384] == 128
    assert prefill_row(metadata, 511 - 384) == slots(384, 511, table)
    assert prefill_row(metadata, 137) == slots(521 - 127, 521, table)
    assert int(metadata.prefill_swa_indices.max()) < 28 * 64
    assert metadata.prefill_gather_lens.tolist() == [138]


@pytest.mark.parametrize("ragged", [False, True])
def test_r9_a_missing_page_leaves_its_entries_empty(device: torch.device, ragged: bool) -> None:
    metadata = build(device, Batch([1], [130], table=[[7, -1, 9]], slots=[577]), ragged=ragged)
    assert metadata.decode_swa_lens.tolist() == [128]
    assert decode_row(metadata, 0) == [*range(450, 512), *[NONE] * 64, 576, 577]
    if ragged:  # the remaining 64 keys
        assert metadata.decode_swa_ragged_indptr.tolist() == [0, 64]
        assert metadata.decode_swa_ragged_indices[:64].tolist() == [*range(450, 512), 576, 577]


# Padding and captured graphs


def test_g2_page_zero_shows_in_no_row_that_it_does_not_belong_to(device: torch.device) -> None:
    """Tables are filled up with 0: neither a short row nor a padded one may reach page 0."""
    case = Batch([1, 1, 1], [5, 130, 3], table=[[5, 0, 0], [7, 3, 9], [0, 0, 0]], slots=[324, -1, 2])
    metadata = build(device, case)
    assert decode_row(metadata, 0) == padded([320, 321, 322, 323, 324], 128)
    assert decode_row(metadata, 1) == [NONE] * 128
    assert decode_row(metadata, 2) == padded([0, 1, 2], 128), "page 0 is an ordinary page"


def test_g2_what_page_zero_holds_does_not_reach_a_workspace(device: torch.device) -> None:
    """Page 0, data and scales, full of NaN: a short request and one of no length are as with page 0 zeroed."""
    found = []
    for fill in (0xFF, 0):
        twin = make_twin(device, "fp8_ds_mla", entries=64, pages=3)
        twin.memory[: twin.view.page_stride] = fill
        write_kv(bf16(finite_keys(1, seed=9), device), twin.view, torch.tensor([64 + 4], device=device))
        twin.memory[37_440 : 37_440 + 4 * 576] = 0x38
        twin.memory[37_440 + 64 * 576 : 37_440 + 64 * 576 + 4 * 8] = 127
        out = torch.full((2, 8, 512), 7.0, dtype=torch.bfloat16, device=device)
        table = torch.tensor([[1, 0, 0], [0, 0, 0]], dtype=torch.int32, device=device)
        gather_kv(twin.view, table, torch.tensor([5, 0], dtype=torch.int32, device=device), None, out, 0)
        found.append(out)
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert (found[0][1] == 7.0).all()


def test_g3_a_capture_time_dummy_batch_writes_nothing(device: torch.device) -> None:
    config = make_config(k=1, max_num_seqs=8, max_num_batched_tokens=16)
    groups = (CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256))
    builder = kernel_builder(config, device, ragged=True, compressed_groups=groups)
    batch = Batch([2] * 8, [130] * 8, table=[[0] * 8] * 8, slots=[-1] * 16).metadata(str(device))
    further = dict.fromkeys(("c4a", "c128a"), (batch.block_table_tensor, batch.slot_mapping))
    metadata = CapturedBuild(builder, batch, further).metadata
    assert (metadata.slot_mapping == -1).all()
    found = tensors_of(metadata)
    for name in ("is_valid_token", "decode_swa_lens", "c128a.lens", "decode_swa_ragged_indptr"):
        assert not found[name].any(), name
    for name in ("decode_swa_indices", "c4a.slots", "c128a.slots"):
        assert (found[name] == NONE).all(), name
    for where in (metadata.slot_mapping, found["c4a.slots"]):
        twin = make_twin(device, "fp8_ds_mla", entries=64)
        write_kv(bf16(wild_keys(16, seed=1), device), twin.view, where)
        twin.assert_same_bytes()


def test_g4_342_tokens_padded_to_352(device: torch.device) -> None:
    seqs = [1 + 7 * request % 300 for request in range(342)]
    config = {"max_num_seqs": 352, "max_num_batched_tokens": 512}
    metadata = build(device, Batch([1] * 342, seqs, padding=10), ragged=True, **config)
    indptr = metadata.decode_swa_ragged_indptr.tolist()
    assert len(indptr) == 353
    lens = [min(seq, 128) for seq in seqs]
    assert indptr == [0, *np.cumsum(lens), *[sum(lens)] * 10]
    assert metadata.decode_swa_lens.tolist() == [*lens, *[0] * 10]
    assert (metadata.decode_swa_indices[342:] == NONE).all()
    assert not metadata.is_valid_token[342:].any()


def test_g5_a_graph_of_8_requests_replays_other_lengths(device: torch.device) -> None:
    config = make_config(k=1, max_num_seqs=8, max_num_batched_tokens=16)
    groups = (CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256))

    def builder() -> Any:
        return kernel_builder(config, device, ragged=True, num_pages=50, compressed_groups=groups)

    own, fresh = builder(), builder()
    batch = Batch([2] * 8, [130] * 8, table=[[1] * 8] * 8, slots=[-1] * 16).metadata(str(device))
    further = dict.fromkeys(("c4a", "c128a"), (batch.block_table_tensor, batch.slot_mapping))
    graph = CapturedBuild(own, batch, further)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(graph.metadata).items()}
    rng = np.random.default_rng(8)
    for _ in range(2):
        queries = rng.integers(0, 3, 8)
        tokens = int(queries.sum())
        starts = np.concatenate([[0], queries.cumsum()])
        batch.query_start_loc.copy_(torch.from_numpy(starts.astype(np.int32)))
        batch.seq_lens.copy_(torch.from_numpy((queries + rng.integers(0, 500, 8)).astype(np.int32)))
        batch.block_table_tensor.copy_(torch.from_numpy(rng.integers(-1, 55, (8, 8)).astype(np.int32)))
        batch.slot_mapping.copy_(torch.tensor([5] * tokens + [-1] * (16 - tokens)))
        graph.replay()
        assert_same(graph.metadata, fresh.capture_build(8, 16, batch, groups=further))
        live = graph.metadata.decode_swa_lens.cpu()
        position = batch.seq_lens.cpu().repeat_interleave(torch.from_numpy(queries)) - 1
        position -= torch.from_numpy(np.concatenate([np.arange(q)[::-1] for q in queries]).copy()).int()
        assert live.tolist() == [*(position + 1).clamp(max=128).tolist(), *[0] * (16 - tokens)]
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(graph.metadata).items()} == addresses


def test_g6_longer_rows_than_at_capture(device: torch.device) -> None:
    """Captured while no row had more than one entry; the width is fixed, each row's length is its own."""
    config = make_config(max_model_len=128 * 256, max_num_seqs=4, max_num_batched_tokens=4)
    builder = kernel_builder(config, device, compressed_groups=(CompressedGroup("c128a", 128, 256),))
    columns = 128
    table = torch.arange(4 * columns, dtype=torch.int32).view(4, columns).flip(1) + 3
    batch = Batch([1] * 4, [128, 5, 128, 127], table=[[1] * 512] * 4, slots=[0] * 4).metadata(str(device))
    graph = CapturedBuild(builder, batch, {"c128a": (table.to(device), batch.slot_mapping)})
    group = graph.metadata.compressed["c128a"]
    assert group.rows.shape == (4, 256)
    assert group.lens.tolist() == [1, 0, 1, 0]
    assert group.rows[0, 0] == 2 * int(table[0, 0])
    batch.seq_lens.copy_(torch.tensor([128 * 150 + 3, 129, 128 * 256, 128 * 65], dtype=torch.int32))
    graph.replay()
    assert group.lens.tolist() == [150, 1, 256, 65]
    for row, length in enumerate((150, 1, 256, 65)):
        right = [2 * int(table[row, entry // 2]) + entry % 2 for entry in range(length)]
        assert group.rows[row, :length].tolist() == right


@pytest.mark.parametrize("count", [8, 32, 33, 64, 250, 256])
def test_g7_lengths_that_are_all_zero(device: torch.device, count: int) -> None:
    config = make_config(max_num_seqs=count, max_num_batched_tokens=count)
    groups = (CompressedGroup("c128a", 128, 256),)
    builder = kernel_builder(config, device, ragged=True, compressed_groups=groups)
    # Some tokens even have a slot: there is nothing before them all the same.
    case = Batch([1] * count, [0] * count, table=[[0, 0]] * count, slots=[-1, 3] * (count // 2) + [-1] * (count % 2))
    batch = case.metadata(str(device))
    metadata = CapturedBuild(builder, batch, {"c128a": (batch.block_table_tensor, batch.slot_mapping)}).metadata
    found = tensors_of(metadata)
    for name in ("decode_swa_lens", "decode_swa_ragged_indptr", "c128a.lens"):
        assert not found[name].any(), name
    assert (found["decode_swa_indices"] == NONE).all()
    assert (found["c128a.slots"] == NONE).all()
    zeros = torch.zeros(count, dtype=torch.int32, device=device)
    out = torch.full((count, 1, 512), 7.0, dtype=torch.bfloat16, device=device)
    gather_kv(make_twin(device, "fp8_ds_mla").view, batch.block_table_tensor, zeros, None, out, 0)
    assert (out == 7.0).all()


@pytest.mark.parametrize(("k", "parallel"), [(5, False), (7, False), (5, True)])
def test_g8_the_largest_speculative_step_fits_and_a_larger_one_is_refused(
    device: torch.device, k: int, parallel: bool
) -> None:
    longest = 1 + (2 * k if parallel else k)
    config = make_config(k=k, parallel_drafting=parallel, max_num_seqs=64, max_num_batched_tokens=64 * longest)
    builder = kernel_builder(config, device)
    metadata = builder.build(0, Batch([longest] * 64, [300] * 64).metadata(str(device)))
    assert metadata.num_decode_tokens == 64 * longest
    assert metadata.decode_swa_lens.tolist() == [128] * (64 * longest)
    last = Batch([longest] * 64, [300] * 64).block_table().tolist()[-1]
    assert decode_row(metadata, 64 * longest - 1) == slots(172, 299, last)
    launches = stats().launches
    for case in (
        Batch([longest] * 65, [300] * 65),
        Batch([longest] * 64, [300] * 64, padding=1),
        Batch([longest] * 63 + [longest + 1] * 2, [300] * 65),
    ):
        with pytest.raises(BatchError, match=r"num_(reqs|actual_tokens)"):
            builder.build(0, case.metadata(str(device)))
    assert stats().launches == launches


def test_g9_random_accepts_and_drains_stay_inside_the_cache(device: torch.device) -> None:
    """On a GPU ten thousand replays, as in the case; elsewhere a few."""
    rng = np.random.default_rng(9)
    pages, page, count, queries = 30, 32, 6, 4
    config = make_config(k=3, page_tokens=page, max_num_seqs=count, max_num_batched_tokens=24)
    groups = (CompressedGroup("c128a", 128, 256, num_pages=11),)
    builder = kernel_builder(config, device, ragged=True, num_pages=pages, compressed_groups=groups)
    batch = Batch([queries] * count, [9] * count, table=[[0] * 8] * count, slots=[-1] * 24).metadata(str(device))
    graph = CapturedBuild(builder, batch, {"c128a": (batch.block_table_tensor, batch.slot_mapping)})
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    found = tensors_of(graph.metadata)
    for _ in range(10_000 if device.type == "cuda" else 15):
        accepted = np.where(rng.random(count) < 0.8, rng.integers(0, queries + 1, count), 0)
        starts = np.concatenate([[0], accepted.cumsum()])
        batch.query_start_loc.copy_(torch.from_numpy(starts.astype(np.int32)))
        batch.seq_lens.copy_(torch.from_numpy((accepted + rng.integers(0, 1000, count)).astype(np.int32)))
        batch.block_table_tensor.copy_(torch.from_numpy(rng.integers(-2, pages + 3, (count, 8)).astype(np.int32)))
        batch.slot_mapping.copy_(torch.from_numpy(rng.integers(-1, pages * page, 24)))
        graph.replay()
        for name, room in (("decode_swa_indices", pages * page), ("c128a.slots", 22), ("c128a.rows", 22)):
            wrong += ((found[name] < -1) | (found[name] >= room)).sum()
        live = torch.arange(24 * 128, device=device) < found["decode_swa_ragged_indptr"][-1]
        entries = found["decode_swa_ragged_indices"]
        wrong += (live & ((entries < 0) | (entries >= pages * page))).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("position", [0, 3, 130, 8192, 100000, 1048575])
def test_g10_the_last_row_of_a_table_never_shows_its_neighbour(device: torch.device, position: int) -> None:
    """A (2, 4) table of pages of 32 tokens reaches to position 127; legal page numbers follow it in memory."""
    storage = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], dtype=torch.int32)
    config = make_config(page_tokens=32, max_model_len=1048576, max_num_seqs=2, max_num_batched_tokens=2)
    batch = Batch([1, 1], [1, position + 1], 32, table=storage[:2].tolist(), slots=[32, 0]).metadata(str(device))
    batch.block_table_tensor = storage.to(device)[:2]
    metadata = kernel_builder(config, device).build(0, batch)
    first = max(position - 127, 0)
    right = [[5, 6, 7, 8][at // 32] * 32 + at % 32 if at < 128 else NONE for at in range(first, position + 1)]
    assert decode_row(metadata, 0) == padded([32], 128)
    assert metadata.decode_swa_lens.tolist() == [1, len(right)]
    assert decode_row(metadata, 1) == padded(right, 128)

    twin = make_twin(device, "bf16", entries=32, pages=10)
    twin.randomise(1)
    out = torch.full((2, 1, 512), 7.0, dtype=torch.bfloat16, device=device)
    one = torch.ones(2, dtype=torch.int32, device=device)
    gather_kv(twin.view, batch.block_table_tensor, batch.seq_lens, one, out, 0)
    slot = right[-1]
    row = np.zeros(512, np.uint16) if slot < 0 else twin.pool.memory.view(np.uint16)[slot * 512 :][:512]
    np.testing.assert_array_equal(bits_of(out)[1, 0], row)


# Drafts


def test_s9_ragged_rows_of_a_full_draft_step(device: torch.device) -> None:
    config = make_config(k=5, dspark=True, max_num_seqs=8, max_num_batched_tokens=40)
    builder = kernel_builder(config, device, ragged=True)
    case = Batch([5] * 8, [205] * 8, causal=False)
    metadata = builder.build(0, case.metadata(str(device)))
    assert builder._buffers.decode_ragged is not None
    assert builder._buffers.decode_ragged.indices.shape == (1, 40 * 192)
    assert metadata.decode_swa_lens.tolist() == [133] * 40
    assert metadata.decode_swa_ragged_indptr.tolist() == [133 * i for i in range(41)]
    assert metadata.decode_swa_ragged_indices.shape == (40 * 192,)
    right = [slots(72, 204, table) for table in case.block_table().tolist()]
    found = metadata.decode_swa_ragged_indices[: 40 * 133].view(40, 133).tolist()
    assert found == [right[token // 5] for token in range(40)]


@pytest.mark.parametrize("causal", [True, False])
def test_s10_a_draft_update_equals_a_fresh_build(device: torch.device, causal: bool) -> None:
    config = make_config(k=3, dspark=True, max_num_seqs=4, max_num_batched_tokens=16)
    queries = [4, 4, 2] if causal else [3, 3, 2]
    builder, fresh = (kernel_builder(config, device, ragged=True, num_pages=40) for _ in range(2))
    case = Batch(queries, [100, 200, 60], table=[[4, 5, 6, 7], [8, 9, 1, 2], [3, 3, 3, 3]], causal=causal)
    batch = case.metadata(str(device))
    metadata = builder.build(0, batch)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            builder.update_draft_decode_metadata(metadata)
    for step in range(3):
        batch.seq_lens.add_(1)
        batch.slot_mapping[step] = -1
        batch.block_table_tensor[1, 2] = 30 + 5 * step
        if device.type == "cuda":
            graph.replay()
        else:
            builder.update_draft_decode_metadata(metadata)
        assert_same(metadata, fresh.build(0, batch))
        assert metadata.decode_swa_lens.tolist()[: step + 1] == [0] * (step + 1)
        assert metadata.decode_swa_lens[queries[0]] == (128 if causal else 131)


# Prefill


@pytest.mark.parametrize(("window", "width", "stride"), [(133, 133, 648), (192, 192, 192 + 512)])
def test_p4_combined_rows_stay_16_byte_aligned(device: torch.device, window: int, width: int, stride: int) -> None:
    tokens = 3
    assert combined_stride(width + 512) == stride

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    rows = torch.full((tokens, combined_stride(width + 512)), 77, dtype=torch.int32, device=device)
    lens = ints([77] * tokens)
    topk = torch.arange(512, dtype=torch.int32).flip(0).expand(tokens, 512).contiguous().to(device)
    compressed = CompressedRows(topk, ints([list(range(64))]), 64, 64, 4)
    combine_rows(
        CombineStep(
            PrefillChunk(0, 1, 512, 512 + window), 0, 0, ints([list(range(width))] * tokens), ints([window] * tokens),
            ints([0] * tokens), torch.ones(tokens, dtype=torch.bool, device=device), ints([0, tokens]), ints([4096]),
            ints([window + tokens - 1]), None, compressed, rows, lens,
        )
    )  # fmt: skip
    assert lens.tolist() == [window + 512] * tokens
    for token in range(tokens):
        assert rows[token].data_ptr() % 16 == 0
        # The last token's window ends with the last gathered row; every entry is complete at every token.
        first = 512 + token
        assert rows[token].tolist() == padded([*range(first, first + window), *reversed(range(512))], stride)


# Caches


def test_c3_gather_honours_stride_and_storage_offset(device: torch.device) -> None:
    twin = make_twin(device, "fp8_ds_mla", entries=64, pages=2, gap=1_435_968 - 37_440, first=37_440 * 5 + 64)
    keys = finite_keys(3, seed=3)
    twin.pool.write(keys, [63, 64, 65])
    twin.memory.copy_(torch.from_numpy(twin.pool.memory))
    out = torch.full((1, 3, 512), 7.0, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([[66], [3]], dtype=torch.int32, device=device)
    gather_kv(twin.view, table, lens[0], lens[1], out, 0)
    expected = np.zeros((1, 3, 512), np.uint16)
    twin.pool.gather(table.cpu().numpy(), [66], [3], expected, 0)
    assert expected.any(axis=2).all()
    np.testing.assert_array_equal(bits_of(out), expected)


@pytest.mark.parametrize("dialect", [Dialect.OCP, Dialect.FNUZ])
def test_c7_codes_and_scale_bytes_in_a_page(device: torch.device, dialect: Dialect) -> None:
    """Codes 0x38, 0x80 and 0x7F under the scale bytes 0, 127, 254 and 255, one group of a row each."""
    nan = float("nan")
    values = [1.0, -0.0, nan] if dialect is Dialect.OCP else [0.5, nan, 240.0]
    twin = make_twin(device, "fp8_ds_mla", dialect, entries=2, pages=1)
    page = torch.zeros(1728, dtype=torch.uint8)
    for group in range(4):
        page[group * 64 : group * 64 + 3] = torch.tensor([0x38, 0x80, 0x7F], dtype=torch.uint8)
    page[2 * 576 : 2 * 576 + 4] = torch.tensor([0, 127, 254, 255], dtype=torch.uint8)
    twin.memory.copy_(page)
    out = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device)
    gather_kv(
        twin.view, torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.ones(1, dtype=torch.int32, device=device), None, out, 0,
    )  # fmt: skip
    found = out[0, 0].float().cpu()
    for group, scale in enumerate((2.0**-127, 1.0, 2.0**127, nan)):
        right = (torch.tensor(values, dtype=torch.float64) * scale).to(torch.float32)
        here = found[group * 64 : group * 64 + 3]
        assert torch.equal(here.isnan(), right.isnan())
        assert torch.equal(here.nan_to_num(0, 9, -9), right.bfloat16().float().nan_to_num(0, 9, -9))
        assert torch.equal(here.signbit() & ~here.isnan(), right.signbit() & ~right.isnan())


# Addresses: interpreted, every test here also checks where dead lanes point (``lanes``)


@pytest.mark.parametrize("ragged", [False, pytest.param(True, marks=pytest.mark.simulate)])
def test_h2_build_with_every_input_at_the_end_of_its_allocation(device: torch.device, ragged: bool) -> None:
    """A table exactly as wide as needed, a window of 3 tokens, tiles of 1024 entries."""
    config = make_config(window=3, k=1, max_num_batched_tokens=32, max_num_seqs=8)
    groups = (CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256))
    builder = kernel_builder(config, device, ragged=ragged, num_pages=9, compressed_groups=groups)
    case = Batch([1, 2, 9], [64, 2, 129], table=[[1, 2, 3], [4, 5, 6], [7, 8, 0]])
    batch = case.metadata(str(device))
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor"):
        setattr(batch, name, at_the_end(getattr(batch, name).cpu(), device))
    further = {
        "c4a": (at_the_end(torch.tensor([[1], [2], [3]], dtype=torch.int32), device), batch.slot_mapping),
        "c128a": (at_the_end(torch.tensor([[4], [5], [6]], dtype=torch.int32), device), batch.slot_mapping),
    }
    metadata = builder.build(0, batch, groups=further)
    assert metadata.decode_swa_lens.tolist() == [3, 1, 2]
    assert [decode_row(metadata, token) for token in range(3)] == [[125, 126, 127], [256, -1, -1], [256, 257, -1]]
    assert prefill_row(metadata, 0) == slots(118, 120, [7, 8, 0])
    assert prefill_row(metadata, 8) == slots(126, 128, [7, 8, 0])
    c4a, c128a = metadata.compressed["c4a"], metadata.compressed["c128a"]
    assert c4a.compressed_slot_mapping.tolist() == [64 + 15, *[-1] * 5, 3 * 64 + 30, *[-1] * 3, 3 * 64 + 31, -1]
    assert c128a.compressed_slot_mapping.tolist() == [*[-1] * 10, 6 * 2, -1]
    assert c128a.lens.tolist() == [*[0] * 10, 1, 1]


@pytest.mark.simulate
def test_h2_caches_and_topk_with_every_input_at_the_end_of_its_allocation(device: torch.device) -> None:
    twin = make_twin(device, "fp8_ds_mla", entries=2, pages=5)
    keys = at_the_end(bf16(finite_keys(3, seed=4), torch.device("cpu")), device)
    write_kv(keys, twin.view, at_the_end(torch.tensor([3, 9, -1]), device))
    twin.pool.write(bits_of(keys), [3, 9, -1])
    twin.assert_same_bytes()

    def tail(values: Any) -> torch.Tensor:
        return at_the_end(torch.tensor(values, dtype=torch.int32), device)

    table = tail([[1, 0], [2, 4]])
    out = at_the_end(torch.zeros(2, 3, 512, dtype=torch.bfloat16), device)
    gather_kv(twin.view, table, tail([2, 4]), tail([1, 1]), out, 2)
    expected = np.zeros((2, 3, 512), np.uint16)
    twin.pool.gather(table.cpu().numpy(), [2, 4], [1, 1], expected, 2)
    assert expected.any(axis=(1, 2)).all()
    np.testing.assert_array_equal(bits_of(out), expected)

    mapped, lens = tail([[77] * 5] * 2), tail([77, 77])
    map_topk(
        tail([[0, 3, -1, 4, 2], [2**31 - 1, 1, 0, 3, -(2**31)]]), tail([0, 1]), tail([15, 15]), table, 2,
        at_the_end(torch.tensor([True, True]), device), 4, None, mapped, lens,
    )  # fmt: skip
    assert mapped.tolist() == [[2, 1, 0, -1, -1], [5, 4, 9, -1, -1]]
    assert lens.tolist() == [3, 3]
