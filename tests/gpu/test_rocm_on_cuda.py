"""The ROCm platform's own code on an NVIDIA GPU: builder, fnuz pages, attention, captured graphs. Needs a device.

The chip is named (gfx942), so that dialects and providers are that chip's; the kernels are compiled for the GPU here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.attention import attend
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.pages import PageView
from swa_backend.replay import ReplayOptions, run_replay, runner
from swa_backend.transcode import transcode_pages
from swa_backend.write import write_kv
from swa_platform_rocm.aiter_room import Room
from swa_platform_rocm.aiter_rows import ragged_rows
from swa_platform_rocm.builder import GraphSupport
from tests.independent_codec import Pool
from tests.kernels.pools import bits_of, wild_keys
from tests.rocm_support import GFX942, GFX950, rocm_backend, rocm_builder
from tests.support import Batch, make_config
from tests.test_rocm_builder import entries, from_dense
from tests.test_rocm_replay import write_trace

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def captured(run: Any) -> torch.cuda.CUDAGraph:
    """``run`` in a graph, after a call outside of it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("target", [GFX942, GFX950])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_replay_of_v4_flash(target: str, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 64 heads and real top-k; gfx942 with a fnuz window cache beside OCP entries."""
    for variable in ("SWA_BACKEND_ATTENTION", "SWA_BACKEND_VALIDATE"):
        monkeypatch.delenv(variable, raising=False)
    backend = rocm_backend(DEVICE, target)
    monkeypatch.setattr(runner, "get_backend", lambda name: backend)
    options = ReplayOptions(
        trace=write_trace(tmp_path, [(900, 12), (20, 30), (300, 5)]), drafts=drafts, pages=64, max_batched_tokens=512
    )
    report = run_replay(options)
    print(target, drafts, report.provider, report.worst_error, report.tokens_verified, report.steps)
    assert report.mismatches == 0, report.examples
    assert (report.platform, report.requests) == ("rocm", 3)
    assert report.tokens_verified > 100


def test_fnuz_pages_are_written_as_the_independent_codec_writes_them() -> None:
    backend = rocm_backend(DEVICE)
    cache = DeepseekV4SWACache(512, 128, torch.uint8, "window", None, backend)
    assert cache.layout.dialect is Dialect.FNUZ
    cache.bind_kv_cache(cache.allocate(4, DEVICE))
    bits = wild_keys(200, 3)
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:200]
    pool = Pool(np.zeros(4 * 37_440, np.uint8), "fp8_ds_mla", 64, 4, 37_440, dialect="fnuz")
    keys = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    write_kv(keys, cache, slots.to(DEVICE))
    pool.write(bits, slots.tolist())
    np.testing.assert_array_equal(cache.pages.data.cpu().numpy(), pool.memory.reshape(4, -1)[:, : 64 * 584])
    assert len(bits_of(keys)) == 200


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_transcoding_on_a_gpu_gives_the_bytes_of_the_cpu(dialect: str) -> None:
    layout = get_layout("fp8_ds_mla", Dialect(dialect))
    other = get_layout("fp8_ds_mla", Dialect.FNUZ if dialect == "ocp" else Dialect.OCP)
    memory = torch.randint(0, 256, (6, 64, 585), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    results = []
    for device in ("cpu", "cuda"):
        rows = memory.clone().to(device)[..., :584].as_strided((6, 64, 584), (64 * 585, 584, 1))
        view = PageView.of(rows, layout, 64)
        transcode_pages(view, PageView.of(rows, other, 64))
        results.append(view.data.cpu())
    assert torch.equal(*results)


def test_ragged_rows_of_a_captured_draft_update_follow_the_inputs() -> None:
    config = make_config(k=3, dspark=True, max_model_len=2048)
    case = Batch([3, 1, 2, 2], [126, 255, 40, 129], padding=2, causal=False)
    batch = case.metadata("cuda")
    builder = rocm_builder(config, DEVICE, num_pages=90)
    metadata = builder.build(0, batch)
    graph = captured(lambda: builder.update_draft_decode_metadata(metadata))
    for step in range(20):
        batch.seq_lens.add_(1)
        batch.slot_mapping[step % 8] = -1 if step % 3 else 7
        batch.block_table_tensor[step % 4, step % 3] = -1 if step % 2 else step
        graph.replay()
        fresh = rocm_builder(config, DEVICE, num_pages=90).build(0, batch)
        assert entries(metadata, "decode") == entries(fresh, "decode") == from_dense(fresh, "decode")
        assert metadata.decode_swa_ragged_indptr.tolist() == fresh.decode_swa_ragged_indptr.tolist()


def test_a_decode_step_in_a_graph_is_what_the_builder_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build and attention, captured once, follow lengths, slots and table; every output is that of an eager step."""
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    backend = rocm_backend(DEVICE)
    builder = rocm_builder(make_config(num_heads=16), DEVICE, num_pages=40)
    assert builder.graph_support is GraphSupport.DECODE
    cache = DeepseekV4SWACache(512, 128, torch.uint8, "window", None, backend)
    cache.bind_kv_cache(cache.allocate(40, DEVICE))
    generator = torch.Generator().manual_seed(9)
    write_kv(torch.randn(2560, 512, generator=generator).bfloat16().to(DEVICE), cache, torch.arange(2560).to(DEVICE))
    table = [[i, 8 + i, 16 + i, 24 + i, 32 + i] for i in range(8)]
    given = Batch([1] * 8, [130, 5, 200, 64, 128, 129, 1, 300], table=table).metadata("cuda")
    q, sink = torch.randn(8, 16, 512, generator=generator).bfloat16().to(DEVICE), torch.zeros(16, device=DEVICE)
    out = torch.empty_like(q)

    def step() -> None:
        attend(q, builder.capture_build(8, 8, given), cache, sink, out=out)

    graph = captured(step)
    for number in range(10):
        given.seq_lens.copy_(torch.randint(1, 320, (8,), generator=generator, dtype=torch.int32))
        given.slot_mapping.copy_(torch.randint(-1, 2560, (8,), generator=generator))
        given.block_table_tensor.copy_(torch.randint(0, 40, (8, 5), generator=generator, dtype=torch.int32))
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        eager = rocm_builder(make_config(num_heads=16), DEVICE, num_pages=40)
        right = attend(q, eager.build(0, given), cache, sink).out
        torch.testing.assert_close(out, right, rtol=2**-6, atol=2**-8, msg=f"replay {number}")
        assert not out[given.slot_mapping < 0].any()


def test_compressed_rows_for_aiter_are_packed_in_a_captured_graph() -> None:
    generator = torch.Generator().manual_seed(5)
    room = Room.allocate(1000 * 512, DEVICE)
    rows = torch.zeros((1000, 512), dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(1000, dtype=torch.int32, device=DEVICE)
    valid = torch.ones(1000, dtype=torch.bool, device=DEVICE)
    graph = captured(lambda: ragged_rows(rows, lens, valid, 4000, room))
    for _ in range(50):
        new_rows = torch.randint(-500, 4500, (1000, 512), dtype=torch.int32, generator=generator)
        new_lens = torch.randint(0, 513, (1000,), dtype=torch.int32, generator=generator)
        new_valid = torch.rand(1000, generator=generator) > 0.2
        rows.copy_(new_rows)
        lens.copy_(new_lens)
        valid.copy_(new_valid)
        graph.replay()
        keep = (torch.arange(512) < new_lens[:, None]) & new_valid[:, None] & (new_rows >= 0) & (new_rows < 4000)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])
        assert torch.equal(room.indptr[:1001].cpu().long(), indptr)
        assert torch.equal(room.indices[: int(indptr[-1])].cpu(), new_rows[keep])
