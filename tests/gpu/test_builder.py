"""The builder on a GPU: captured graphs, addresses, allocations, synchronisation, compilations. Needs a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.groups import CompressedGroup
from swa_backend.kernels.jit import stats
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.registry import get_backend
from tests.support import Batch, make_builder, make_config

pytestmark = pytest.mark.gpu

PAGE, NUM_PAGES = 64, 300


def gpu_builder(config: Any, **options: Any) -> Any:
    platform = "rocm" if torch.version.hip else "cuda"
    return make_builder(config, backend=get_backend(platform), device="cuda:0", **options)


def device_tensors(metadata: DeepseekSparseSWAMetadata) -> dict[str, torch.Tensor]:
    """Every device tensor of a metadata object, those of compressed groups included."""
    found = {}
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            found[field.name] = value
    for name, group in metadata.compressed.items():
        for part in ("compressed_slot_mapping", "rows", "lens"):
            if getattr(group, part) is not None:
                found[f"{name}.{part}"] = getattr(group, part)
    return found


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


BATCHES = {
    "decodes": (Batch([1] * 40, [100 + 31 * i for i in range(40)]), {}),
    "mixed": (Batch([1] * 7 + [300, 200], [500] * 7 + [300, 900]), {}),
    "drafts": (Batch([5] * 9, [205] * 9, causal=False), {"k": 5, "dspark": True}),
    "replay": (Batch([138], [522], replay=[384]), {}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_h3_a_build_reads_nothing_and_allocates_nothing(name: str) -> None:
    case, options = BATCHES[name]
    builder = gpu_builder(make_config(**options))
    batch = case.metadata("cuda:0")
    first = {field: tensor.data_ptr() for field, tensor in device_tensors(builder.build(0, batch)).items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    launches = stats().launches
    with no_synchronisation():
        for _ in range(5):
            metadata = builder.build(0, batch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert stats().launches == launches + 5
    assert {field: tensor.data_ptr() for field, tensor in device_tensors(metadata).items()} == first


def test_h4_spans_go_up_in_one_copy_that_is_not_waited_for() -> None:
    builder = gpu_builder(make_config(max_image_tokens=384))
    batch = Batch([1, 450], [90, 450], spans={1: [(10, 20), (100, 400)]}).metadata("cuda:0")
    right = make_builder(make_config(max_image_tokens=384)).build(
        0, Batch([1, 450], [90, 450], spans={1: [(10, 20), (100, 400)]}).metadata()
    )
    builder.build(0, batch)
    with no_synchronisation():
        metadata = builder.build(0, batch)
    assert torch.equal(metadata.prefill_swa_indices.cpu(), right.prefill_swa_indices)
    assert torch.equal(metadata.prefill_right_visible.cpu()[1:], right.prefill_right_visible[1:])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        builder.build(0, batch)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
    assert sum("Memcpy HtoD" in name and "Pinned" in name for name in names) == 1
    assert len(names) == 2  # the copy and the kernel


def test_h1_no_compilation_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = gpu_builder(make_config(k=3, max_num_seqs=257, max_num_batched_tokens=1100, max_model_len=300_000))
    builder.build(0, Batch([1], [9]).metadata("cuda:0"))
    monkeypatch.setenv("SWA_BACKEND_JIT_STRICT", "1")
    compiled = stats().compilations
    rng = np.random.default_rng(0)
    for count in (1, 2, 15, 16, 17, 64, 200, 257):
        for columns in (1, 15, 16, 17, 4096):
            queries = rng.integers(1, 5, count).tolist()
            table = rng.integers(0, 9, (count, columns)).tolist()
            batch = Batch(queries, [q + 20 for q in queries], table=table, slots=[1] * sum(queries))
            builder.build(0, batch.metadata("cuda:0"))
    assert stats().compilations == compiled


def random_contents(rng: np.random.Generator, queries: int, count: int, columns: int, tokens: int) -> dict[str, Any]:
    """Queries after random accepts, drained requests, pages of which some are gone, padded tokens."""
    accepted = np.where(rng.random(count) < 0.9, rng.integers(0, queries + 1, count), 0)
    starts = np.concatenate([[0], accepted.cumsum()])
    slots = np.where(rng.random(tokens) < 0.9, rng.integers(0, NUM_PAGES * PAGE, tokens), -1)
    slots[starts[-1] :] = -1
    return {
        "query_start_loc": torch.from_numpy(starts.astype(np.int32)),
        "seq_lens": torch.from_numpy((accepted + rng.integers(0, 900, count)).astype(np.int32)),
        "slot_mapping": torch.from_numpy(slots),
        "block_table_tensor": torch.from_numpy(rng.integers(-1, NUM_PAGES + 5, (count, columns)).astype(np.int32)),
    }


@pytest.mark.parametrize("ragged", [False, True])
def test_g5_and_g9_ten_thousand_replays_equal_eager(ragged: bool) -> None:
    """A captured build, replayed with random contents: each equals an eager one, every thousandth the CPU's."""
    queries, count, columns = 2, 32, 15
    tokens = queries * count
    config = make_config(k=1, max_num_seqs=count, max_num_batched_tokens=tokens + 16)
    groups = (CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256))
    graphed = gpu_builder(config, ragged=ragged, num_pages=NUM_PAGES, compressed_groups=groups)
    eager = gpu_builder(config, ragged=ragged, num_pages=NUM_PAGES, compressed_groups=groups)
    right = make_builder(config, ragged=ragged, num_pages=NUM_PAGES, compressed_groups=groups)
    host = Batch([queries] * count, [100] * count, table=[[1] * columns] * count, slots=[0] * tokens).metadata()
    batch = Batch([queries] * count, [100] * count, table=[[1] * columns] * count, slots=[0] * tokens).metadata(
        "cuda:0"
    )

    def further(one: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return dict.fromkeys(("c4a", "c128a"), (one.block_table_tensor, one.slot_mapping))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphed.capture_build(count, tokens, batch, groups=further(batch))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = graphed.capture_build(count, tokens, batch, groups=further(batch))
    addresses = {name: tensor.data_ptr() for name, tensor in device_tensors(captured).items()}
    assert len(addresses) > 8

    rng = np.random.default_rng(5)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda:0")
    for replay in range(10_000):
        for name, value in random_contents(rng, queries, count, columns, tokens).items():
            getattr(batch, name).copy_(value)
            getattr(host, name).copy_(value)
        graph.replay()
        expected = device_tensors(eager.capture_build(count, tokens, batch, groups=further(batch)))
        for name, tensor in device_tensors(captured).items():
            if "ragged_indices" in name or name.endswith("c128a.rows"):
                continue  # what lies past the live entries depends on earlier steps; compared below
            wrong += (tensor != expected[name]).sum()
        if replay % 1000 == 0:
            compare_live(captured, right.capture_build(count, tokens, host, groups=further(host)))
    assert int(wrong) == 0
    assert {name: tensor.data_ptr() for name, tensor in device_tensors(captured).items()} == addresses
    rows = captured.decode_swa_indices
    assert int(rows.min()) >= -1
    assert int(rows.max()) < NUM_PAGES * PAGE


def compare_live(found: DeepseekSparseSWAMetadata, right: DeepseekSparseSWAMetadata) -> None:
    """Everything that means something, against the CPU's build."""
    for name, tensor in device_tensors(found).items():
        group, _, part = name.partition(".")
        other = getattr(right.compressed[group], part) if part else getattr(right, name)
        if "ragged_indices" in name:
            live = int(right.decode_swa_ragged_indptr[-1])
            assert torch.equal(tensor[:live].cpu(), other[:live]), name
        elif part == "rows":
            for row, length in enumerate(right.compressed[group].lens.tolist()):
                assert torch.equal(tensor[row, :length].cpu(), other[row, :length]), name
        else:
            assert torch.equal(tensor.cpu(), other), name


def test_s10_draft_updates_in_a_graph_equal_fresh_builds() -> None:
    config = make_config(k=3, max_num_seqs=16, max_num_batched_tokens=64)
    builder, fresh = gpu_builder(config, ragged=True), gpu_builder(config, ragged=True)
    batch = Batch([4] * 16, [100 + 9 * i for i in range(16)], slots=[1] * 64).metadata("cuda:0")
    metadata = builder.build(0, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        builder.update_draft_decode_metadata(metadata)
    for step in range(50):
        batch.seq_lens.add_(1)
        batch.slot_mapping[step] *= -1
        graph.replay()
        expected = fresh.build(0, batch)
        for name, tensor in device_tensors(expected).items():
            found = getattr(metadata, name)
            if "ragged_indices" in name:
                live = int(expected.decode_swa_ragged_indptr[-1])
                found, tensor = found[:live], tensor[:live]
            assert torch.equal(found, tensor), name


def test_sixteen_thousand_tokens_of_four_thousand_requests() -> None:
    rng = np.random.default_rng(1)
    queries = [3] * 4094 + [2000, 2102]
    seqs = [int(q + rng.integers(0, 400)) for q in queries]
    config = make_config(k=2, max_num_seqs=4096, max_num_batched_tokens=16384)
    case = Batch(queries, seqs)
    assert sum(queries) == 16384
    for ragged in (False, True):
        found = gpu_builder(config, ragged=ragged).build(0, case.metadata("cuda:0"))
        right = make_builder(config, ragged=ragged).build(0, case.metadata())
        for field in ("decode_swa_indices", "decode_swa_lens", "prefill_swa_indices", "prefill_swa_lens"):
            assert torch.equal(getattr(found, field).cpu(), getattr(right, field)), field
        if ragged:
            for part in ("decode", "prefill"):
                indptr = getattr(right, f"{part}_swa_ragged_indptr")
                assert torch.equal(getattr(found, f"{part}_swa_ragged_indptr").cpu(), indptr)
                live, name = int(indptr[-1]), f"{part}_swa_ragged_indices"
                assert torch.equal(getattr(found, name)[:live].cpu(), getattr(right, name)[:live])
