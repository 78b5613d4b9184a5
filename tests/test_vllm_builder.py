"""vLLM's metadata builders as the plugin replaces them: settings, every recorded case, groups built together."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend.errors import BatchError, ConfigError
from swa_backend.integrations.vllm import builder as builder_module
from swa_backend.integrations.vllm.builder import Builds, Replacements
from swa_backend.integrations.vllm.shared_step import GROUPS, SharedBatch, together, wrap_loops
from swa_backend.integrations.vllm.surface import FILLED_BY_VLLM, METADATA_FIELDS, RAGGED_FIELDS
from tests.support import Batch, GoldenCase, golden_cases, load_golden
from tests.vllm_fake import (
    ATTN_UTILS,
    FLASHINFER_V41,
    FLASHMLA,
    MODEL_STATE,
    ROCM,
    RUNNER,
    Fake,
    Plan,
    batch_of,
    build_attn_metadata,
    spec,
    vllm_config,
)

CPU = torch.device("cpu")
CASES = golden_cases("metadata")
MIXED = Batch([1, 2, 40, 30], [130, 20, 300, 30], padding=3)
KINDS = ("swaonly", "c1a", "c2a", "c4a", "c128a")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("SWA_BACKEND_PLATFORM", "cpu")
    return Fake().install(monkeypatch)


def make(fake: Fake, *, count: int = 1, original: type | None = None, page: int = 64, **options: Any) -> list[Any]:
    """Builders of so many cache groups, in the place of ``original``."""
    replacing = Replacements(fake.sparse_swa).builder(original or fake.sparse_swa.DeepseekSparseSWAMetadataBuilder)
    config = vllm_config(**options)
    return [replacing(spec(block_size=page), [f"layer{number}"], config, CPU) for number in range(count)]


def options_of(case: GoldenCase) -> dict[str, Any]:
    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "compress_ratios", "max_image_tokens")
    return {
        "window": case["inputs/window_size"],
        "page": case["inputs/block_size"],
        "k": case["inputs/num_speculative_tokens"],
        "parallel_drafting": case["inputs/parallel_drafting"],
        "dspark": case["inputs/dspark"],
        **{name: case[f"inputs/{name}"] for name in names},
    }


def check_recorded(case: GoldenCase, metadata: Any) -> None:
    """Every recorded field; visibility was recorded for the prefill tokens alone."""
    expected = {
        key.removeprefix("expected/"): value for key, value in case.values.items() if key.startswith("expected/")
    }
    compared = 0
    for name in METADATA_FIELDS & expected.keys():
        right, found = expected[name], getattr(metadata, name)
        if name.endswith("_visible") and right is not None:
            found = found[metadata.num_decode_tokens :]
        if right is None or isinstance(right, int):
            assert found == right, name
        else:
            assert found.tolist() == right.tolist(), name
        compared += 1
    assert compared > 15
    assert {kind for kind in KINDS if getattr(metadata, f"tile_sched_{kind}")} == set(expected["tile_sched_present"])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_recorded_case(path: Path, fake: Fake) -> None:
    case = load_golden(path)
    (builder,) = make(fake, **options_of(case))
    ours = case.batch()
    batch = batch_of(ours)
    metadata = builder.build(0, batch)
    check_recorded(case, metadata)
    assert isinstance(metadata, fake.sparse_swa.DeepseekSparseSWAMetadata)
    assert builder.decode_threshold == case["expected/decode_threshold"]
    given = {"block_table": "block_table_tensor", "query_start_loc": "query_start_loc", "seq_lens": "seq_lens"}
    given |= {"slot_mapping": "slot_mapping", "query_start_loc_cpu": "query_start_loc_cpu"}
    for name, source in given.items():
        assert getattr(metadata, name) is getattr(batch, source), name
    for name in FILLED_BY_VLLM:
        assert not getattr(metadata, name), name
    assert metadata.replay_start.tolist() == [0] * batch.num_reqs
    limits = {"prefill_window_size": "window_size", "prefill_max_model_len": "max_model_len"}
    limits["prefill_max_num_batched_tokens"] = "max_num_batched_tokens"
    for name, source in limits.items():
        assert getattr(metadata, name) == (case[f"inputs/{source}"] if metadata.num_prefills else 0)
    for key, plan in (case.get("expected/chunk_plans") or {}).items():
        ratio, size, flag = key.split("/")
        compressed = {"None": None, "True": True, "False": False}[flag]
        assert [list(chunk) for chunk in metadata.get_prefill_chunk_plan(int(ratio), int(size), compressed)] == plan


@pytest.mark.parametrize("path", CASES[::6], ids=lambda path: path.stem)
def test_the_ragged_builder_makes_the_recorded_ragged_rows(path: Path, fake: Fake) -> None:
    case = load_golden(path)
    original = fake.modules[ROCM].DeepseekV4ROCMAiterSparseSWAMetadataBuilder
    (builder,) = make(fake, original=original, **options_of(case))
    metadata = builder.build(0, batch_of(case.batch()))  # vLLM's own ragged build would raise
    assert type(metadata).__mro__[1] is fake.modules[ROCM].DeepseekV4ROCMAiterSparseSWAMetadata
    check_recorded(case, metadata)
    seen = 0
    for part in ("decode", "prefill"):
        if case.get(f"expected/{part}_ragged_indptr") is None:
            continue
        indptr = getattr(metadata, f"{part}_swa_ragged_indptr")
        assert indptr.tolist() == case[f"expected/{part}_ragged_indptr"].tolist()
        indices = getattr(metadata, f"{part}_swa_ragged_indices")[: indptr[-1]]
        assert indices.tolist() == case[f"expected/{part}_ragged_indices"].tolist()
        seen += 1
    assert seen
    assert builder.supports_draft_decode_metadata_update
    assert not original.supports_draft_decode_metadata_update
    assert not [name for name in vars(builder) if name.endswith("_buffer")]


def test_vllms_own_buffers_are_not_allocated(fake: Fake) -> None:
    (builder,) = make(fake)
    assert not [name for name, value in vars(builder).items() if isinstance(value, torch.Tensor)]
    assert builder.device == CPU
    assert builder._cudagraph_support == "uniform"
    (always,) = make(fake, original=fake.modules[FLASHMLA].DeepseekSparseSWAFlashMLAMetadataBuilder)
    assert always._cudagraph_support == "always"


def test_what_a_subclass_of_vllms_fills_after_the_build_is_kept(fake: Fake) -> None:
    """Inside vLLM's loop, too, where it looks before the groups are built together."""
    original = fake.modules[FLASHINFER_V41].DeepseekSparseSWAFlashInferMetadataBuilder
    builders = make(fake, original=original, count=2)
    assert builders[0].own_buffer.device == CPU  # allocated by the subclass itself
    batch = batch_of(MIXED.metadata())
    for metadata in (builders[0].build(0, batch), *together(build_attn_metadata)(builders, [batch, batch])):
        assert metadata.flashinfer_decode_topk_lens.tolist() == metadata.decode_swa_lens.clamp(min=128).tolist()
        assert metadata.num_decode_tokens == 1


@pytest.mark.parametrize(
    ("options", "threshold", "width"),
    [
        ({}, 1, 0),
        ({"k": 3}, 4, 0),
        ({"k": 3, "parallel_drafting": True}, 7, 0),
        ({"k": 5, "dspark": True}, 6, 192),
    ],
)
def test_settings_are_vllms(options: dict[str, Any], threshold: int, width: int, fake: Fake) -> None:
    (builder,) = make(fake, max_num_seqs=4, **options)
    config = builder.swa_config
    assert (config.decode_threshold, config.non_causal_width) == (threshold, width)
    assert config.model.window_size == 128
    assert config.scheduler.max_num_batched_tokens == 512
    assert builder.swa_config is make(fake, max_num_seqs=4, **options)[0].swa_config


def test_a_padded_batch_may_have_as_many_decodes_as_tokens(fake: Fake) -> None:
    """vLLM pads to the sizes of its graphs, which may exceed ``max_num_seqs`` times the decode threshold."""
    (builder,) = make(fake, max_num_seqs=3, max_num_batched_tokens=16)
    metadata = builder.build(0, batch_of(Batch([1, 1, 1], [9, 9, 9], padding=13).metadata()))
    assert metadata.num_decode_tokens == 16
    assert metadata.is_valid_token.tolist() == [True] * 3 + [False] * 13


@pytest.mark.parametrize(
    ("dtype", "content", "layout"),
    [
        (torch.uint8, 584, "fp8_ds_mla"),
        (torch.uint8, 528, "fp8_ds_mla_v41"),
        (torch.bfloat16, None, "bf16"),
        (torch.float8_e4m3fn, None, "fp8_per_tensor"),
    ],
)
def test_layouts_by_vllms_spec(dtype: torch.dtype, content: int | None, layout: str, fake: Fake) -> None:
    (builder,) = make(fake)
    builder.kv_cache_spec = spec(dtype=dtype, state_content_bytes=content)
    assert Builds((builder,)).builder.kv_cache_spec.layout.name == layout


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"pcp": 2}, "prefill_context_parallel_size"),
        ({"k": 2, "dspark": True, "sample_from_anchor": False}, "sample_from_anchor"),
        ({"page": 48}, "page_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_at_construction(options: dict[str, Any], field: str, fake: Fake) -> None:
    with pytest.raises(ConfigError) as caught:
        make(fake, **options)
    assert caught.value.field == field


def test_a_spec_of_an_unknown_layout_is_refused(fake: Fake) -> None:
    (builder,) = make(fake)
    builder.kv_cache_spec = spec(state_content_bytes=640)
    with pytest.raises(ConfigError, match="640"):
        builder.build(0, batch_of(MIXED.metadata()))


def test_a_threshold_or_width_of_another_vllm_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    base = fake.sparse_swa.DeepseekSparseSWAMetadataBuilder
    original = base.__init__

    def initialise(self: Any, *args: Any) -> None:
        original(self, *args)
        self.decode_threshold += 1

    monkeypatch.setattr(base, "__init__", initialise)
    with pytest.raises(ConfigError, match="decode threshold"):
        make(fake, k=3)

    def widen(self: Any, *args: Any) -> None:
        original(self, *args)
        self.noncausal_index_width += 64

    monkeypatch.setattr(base, "__init__", widen)
    with pytest.raises(ConfigError, match="noncausal_index_width"):
        make(fake, k=3)


def test_a_builder_without_the_settings_that_are_taken_over_is_refused(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = fake.sparse_swa.DeepseekSparseSWAMetadataBuilder
    original = base.__init__

    def initialise(self: Any, *args: Any) -> None:
        original(self, *args)
        del self.window_size

    monkeypatch.setattr(base, "__init__", initialise)
    with pytest.raises(ConfigError, match="no attribute window_size"):
        make(fake)


class Counted:
    """Counts the builds that the library is asked for, by their groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[int] = []
        original = Builds.launch

        def launch(builds: Builds, batch: SharedBatch) -> Any:
            self.groups.append(len(batch.builders))
            return original(builds, batch)

        monkeypatch.setattr(Builds, "launch", launch)


def group_batches(count: int, batch: Batch = MIXED) -> list[Any]:
    """vLLM's batches of a step: each group its own table and slots, everything else the same objects."""
    ours = batch.metadata()
    made = []
    for number in range(count):
        table = batch.block_table() + 100 * number
        slots = dataclasses.replace(batch, table=table.tolist()).slot_mapping()
        made.append(batch_of(ours, block_table_tensor=table, slot_mapping=slots))
    return made


def same(found: Any, right: Any) -> None:
    for name in METADATA_FIELDS | RAGGED_FIELDS:
        mine, other = getattr(found, name, None), getattr(right, name, None)
        if isinstance(other, torch.Tensor):
            live = None
            if name.endswith("ragged_indices"):  # what lies past the last row means nothing
                live = int(getattr(right, name.replace("indices", "indptr"))[-1])
            assert torch.equal(mine[:live], other[:live]), name
        elif name.startswith("tile_sched"):
            assert type(mine) is type(other), name
        else:
            assert mine == other, name


@pytest.mark.parametrize("count", [1, 2, GROUPS])
def test_groups_of_a_step_are_built_together(count: int, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = make(fake, count=count)
    batches = group_batches(count)
    counted = Counted(monkeypatch)
    for _ in range(2):
        together_made = together(build_attn_metadata)(builders, batches)
    assert counted.groups == [count] * 2
    alone = [make(fake)[0].build(0, batch) for batch in batches]
    assert counted.groups[2:] == [1] * count
    for found, right in zip(together_made, alone, strict=True):
        same(found, right)
    if count > 1:
        assert not torch.equal(together_made[0].decode_swa_indices, together_made[1].decode_swa_indices)


def test_more_groups_than_a_launch_takes_are_built_in_several(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    builders, batches = make(fake, count=GROUPS + 3), group_batches(GROUPS + 3)
    counted = Counted(monkeypatch)
    made = together(build_attn_metadata)(builders, batches)
    assert counted.groups == [GROUPS, 3]
    for found, batch in zip(made, batches, strict=True):
        same(found, make(fake)[0].build(0, batch))


def test_addresses_stay_from_step_to_step(fake: Fake) -> None:
    builders = make(fake, count=3)
    loop = together(build_attn_metadata)

    def addresses() -> list[int]:
        made = loop(builders, group_batches(3))
        names = (
            "decode_swa_indices",
            "decode_swa_lens",
            "prefill_swa_indices",
            "is_valid_token",
            "prefill_gather_lens",
        )
        return [getattr(one, name).data_ptr() for one in made for name in (*names, "token_to_req_indices")]

    assert addresses() == addresses()


def test_outside_of_a_loop_a_build_is_made_at_once(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = make(fake, count=2)
    counted = Counted(monkeypatch)
    for builder, batch in zip(builders, group_batches(2), strict=True):
        builder.build(0, batch)
    assert counted.groups == [1, 1]
    builders[0].build_for_cudagraph_capture(group_batches(1)[0])
    assert counted.groups == [1, 1, 1]


def test_reading_early_builds_early(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    builders, batches = make(fake, count=3), group_batches(3)
    counted = Counted(monkeypatch)

    def loop(builders: list[Any], batches: list[Any]) -> list[Any]:
        made = [builder.build(0, batch) for builder, batch in zip(builders[:2], batches[:2], strict=True)]
        assert counted.groups == []
        assert made[1].num_decodes == 1  # the first look
        assert counted.groups == [2]
        made.append(builders[2].build(0, batches[2]))
        return made

    made = together(loop)(builders, batches)
    assert counted.groups == [2, 1]
    for found, batch in zip(made, batches, strict=True):
        same(found, make(fake)[0].build(0, batch))


def test_what_vllm_sets_before_the_build_stays(fake: Fake) -> None:
    def loop(builder: Any, batch: Any) -> Any:
        metadata = builder.build(0, batch)
        metadata.cache_positions = "set by vLLM"
        return metadata

    (builder,) = make(fake)
    metadata = together(loop)(builder, group_batches(1)[0])
    assert metadata.cache_positions == "set by vLLM"
    assert metadata.num_decodes == 1


def test_batches_that_differ_are_built_apart(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of a step (as in vLLM's dual batches) and a builder that is called twice."""
    builders = make(fake, count=4)
    one, other = group_batches(2), group_batches(2, Batch([1, 1], [90, 200]))
    counted = Counted(monkeypatch)
    made = together(build_attn_metadata)(builders, [one[0], other[0], one[1], other[1]])
    assert counted.groups == [2, 2]
    for found, batch in zip(made, [one[0], other[0], one[1], other[1]], strict=True):
        same(found, make(fake)[0].build(0, batch))
    counted.groups.clear()
    together(build_attn_metadata)([builders[0], builders[0]], one)
    assert counted.groups == [1, 1]


def test_views_of_the_same_memory_are_the_same_batch(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    builders, batches = make(fake, count=2), group_batches(2)
    names = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound")
    batches[1] = dataclasses.replace(batches[1], **{name: getattr(batches[1], name)[:] for name in names})
    counted = Counted(monkeypatch)
    together(build_attn_metadata)(builders, batches)
    batches[1] = dataclasses.replace(batches[1], seq_lens=batches[1].seq_lens.clone())
    together(build_attn_metadata)(builders, batches)
    assert counted.groups == [2, 1, 1]


def test_a_step_leaves_no_circle_of_references(fake: Fake) -> None:
    """Else its tensors would stay until Python's collector runs, which costs more than the build."""
    builders = make(fake, count=2)
    loop = together(build_attn_metadata)
    loop(builders, group_batches(2))
    gc.collect()
    gc.disable()
    try:
        for read in (False, True):
            batches = group_batches(2)
            slots = weakref.ref(batches[1].slot_mapping)
            made = loop(builders, batches)
            if read:
                assert made[1].num_decodes == 1
            del made, batches
            assert slots() is None
    finally:
        gc.enable()


def test_a_loop_that_fails_leaves_nothing_open(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    builders, batches = make(fake, count=2), group_batches(2)
    counted = Counted(monkeypatch)
    loop = together(build_attn_metadata)
    with pytest.raises(RuntimeError, match="a later group failed"):
        loop(builders, batches, fail=True)
    assert counted.groups == []
    builders[0].build(0, batches[0])
    loop(builders, batches)
    assert counted.groups == [1, 2]


def test_replay_starts_reach_the_rows(fake: Fake) -> None:
    builders, batches = make(fake, count=2), group_batches(2, Batch([40], [300]))
    starts = torch.tensor([240], dtype=torch.int32)
    for metadata in together(build_attn_metadata)(builders, batches, replay_start=starts):
        assert metadata.replay_start is starts
        assert metadata.prefill_swa_lens.tolist() == [min(128, position - 239) for position in range(260, 300)]


def test_loops_are_wrapped_wherever_they_are_known(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    builders, batches = make(fake, count=2), group_batches(2)  # constructing a builder wraps them
    assert wrap_loops() == ()
    for call in (
        sys.modules[ATTN_UTILS].build_attn_metadata,
        sys.modules[MODEL_STATE].build_attn_metadata,  # imported by name
        sys.modules[RUNNER].GPUModelRunner()._build_attention_metadata,
    ):
        counted.groups.clear()
        call(builders, batches)
        assert counted.groups == [2]


def test_a_model_runner_without_its_loop_is_refused(fake: Fake) -> None:
    del sys.modules[ATTN_UTILS].build_attn_metadata  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="build_attn_metadata"):
        make(fake)


def test_slots_tables_and_lengths_past_the_batch_are_passed_through(fake: Fake) -> None:
    """vLLM hands out buffers longer than the step."""
    (builder,) = make(fake)
    batch = group_batches(1)[0]
    right = builder.build(0, batch)
    expected = {name: getattr(right, name).clone() for name in ("decode_swa_indices", "prefill_swa_indices")}
    more = torch.tensor([-1, -1])
    longer = dataclasses.replace(
        batch,
        slot_mapping=torch.cat([batch.slot_mapping, more]),
        block_table_tensor=torch.cat([batch.block_table_tensor, batch.block_table_tensor]),
        query_start_loc=torch.cat([batch.query_start_loc, more.int()]),
        seq_lens_cpu_upper_bound=torch.cat([batch.seq_lens_cpu_upper_bound, more.int()]),
        max_seq_len=99999,
    )
    metadata = builder.build(0, longer)
    assert metadata.slot_mapping is longer.slot_mapping
    assert metadata.block_table is longer.block_table_tensor
    for name, tensor in expected.items():
        assert torch.equal(getattr(metadata, name), tensor)


@pytest.mark.parametrize("ragged", [False, True])
def test_draft_updates_equal_a_fresh_build(ragged: bool, fake: Fake) -> None:
    original = fake.modules[ROCM].DeepseekV4ROCMAiterSparseSWAMetadataBuilder if ragged else None
    builders = make(fake, original=original, count=2, k=2)
    batches = group_batches(2, Batch([3, 3], [90, 200]))
    made = together(build_attn_metadata)(builders, batches)
    plans = [metadata.tile_sched_swaonly for metadata in made]
    made[1].flashinfer_sparse_index_cache["swa_only"] = "of the step before"
    batches[0].seq_lens.add_(1)
    batches[1].slot_mapping[4] = -1
    for builder, metadata in zip(builders, made, strict=True):
        builder.update_draft_decode_metadata(metadata)
    assert made[1].flashinfer_sparse_index_cache == {}
    for metadata, plan, batch in zip(made, plans, batches, strict=True):
        assert isinstance(metadata.tile_sched_swaonly, Plan)
        assert metadata.tile_sched_swaonly is not plan
        advanced = dataclasses.replace(batch, max_seq_len=201, seq_lens_cpu_upper_bound=batch.seq_lens.clone())
        same(metadata, make(fake, original=original, k=2)[0].build(0, advanced))


def test_an_update_of_nothing_or_of_something_else(fake: Fake) -> None:
    (builder,) = make(fake)
    prefill = builder.build(0, batch_of(Batch([40], [300]).metadata()))
    builder.update_draft_decode_metadata(prefill)  # no decodes: nothing to do, as in vLLM
    other = fake.sparse_swa.DeepseekSparseSWAMetadata(None, None, 0)
    other.num_decode_tokens = 4
    with pytest.raises(BatchError, match="did not make"):
        builder.update_draft_decode_metadata(other)


def test_plans_are_fresh_in_every_step_and_absent_without_decodes(fake: Fake) -> None:
    (builder,) = make(fake)
    batch = batch_of(Batch([1], [90]).metadata())
    first, second = builder.build(0, batch), builder.build(0, batch)
    assert isinstance(first.tile_sched_c4a, Plan)
    assert first.tile_sched_c4a is not second.tile_sched_c4a
    assert first.tile_sched_c4a is not first.tile_sched_swaonly
    assert first.tile_sched_c2a is None
    assert builder.build(0, batch_of(Batch([40], [300]).metadata())).tile_sched_swaonly is None


def test_a_copy_that_vllm_makes_plans_its_chunks_as_vllm_does(fake: Fake) -> None:
    (builder,) = make(fake)
    metadata = builder.build(0, group_batches(1)[0])
    copied = dataclasses.replace(metadata, num_decodes=1)
    assert copied.get_prefill_chunk_plan(4, 4) == ["vLLM's own plan"]
    assert metadata.get_prefill_chunk_plan(4, 4) != ["vLLM's own plan"]


def test_the_first_build_inside_a_capture_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that a graph's memory pool owns would not outlive it."""
    builders, batches = make(fake, count=2), group_batches(2)
    builders[0].build(0, batches[0])
    monkeypatch.setattr(builder_module, "capture_id", lambda tensor: 7)
    builders[0].build(0, batches[0])  # allocated before
    with pytest.raises(BatchError, match="capture"):
        together(build_attn_metadata)(builders, batches)


def test_a_forced_provider_does_not_concern_vllms_attention(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "triton")
    (builder,) = make(fake)
    assert builder.build(0, batch_of(Batch([1], [9]).metadata())).num_decodes == 1


def test_attention_over_these_metadata_is_vllms_own(fake: Fake) -> None:
    from swa_backend.attention import attend
    from swa_backend.cache import DeepseekV4SWACache
    from swa_backend.errors import ProviderError
    from swa_backend.integrations.vllm.metadata import OURS
    from swa_backend.registry import get_backend

    (builder,) = make(fake)
    metadata = builder.build(0, batch_of(Batch([1], [9]).metadata()))
    cache = DeepseekV4SWACache(512, 128, torch.uint8, "layer", None, get_backend("cpu"))
    cache.bind_kv_cache(cache.allocate(4, "cpu"))
    with pytest.raises(ProviderError, match="SWA_BACKEND_VLLM=attention"):
        attend(torch.ones(1, 1, 512, dtype=torch.bfloat16), getattr(metadata, OURS), cache, torch.zeros(1))
