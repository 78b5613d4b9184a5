"""FlashMLA's tile plans: filled once, shared, refused. Fake kernels."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

for helper in ("attention_scene", "flashmla_fake", "flashmla_scene"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.errors import ProviderError  # noqa: E402
from swa_backend.layer_types import LayerType  # noqa: E402
from swa_platform_cuda.flashmla_plan import FlashMLATileScheduler, PlanShape, TilePlan  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, check  # noqa: E402
from tests.flashmla_fake import FakeKernels  # noqa: E402
from tests.flashmla_scene import *  # noqa: E402, F403
from tests.flashmla_scene import C4, local_entries, seen_by  # noqa: E402

SHAPE = PlanShape(LayerType.C4A, 3, 1, 64, 64, 128, 64, 512)


class TestPlan:
    lens = torch.ones(3, dtype=torch.int32)

    def test_filled_once_then_reused(self) -> None:
        plan = TilePlan(LayerType.C4A)
        first = plan.use(object, SHAPE, 7, self.lens)
        assert all(plan.use(object, SHAPE, 7, self.lens) is first for _ in range(5))
        assert plan.filled == 1

    @pytest.mark.parametrize("field", [name for name in PlanShape._fields if name != "layer_type"])
    def test_another_shape_is_refused_and_named(self, field: str) -> None:
        plan = TilePlan(LayerType.C4A)
        plan.use(object, SHAPE, 7, self.lens)
        other = SHAPE._replace(**{field: getattr(SHAPE, field) * 2})
        with pytest.raises(ProviderError) as error:
            plan.use(object, other, 7, self.lens)
        assert error.value.field == f"plan of c4a layers: {field}"
        assert str(getattr(SHAPE, field)) in str(error.value.legal)

    def test_t1_a_later_build_is_refused(self) -> None:
        plan = TilePlan(LayerType.C4A)
        plan.use(object, SHAPE, 7, self.lens)
        with pytest.raises(ProviderError, match="lengths: found a decode with those of build 8"):
            plan.use(object, SHAPE, 8, self.lens)

    @pytest.mark.parametrize("filled", [False, True])
    def test_t2_another_layer_type_is_refused(self, filled: bool) -> None:
        plan = TilePlan(LayerType.SWAONLY)
        if filled:
            plan.use(object, SHAPE._replace(layer_type=LayerType.SWAONLY), 7, self.lens)
        with pytest.raises(ProviderError, match="swaonly layers: layer_type: found a decode with c4a"):
            plan.use(object, SHAPE, 7, self.lens)

    def test_lengths_in_other_tensors_or_changed_in_place_are_planned_anew(self) -> None:
        plan, lens = TilePlan(LayerType.C4A), self.lens.clone()
        first = plan.use(object, SHAPE, 7, lens)
        second = plan.use(object, SHAPE, 7, lens.clone())
        third = plan.use(object, SHAPE, 7, lens)
        lens.zero_()
        fourth = plan.use(object, SHAPE, 7, lens)
        assert len({id(one) for one in (first, second, third, fourth)}) == 4
        assert plan.filled == 4

    def test_lengths_that_change_unseen_are_counted_or_planned_for_every_time(self) -> None:
        plan, counted = TilePlan(LayerType.C4A), [1, 1, 2, 2, 1]
        made = [plan.use(object, SHAPE, 7, self.lens, version=version) for version in counted]
        assert [one is other for one, other in pairwise(made)] == [True, False, True, False]
        assert plan.use(object, SHAPE, 7, self.lens, version=None) is not plan.use(
            object, SHAPE, 7, self.lens, version=None
        )

    def test_each_capture_plans_for_itself(self) -> None:
        plan = TilePlan(LayerType.C4A)
        made = [plan.use(object, SHAPE, 7, self.lens, capture=capture) for capture in (0, 41, 41, 42, 0)]
        assert [one is other for one, other in pairwise(made)] == [False, True, False, False]

    def test_inference_tensors_carry_no_version(self) -> None:
        with torch.inference_mode():
            lens = torch.ones(3, dtype=torch.int32)
        TilePlan(LayerType.C4A).use(object, SHAPE, 7, lens)

    def test_the_scheduler_makes_one_for_each_type(self) -> None:
        scheduler, kinds = FlashMLATileScheduler(), (LayerType.SWAONLY, LayerType.C4A)
        first, second = scheduler.fresh_plans(kinds), scheduler.fresh_plans(kinds)
        assert list(first) == list(kinds)
        assert len({id(plan) for plans in (first, second) for plan in plans.values()}) == 4


def test_t1_60_layers_of_three_types_plan_three_times_a_step(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    scene = Scene(provider, [1, 3, 1], [700, 300, 900], second=C4, config={"k": 2})
    assert [kind for kind, plan in scene.metadata.plans.items() if plan is not None] == [
        LayerType.SWAONLY, LayerType.C4A, LayerType.C128A,
    ]  # fmt: skip
    for step in (1, 2):
        compressed = scene.topk(local_entries(scene))
        for _ in range(30):
            scene.run()
            scene.run(compressed=compressed)
        assert kernels.planned == 2 * step
        scene.metadata = scene.build()


@pytest.mark.parametrize(("distinct", "plans"), [(True, 1), (False, 3)])
def test_t1_layers_whose_picks_differ_in_number(
    provider: ProviderUnderTest, kernels: FakeKernels, distinct: bool, plans: int
) -> None:
    """One persistent buffer, as engines have it: the plan never belongs to lengths that another layer left there."""
    scene = Scene(provider, [1, 1], [700, 300], second=C4)
    _, slots, lens = scene.topk(torch.full((2, 64), -1))
    positions = torch.tensor([699, 299])
    for picked in (64, 3, 30):
        local = torch.arange(64).repeat(2, 1).where(torch.arange(64) < picked, -1)
        compressed = scene.topk(local, positions, out=(slots, lens), distinct=distinct)
        check(scene.run(compressed=compressed), scene.expected(seen_by(scene, local)))
        assert kernels.decodes[-1]["extra"].data_ptr() == slots.data_ptr(), "rows of map_topk go there as they are"
    assert kernels.planned == plans


@pytest.mark.parametrize("distinct", [True, False])
def test_t1_mappings_that_torch_does_not_see(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch, distinct: bool
) -> None:
    """As on a GPU, where a kernel writes the same buffers and no version changes."""
    scene = Scene(provider, [1, 1], [700, 300], second=C4)
    operations = provider.backend.operations
    plainly = operations.map_topk

    def unseen(*args: Any) -> None:
        *given, slots, lens = args
        found = torch.empty_like(slots), torch.empty_like(lens)
        plainly(*given, *found)
        slots.numpy()[:], lens.numpy()[:] = found[0].numpy(), found[1].numpy()

    monkeypatch.setattr(operations, "map_topk", unseen)
    _, slots, lens = scene.topk(torch.full((2, 64), -1))
    versions, positions = (slots._version, lens._version), torch.tensor([699, 299])
    for picked in (64, 3, 30):
        local = torch.arange(64).repeat(2, 1).where(torch.arange(64) < picked, -1)
        compressed = scene.topk(local, positions, out=(slots, lens), distinct=distinct)
        check(scene.run(compressed=compressed), scene.expected(seen_by(scene, local)))
    assert (slots._version, lens._version) == versions


def test_t1_picks_that_occur_twice_beyond_the_bound(provider: ProviderUnderTest) -> None:
    """Twice counts twice: more entries than are complete, so that no bound from positions may be used."""
    scene = Scene(provider, [1], [9], second=C4)
    local = torch.tensor([[0, 1] * 32])
    check(scene.run(compressed=scene.topk(local)), scene.expected(seen_by(scene, local)))


def test_t1_rows_of_unknown_origin_are_planned_for_call_by_call(
    provider: ProviderUnderTest, kernels: FakeKernels
) -> None:
    """A kernel of the engine's own may write other lengths to the same memory, and nothing tells."""
    scene = Scene(provider, [1, 1], [700, 300], second=C4)
    cache, slots, lens = scene.topk(torch.arange(64).repeat(2, 1))
    rows, counts = slots.clone(), lens.clone()
    scene.run(compressed=(cache, rows, counts))
    raw = counts.numpy()  # behind torch's back
    raw[:] = [5, 0]
    seen = [torch.cat([scene.window(0), scene.entries[0][:5]]), scene.window(1)]
    check(scene.run(compressed=(cache, rows, counts)), scene.expected(seen))
    assert kernels.planned == 2


def test_c8_rows_of_unknown_origin_may_name_what_is_not_there(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1], [700], second=C4)
    cache, slots, lens = scene.topk(torch.arange(64)[None])
    rows = slots.clone()
    rows[0, 3:7] = torch.tensor([cache.pages.num_slots, cache.pages.num_slots + 7, 2**31 - 1, -5])
    keep = [entry for entry in range(64) if not 3 <= entry < 7]
    seen = [torch.cat([scene.window(0), scene.entries[0][keep]])]
    check(scene.run(compressed=(cache, rows, lens.clone())), scene.expected(seen))


def test_t2_the_plan_of_another_type_is_refused_before_the_kernel(
    provider: ProviderUnderTest, kernels: FakeKernels
) -> None:
    scene = Scene(provider, [1], [300], second=C4)
    scene.run()
    before = len(kernels.decodes)
    plans = scene.metadata.plans
    scene.metadata.plans = {**plans, LayerType.C4A: plans[LayerType.SWAONLY]}
    with pytest.raises(ProviderError, match="plan of swaonly layers"):
        scene.run(compressed=scene.topk(local_entries(scene)))
    assert len(kernels.decodes) == before


def test_t1_a_plan_kept_from_an_earlier_step_is_refused(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    scene = Scene(provider, [1], [300])
    scene.run()
    old = scene.metadata.plans
    scene.metadata = scene.build()
    scene.metadata.plans = old
    with pytest.raises(ProviderError, match="lengths"):
        scene.run()
    assert kernels.planned == 1


def test_a_draft_update_plans_anew(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    scene = Scene(provider, [1, 1], [300, 128])
    scene.run()
    scene.builder.update_draft_decode_metadata(scene.metadata)
    check(scene.run(), scene.expected())
    assert kernels.planned == 2


def test_no_plans_where_another_provider_was_chosen(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swa_backend.reference.provider import ReferenceAttention

    backend = dataclasses.replace(
        provider.backend,
        platform=dataclasses.replace(provider.backend.platform, load_providers=lambda target: (ReferenceAttention(),)),
    )
    scene = Scene(dataclasses.replace(provider, backend=backend), [1], [300])
    assert set(scene.metadata.plans.values()) == {None}
