"""What `build` refuses on every step before anything is launched, and what counts as a batch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.batch import OPTIONAL, REQUIRED, CommonAttentionMetadata
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.errors import BatchError, ConfigError
from swa_backend.groups import CompressedGroup, SwaGroup
from tests.support import Batch, make_builder, make_config

MIXED = Batch([1, 3, 40], [130, 20, 90], replay=[0, 5, 10], padding=2)


def watched(monkeypatch: pytest.MonkeyPatch, **config: Any) -> DeepseekSparseSWAMetadataBuilder:
    """A builder whose launch fails the test."""
    builder = make_builder(make_config(k=2, **config))
    monkeypatch.setattr(builder, "_build_indices", lambda step: pytest.fail("something was launched"))
    return builder


def refused(builder: DeepseekSparseSWAMetadataBuilder, batch: Any, **options: Any) -> BatchError:
    with pytest.raises(BatchError) as error:
        builder.build(0, batch, **options)
    return error.value


TENSORS = {
    "query_start_loc": torch.int32,
    "query_start_loc_cpu": torch.int32,
    "seq_lens": torch.int32,
    "seq_lens_cpu_upper_bound": torch.int32,
    "block_table_tensor": torch.int32,
    "slot_mapping": torch.int64,
    "replay_start": torch.int32,
    "replay_start_cpu": torch.int32,
}


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap between neighbours."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


@pytest.mark.parametrize("field", TENSORS)
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda t: t.to(torch.int64 if t.dtype == torch.int32 else torch.int32), id="other-integer"),
        pytest.param(lambda t: t.float(), id="float"),
        pytest.param(lambda t: t.to(torch.uint8), id="uint8"),
        pytest.param(spaced, id="gaps"),
        pytest.param(lambda t: t.to("meta"), id="other-device"),
        pytest.param(lambda t: t[:-1], id="short"),
        pytest.param(lambda t: torch.cat([t, t[:1]]), id="long"),
        pytest.param(lambda t: t[None], id="more-dimensions"),
        pytest.param(lambda t: t.tolist(), id="list"),
    ],
)
@pytest.mark.parametrize("replay", [True, False])
def test_a_tensor_of_another_form_is_refused_by_name(
    field: str, wrong: Any, replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches without replay, nearly all there are, have checks of their own."""
    batch = MIXED.metadata()
    batch.replay_start_cpu = batch.replay_start.clone()
    if not replay and not field.startswith("replay"):
        batch.replay_start = batch.replay_start_cpu = None
    setattr(batch, field, wrong(getattr(batch, field)))
    error = refused(watched(monkeypatch), batch)
    assert error.field == field
    assert str(TENSORS[field]) in str(error.legal)


@pytest.mark.parametrize("field", [name for name in TENSORS if name in REQUIRED])
def test_a_missing_tensor_is_refused_by_name(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = dataclasses.replace(MIXED.metadata(), replay_start=None, **{field: None})
    assert refused(watched(monkeypatch), batch).field == field


@pytest.mark.parametrize("field", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
@pytest.mark.parametrize("value", [-1, 3.0, True, "3", None, torch.tensor(3)])
def test_a_number_that_is_no_count_is_refused(field: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(watched(monkeypatch), dataclasses.replace(MIXED.metadata(), **{field: value}))
    assert (error.field, error.found) == (field, repr(value))


@pytest.mark.parametrize("value", [0, 1, None, torch.tensor(True)])
def test_causal_is_a_bool(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(watched(monkeypatch), dataclasses.replace(MIXED.metadata(), causal=value)).field == "causal"


@pytest.mark.parametrize(
    ("config", "field", "limit"),
    [
        ({"max_num_seqs": 2}, "num_reqs", "max_num_seqs = 2"),
        ({"max_num_batched_tokens": 45}, "num_actual_tokens", "max_num_batched_tokens = 45"),
        ({"max_model_len": 129}, "max_seq_len", "max_model_len = 129"),
    ],
)
def test_capacities(config: Any, field: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """46 tokens of 3 requests, the longest of 130 tokens: each limit one too small."""
    error = refused(watched(monkeypatch, **config), MIXED.metadata())
    assert error.field == field
    assert limit in str(error.legal)


def test_full_capacities_are_allowed() -> None:
    config = make_config(k=2, max_num_seqs=3, max_num_batched_tokens=46, max_model_len=130)
    assert make_builder(config).build(0, MIXED.metadata()).num_tokens == 46


@pytest.mark.parametrize("replay", [None, [0, 5, 10]])
def test_rows_of_a_table_may_lie_apart_and_its_only_column_anyhow(replay: Any) -> None:
    batch = dataclasses.replace(MIXED, replay=replay).metadata()
    expected = make_builder(make_config(k=2)).build(0, batch).decode_swa_indices.clone()
    wide = torch.full((3, 99), 77, dtype=torch.int32)
    wide[:, : batch.block_table_tensor.shape[1]] = batch.block_table_tensor
    batch.block_table_tensor = wide[:, : batch.block_table_tensor.shape[1]]
    assert torch.equal(make_builder(make_config(k=2)).build(0, batch).decode_swa_indices, expected)
    batch.block_table_tensor = wide[:, ::99]  # one column: the distance to the next says nothing
    assert make_builder(make_config(k=2)).build(0, batch).num_tokens == 46


@pytest.mark.parametrize("mapped", [-1, 47])
def test_real_tokens_are_among_all_tokens(mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = MIXED.metadata()
    batch.query_start_loc_cpu[-1] = mapped
    assert refused(watched(monkeypatch), batch).field == "query_start_loc_cpu"


@pytest.mark.parametrize("k", [5, 7])
@pytest.mark.parametrize("parallel", [False, True])
def test_g8_decode_rows_fit_and_a_larger_step_is_refused(
    k: int, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = 1 + (2 * k if parallel else k)
    full = Batch([query] * 64, [300] * 64)
    sizes = {"k": k, "parallel_drafting": parallel, "max_num_seqs": 64, "max_model_len": 300}
    builder = make_builder(make_config(**sizes, max_num_batched_tokens=64 * query))
    metadata = builder.build(0, full.metadata())
    assert metadata.decode_swa_indices.shape == (64 * query, 1, 128)
    assert metadata.decode_swa_lens.tolist() == [128] * (64 * query)

    def refuse(config: Any, batch: Batch) -> BatchError:
        builder = make_builder(config)
        monkeypatch.setattr(builder, "_build_indices", lambda step: pytest.fail("something was launched"))
        return refused(builder, batch.metadata())

    error = refuse(make_config(**sizes, max_num_batched_tokens=64 * query - 1), full)
    assert error.field == "num_actual_tokens"
    assert f"max_num_batched_tokens = {64 * query - 1}" in str(error.legal)
    # Padding counts as decode rows, and there are no more of those than the requests could have.
    padded = Batch([query] * 64, [300] * 64, padding=1)
    error = refuse(make_config(**sizes, max_num_batched_tokens=2000), padded)
    assert error.field == "num_actual_tokens"
    assert str(64 * query) in str(error.legal)
    error = refuse(make_config(**sizes, max_num_batched_tokens=2000), Batch([query] * 65, [300] * 65))
    assert error.field == "num_reqs"


class TestDuckTyping:
    def same(self, batch: Any) -> None:
        config = make_config(k=2, max_image_tokens=16)
        found, expected = make_builder(config).build(0, batch), make_builder(config).build(0, self.batch())
        for field in dataclasses.fields(expected):
            one, right = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(right, torch.Tensor):
                assert torch.equal(one, right), field.name
        assert found.num_prefills == 1
        assert int(found.prefill_right_visible.max()) == 9

    def batch(self) -> CommonAttentionMetadata:
        return dataclasses.replace(MIXED, spans={2: [(60, 69)]}).metadata()

    def values(self) -> dict[str, Any]:
        batch = self.batch()
        return {name: getattr(batch, name) for name in (*REQUIRED, *OPTIONAL)}

    def test_attributes_alone_are_enough(self) -> None:
        self.same(SimpleNamespace(**self.values()))

    def test_an_engines_object_with_slots_properties_and_more(self) -> None:
        """As vLLM's: further attributes, some computed, none of ours, and it cannot be copied or iterated."""
        values = self.values()

        class Engine:
            __slots__ = ("_seq_lens_cpu", "logits_indices_padded", *values.keys() - {"max_seq_len"})

            @property
            def max_seq_len(self) -> int:
                return 130

            @property
            def seq_lens_cpu(self) -> torch.Tensor:
                raise RuntimeError("this would synchronise")

        engine = Engine()
        for name in values.keys() - {"max_seq_len"}:
            setattr(engine, name, values[name])
        self.same(engine)

    @pytest.mark.parametrize("name", REQUIRED)
    def test_a_missing_attribute_is_named(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        values = self.values()
        del values[name]
        error = refused(watched(monkeypatch), SimpleNamespace(**values))
        assert error.field == "common_attn_metadata"
        assert f"without {name}" in str(error.found)

    def test_optional_attributes_may_be_absent(self) -> None:
        values = {name: value for name, value in self.values().items() if name in REQUIRED}
        metadata = make_builder(make_config(k=2, max_image_tokens=16)).build(0, SimpleNamespace(**values))
        assert metadata.replay_start.tolist() == [0, 0, 0]
        assert metadata.prefill_left_visible is None
        assert metadata.causal


class TestGroups:
    def builder(self) -> DeepseekSparseSWAMetadataBuilder:
        groups = (CompressedGroup("c4a", 4, 256),)
        return make_builder(make_config(k=2), compressed_groups=groups, swa_groups=(SwaGroup("other"),))

    def inputs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {name: (MIXED.block_table(), MIXED.slot_mapping()) for name in ("c4a", "other")}

    @pytest.mark.parametrize("names", [(), ("c4a",), ("c4a", "other", "more"), ("c4a", "main")])
    def test_exactly_the_groups_of_the_builder(self, names: tuple[str, ...]) -> None:
        given = {name: (MIXED.block_table(), MIXED.slot_mapping()) for name in names}
        error = refused(self.builder(), MIXED.metadata(), groups=given)
        assert (error.field, error.legal) == ("groups", ["c4a", "other"])

    @pytest.mark.parametrize("name", ["c4a", "other"])
    @pytest.mark.parametrize(
        ("at", "wrong"),
        [
            (0, lambda t: t.long()),
            (0, lambda t: t[:2]),
            (0, spaced),
            (0, lambda t: t.to("meta")),
            (1, lambda t: t.int()),
            (1, lambda t: t[:-1]),
            (1, spaced),
            (1, lambda t: t.to("meta")),
        ],
    )
    def test_a_group_tensor_of_another_form(self, name: str, at: int, wrong: Any) -> None:
        inputs = self.inputs()
        pair = list(inputs[name])
        pair[at] = wrong(pair[at])
        error = refused(self.builder(), MIXED.metadata(), groups={**inputs, name: tuple(pair)})
        assert error.field == f"groups[{name!r}] {('block table', 'slot mapping')[at]}"

    @pytest.mark.parametrize(
        "groups",
        [
            {"swa_groups": (SwaGroup("main"),)},
            {"swa_groups": (SwaGroup("a"),), "compressed_groups": (CompressedGroup("a", 4, 256),)},
            {"compressed_groups": (CompressedGroup("a", 4, 256), CompressedGroup("a", 128, 256))},
        ],
    )
    def test_names_differ(self, groups: Any) -> None:
        with pytest.raises(ConfigError, match="groups"):
            make_builder(make_config(), **groups)

    @pytest.mark.parametrize(
        ("ratio", "page_tokens", "field"),
        [
            (0, 256, "ratio"),
            (-4, 256, "ratio"),
            ("4", 256, "ratio"),
            (None, 256, "ratio"),
            (4.0, 256, "ratio"),
            (4, 0, "page"),
            (4, 2, "page"),
            (128, 192, "page"),
            (4, 256.0, "page"),
        ],
    )
    def test_a_page_holds_whole_entries(self, ratio: Any, page_tokens: Any, field: str) -> None:
        with pytest.raises(ConfigError, match=rf"compressed_groups\['a'\]\.{field}"):
            CompressedGroup("a", ratio, page_tokens)

    @pytest.mark.parametrize("size", [0, 33, -32, "64", 64.0, True])
    def test_c6_page_sizes_of_window_groups(self, size: Any) -> None:
        with pytest.raises(ConfigError, match=r"swa_groups\['a'\]\.page_tokens"):
            SwaGroup("a", size)
        assert SwaGroup("a", 96).page_tokens == 96

    def test_a_group_has_a_name(self) -> None:
        for make in (lambda: SwaGroup(None), lambda: CompressedGroup(4, 4, 256)):  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="groups name"):
                make()
