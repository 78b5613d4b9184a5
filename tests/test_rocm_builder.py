"""The AMD platform's builder: ragged rows out of the one launch, their memory, draft updates, what a graph may hold."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend.attention import attend
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.cache_layout import get_layout
from swa_backend.errors import BatchError, CacheError, PlatformError
from swa_backend.groups import CompressedGroup, SwaGroup
from swa_backend.platform import CacheRole
from swa_backend.reference.codec import write_kv as reference_write
from swa_backend.registry import get_backend
from swa_backend.transcode import transcode_pages
from swa_platform_rocm import PLATFORM
from swa_platform_rocm.builder import DeepseekV4ROCMAiterSparseSWAMetadataBuilder, GraphSupport
from tests.rocm_support import GFX942, GFX950, rocm_backend, rocm_builder
from tests.support import Batch, golden_cases, load_golden, make_builder, make_config

pytest.importorskip("triton")  # the platform's attention is Triton's

# One of each kind; the kernel is compared with every recorded case in tests/kernels.
GOLDEN = [
    "decode_single", "decode_invalid_tokens", "decode_padded_requests", "decode_window_16", "draft_update_3",
    "dspark_noncausal_k5_w128", "mixed_chunked_prefill", "mtp_3_parallel_drafting", "prefill_zero_length_tail",
    "vision_span_inside", "random_07",
]  # fmt: skip


def entries(metadata: Any, part: str) -> list[list[int]]:
    """Ragged rows as lists."""
    indices = getattr(metadata, f"{part}_swa_ragged_indices").tolist()
    indptr = getattr(metadata, f"{part}_swa_ragged_indptr").tolist()
    return [indices[begin:end] for begin, end in pairwise(indptr)]


def from_dense(metadata: Any, part: str) -> list[list[int]]:
    """What the ragged rows should hold, by the dense ones."""
    dense, lens = getattr(metadata, f"{part}_swa_indices")[:, 0].tolist(), getattr(metadata, f"{part}_swa_lens")
    return [[slot for slot in row[:n] if slot >= 0] for row, n in zip(dense, lens.tolist(), strict=True)]


def test_its_name_and_what_it_says_of_itself() -> None:
    backend = rocm_backend("cpu")
    builder_cls = backend.get_builder_cls()
    assert builder_cls.__name__ == "DeepseekV4ROCMAiterSparseSWAMetadataBuilder"
    assert issubclass(builder_cls, DeepseekV4ROCMAiterSparseSWAMetadataBuilder)
    assert issubclass(PLATFORM.load_builder(), DeepseekSparseSWAMetadataBuilder)
    assert builder_cls.wants_ragged_rows
    assert builder_cls.supports_draft_decode_metadata_update


@pytest.mark.parametrize("path", [p for p in golden_cases("metadata") if p.stem in GOLDEN], ids=lambda p: p.stem)
def test_golden_ragged_rows(device: torch.device, path: Path) -> None:
    case = load_golden(path)
    metadata = rocm_builder(case.config(), device).build(0, case.batch(str(device)))
    seen = 0
    for part in ("decode", "prefill"):
        expected = case.get(f"expected/{part}_ragged_indptr")
        if expected is not None:
            indptr = getattr(metadata, f"{part}_swa_ragged_indptr")
            assert indptr.tolist() == expected.tolist()
            found = getattr(metadata, f"{part}_swa_ragged_indices")[: int(indptr[-1])]
            assert found.tolist() == case[f"expected/{part}_ragged_indices"].tolist()
            seen += 1
    assert seen


def test_s9_every_row_of_a_draft_step_fits(device: torch.device) -> None:
    """max_tokens rows of 133 entries, in a buffer for max_tokens rows of 192; a causal step uses the same one."""
    config = make_config(k=5, dspark=True, max_num_batched_tokens=40, max_num_seqs=8)
    builder = rocm_builder(config, device)
    draft = builder.build(0, Batch([5] * 8, [205] * 8, causal=False).metadata(str(device)))
    buffer = builder._buffers.decode_ragged
    assert buffer.indices.shape == (1, 40 * 192)
    assert draft.decode_swa_ragged_indices.shape == (40 * 192,)
    assert draft.decode_swa_ragged_indptr.tolist() == [133 * row for row in range(41)]
    assert entries(draft, "decode") == from_dense(draft, "decode")
    causal = builder.build(0, Batch([1] * 8, [205] * 8).metadata(str(device)))
    assert causal.decode_swa_ragged_indices.data_ptr() == draft.decode_swa_ragged_indices.data_ptr()
    assert causal.decode_swa_ragged_indptr.tolist() == [128 * row for row in range(9)]
    with pytest.raises(BatchError, match="max_num_batched_tokens"):
        builder.build(0, Batch([41], [205]).metadata(str(device)))


@pytest.mark.parametrize("dspark", [False, True])
def test_capacity_is_that_of_the_widest_step(dspark: bool) -> None:
    config = make_config(k=5, dspark=dspark, max_image_tokens=384, max_num_batched_tokens=64)
    buffers = rocm_builder(config, torch.device("cpu"))._buffers
    assert buffers.decode_ragged.indices.shape == (1, 64 * (192 if dspark else 128))
    assert buffers.prefill_ragged.indices.shape == (1, 64 * (128 + 384))
    assert buffers.decode_ragged.indptr.shape == buffers.prefill_ragged.indptr.shape == (1, 65)


def test_g4_padded_rows_repeat_the_last_indptr(device: torch.device) -> None:
    """342 real tokens padded to 352, of which some of the real ones are not valid either."""
    config = make_config(max_num_seqs=352)
    case = Batch([1] * 342, [1 + t % 200 for t in range(342)], padding=10)
    batch = case.metadata(str(device))
    batch.slot_mapping[[7, 341]] = -1
    metadata = rocm_builder(config, device).build(0, batch)
    indptr = metadata.decode_swa_ragged_indptr.tolist()
    assert len(indptr) == 353
    assert indptr[341:] == [indptr[-1]] * 12
    assert indptr[7] == indptr[8]
    assert indptr[-1] == sum(min(1 + t % 200, 128) for t in range(341) if t != 7)
    assert entries(metadata, "decode") == from_dense(metadata, "decode")
    assert not metadata.decode_swa_lens[342:].any()


def test_prefill_rows_of_every_group_are_ragged(device: torch.device) -> None:
    builder = rocm_builder(
        make_config(k=2),
        device,
        swa_groups=[SwaGroup("other", 32, 400)],
        compressed_groups=[CompressedGroup("c4a", 4, 256, 50)],
        num_pages=60,
    )
    case = Batch([1, 3, 40, 70], [130, 5, 40, 200], padding=3)
    batch = case.metadata(str(device))
    batch.block_table_tensor[3, 1] = -1  # a missing page leaves its gap out
    tables = {name: (batch.block_table_tensor.flip(0).contiguous(), batch.slot_mapping) for name in ("other", "c4a")}
    metadata = builder.build(0, batch, groups=tables)
    for one in (metadata, metadata.groups["other"]):
        for part in ("decode", "prefill"):
            assert entries(one, part) == from_dense(one, part)
    assert min(map(len, entries(metadata, "prefill")[60:110])) < 128


@pytest.mark.parametrize("causal", [True, False])
def test_s10_a_draft_update_equals_a_fresh_build(device: torch.device, causal: bool) -> None:
    """Lengths, slots and table advance in place; the ragged copies keep their addresses and follow."""
    config = make_config(k=3, dspark=True, max_model_len=2048)
    case = Batch([3, 1, 0, 2], [126, 255, 40, 129], causal=causal, padding=2)
    batch = case.metadata(str(device))
    builder = rocm_builder(config, device, num_pages=90)
    metadata = builder.build(0, batch)
    addresses = metadata.decode_swa_ragged_indices.data_ptr(), metadata.decode_swa_ragged_indptr.data_ptr()
    for step in range(4):
        batch.seq_lens.add_(torch.tensor([1, 1, 0, step % 2], dtype=torch.int32, device=device))
        batch.slot_mapping[step] = -1
        batch.block_table_tensor[0, step % 3] = -1
        builder._buffers.decode_ragged.indices.fill_(77)
        builder._buffers.decode_ragged.indptr[:, 1:].fill_(77)
        builder.update_draft_decode_metadata(metadata)
        fresh = rocm_builder(config, device, num_pages=90).build(0, batch)
        assert entries(metadata, "decode") == entries(fresh, "decode") == from_dense(fresh, "decode")
        assert metadata.decode_swa_ragged_indptr.tolist() == fresh.decode_swa_ragged_indptr.tolist()
    assert addresses == (metadata.decode_swa_ragged_indices.data_ptr(), metadata.decode_swa_ragged_indptr.data_ptr())
    assert metadata.causal is causal


def test_graph_support_is_what_the_provider_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference reads lengths on the host: a graph may then hold the build alone."""
    cpu = torch.device("cpu")
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "reference")
    assert rocm_builder(make_config(), cpu).graph_support is GraphSupport.BUILD
    monkeypatch.delenv("SWA_BACKEND_ATTENTION")
    builder = rocm_builder(make_config(), cpu)
    alone = builder.provider.name == "reference"
    assert builder.graph_support is (GraphSupport.BUILD if alone else GraphSupport.DECODE)
    builder.provider = object()
    assert builder.graph_support is GraphSupport.DECODE


@pytest.mark.parametrize(("target", "window"), [(GFX942, "fnuz"), (GFX950, "ocp"), ("hip:gfx1201", "ocp")])
def test_dialects_come_from_each_caches_layout(target: str, window: str) -> None:
    builder = rocm_builder(make_config(), torch.device("cpu"), target)
    assert builder.shape.swa_layout.dialect == window
    assert [layout.dialect for layout in builder.shape.compressed_layouts] == ["ocp"]


def test_c7_a_cache_of_the_other_dialect_is_refused_and_not_reread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that came from another vendor have to be transcoded: both dialects are 584 bytes a token."""
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "reference")
    backend, cpu = rocm_backend("cpu"), torch.device("cpu")
    moved = DeepseekV4SWACache(512, 128, torch.uint8, "moved", None, backend, layout=get_layout("fp8_ds_mla"))
    own = DeepseekV4SWACache(512, 128, torch.uint8, "own", None, backend)
    for cache in (moved, own):
        cache.bind_kv_cache(cache.allocate(4, cpu))
    batch = Batch([1], [70], table=[[1, 2]])
    metadata = make_builder(make_config(num_heads=2), backend=backend, num_pages=4).build(0, batch.metadata())
    key = torch.randn(1, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    reference_write(key.expand(70, 512), moved.pages, torch.arange(64, 134))
    q, sink = torch.ones(1, 2, 512, dtype=torch.bfloat16), torch.full((2,), -torch.inf)
    with pytest.raises(CacheError, match=r"found fp8_ds_mla version 1 \(584 bytes a token, ocp\).*fnuz"):
        attend(q, metadata, moved, sink)
    transcode_pages(moved, own)
    # Every key is the same one, so that it is the output, but for two roundings: to three and to eight bits.
    out = attend(q, metadata, own, sink).out
    torch.testing.assert_close(out[0], key.expand(2, 512), rtol=2**-4 + 2**-8, atol=1e-3)


def test_without_a_device_a_chip_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlatformError, match="neither a target nor a device"):
        PLATFORM.cache_dialect(CacheRole.SWA, None)
    assert PLATFORM.cache_dialect(CacheRole.COMPRESSED, None) == "ocp"
    assert get_backend("rocm", target=GFX942).cache_dialect(CacheRole.SWA) == "fnuz"
