"""The vLLM builders on a GPU, beside vLLM's own ones: a folder that holds them is named by the variable ``PEER``.

Run as a script it prints what a build costs either of them, for one and for eight cache groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.bench.peer import load_peer
from swa_backend.integrations.vllm.builder import Replacements
from swa_backend.integrations.vllm.metadata import MADE_BY
from swa_backend.integrations.vllm.shared_step import together
from swa_backend.integrations.vllm.surface import FILLED_BY_VLLM
from swa_backend.kernels.jit import stats
from swa_backend.replay.blocks import BlockManager, GroupSpec
from swa_backend.replay.history import Histories
from swa_backend.replay.runner import PageKeysOf
from swa_backend.replay.scheduler import Scheduler, SchedulerLimits
from swa_backend.replay.step import make_step
from swa_backend.replay.traces import Request

PEER = os.environ.get("PEER")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not PEER, reason="PEER names no folder with vLLM's builder")]

DEVICE = "cuda:0"
PAGE, WINDOW = 64, 128
EIGHT = ("window", *(f"window{number}" for number in range(2, 9)))


@cache
def peer() -> ModuleType:
    return load_peer(Path(str(PEER)))


def engine(**options: Any) -> SimpleNamespace:
    """vLLM's settings, as far as the peer and the plugin look."""
    values = {"max_model_len": 16384, "max_num_seqs": 256, "max_num_batched_tokens": 2048, "k": 0, **options}
    speculative = None
    if values["k"]:
        speculative = SimpleNamespace(
            num_speculative_tokens=values["k"],
            parallel_drafting=values.get("parallel_drafting", False),
            use_dspark=lambda: values.get("dspark", False),
        )
    hf = SimpleNamespace(sliding_window=WINDOW, compress_ratios=[0, 4, 128])
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=values["max_model_len"], hf_config=hf),
        scheduler_config=SimpleNamespace(
            max_num_seqs=values["max_num_seqs"], max_num_batched_tokens=values["max_num_batched_tokens"]
        ),
        speculative_config=speculative,
    )


def builders(count: int = 1, **options: Any) -> tuple[list[Any], list[Any]]:
    """(this library's, vLLM's) builders of so many cache groups."""
    sparse_swa = peer().sparse_swa
    spec = peer().SlidingWindowMLASpec(
        head_size=512, tokens_per_state=1, block_size=PAGE, dtype=torch.uint8, state_content_bytes=584
    )
    theirs = sparse_swa.DeepseekSparseSWAMetadataBuilder
    ours = Replacements(sparse_swa).builder(theirs)
    config = engine(**options)
    device = torch.device(DEVICE)
    made = [[one(spec, [f"layer{number}"], config, device) for number in range(count)] for one in (ours, theirs)]
    return made[0], made[1]


def common(batch: Any, table: torch.Tensor, slots: torch.Tensor, known: torch.Tensor | None = None) -> Any:
    """vLLM's batch of one cache group; ``known`` is the request map that an earlier group's builder made."""
    return peer().CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc_cpu,
        seq_lens=batch.seq_lens,
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_actual_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=table,
        slot_mapping=slots,
        causal=batch.causal,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
        _token_to_req_indices_cache=known,
    )


def loop(group_builders: Sequence[Any], batch: Any, tables: Sequence[torch.Tensor], slots: Sequence[Any]) -> list[Any]:
    """What vLLM's model runner does for a batch: the builder of every group in turn."""
    made, known = [], None
    for builder, table, own in zip(group_builders, tables, slots, strict=True):
        one = common(batch, table, own, known)
        made.append(builder.build(0, one))
        known = one._token_to_req_indices_cache
    return made


shared_loop: Callable[..., list[Any]] = together(loop)


def compare(ours: Any, theirs: Any, where: object) -> None:
    """Every field of vLLM's metadata."""
    for field in fields(peer().sparse_swa.DeepseekSparseSWAMetadata):
        name = field.name
        mine, right = getattr(ours, name), getattr(theirs, name)
        if name.startswith("tile_sched_"):
            assert (mine is None) == (right is None), (where, name)
            assert type(mine) is type(right), (where, name)
        elif name == "replay_start":  # vLLM hands out its whole buffer of zeros
            assert torch.equal(mine, right[: mine.shape[0]]), (where, name)
        elif isinstance(right, torch.Tensor):
            assert mine.dtype == right.dtype, (where, name)
            assert torch.equal(mine, right), (where, name)
        else:
            assert mine == right, (where, name)
    for name in FILLED_BY_VLLM:
        assert not getattr(ours, name), (where, name)


def steps(names: Sequence[str], drafts: int, seed: int) -> Iterator[Any]:
    """An engine's history: requests come, are chunked, decode, draft, and share pages."""
    rng = np.random.default_rng(seed)
    requests = [
        Request(number, number + 1, 0.0, int(rng.integers(1, 3000)), int(rng.integers(1, 24)), None)
        for number in range(36)
    ]
    manager = BlockManager([GroupSpec(name, PAGE, 4000, window=WINDOW) for name in names], 16384, seed)
    histories = Histories(requests, seed, ())
    limits = SchedulerLimits(
        max_num_seqs=24, max_num_batched_tokens=2048, decode_threshold=1 + drafts, drafts=drafts, seed=seed
    )
    scheduler = Scheduler(requests, manager, PageKeysOf(histories, manager), limits)
    while work := scheduler.step():
        yield make_step(work, manager, histories, torch.device(DEVICE))
        scheduler.finish(work)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("names", [EIGHT[:1], EIGHT], ids=["one group", "eight groups"])
def test_engine_histories_give_equal_fields(names: tuple[str, ...], drafts: int) -> None:
    ours, theirs = builders(len(names), k=drafts)
    seen = {"steps": 0, "decodes": 0, "mixed": 0}
    for step in steps(names, drafts, seed=drafts):
        tables = [step.batch.block_table_tensor, *(step.groups[name][0] for name in names[1:])]
        slots = [step.batch.slot_mapping, *(step.groups[name][1] for name in names[1:])]
        launches = stats().launches
        mine = shared_loop(ours, step.batch, tables, slots)
        assert stats().launches == launches + 1  # all groups in one
        right = loop(theirs, step.batch, tables, slots)
        for group, (one, other) in enumerate(zip(mine, right, strict=True)):
            compare(one, other, (seen["steps"], group))
            if other.num_prefills:
                assert one.get_prefill_chunk_plan(4, 4) == other.get_prefill_chunk_plan(4, 4)
                assert one.get_prefill_chunk_plan(1, 4) == other.get_prefill_chunk_plan(1, 4)
        seen["steps"] += 1
        seen["decodes"] += not right[0].num_prefills
        seen["mixed"] += bool(right[0].num_prefills and right[0].num_decodes)
    assert min(seen.values()) > 5, seen


def fixed_batch(query_lens: Sequence[int], seq_lens: Sequence[int], groups: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(batch, block tables, slot mappings) with scattered pages."""
    rng = np.random.default_rng(seed)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32))
    lens = torch.tensor(list(seq_lens), dtype=torch.int32)
    columns = -(-max(seq_lens) // PAGE)
    tables, slots = [], []
    for _ in range(groups):
        table = rng.permutation(len(seq_lens) * columns).reshape(len(seq_lens), columns).astype(np.int32)
        positions = [np.arange(end - count, end) for count, end in zip(query_lens, seq_lens, strict=True)]
        own = [table[r, p // PAGE].astype(np.int64) * PAGE + p % PAGE for r, p in enumerate(positions)]
        tables.append(torch.from_numpy(table).to(DEVICE))
        slots.append(torch.from_numpy(np.concatenate(own)).to(DEVICE))
    batch = SimpleNamespace(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE),
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        causal=True,
        seq_lens_cpu_upper_bound=lens,
    )
    return batch, tables, slots


def filled_cache(num_pages: int) -> torch.Tensor:
    """[pages, 64, 584] packed pages with written keys, 37440 bytes apart."""
    from swa_backend.cache import DeepseekV4SWACache
    from swa_backend.registry import get_backend
    from swa_backend.write import write_kv

    cache = DeepseekV4SWACache(512, WINDOW, torch.uint8, "layer", None, get_backend("cuda"), PAGE)
    cache.bind_kv_cache(cache.allocate(num_pages, DEVICE))
    generator = torch.Generator(DEVICE).manual_seed(1)
    for first in range(0, num_pages * PAGE, 4096):
        slots = torch.arange(first, min(first + 4096, num_pages * PAGE), device=DEVICE)
        keys = torch.randn(len(slots), 512, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        write_kv(keys, cache, slots)
    return cache.kv_cache


def decode(metadata: Any, cache: torch.Tensor, q: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """A window layer's decode as vLLM calls FlashMLA."""
    out = torch.empty_like(q)
    peer().flash_mla_with_kvcache(
        q=q.unsqueeze(1),
        k_cache=cache.unsqueeze(-2),
        block_table=None,
        head_dim_v=512,
        tile_scheduler_metadata=metadata.tile_sched_swaonly,
        cache_seqlens=None,
        is_fp8_kvcache=True,
        indices=metadata.decode_swa_indices,
        topk_length=metadata.decode_swa_lens,
        softmax_scale=512**-0.5,
        attn_sink=sink,
        out=out.unsqueeze(1),
    )
    return out


def prefill(metadata: Any, cache: torch.Tensor, q: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """A window layer's prefill with vLLM's kernels: gather, combine, attend, chunk by chunk."""
    out = torch.zeros_like(q)
    starts, first = metadata.query_start_loc_cpu, metadata.num_decodes
    base = int(starts[first])
    nothing = torch.full((len(q), 1), -1, dtype=torch.int32, device=DEVICE)
    for begin, end, entries, width in metadata.get_prefill_chunk_plan(1, 4):
        kv = torch.zeros(end - begin, width, 512, dtype=torch.bfloat16, device=DEVICE)
        lens, gathered = metadata.prefill_seq_lens[begin:end], metadata.prefill_gather_lens[begin:end]
        peer().dequantize_and_gather_k_cache(
            kv,
            cache,
            seq_lens=lens,
            gather_lens=gathered,
            block_table=metadata.block_table[first + begin : first + end],
            block_size=metadata.block_size,
            offset=entries,
        )
        one, last = int(starts[first + begin]) - base, int(starts[first + end]) - base
        indices, counts = peer().combine_topk_swa_indices(
            nothing[one:last],
            metadata.query_start_loc[first + begin : first + end + 1],
            lens,
            gathered,
            WINDOW,
            1,
            0,
            width,
            entries,
        )
        peer().flash_mla_sparse_fwd(
            q=q[one:last],
            kv=kv.view(-1, 1, 512),
            indices=indices.unsqueeze(1),
            sm_scale=512**-0.5,
            attn_sink=sink,
            topk_length=counts,
            out=out[one:last],
        )
    return out


@pytest.mark.parametrize("heads", [64, 128])
def test_vllms_flashmla_calls_run_on_these_metadata(heads: int) -> None:
    batch, tables, slots = fixed_batch([1] * 40 + [300, 200], [50 + 31 * i for i in range(40)] + [300, 900], 1)
    ours, theirs = builders()
    cache = filled_cache(int(tables[0].max()) + 1)
    generator = torch.Generator(DEVICE).manual_seed(2)
    q = torch.randn(540, heads, 512, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    sink = torch.randn(heads, generator=generator, device=DEVICE)
    outs = []
    for one in (ours, theirs):
        (metadata,) = loop(one, batch, tables, slots)
        first = decode(metadata, cache, q[:40], sink)
        again = decode(metadata, cache, q[:40], sink)  # a second layer, with the plan that the first one filled
        assert torch.equal(first, again)
        outs.append(torch.cat([first, prefill(metadata, cache, q[40:], sink)]))
    assert torch.isfinite(outs[1]).all()
    assert outs[1].float().norm(dim=-1).min() > 0.1
    assert torch.equal(outs[0], outs[1])


def test_draft_updates_inside_a_graph_give_equal_fields() -> None:
    """What vLLM's speculators do: the update is captured once and replayed after lengths and slots advanced."""
    batch, tables, slots = fixed_batch([3] * 16, [100 + 9 * i for i in range(16)], 1)
    ours, theirs = builders(k=2)
    (mine,), (right,) = loop(ours, batch, tables, slots), loop(theirs, batch, tables, slots)
    addresses = {f.name: getattr(mine, f.name).data_ptr() for f in fields(type(mine)) if _on_gpu(mine, f.name)}
    ours[0].update_draft_decode_metadata(mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours[0].update_draft_decode_metadata(mine)
    for step in range(20):
        batch.seq_lens.add_(1)
        slots[0][step] *= -1
        graph.replay()
        theirs[0].update_draft_decode_metadata(right)
        compare(mine, right, step)
    assert addresses == {name: getattr(mine, name).data_ptr() for name in addresses}


def _on_gpu(metadata: Any, name: str) -> bool:
    value = getattr(metadata, name)
    return isinstance(value, torch.Tensor) and value.is_cuda


def test_non_causal_draft_steps_give_equal_fields() -> None:
    ours, theirs = builders(k=5, dspark=True)
    batch, tables, slots = fixed_batch([5] * 9, [205 + 40 * i for i in range(9)], 1)
    batch.causal = False
    (mine,), (right,) = loop(ours, batch, tables, slots), loop(theirs, batch, tables, slots)
    compare(mine, right, "draft")
    assert mine.decode_swa_width == 192


def test_nothing_compiles_after_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = builders(2, k=3, max_num_batched_tokens=1024)
    monkeypatch.setenv("SWA_BACKEND_JIT_STRICT", "1")
    compiled = stats().compilations
    for queries in ([1], [4] * 30, [1, 4, 2], [4, 300], [700]):
        batch, tables, slots = fixed_batch(queries, [query + 77 for query in queries], 2)
        shared_loop(ours, batch, tables, slots)
        loop(ours[:1], batch, tables[:1], slots[:1])
    assert stats().compilations == compiled


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins of vLLM's layers with the plugin's attention, on this GPU."""
    from swa_backend.integrations.vllm import plugin
    from tests.vllm_fake import Fake

    monkeypatch.setattr(plugin, "_done", None)
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "flashmla")
    fake = Fake(heads=64)
    plugin.activate("attention", fake.load)
    return fake


def _scene(ratio: int, **options: Any) -> Any:
    from swa_backend.registry import get_backend
    from tests.attention_scene import ProviderUnderTest, mixed

    provider = ProviderUnderTest("flashmla", get_backend("cuda"), DEVICE)
    second = {"second": (ratio, "fp8_ds_mla", 256)} if ratio > 1 else {}
    return mixed(provider, heads=64, **second, **options)


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_attention_of_vllms_layers(ratio: int, layers: Any) -> None:
    from tests.test_vllm_attention import Step, check, complete, picked

    scene = _scene(ratio)
    picks, seen = picked(scene) if ratio == 4 else (None, complete(scene) if ratio == 128 else None)
    step = Step(scene, layers, ratio, picks)
    expected = scene.expected(seen)
    check(step.run(), expected)
    check(step.run(), expected)
    compiled = stats().compilations
    step.build()
    check(step.run(), expected)
    assert stats().compilations == compiled


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_attention_of_vllms_layers_in_a_graph(ratio: int, layers: Any) -> None:
    """A captured decode step, replayed after the build of another one: equal to the step computed eagerly."""
    from tests.attention_scene import Scene
    from tests.test_vllm_attention import Step

    whole = _scene(ratio)
    options = {"second": whole.second} if ratio > 1 else {}
    scene = Scene(whole.provider, [1] * 6, [130, 5, 700, 1, 40, 200], heads=64, config={"k": 2}, **options)
    picks = None
    if ratio == 4:
        picks = torch.arange(64, dtype=torch.int32).expand(scene.tokens, 64).contiguous()
    step = Step(scene, layers, ratio, picks)
    positions, output = step.positions(), torch.empty_like(scene.q)
    q = scene.q.clone()
    step.layer.forward_mqa(q, None, positions, output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.layer.forward_mqa(q, None, positions, output)
    for shift in (0, 1, 3):
        q.copy_(scene.q.roll(shift, 0))
        step.build()  # into the same buffers
        graph.replay()
        found = output.clone()
        step.layer.forward_mqa(q, None, positions, output)
        assert torch.equal(found, output), shift
        assert torch.isfinite(found).all()


def main() -> None:
    """Host and GPU time of a build of either library, in one run."""
    from swa_backend.bench.timing import machine

    print(machine())
    contexts = [1000 + 37 * i for i in range(512)]
    cases = {
        "decode 64": ([1] * 64, contexts[:64]),
        "decode 512": ([1] * 512, contexts),
        "64 decodes + 2 x 2048 prefill": ([1] * 64 + [2048, 2048], [*contexts[:64], 4096, 3000]),
    }
    options = {"max_model_len": 131072, "max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    for count in (8, 1):
        ours, theirs = builders(count, **options)
        for name, (queries, seqs) in cases.items():
            _time(f"{count} groups, {name}", ours, theirs, *fixed_batch(queries, seqs, count))


def _time(case: str, ours: list[Any], theirs: list[Any], batch: Any, tables: list[Any], slots: list[Any]) -> None:
    from swa_backend.bench.timing import compare as time_all

    mine = shared_loop(ours, batch, tables, slots)
    for one, other in zip(mine, loop(theirs, batch, tables, slots), strict=True):
        compare(one, other, case)
    builds, _ = getattr(mine[0], MADE_BY)
    calls = {
        "ours": lambda: shared_loop(ours, batch, tables, slots),
        "ours, all of it read": lambda: [one.num_decodes for one in shared_loop(ours, batch, tables, slots)],
        "vLLM": lambda: loop(theirs, batch, tables, slots),
        "batches alone": lambda: [common(batch, table, own) for table, own in zip(tables, slots, strict=True)],
        "library's build alone": _library_build(builds.builder, batch, tables, slots),
    }
    timed = time_all(calls)
    base = timed["batches alone"].host
    for who, timing in timed.items():
        ratio, net = timed["vLLM"].host / timing.host, (timed["vLLM"].host - base) / max(timing.host - base, 0.1)
        print(
            f"{case:38} {who:23} host {timing.host:7.1f} us, gpu {timing.gpu:6.1f}, {timing.launches:4.1f} launches; "
            f"vLLM's host time is {ratio:5.1f} times it"
            + (f", {net:5.1f} without batches" if timing.host > base else ""),
            flush=True,
        )


def _library_build(builder: Any, batch: Any, tables: Sequence[Any], slots: Sequence[Any]) -> Callable[[], Any]:
    """The launch alone, from a batch that is in this library's form already."""
    from swa_backend.batch import CommonAttentionMetadata

    whole = CommonAttentionMetadata(block_table_tensor=tables[0], slot_mapping=slots[0], **vars(batch))
    groups = [common(batch, table, own) for table, own in zip(tables[1:], slots[1:], strict=True)]
    return lambda: builder.build(0, whole, groups=groups)


if __name__ == "__main__":
    main()
