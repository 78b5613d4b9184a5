"""What a builder promises around its rows: construction, fields, one address for life, plans, updates, capture."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.errors import BatchError, ConfigError, PlatformError, ProviderError
from swa_backend.groups import CompressedGroup, SwaGroup
from swa_backend.layer_types import LayerType, ModelVersion
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.registry import get_backend
from tests.fakes import planning_backend
from tests.support import Batch, make_builder, make_config

MIXED = Batch([1, 2, 40, 30], [130, 20, 300, 30], spans={2: [(270, 279)]}, padding=3)
GROUPS = (CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256))
OTHER = SwaGroup("other", page_tokens=32)


def computed(metadata: DeepseekSparseSWAMetadata) -> dict[str, torch.Tensor]:
    """Every tensor that the builder computed, those of further groups included."""
    given = {"block_table", "slot_mapping", "seq_lens", "query_start_loc", "query_start_loc_cpu"}
    given |= {"prefill_seq_lens", "prefill_seq_lens_cpu", "prefill_query_lens_cpu"}
    found = {}
    for name, one in {"": metadata, **metadata.groups, **metadata.compressed}.items():
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            if isinstance(value, torch.Tensor) and field.name not in given:
                found[f"{name}.{field.name}"] = value
    return found


def further(batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of `GROUPS` and `OTHER` for a batch."""
    narrow = dataclasses.replace(batch, page_tokens=32, table=None)
    tables = torch.arange(8 * len(batch.queries), dtype=torch.int32).reshape(-1, 8)
    return {
        "c4a": (tables, batch.slot_mapping()),
        "c128a": (tables.flip(1).contiguous(), batch.slot_mapping()),
        "other": (narrow.block_table(), narrow.slot_mapping()),
    }


def compare(found: DeepseekSparseSWAMetadata, expected: DeepseekSparseSWAMetadata) -> None:
    """Every computed tensor, as far as it means anything: ragged entries to the last indptr, rows to their lengths."""
    right = computed(expected)
    assert computed(found).keys() == right.keys()
    for name, tensor in computed(found).items():
        other, live = right[name], slice(None)
        if "ragged_indices" in name:
            live = slice(int(right[name.replace("indices", "indptr")][-1]))
        elif name == "c128a.rows":
            means = torch.arange(tensor.shape[1]) < right["c128a.lens"][:, None]
            tensor, other = tensor.where(means, -1), other.where(means, -1)
        elif "replay_start" in name:
            live = slice(other.shape[0])  # of the requests that both have
        assert torch.equal(tensor[live], other[live]), name


class TestConstruction:
    def test_the_spec_is_that_of_the_models_window(self) -> None:
        backend, config = get_backend("cpu"), make_config()
        cache = DeepseekV4SWACache(512, 64, torch.uint8, "x", None, backend)
        with pytest.raises(ConfigError, match=r"kv_cache_spec.sliding_window.*64.*128"):
            backend.get_builder_cls()(cache.get_kv_cache_spec(config), [], config, "cpu")
        compressed = CompressedCache(4, "fp8_ds_mla", 256, "y", None, backend)
        with pytest.raises(ConfigError, match="kv_cache_spec"):
            backend.get_builder_cls()(compressed.get_kv_cache_spec(config), [], config, "cpu")

    @pytest.mark.parametrize("device", ["cuda:0", "meta"])
    def test_another_device_than_the_platforms(self, device: str) -> None:
        with pytest.raises(PlatformError) as error:
            make_builder(make_config(), device=device)
        assert (error.value.field, error.value.found) == ("device", device)

    def test_a_provider_that_nobody_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SWA_BACKEND_ATTENTION", "flashiest")
        with pytest.raises(ProviderError, match="flashiest"):
            make_builder(make_config())

    @pytest.mark.parametrize("pages", [2**25, 2**40, -1, 2.0, "9"])
    def test_c2_a_cache_of_2_to_the_31_slots_is_refused(self, pages: Any) -> None:
        """64 tokens a page; further groups likewise, each by the entries of its own pages."""
        for options, name in (
            ({"num_pages": pages}, "main"),
            ({"swa_groups": (SwaGroup("other", num_pages=pages),)}, "other"),
            ({"compressed_groups": (CompressedGroup("c4a", 4, 256, num_pages=pages),)}, "c4a"),
        ):
            with pytest.raises(BatchError, match=f"num_pages of group '{name}'"):
                make_builder(make_config(), **options)
            if name == "main":
                builder = make_builder(make_config())
                with pytest.raises(BatchError, match="num_pages of group 'main'"):
                    builder.set_num_pages(pages)

    def test_the_most_pages_are_legal(self) -> None:
        builder = make_builder(make_config(), num_pages=2**25 - 1)
        metadata = builder.build(0, Batch([1], [1], table=[[2**25 - 2]], slots=[0]).metadata())
        assert metadata.decode_swa_indices[0, 0, 0] == (2**25 - 2) * 64

    def test_page_counts_of_a_group_nobody_named(self) -> None:
        with pytest.raises(BatchError, match="'other'"):
            make_builder(make_config()).set_num_pages(5, "other")

    def test_page_counts_may_come_later_for_each_group(self) -> None:
        builder = make_builder(make_config(), compressed_groups=GROUPS, swa_groups=(OTHER,))
        batch = Batch([1], [260], table=[[1, 2, 3, 4, 5]])
        groups = further(batch)
        for name, pages in (("main", 5), ("other", 3), ("c4a", 1), ("c128a", 7)):
            builder.set_num_pages(pages, name)
        metadata = builder.build(0, batch.metadata(), groups=groups)
        assert int(metadata.decode_swa_indices.max()) == 4 * 64 + 63  # page 5 is past the cache
        assert metadata.decode_swa_indices[0, 0, -4:].tolist() == [-1] * 4
        other = metadata.groups["other"].decode_swa_indices
        assert int(other.max()) < 3 * 32
        assert metadata.compressed["c4a"].compressed_slot_mapping.tolist() == [-1]  # entry 64, page 1
        assert metadata.compressed["c128a"].lens.tolist() == [2]
        assert metadata.compressed["c128a"].rows[0, :2].tolist() == [-1, -1]  # page 7 of 7

    def test_a_second_buffer_only_with_dspark(self) -> None:
        assert make_builder(make_config(k=5))._buffers.noncausal_indices is None
        wide = make_builder(make_config(k=5, dspark=True))._buffers
        assert wide.noncausal_indices is not None
        assert wide.noncausal_indices.shape[-1] == 192
        assert wide.decode_indices.shape[-1] == 128


class TestMetadata:
    def test_fields_of_a_mixed_step(self) -> None:
        batch = MIXED.metadata()
        builder = make_builder(make_config(k=1, max_image_tokens=16, max_num_batched_tokens=96, max_model_len=512))
        metadata = builder.build(0, batch)
        for name in ("slot_mapping", "seq_lens", "query_start_loc", "query_start_loc_cpu"):
            assert getattr(metadata, name) is getattr(batch, name)
        assert metadata.block_table is batch.block_table_tensor
        assert metadata.block_size == 64
        assert metadata.max_decode_query_len == 2
        assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
        assert (metadata.num_decode_tokens, metadata.num_prefill_tokens) == (3, 73)
        assert metadata.prefill_swa_indices.shape == (73, 1, 144)
        assert metadata.prefill_seq_lens.tolist() == [300, 30]
        assert metadata.prefill_seq_lens.data_ptr() == batch.seq_lens[2:].data_ptr()
        assert metadata.prefill_seq_lens_cpu.tolist() == [300, 30]
        assert metadata.prefill_query_lens_cpu.tolist() == [40, 30]
        assert metadata.prefill_gather_lens.tolist() == [167, 30]
        assert (metadata.prefill_window_size, metadata.prefill_max_model_len) == (128, 512)
        assert metadata.prefill_max_num_batched_tokens == 96
        assert metadata.replay_start.tolist() == [0] * 4
        assert metadata.compressed == {}
        dtypes = {name: tensor.dtype for name, tensor in computed(metadata).items()}
        assert dtypes.pop(".is_valid_token") == torch.bool
        assert set(dtypes.values()) == {torch.int32}

    def test_a_step_without_prefills(self) -> None:
        metadata = make_builder(make_config()).build(0, Batch([1, 1], [9, 200]).metadata())
        for field in dataclasses.fields(metadata):
            if field.name.startswith("prefill_"):
                assert getattr(metadata, field.name) in (None, 0), field.name
        assert metadata.get_prefill_chunk_plan(4, 4) == []

    def test_a_step_without_decodes(self) -> None:
        metadata = make_builder(make_config(k=2)).build(0, Batch([40, 2], [40, 30]).metadata())
        assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.max_decode_query_len) == (0, 0, 3)
        assert metadata.decode_swa_indices.shape == (0, 1, 128)
        assert metadata.decode_swa_lens.shape == (0,)
        assert metadata.prefill_seq_lens.tolist() == [40, 30]

    def test_compressed_groups_say_how_they_are_paged(self) -> None:
        batch = Batch([1], [260])
        metadata = make_builder(make_config(), compressed_groups=GROUPS, swa_groups=(OTHER,)).build(
            0, batch.metadata(), groups=further(batch)
        )
        for name, ratio, entries in (("c4a", 4, 64), ("c128a", 128, 2)):
            one = metadata.compressed[name]
            assert (one.name, one.ratio, one.page_tokens, one.entries_per_page) == (name, ratio, 256, entries)
            assert one.compressed_slot_mapping.dtype == torch.int64
        assert metadata.compressed["c4a"].block_table.shape == (1, 8)
        assert metadata.compressed["c128a"].rows.shape == (1, 64)  # 8192 / 128 entries

    def test_one_address_for_the_builders_life(self) -> None:
        """Steps of every kind and size between two of the same: no tensor of it has moved."""
        config = make_config(k=3, dspark=True, max_image_tokens=16)
        builder = make_builder(config, ragged=True, compressed_groups=GROUPS, swa_groups=(OTHER,))

        def addresses(batch: Batch) -> dict[str, int]:
            metadata = builder.build(0, batch.metadata(), groups=further(batch))
            return {name: tensor.data_ptr() for name, tensor in computed(metadata).items() if tensor.numel()}

        draft = Batch([3, 3], [90, 200], causal=False)
        before = {id(batch): addresses(batch) for batch in (MIXED, draft)}
        assert len(before[id(MIXED)]) > 20
        for batch in (Batch([1] * 9, [200] * 9), draft, MIXED, Batch([500], [600]), Batch([], []), draft, MIXED):
            if id(batch) in before:
                assert addresses(batch) == before[id(batch)]
            else:
                builder.build(0, batch.metadata(), groups=further(batch))
        builder.set_num_pages(9)
        assert addresses(MIXED) == before[id(MIXED)]

    def test_on_a_cpu_host_copies_may_be_left_out(self) -> None:
        """There the device tensors are host tensors; elsewhere prefills need the host copy."""
        batch = Batch([1, 50, 60], [9, 500, 300], replay=[0, 440, 0], spans={1: [(470, 479)]}).metadata()
        expected = make_builder(make_config(max_image_tokens=16)).build(0, batch)
        without = dataclasses.replace(batch, seq_lens_cpu_upper_bound=None)
        found = make_builder(make_config(max_image_tokens=16)).build(0, without)
        compare(found, expected)
        assert found.prefill_seq_lens_cpu.tolist() == [500, 300]
        assert found.get_prefill_chunk_plan(4, 4) == [(0, 2, 125, 125 + 187)]
        assert found.get_prefill_chunk_plan(0, 1) == [(0, 2, 0, 187)]

    def test_steps_do_not_share_what_a_batch_brings(self) -> None:
        """Two objects of the same split: the later one changes buffers, never the earlier one's own fields."""
        builder = make_builder(make_config(), compressed_groups=GROUPS, swa_groups=(OTHER,))
        one, two = Batch([50], [500]), Batch([50], [300], replay=[240])
        first = builder.build(0, one.metadata(), groups=further(one))
        plan = first.get_prefill_chunk_plan(4, 4)
        second = builder.build(0, two.metadata(), groups=further(two))
        assert first.seq_lens.tolist() == [500]
        assert first.replay_start.tolist() == [0]
        assert second.replay_start.tolist() == [240]
        assert second.groups["other"].replay_start.tolist() == [240]
        assert first.get_prefill_chunk_plan(4, 4) is plan
        assert plan == [(0, 1, 125, 125 + 177)]
        assert second.get_prefill_chunk_plan(4, 4) == [(0, 1, 75, 75 + 60)]
        assert first.compressed is not second.compressed
        assert second.generation > first.generation

    @pytest.mark.parametrize(("queries", "padding"), [([], 0), ([], 5), ([0, 0, 0], 0)])
    def test_an_empty_step_launches_nothing(
        self, queries: list[int], padding: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        builder = make_builder(make_config(), ragged=True, compressed_groups=GROUPS, swa_groups=(OTHER,))
        monkeypatch.setattr(builder, "_build_indices", lambda step: pytest.fail("something was launched"))
        batch = Batch(queries, queries, padding=padding)
        metadata = builder.build(0, batch.metadata(), groups=further(batch))
        builder.update_draft_decode_metadata(metadata)
        assert metadata.num_tokens == 0
        assert (metadata.num_decodes, metadata.num_prefills) == (len(queries), 0)
        for name, tensor in computed(metadata).items():
            rows = len(queries) if "replay_start" in name else 1 if "indptr" in name else 0
            assert tensor.shape[0] == rows, name
        assert metadata.slot_mapping.shape == (0,)


class TestPlans:
    NAMES = tuple(f"tile_sched_{layer_type}" for layer_type in LayerType)

    def plans(self, metadata: DeepseekSparseSWAMetadata) -> dict[str, Any]:
        assert metadata.plans.keys() == set(LayerType)
        return {name: getattr(metadata, name) for name in self.NAMES}

    def test_names_of_the_established_implementation(self) -> None:
        assert set(self.NAMES) == {f"tile_sched_{kind}" for kind in ("swaonly", "c1a", "c2a", "c4a", "c128a")}

    @pytest.mark.parametrize(
        ("version", "ratios", "present"),
        [
            (ModelVersion.V4, (1, 4, 128), {"swaonly", "c4a", "c128a"}),
            (ModelVersion.V4, (4, 128), {"c4a", "c128a"}),
            (ModelVersion.V4_1, (0, 1, 2), {"swaonly", "c1a", "c2a"}),
        ],
    )
    def test_a_fresh_plan_for_each_type_of_the_model(
        self, version: ModelVersion, ratios: tuple[int, ...], present: set[str]
    ) -> None:
        config = make_config(version=version, compress_ratios=ratios)
        builder = make_builder(config, backend=planning_backend(), swa_groups=(OTHER,))
        batch = Batch([1, 40], [200, 40])
        groups = {"other": further(batch)["other"]}
        first = builder.build(0, batch.metadata(), groups=groups)
        found = self.plans(first)
        assert {name for name, plan in found.items() if plan is not None} == {f"tile_sched_{one}" for one in present}
        others = self.plans(first.groups["other"])
        assert all(others[name] is not plan for name, plan in found.items() if plan is not None)
        second = self.plans(builder.build(0, batch.metadata(), groups=groups))
        assert all(second[name] is not plan for name, plan in found.items() if plan is not None)

    def test_none_without_decode_tokens(self) -> None:
        builder = make_builder(make_config(), backend=planning_backend())
        for batch in (Batch([40], [40]), Batch([], [])):
            assert set(self.plans(builder.build(0, batch.metadata())).values()) == {None}

    def test_none_where_no_kernel_takes_one(self) -> None:
        metadata = make_builder(make_config()).build(0, Batch([1], [40]).metadata())
        assert set(self.plans(metadata).values()) == {None}

    def test_an_update_brings_fresh_plans_and_a_new_generation(self) -> None:
        builder = make_builder(make_config(), backend=planning_backend(), swa_groups=(OTHER,))
        batch = Batch([1], [40])
        metadata = builder.build(0, batch.metadata(), groups={"other": further(batch)["other"]})
        before, generation = self.plans(metadata), metadata.generation
        others = self.plans(metadata.groups["other"])
        builder.update_draft_decode_metadata(metadata)
        for old, new in ((before, self.plans(metadata)), (others, self.plans(metadata.groups["other"]))):
            assert all(new[name] is not plan for name, plan in old.items() if plan is not None)
            assert {name for name in new if new[name]} == {name for name in old if old[name]}
        assert metadata.generation == metadata.groups["other"].generation > generation


@pytest.mark.parametrize("causal", [True, False])
def test_s10_a_draft_update_equals_a_fresh_build(causal: bool) -> None:
    """Lengths, slots and tables of every group change in place; ragged copies and compressed groups follow."""
    config = make_config(k=3, dspark=True, max_model_len=2048)
    options: dict[str, Any] = {"ragged": True, "compressed_groups": GROUPS, "swa_groups": (OTHER,), "num_pages": 90}
    queries = [3, 1, 0, 2, 3]
    case = Batch(queries, [126, 255, 40, 129, 3], causal=causal, padding=2, replay=[3, 0, 0, 100, 0])
    batch, groups = case.metadata(), further(case)
    builder = make_builder(config, **options)
    metadata = builder.build(0, batch, groups=groups)
    host = metadata.query_start_loc_cpu.tolist(), metadata.max_decode_query_len, metadata.num_decode_tokens
    generator = torch.Generator().manual_seed(3)
    for step in range(12):
        batch.seq_lens.add_(torch.tensor([1, 1, 0, step % 2, 1], dtype=torch.int32))
        for table, slots in ((batch.block_table_tensor, batch.slot_mapping), *groups.values()):
            slots[:9] = torch.randint(-1, 60, (9,), generator=generator)
            table.copy_(torch.randint(-2, 95, table.shape, generator=generator))
        if step == 7:  # a request is gone: its tokens now belong to the next one
            batch.query_start_loc.copy_(torch.tensor([0, 3, 3, 3, 6, 9], dtype=torch.int32))
        for buffer in (builder._buffers.decode_indices, builder._buffers.decode_lens, builder._buffers.full_lens):
            buffer.fill_(77)
        builder.update_draft_decode_metadata(metadata)
        again = dataclasses.replace(batch, query_start_loc_cpu=batch.query_start_loc.clone())
        compare(metadata, make_builder(config, **options).build(0, again, groups=groups))
        assert not torch.as_strided(metadata.decode_swa_lens, (1024,), (1,))[11:].any()
    assert metadata.causal is causal
    assert metadata.decode_swa_width == (128 if causal else 192)
    assert (metadata.query_start_loc_cpu.tolist(), metadata.max_decode_query_len, metadata.num_decode_tokens) == host


def test_an_update_of_a_step_with_prefills_is_refused() -> None:
    builder = make_builder(make_config(k=3))
    with pytest.raises(BatchError, match="1 prefills"):
        builder.update_draft_decode_metadata(builder.build(0, Batch([1, 40], [9, 40]).metadata()))
    by_hand = dataclasses.replace(builder.build(0, Batch([1], [9]).metadata()), step=None)
    with pytest.raises(BatchError, match="this builder did not make"):
        builder.update_draft_decode_metadata(by_hand)


class TestCapture:
    """What a graph records: every request and token of it may turn out not to be there."""

    def builder(self) -> DeepseekSparseSWAMetadataBuilder:
        config = make_config(k=1, max_num_seqs=8)
        return make_builder(config, ragged=True, compressed_groups=GROUPS, swa_groups=(OTHER,))

    def test_g3_a_dummy_batch_has_no_slot_and_sees_nothing(self) -> None:
        """An engine captures before there are requests: slots of -1, lengths and tables of anything."""
        case = Batch([2] * 8, [130] * 8, table=[[0] * 8] * 8, slots=[-1] * 16)
        batch, groups = case.metadata(), further(case)
        groups["other"] = (groups["other"][0], batch.slot_mapping)
        metadata = self.builder().capture_build(8, 16, batch, groups=groups)
        assert metadata.slot_mapping.eq(-1).all(), "never 0: page 0 is an ordinary page"
        found = computed(metadata)
        for name in (".is_valid_token", ".decode_swa_lens", "other.decode_swa_lens", "c128a.lens"):
            assert not found[name].any(), name
        for name in (".decode_swa_indices", "other.decode_swa_indices", "c4a.compressed_slot_mapping"):
            assert found[name].eq(-1).all(), name
        assert found["c128a.compressed_slot_mapping"].eq(-1).all()
        assert not found[".decode_swa_ragged_indptr"].any()

    def test_a_replay_with_other_requests_equals_a_build(self) -> None:
        """What the graph runs again is the update's launch: other lengths and tables, fewer requests and tokens."""
        case = Batch([2] * 8, [130] * 8, slots=[-1] * 16)
        batch, builder, groups = case.metadata(), self.builder(), further(case)
        metadata = builder.capture_build(8, 16, batch, groups=groups)
        batch.query_start_loc.copy_(torch.tensor([0, 2, 3, 5, 5, 5, 5, 5, 5], dtype=torch.int32))
        batch.seq_lens.copy_(torch.tensor([140, 7, 260, 9, -9, 0, 2**31 - 1, -(2**31)], dtype=torch.int32))
        generator = torch.Generator().manual_seed(1)
        inputs = [(batch.block_table_tensor, batch.slot_mapping), *groups.values()]
        for table, slots in inputs:
            table.copy_(torch.randint(-1, 50, table.shape, generator=generator))
            slots.copy_(torch.tensor([5, 6, 7, -1, 8] + [-1] * 11))
        builder.update_draft_decode_metadata(metadata)

        real = Batch([2, 1, 2], [140, 7, 260], table=inputs[0][0][:3].tolist(), slots=inputs[0][1].tolist())
        live = {name: (table[:3], slots) for name, (table, slots) in groups.items()}
        compare(metadata, self.builder().build(0, real.metadata(), groups=live))


def test_metadata_of_another_builder_is_not_updated() -> None:
    """It would fill this builder's buffers, and leave the other's as they are."""
    mine, other = make_builder(make_config(k=3)), make_builder(make_config(k=3))
    mine.build(0, Batch([1], [9]).metadata())
    metadata = other.build(0, Batch([1], [200]).metadata())
    before = mine._buffers.decode_indices.clone()
    for wrong in (metadata, None, "metadata"):
        with pytest.raises(BatchError, match="this builder did not make"):
            mine.update_draft_decode_metadata(wrong)
    assert torch.equal(mine._buffers.decode_indices, before)


def test_metadata_is_overwritten_by_the_next_build_or_update_of_its_builder() -> None:
    builder, other = make_builder(make_config(k=3)), make_builder(make_config(k=3))
    first = builder.build(0, Batch([1], [9]).metadata())
    other.build(0, Batch([1], [9]).metadata())
    assert not first.is_overwritten
    second = builder.build(0, Batch([1], [9]).metadata())
    assert first.is_overwritten
    assert not second.is_overwritten
    builder.update_draft_decode_metadata(first)
    assert not first.is_overwritten
    assert second.is_overwritten


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("compressed_groups", {"compressed_groups": [OTHER]}),
        ("swa_groups", {"swa_groups": [GROUPS[0]]}),
        ("swa_groups", {"swa_groups": ["a"]}),
    ],
)
def test_groups_of_another_kind_are_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        make_builder(make_config(), **options)


def test_spec_config_and_device_of_another_kind_are_refused() -> None:
    builder_cls, config = get_backend("cpu").get_builder_cls(), make_config()
    spec = make_builder(config).kv_cache_spec
    with pytest.raises(ConfigError, match=r"^kv_cache_spec: .*None"):
        builder_cls(None, [], config, "cpu")
    with pytest.raises(ConfigError, match=r"^config: .*V4"):
        builder_cls(spec, [], "V4", "cpu")
    for device in ("nonsense", None, 3.5):
        with pytest.raises(PlatformError, match=r"^device: "):
            builder_cls(spec, [], config, device)


@pytest.mark.parametrize("longest", [1025, 10**40, -1])
def test_longest_query_beyond_a_step_is_refused(longest: int) -> None:
    batch = dataclasses.replace(Batch([1], [9]).metadata(), max_query_len=longest)
    with pytest.raises(BatchError, match=r"^max_query_len: "):
        make_builder(make_config(max_num_batched_tokens=1024)).build(0, batch)


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        (3, "groups"),
        ({"c4a": None}, "groups"),
        ({"other": None, "c4a": None, "c128a": None}, "groups['other']"),
        ({"other": 3, "c4a": None, "c128a": None}, "groups['other']"),
    ],
)
def test_group_inputs_of_another_form_are_refused(groups: Any, field: str) -> None:
    builder = make_builder(make_config(), compressed_groups=GROUPS, swa_groups=(OTHER,))
    with pytest.raises(BatchError) as error:
        builder.build(0, Batch([1], [9]).metadata(), groups=groups)
    assert error.value.field == field


def test_page_size_is_that_of_the_cache() -> None:
    """An engine may give one group other pages than the configuration names; rows follow the cache."""
    config = make_config(page_tokens=64)
    spec = make_builder(make_config(page_tokens=256)).kv_cache_spec
    builder = get_backend("cpu").get_builder_cls()(spec, [], config, "cpu")
    batch = Batch([1], [300], page_tokens=256, table=[[5, 2]])
    metadata = builder.build(0, batch.metadata())
    assert metadata.block_size == 256
    assert metadata.decode_swa_indices[0, 0].tolist() == [*range(5 * 256 + 172, 6 * 256), *range(2 * 256, 2 * 256 + 44)]


def test_nothing_is_built_when_host_lengths_are_missing() -> None:
    """The refusal comes before the launch, on a device whose lengths the host cannot see."""
    builder = make_builder(make_config())
    builder.device = torch.device("meta")
    batch = Batch([40], [40]).metadata()
    step = dataclasses.replace(batch, seq_lens_cpu_upper_bound=None)
    builder._build_indices = lambda step: pytest.fail("launched")
    with pytest.raises(BatchError, match=r"^seq_lens_cpu_upper_bound: "):
        builder._run(step, builder._split(step), ((step.block_table_tensor, step.slot_mapping),))


class TestScratch:
    """Attention's scratch memory belongs to a builder, unless two say that they never run at the same time."""

    def test_each_builder_has_providers_of_its_own(self) -> None:
        backend = planning_backend()
        first, second = make_builder(make_config(), backend=backend), make_builder(make_config(), backend=backend)
        assert first.provider.name == second.provider.name
        assert first.provider is not second.provider

    def test_builders_that_share_it_have_the_same(self) -> None:
        backend = planning_backend()
        first = make_builder(make_config(), backend=backend)
        second = make_builder(make_config(k=2), backend=backend, shares_scratch_with=first)
        assert second.provider is first.provider

    def test_it_is_shared_with_builders_alone(self) -> None:
        with pytest.raises(ConfigError, match=r"^shares_scratch_with: "):
            make_builder(make_config(), shares_scratch_with=get_backend("cpu"))
