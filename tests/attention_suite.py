"""What attention means, written once for every provider; a test module imports all of it and supplies ``provider``.

Field cases are named by their ids.
"""

from __future__ import annotations

import math

import pytest
import torch

from swa_backend.attention import AttentionResult, attend
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.chunk_plan import workspace_bytes
from swa_backend.errors import BatchError, ConfigError
from swa_backend.merge import apply_sink, merge_states
from swa_backend.reference.codec import write_kv
from swa_backend.write import write_kv as public_write_kv
from tests.attention_scene import HEADS, INF, SCALE, ProviderUnderTest, Scene, W, check, floats, mixed
from tests.oracle_attention import relative_error
from tests.support import Batch

# The window.


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_ds_mla_v41", "bf16", "fp8_per_tensor"])
@pytest.mark.parametrize("page_tokens", [32, 64, 256])
def test_a_mixed_batch_equals_its_history(provider: ProviderUnderTest, layout: str, page_tokens: int) -> None:
    if layout not in provider.swa_layouts:
        pytest.skip(f"{provider.name} does not read {layout}")
    scene = mixed(provider, layout=layout, config={"page_tokens": page_tokens})
    assert (scene.metadata.num_decode_tokens, scene.metadata.num_prefill_tokens) == (7, 110)
    check(scene.run(), scene.expected())


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 96, 128])
def test_n4_head_counts(provider: ProviderUnderTest, heads: int) -> None:
    scene = Scene(provider, [1, 1, 9], [130, 40, 9], heads=heads)
    check(scene.run(), scene.expected())


def test_n4_129_heads_are_refused(provider: ProviderUnderTest) -> None:
    with pytest.raises(ConfigError, match="128"):
        Scene(provider, [1], [5], heads=129)
    scene = Scene(provider, [1], [5])
    with pytest.raises(BatchError, match="128"):
        scene.run(q=scene.q.new_zeros(1, 129, 512), attn_sink=scene.sink.new_zeros(129))


@pytest.mark.parametrize("tokens", [8, 32, 33, 64, 250, 256])
def test_g7_all_lens_zero(provider: ProviderUnderTest, tokens: int) -> None:
    scene = Scene(provider, [1] * tokens, [50] * tokens, batch={"slots": [-1] * tokens}, config={"max_num_seqs": 256})
    result = scene.run()
    assert not result.out.any()
    assert result.lse is not None
    assert torch.all(result.lse == -INF)


@pytest.mark.parametrize("rows", [60, 64, 65, 66])
def test_s5_decode_rows_around_64(provider: ProviderUnderTest, rows: int) -> None:
    """Whatever number of rows a kernel takes at a time."""
    scene = Scene(provider, [1] * rows, [1 + 3 * row for row in range(rows)], heads=1, config={"max_num_seqs": 80})
    check(scene.run(), scene.expected())


def test_g4_padded_tokens_are_zero(provider: ProviderUnderTest) -> None:
    scene = Scene(
        provider, [1] * 342, [1 + t % 9 for t in range(342)], batch={"padding": 10}, config={"max_num_seqs": 352}
    )
    check(scene.run(), scene.expected())
    assert not scene.run().out[342:].any()


@pytest.mark.parametrize("queries", [[1, 1], [40, 30]])
def test_g2_page_0_never_reaches_a_row(provider: ProviderUnderTest, queries: list[int]) -> None:
    results = []
    for fill in (0xFF, 0):
        seqs = [queries[0] + 4, 60]
        slots = [64 * 3 + position for position in range(4, seqs[0])] + [-1] * queries[1]
        scene = Scene(provider, queries, seqs, batch={"table": [[3, 0, 0], [0, 0, 0]], "slots": slots})
        scene.cache.pages.data[0] = fill
        results.append(scene.run())
    assert torch.isfinite(results[0].out).all()
    assert torch.equal(results[0].out, results[1].out)
    assert not results[0].out[queries[0] :].any()


def test_g2_the_writer_given_no_slot_changes_no_byte(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1, 1], [5, 60])
    before = scene.cache.pages.data.clone()
    k = torch.ones(3, 512, dtype=torch.bfloat16, device=scene.device)
    public_write_kv(k, scene.cache, torch.full((3,), -1, device=scene.device))
    assert torch.equal(scene.cache.pages.data, before)


def test_r9_a_missing_page_leaves_the_other_keys(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1], [130], batch={"table": [[7, -1, 9]]})
    keys = torch.cat([scene.history[0][2:64], scene.history[0][128:]])
    assert len(keys) == 64
    check(scene.run(), scene.expected([keys]))


@pytest.mark.parametrize("last", [False, True])
def test_n1_no_entry_inside_a_row(provider: ProviderUnderTest, last: bool) -> None:
    scene = Scene(provider, [1, 1], [130, 300])
    holes = torch.arange(16) + (112 if last else 0)
    scene.metadata.decode_swa_indices[0, 0, holes] = -1
    scene.metadata.decode_swa_indices[1] = -1
    window = scene.window(0)
    kept = window[:112] if last else window[16:]
    check(scene.run(), scene.expected([kept, None]))


def test_c8_entries_outside_the_cache_are_skipped(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1, 6], [130, 6])
    slots = scene.num_pages * 64
    wild = torch.tensor([slots, slots + 7, 2**31 - 1, -(2**31), -2], dtype=torch.int32)
    scene.metadata.decode_swa_indices[0, 0, 5:10] = wild
    scene.metadata.prefill_swa_indices[5, 0, :5] = wild
    window = scene.window(0)
    seen: list[torch.Tensor | None] = [torch.cat([window[:5], window[10:]])]
    seen += [scene.window(t) for t in range(1, 6)] + [scene.window(6)[5:]]
    check(scene.run(), scene.expected(seen))


def test_entries_past_the_length_are_never_looked_at(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1, 3], [5, 3])
    scene.metadata.decode_swa_indices[0, 0, 5:] = 0  # page 0 holds NaN
    scene.metadata.prefill_swa_indices[:, 0, 3:] = 2**31 - 1
    check(scene.run(), scene.expected())


@pytest.mark.parametrize(("k", "width"), [(7, 192), (65, 256)])
def test_s2_non_causal_drafts_have_rows_of_their_own_width(provider: ProviderUnderTest, k: int, width: int) -> None:
    scene = Scene(provider, [7], [207], batch={"causal": False}, config={"k": k, "dspark": True})
    assert scene.metadata.decode_swa_width == width
    assert scene.metadata.window_size == W, "S3: the window is not the width"
    check(scene.run(), scene.expected([scene.history[0][72:207]] * 7))


def test_r7_image_rows_look_ahead(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [450], [450], heads=1, batch={"spans": {0: [(100, 400)]}}, config={"max_image_tokens": 384})
    keys = scene.history[0]
    seen = [keys[min(max(t - 127, 0), 100) : 401] if 100 <= t <= 400 else scene.window(t) for t in range(450)]
    check(scene.run(), scene.expected(seen))


# Two caches.


@pytest.mark.parametrize(
    "layouts",
    [
        ("fp8_ds_mla", "fp8_ds_mla"),
        ("fp8_ds_mla", "fp8_ds_mla_v41"),
        ("fp8_ds_mla_v41", "fp8_ds_mla_v41"),
        ("bf16", "bf16"),
        ("bf16", "fp8_ds_mla"),
        ("fp8_per_tensor", "fp8_per_tensor"),
    ],
)
def test_a_second_cache_joins_the_window(provider: ProviderUnderTest, layouts: tuple[str, str]) -> None:
    if layouts not in provider.layout_pairs:
        pytest.skip(f"{provider.name} does not read {layouts[1]} beside {layouts[0]}")
    scene = mixed(provider, layout=layouts[0], second=(4, layouts[1], 256))
    generator = torch.Generator().manual_seed(7)
    local = torch.randint(-3, 190, (scene.tokens, 64), generator=generator)
    seen = []
    for t in range(scene.tokens):
        request, position = scene.token(t)
        chosen = [entry for entry in local[t].tolist() if 0 <= entry < (position + 1) // 4]
        seen.append(torch.cat([scene.window(t), scene.entries[request][chosen]]))
    check(scene.run(compressed=scene.topk(local)), scene.expected(seen))


def test_every_complete_entry_of_ratio_128(provider: ProviderUnderTest) -> None:
    scene = mixed(provider, second=(128, "fp8_ds_mla", 256))
    group = scene.metadata.compressed["second"]
    seen = []
    for t in range(scene.tokens):
        request, position = scene.token(t)
        seen.append(torch.cat([scene.window(t), scene.entries[request][: (position + 1) // 128]]))
    check(scene.run(compressed=(scene.second_cache, group.rows, group.lens)), scene.expected(seen))


def test_s8_an_incomplete_entry_is_dropped(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [5], [1028], second=(4, "fp8_ds_mla", 256), config={"k": 4})
    local = torch.tensor([[256, 255, 0]] * 5)
    seen = [torch.cat([scene.window(t), scene.entries[0][[255, 0]]]) for t in range(4)]
    seen.append(torch.cat([scene.window(4), scene.entries[0][[256, 255, 0]]]))
    check(scene.run(compressed=scene.topk(local)), scene.expected(seen))


def test_g1_top_k_outside_the_table_and_padded_tokens(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1, 1], [200, 130], second=(4, "fp8_ds_mla", 256), batch={"padding": 2})
    local = torch.tensor([[3, 9999, -1], [9999, 3, -1], [1, 2, 3], [4, 5, 6]])
    seen: list[torch.Tensor | None] = [
        torch.cat([scene.window(t), scene.entries[scene.token(t)[0]][[3]]]) for t in range(2)
    ]
    result = scene.run(compressed=scene.topk(local))
    check(result, scene.expected([*seen, None, None]))


def test_an_entry_that_occurs_twice_counts_twice(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1], [40], second=(4, "fp8_ds_mla", 256))
    local = torch.tensor([[5, 5, 9, 5]])
    check(
        scene.run(compressed=scene.topk(local)),
        scene.expected([torch.cat([scene.window(0), scene.entries[0][[5, 5, 9, 5]]])]),
    )


def test_gaps_wild_entries_and_garbage_in_compressed_rows(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1, 1], [130, 130], second=(4, "fp8_ds_mla", 256))
    cache, slots, _ = scene.topk(torch.tensor([[5, 6, 7, 8]] * 2))
    limit = cache.pages.num_slots
    rows = torch.tensor([[-1, limit, limit + 7, 2**31 - 1, -(2**31)] * 4] * 2, dtype=torch.int32, device=slots.device)
    rows = torch.cat([rows, slots, torch.zeros_like(slots)], dim=1)  # page 0 holds NaN
    lens = torch.tensor([24, 22], dtype=torch.int32, device=slots.device)
    entries = scene.entries
    seen = [
        torch.cat([scene.window(0), entries[0][[5, 6, 7, 8]]]),
        torch.cat([scene.window(1), entries[1][[5, 6]]]),
    ]
    check(scene.run(compressed=(cache, rows, lens)), scene.expected(seen))


def test_a_length_beyond_the_row_is_its_width(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1], [130], second=(4, "fp8_ds_mla", 256))
    cache, slots, lens = scene.topk(torch.tensor([[5, 6, 7]]))
    for wild in (4, 100, 2**31 - 1):
        result = scene.run(compressed=(cache, slots, torch.full_like(lens, wild)))
        check(result, scene.expected([torch.cat([scene.window(0), scene.entries[0][[5, 6, 7]]])]))
    check(scene.run(compressed=(cache, slots, torch.full_like(lens, -5))), scene.expected())


# Numerics.


def test_n2_sinks(provider: ProviderUnderTest) -> None:
    scene = mixed(provider)
    plain = scene.run(attn_sink=torch.full_like(scene.sink, -INF))
    check(plain, scene.expected(sink=torch.full_like(scene.sink, -INF)))
    sink = scene.sink.clone()
    sink[:2] = torch.tensor([INF, -INF])
    result = scene.run(attn_sink=sink)
    assert not result.out[:, 0].any()
    assert torch.equal(result.out[:, 1], plain.out[:, 1])
    torch.testing.assert_close(result.lse, plain.lse, atol=1e-5, rtol=0)
    later = apply_sink(plain.out, plain.lse, sink)
    assert relative_error(floats(later), floats(result.out)) <= 4e-3


@pytest.mark.parametrize("sink", [-INF, 0.0, INF])
def test_an_empty_row_is_zero_whatever_the_sink(provider: ProviderUnderTest, sink: float) -> None:
    scene = Scene(provider, [1, 1, 5], [9, 9, 5], batch={"slots": [-1] * 7})
    result = scene.run(attn_sink=torch.full_like(scene.sink, sink))
    assert not result.out.any()
    assert torch.all(result.lse == -INF)


def test_n3_partial_results_merge_into_one_pass(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1], [64 * 200], second=(4, "fp8_ds_mla", 256), config={"max_model_len": 16384})
    compressed = scene.topk(torch.arange(3072)[None])
    none = torch.full_like(scene.sink, -INF)
    whole = scene.run(compressed=compressed)
    first = scene.run(attn_sink=none)
    scene.metadata.decode_swa_lens.zero_()
    second = scene.run(attn_sink=none, compressed=compressed)
    out, lse = merge_states(first.out, first.lse, second.out, second.lse)
    merged = AttentionResult(apply_sink(out, lse, scene.sink), lse)
    expected = scene.expected([torch.cat([scene.window(0), scene.entries[0][:3072]])])
    check(whole, expected)
    check(merged, expected)


def test_nan_in_a_query_stays_in_its_row(provider: ProviderUnderTest) -> None:
    scene = mixed(provider)
    clean = scene.run()
    for token in (2, 60):
        q = scene.q.clone()
        q[token, 3, 100] = math.nan
        result = scene.run(q=q)
        assert torch.isnan(result.out[token, 3]).all()
        others = torch.arange(scene.tokens, device=q.device) != token
        assert torch.equal(result.out[others], clean.out[others])


def test_nan_in_a_key_stays_in_the_rows_that_refer_to_it(provider: ProviderUnderTest) -> None:
    scene = mixed(provider)
    clean = scene.run()
    slot = int(scene.metadata.prefill_swa_indices[-1, 0, 100])  # request 5, position 172
    key = torch.full((1, 512), math.nan, dtype=torch.bfloat16, device=scene.device)
    write_kv(key, scene.cache.pages, torch.tensor([slot], device=scene.device))
    result = scene.run()
    hit = torch.tensor([scene.token(t)[0] == 5 and scene.token(t)[1] >= 172 for t in range(scene.tokens)])
    hit = hit.to(scene.device)
    assert torch.isnan(result.out[hit]).all()
    assert torch.equal(result.out[~hit], clean.out[~hit])


@pytest.mark.parametrize("heads", [5, 8, 64])
def test_n5_a_row_alone_equals_the_row_in_a_batch(provider: ProviderUnderTest, heads: int) -> None:
    if not provider.batch_invariant:
        pytest.skip(f"{provider.name} has no batch-invariant mode")
    queries, seqs = [1] * 5 + [7, 30], [130, 5, 700, 64, 128, 9, 90]
    scene = Scene(provider, queries, seqs, heads=heads, second=(4, "fp8_ds_mla", 256), config={"batch_invariant": True})
    local = torch.randint(0, 170, (scene.tokens, 100), generator=torch.Generator().manual_seed(4))
    whole = scene.run(compressed=scene.topk(local))
    tables, slots, second = scene.spec.block_table(), scene.spec.slot_mapping(), scene.second_table
    out, lse = whole.out.clone(), whole.lse.clone()
    first = 0
    for r, query in enumerate(queries):
        tokens = slice(first, first + query)
        scene.queries, scene.seqs, scene.second_table = [query], [seqs[r]], second[r : r + 1]
        scene.spec = Batch([query], [seqs[r]], table=[tables[r].tolist()], slots=slots[tokens].tolist())
        scene.metadata = scene.build()
        alone = scene.run(q=scene.q[tokens], compressed=scene.topk(local[tokens]))
        assert torch.equal(alone.out, out[tokens])
        assert torch.equal(alone.lse, lse[tokens])
        first += query


# Calling conventions.


def test_s6_a_profiling_run_has_no_metadata(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1], [5], config={"compress_ratios": (0,)})
    assert workspace_bytes(scene.settings) == 4 * (W + 1024) * 512 * 2, "chunk size 4, 1024 batched tokens, bf16"
    unbound = DeepseekV4SWACache(512, W, torch.uint8, "layers.1", None, provider.backend)
    q = torch.full((17, HEADS, 512), math.nan, dtype=torch.bfloat16, device=scene.device)
    out = torch.full_like(q, math.nan)
    result = attend(q, None, unbound, scene.sink, out=out, return_lse=True)
    assert result.out is out
    assert not out.any()
    assert torch.all(result.lse == -INF)


def test_rows_past_the_step_are_zero(provider: ProviderUnderTest) -> None:
    scene = mixed(provider)
    q = torch.full((scene.tokens + 9, HEADS, 512), math.nan, dtype=torch.bfloat16, device=scene.device)
    q[: scene.tokens] = scene.q
    out = torch.full_like(q, math.nan)
    result = scene.run(q=q, out=out)
    assert result.out is out
    assert not out[scene.tokens :].any()
    assert torch.all(result.lse[scene.tokens :] == -INF)
    check(AttentionResult(out[: scene.tokens], result.lse[: scene.tokens]), scene.expected())


def test_p3_nan_in_fresh_memory_never_reaches_the_output(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that torch hands out without a value holds NaN (integers: their maximum), workspaces included."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        scene = mixed(provider, second=(4, "fp8_ds_mla", 256), batch={"padding": 3})
        local = torch.randint(0, 50, (scene.tokens, 20), generator=torch.Generator().manual_seed(4))
        result = scene.run(compressed=scene.topk(local))
    finally:
        torch.use_deterministic_algorithms(False)
    seen: list[torch.Tensor | None] = []
    for t in range(sum(scene.queries)):
        request, position = scene.token(t)
        chosen = [entry for entry in local[t].tolist() if entry < (position + 1) // 4]
        seen.append(torch.cat([scene.window(t), scene.entries[request][chosen]]))
    check(result, scene.expected([*seen, None, None, None]))


@pytest.mark.parametrize("rows", [0, 3])
def test_an_empty_step(provider: ProviderUnderTest, rows: int) -> None:
    scene = Scene(provider, [], [])
    assert scene.tokens == 0
    result = scene.run(q=torch.ones(rows, HEADS, 512, dtype=torch.bfloat16, device=scene.device))
    assert result.out.shape == (rows, HEADS, 512)
    assert not result.out.any()


def test_p1_a_step_whose_requests_have_no_token_is_not_launched(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(provider, [0] * 8, [0] * 8, config={"max_model_len": 1024, "max_num_batched_tokens": 64})
    for call in ("decode", "prefill"):
        monkeypatch.setattr(scene.metadata.provider, call, lambda _: pytest.fail("something was launched"))
    assert scene.metadata.get_prefill_chunk_plan(4, 4) == scene.metadata.get_prefill_chunk_plan(0, 4) == []
    q = torch.full((5, HEADS, 512), math.nan, dtype=torch.bfloat16, device=scene.device)
    result = scene.run(q=q)
    assert not result.out.any()
    assert torch.all(result.lse == -INF)


def test_strided_tensors_are_taken_as_they_are(provider: ProviderUnderTest) -> None:
    scene = mixed(provider, second=(4, "fp8_ds_mla", 256))
    local = torch.randint(0, 50, (scene.tokens, 20), generator=torch.Generator().manual_seed(4))
    cache, slots, lens = scene.topk(local)
    plain = scene.run(compressed=(cache, slots, lens))
    q = torch.full((scene.tokens, HEADS + 1, 576), math.nan, dtype=torch.bfloat16, device=scene.device)[:, 1:, 32:544]
    q.copy_(scene.q)
    out = torch.full((scene.tokens, 2, HEADS, 520), math.nan, dtype=torch.bfloat16, device=scene.device)[:, 1, :, 8:]
    wide = torch.full((scene.tokens, 33), 2**31 - 1, dtype=torch.int32, device=scene.device)
    wide[:, :20] = slots
    result = scene.run(q=q, out=out, compressed=(cache, wide[:, :20], lens))
    assert torch.equal(out, plain.out)
    assert torch.equal(result.lse, plain.lse)


def test_scale_and_lse_are_options(provider: ProviderUnderTest) -> None:
    scene = mixed(provider)
    result = scene.run(return_lse=False)
    assert result.lse is None
    assert torch.equal(result.out, scene.run(scale=SCALE).out)
    scene.q = (scene.q.float() * 4).bfloat16()
    check(scene.run(scale=SCALE), scene.expected())
    by_scale = scene.run(q=(scene.q.float() / 4).bfloat16(), scale=4 * SCALE)
    check(by_scale, scene.expected())
