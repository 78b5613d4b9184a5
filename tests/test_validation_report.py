"""Broken value rules are counted instead of raised where a report is asked for; planted faults, one of each kind."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend import cli
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.errors import ValidationError
from swa_backend.layer_types import LayerType
from swa_backend.problems import MAX_EXAMPLES, Problem, Problems, broken, count_problems, counting
from swa_backend.registry import get_backend
from swa_backend.replay import ReplayOptions, run_replay, runner
from swa_backend.write import gather_kv, write_kv
from tests.attention_scene import ProviderUnderTest, Scene
from tests.fakes import PlanningAttention, PlanScheduler
from tests.support import Batch, make_builder, make_config

TABLE = [[7, 3, 9, 1], [4, 5, 2, 6]]
NUM_PAGES = 12


@pytest.fixture(autouse=True)
def _not_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)


def counted(batch: CommonAttentionMetadata, **options: Any) -> tuple[Problems, Any]:
    builder = make_builder(make_config(validate=True), num_pages=NUM_PAGES, **options)
    with count_problems() as problems:
        metadata = builder.build(0, batch)
    assert not counting()
    return problems, metadata


class TestBatches:
    def test_a_sound_batch_has_none(self) -> None:
        problems, _ = counted(Batch([1, 40], [131, 200], table=TABLE).metadata())
        assert not problems
        assert problems.texts() == []

    def test_null_pages_in_a_live_window(self) -> None:
        """Pages 7 and 9 hold request 0's window, page 4 is left of request 1's."""
        batch = Batch([1, 40], [131, 240], table=TABLE).metadata()
        problems, metadata = counted(batch, null_page=9)
        assert problems.counts == {Problem.NULL_PAGES: 1}
        (text,) = problems.texts()
        assert text.startswith("block table of main, request 0, column 2: found 9;")
        plain = make_builder(make_config(), num_pages=NUM_PAGES).build(0, batch)
        assert torch.equal(metadata.decode_swa_indices, plain.decode_swa_indices)

    def test_pages_outside_the_cache(self) -> None:
        table = [[7, -1, 9, 1], [4, 5, 99, 98]]
        slots = Batch([1, 40], [131, 240], table=TABLE).slot_mapping().tolist()
        problems, metadata = counted(Batch([1, 40], [131, 240], table=table, slots=slots).metadata())
        assert problems.counts == {Problem.PAGES: 3}
        assert [error.field for error in problems.examples[Problem.PAGES]] == [
            "block table of main, request 0, column 1",
            "block table of main, request 1, column 2",
        ]
        assert int(metadata.decode_swa_lens[0]) == 128
        assert int((metadata.decode_swa_indices[0] >= 0).sum()) == 64

    def test_slots_outside_the_cache(self) -> None:
        batch = Batch([1, 40], [131, 240], table=TABLE, padding=3).metadata()
        batch.slot_mapping[5:9] = NUM_PAGES * 64
        batch.slot_mapping[42] = 0  # padding
        problems, _ = counted(batch)
        assert problems.counts == {Problem.SLOTS: 5}

    def test_lengths(self) -> None:
        batch = Batch([1, 40], [131, 240], table=TABLE).metadata()
        batch.max_query_len, batch.max_seq_len = 39, 130
        problems, _ = counted(batch)
        assert problems.counts == {Problem.LENGTHS: 3}

    def test_a_batch_of_contradictions_is_told_whole(self) -> None:
        batch = Batch([1, 40], [131, 240], table=TABLE, replay=[200, -1]).metadata()
        batch.query_start_loc[1] = 44
        batch.seq_lens[1] = 3
        problems, _ = counted(batch)
        assert problems.counts[Problem.LENGTHS] >= 5
        assert len(problems.examples[Problem.LENGTHS]) == MAX_EXAMPLES


@pytest.fixture
def scene() -> Scene:
    """Tokens 0 (a decode), 1 to 3 (a prefill) and 4 (padding), with a compressed cache of ratio 4."""
    provider = ProviderUnderTest("reference", get_backend("cpu"), "cpu")
    return Scene(
        provider, [1, 3], [200, 3], second=(4, "fp8_ds_mla", 256), batch={"padding": 1}, config={"validate": True}
    )


def poison(scene: Scene, cache: DeepseekV4SWACache, slot: int) -> None:
    """Give the key in a slot the scale NaN."""
    page, entry = divmod(slot, cache.entries_per_page)
    cache.pages.data[page, cache.entries_per_page * 576 + entry * 8] = 255


class TestCalls:
    def test_a_sound_call_has_none(self, scene: Scene) -> None:
        with count_problems() as problems:
            scene.run(compressed=scene.topk(torch.arange(5).repeat(5, 1)))
        assert not problems

    def test_a_nan_key_that_a_token_sees(self, scene: Scene) -> None:
        slot = int(scene.metadata.decode_swa_indices[0, 0, 77])
        poison(scene, scene.cache, slot)
        with pytest.raises(ValidationError) as error:
            scene.run()
        assert error.value.field == "decode_swa rows of token 0 (request 0)"
        assert str(error.value.found) == f"slot {slot} (page {slot // 64}, entry {slot % 64}), whose key is NaN"
        with count_problems() as problems:
            result = scene.run()
        assert problems.counts == {Problem.NAN_ROWS: 1}
        assert result.out[0].isnan().all()
        assert not result.out[1:].isnan().any()

    def test_a_nan_key_in_the_second_cache(self, scene: Scene) -> None:
        cache, rows, lens = scene.topk(torch.arange(5).repeat(5, 1))
        poison(scene, cache, int(rows[0, 2]))
        with pytest.raises(ValidationError) as error:
            scene.run(compressed=(cache, rows, lens))
        assert error.value.field == "compressed rows of token 0 (request 0)"

    def test_nan_keys_that_nobody_sees_are_nobodys_problem(self, scene: Scene) -> None:
        """All other rows of the scene's caches are NaN; so is what a padded token's row or a row's end would name."""
        seen = {int(slot) for slot in scene.metadata.decode_swa_indices.flatten() if slot >= 0}
        seen |= {int(slot) for slot in scene.metadata.prefill_swa_indices.flatten() if slot >= 0}
        free = next(slot for slot in range(scene.cache.pages.num_slots) if slot not in seen)
        poison(scene, scene.cache, free)
        scene.metadata.prefill_swa_indices[0, 0, 1] = free  # past the row's length
        scene.run()

    def test_rows_out_of_range(self, scene: Scene) -> None:
        cache, rows, lens = scene.topk(torch.arange(5).repeat(5, 1))
        rows[0, :2] = cache.pages.num_slots
        lens[1:3] = 6
        with count_problems() as problems:
            scene.run(compressed=(cache, rows, lens))
        assert problems.counts == {Problem.ROWS: 3}
        assert {error.field for error in problems.examples[Problem.ROWS]} == {
            "compressed rows of token 0 (request 0)",
            "compressed lens of token 1 (request 1)",
        }

    def test_sinks(self, scene: Scene) -> None:
        scene.sink[2:4] = math.nan
        with count_problems() as problems:
            scene.run()
        assert problems.counts == {Problem.SINKS: 2}

    def test_stale_plans(self, scene: Scene) -> None:
        """A plan that another step has filled, and one of another layer type, are counted and replaced."""
        old, other = FilledPlan(LayerType.SWAONLY), FilledPlan(LayerType.C128A)
        old.shape, old.generation = (1,), scene.metadata.generation - 1
        scene.metadata.plans = {LayerType.SWAONLY: old, LayerType.C4A: other, LayerType.C128A: None}
        with pytest.raises(ValidationError, match=r"^plans\[swaonly\]: found a plan of swaonly layers for build"):
            scene.run()
        with count_problems() as problems:
            scene.run()
        assert problems.counts == {Problem.STALE_PLANS: 2}
        assert scene.metadata.plans[LayerType.SWAONLY] is not old
        assert scene.metadata.plans[LayerType.C4A].layer_type is LayerType.C4A
        with count_problems() as problems:
            scene.run()
        assert not problems


class FilledPlan:
    """As FlashMLA's plan tells what it is for."""

    def __init__(self, layer_type: LayerType) -> None:
        self.layer_type = layer_type
        self.shape: Any = None
        self.generation = 0


class TestCaches:
    @pytest.fixture
    def cache(self) -> DeepseekV4SWACache:
        cache = DeepseekV4SWACache(512, 128, torch.uint8, "layers.0", None, get_backend("cpu"))
        cache.bind_kv_cache(cache.allocate(2, "cpu"))
        return cache

    def test_keys_and_slots(self, cache: DeepseekV4SWACache) -> None:
        k = torch.ones(4, 512).bfloat16()
        k[1, 300], k[2, 0] = math.inf, math.nan
        slots = torch.tensor([0, 1, 2, 128])
        with count_problems() as problems:
            write_kv(k, cache, slots, validate=True)
        assert problems.counts == {Problem.NAN_KEYS: 2, Problem.SLOTS: 1}
        out = torch.zeros(1, 3, 512).bfloat16()
        table, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        gather_kv(cache, table, lens, None, out)
        assert out[0, 0].eq(1).all()  # what is sound was stored
        assert out[0, 1, 256:320].isnan().all()

    def test_gathers(self, cache: DeepseekV4SWACache) -> None:
        table, lens = torch.tensor([[0, 5]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
        out = torch.zeros(1, 60, 512).bfloat16()
        with count_problems() as problems:
            gather_kv(cache, table, lens, None, out, validate=True)
        assert problems.counts == {Problem.LENGTHS: 1, Problem.PAGES: 1}


class TestUpdates:
    """What an engine advances in place is checked before the update, and before a build of fixed shape."""

    def builder(self, **config: Any) -> Any:
        return make_builder(make_config(validate=True, max_model_len=256, **config), num_pages=NUM_PAGES)

    @pytest.mark.parametrize(
        ("name", "value", "field"),
        [
            ("seq_lens", [131, 257], "seq_lens, request 1"),
            ("seq_lens", [0, 200], "seq_lens, request 0"),
            ("slot_mapping", [5, NUM_PAGES * 64], "slot_mapping of main, token 1"),
            ("block_table_tensor", [[7, 3, 9, 1], [4, 5, 2, 99]], "block table of main, request 1, column 3"),
            ("query_start_loc", [0, 2, 1], "query_start_loc, request 0"),
            ("query_start_loc", [0, 0, 3], "query_start_loc, request 1"),
        ],
    )
    @pytest.mark.parametrize("way", ["update", "capture"])
    def test_a_broken_rule(self, way: str, name: str, value: Any, field: str) -> None:
        builder = self.builder()
        batch = Batch([1, 1], [131, 256], table=TABLE).metadata()
        metadata = builder.build(0, batch)
        rows = metadata.decode_swa_indices.clone()
        getattr(batch, name).copy_(torch.tensor(value))
        again = {
            "update": lambda: builder.update_draft_decode_metadata(metadata),
            "capture": lambda: builder.capture_build(2, 2, batch),
        }[way]
        with pytest.raises(ValidationError) as error:
            again()
        assert error.value.field == field
        assert torch.equal(metadata.decode_swa_indices, rows)  # nothing was launched
        assert not metadata.is_overwritten

    def test_sound_ones_pass(self) -> None:
        builder = self.builder(k=2, dspark=True)
        batch = Batch([2, 1], [130, 200], table=TABLE, causal=False).metadata()
        metadata = builder.build(0, batch)
        batch.seq_lens.add_(1)
        builder.update_draft_decode_metadata(metadata)
        builder.capture_build(2, 6, Batch([3, 1], [130, 200], table=TABLE, padding=2).metadata())

    def test_captured_queries_are_no_longer_than_a_decode(self) -> None:
        batch = Batch([1, 1, 1], [130, 200, 9], table=[*TABLE, [8, 0, 0, 0]]).metadata()
        batch.query_start_loc.copy_(torch.tensor([0, 2, 3, 3]))
        with pytest.raises(ValidationError) as error:
            self.builder().capture_build(3, 3, batch)
        assert (error.value.field, error.value.found) == ("query_start_loc, request 0", 2)

    def test_the_device_has_no_more_tokens_than_the_step(self) -> None:
        batch = Batch([1, 1], [131, 200], table=TABLE).metadata()
        batch.query_start_loc[2] = 3
        with pytest.raises(ValidationError) as error:
            self.builder(k=2).capture_build(2, 2, batch)
        assert (error.value.field, error.value.found) == ("query_start_loc[2]", 3)


def test_each_thread_counts_for_itself() -> None:
    error = ValidationError("x", found=1, legal=2, fix="Correct it.")
    raised: list[BaseException] = []

    def other() -> None:
        try:
            broken(Problem.SLOTS, error)
        except ValidationError as found:
            raised.append(found)

    with count_problems() as outer:
        broken(Problem.SLOTS, error, 2)
        with count_problems() as inner:
            broken(Problem.ROWS, error)
        broken(Problem.SLOTS, error)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert (outer.counts, inner.counts) == ({Problem.SLOTS: 3}, {Problem.ROWS: 1})
    assert raised == [error]


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:44:50.08,200,3\n2023-11-16 18:44:51.08,40,9\n"


class TestReplay:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text(TRACE)
        return path

    def options(self, trace: Path, **changes: Any) -> ReplayOptions:
        return ReplayOptions(
            trace=trace, platform="cpu", pages=16, max_batched_tokens=96, layers=("swaonly",), **changes
        )

    def test_a_sound_replay_breaks_no_rule(self, trace: Path) -> None:
        report = run_replay(self.options(trace, validate=True, drafts=2))
        assert (report.problems, report.mismatches) == ({}, 0)
        assert run_replay(self.options(trace)).problems is None

    def test_a_replay_counts_what_is_planted(
        self, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        original = runner.make_step

        def lossy(*args: Any) -> Any:
            """The second column, in the window of every token past 128, is lost."""
            step = original(*args)
            step.batch.block_table_tensor[:, 1] = -1
            return step

        monkeypatch.setattr(runner, "make_step", lossy)
        command = ["replay", "--platform", "cpu", "--trace", str(trace), "--pages", "16", "--layers", "swaonly"]
        assert cli.main([*command, "--validate", "--verify", "none", "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["problems"][Problem.PAGES] > 0
        assert report["mismatches"] > report["problems"][Problem.PAGES]
        assert any(text.startswith("block table of main, request 0, column 1: found -1") for text in report["examples"])
        assert cli.main([*command, "--validate"]) == 1
        assert "pages outside a cache in a live window" in " ".join(capsys.readouterr().out.split())


def test_plans_of_another_kind_are_left_alone() -> None:
    """A platform's plans that do not say what they are for are never taken for stale."""
    platform = dataclasses.replace(
        get_backend("cpu").platform,
        load_scheduler=lambda target: PlanScheduler(),
        load_providers=lambda target: (PlanningAttention(),),
    )
    backend = dataclasses.replace(get_backend("cpu"), platform=platform)
    scene = Scene(ProviderUnderTest("reference", backend, "cpu"), [1, 3], [200, 3], config={"validate": True})
    assert scene.metadata.tile_sched_swaonly is not None
    scene.run()
