"""What FlashMLA's provider asks of the kernels: plans, padding, buffers, gathered prefill, refusals. Fake kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

for helper in ("attention_scene", "flashmla_fake"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.attention import AttentionResult  # noqa: E402
from swa_backend.cache_layout import get_layout  # noqa: E402
from swa_backend.errors import CacheError, ProviderError  # noqa: E402
from swa_backend.groups import CompressedGroup, SwaGroup  # noqa: E402
from swa_backend.layer_types import LayerType  # noqa: E402
from swa_backend.pages import PageView  # noqa: E402
from swa_platform_cuda import flashmla_provider  # noqa: E402
from swa_platform_cuda.flashmla_forms import cache_of  # noqa: E402
from swa_platform_cuda.flashmla_plan import FlashMLATileScheduler, PlanShape, TilePlan  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, check, mixed  # noqa: E402
from tests.flashmla_fake import DECODE_SCHEMA, PREFILL_SCHEMA, FakeKernels, fake_backend, triton_tools  # noqa: E402

C4 = (4, "fp8_ds_mla", 256)
C128 = (128, "fp8_ds_mla", 256)


@pytest.fixture
def kernels() -> FakeKernels:
    return FakeKernels()


@pytest.fixture
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: FakeKernels
) -> Iterator[ProviderUnderTest]:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    with fake_backend(tmp_path, kernels, **getattr(request, "param", {})) as backend:
        yield ProviderUnderTest("flashmla", backend, "cpu", batch_invariant=False)


def local_entries(scene: Scene, width: int = 64) -> torch.Tensor:
    return torch.randint(-3, 190, (scene.tokens, width), generator=torch.Generator().manual_seed(7))


def seen_by(scene: Scene, local: torch.Tensor) -> list[torch.Tensor]:
    assert scene.second is not None
    seen = []
    for t in range(scene.tokens):
        request, position = scene.token(t)
        chosen = [entry for entry in local[t].tolist() if 0 <= entry < (position + 1) // scene.second[0]]
        seen.append(torch.cat([scene.window(t), scene.entries[request][chosen]]))
    return seen


# Plans.


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


# Decode.


@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (64, 64), (65, 128), (96, 128), (128, 128)])
def test_n4_heads_are_padded_only_where_the_kernel_needs_it(
    provider: ProviderUnderTest, kernels: FakeKernels, heads: int, padded: int
) -> None:
    scene = Scene(provider, [1, 1], [130, 40], heads=heads)
    out = torch.full_like(scene.q, torch.nan)
    check(scene.run(out=out), scene.expected())
    (call,) = kernels.decodes
    assert call["q"].shape == (2, 1, padded, 512)
    assert (call["q"].data_ptr() == scene.q.data_ptr()) == (heads == padded)
    assert (call["out"].data_ptr() == out.data_ptr()) == (heads == padded), "written in place"


@pytest.mark.parametrize(("k", "width"), [(7, 192), (65, 256)])
def test_s4_s2_rows_of_a_draft_block_keep_a_width_the_kernel_has(
    provider: ProviderUnderTest, kernels: FakeKernels, k: int, width: int
) -> None:
    scene = Scene(provider, [7], [207], batch={"causal": False}, config={"k": k, "dspark": True})
    check(scene.run(), scene.expected([scene.history[0][72:207]] * 7))
    assert kernels.decodes[0]["indices"].shape == (7, 1, width)


@pytest.mark.parametrize(("given", "padded"), [(1, 64), (64, 64), (65, 128), (512, 512)])
def test_s4_compressed_rows_are_padded_to_the_next_width(
    provider: ProviderUnderTest, kernels: FakeKernels, given: int, padded: int
) -> None:
    scene = Scene(provider, [1], [3000], second=C4)
    local = torch.arange(given)[None]
    check(scene.run(compressed=scene.topk(local)), scene.expected(seen_by(scene, local)))
    extra = kernels.decodes[0]["extra"]
    assert extra.shape == (1, 1, padded)
    assert (extra[0, 0, given:] == -1).all()


def test_rows_of_every_layer_are_made_once_a_step(provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = mixed(provider, second=C128)
    group = scene.metadata.compressed["second"]
    counts = count_tools(scene, monkeypatch)
    for _ in range(5):
        scene.run()
        scene.run(compressed=(scene.second_cache, group.rows, group.lens))
    # Decode rows and complete entries, prefill rows for both types; combined rows for both types.
    assert counts == {"tidy_rows": 4, "combine_rows": 2}
    scene.metadata = scene.build()
    scene.run()
    assert counts == {"tidy_rows": 6, "combine_rows": 3}


def count_tools(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts calls of the row operations from now on."""
    counts = {"tidy_rows": 0, "combine_rows": 0}
    flashmla = scene.builder.provider

    def counting(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            counts[name] += 1
            call(*args)

        return counted

    for one in (flashmla._paged_on(scene.device)._preparer, flashmla._gathered_on(scene.device)):
        tools = one._tools
        monkeypatch.setattr(
            one, "_tools", tools._replace(**{name: counting(name, getattr(tools, name)) for name in counts})
        )
    return counts


def test_two_groups_do_not_read_each_others_rows(provider: ProviderUnderTest) -> None:
    first, second = Scene(provider, [1], [130]), Scene(provider, [1], [40])
    for _ in range(2):
        check(first.run(), first.expected())
        check(second.run(), second.expected())


OWN_OUTPUT = {
    "decode": DECODE_SCHEMA.replace("Tensor(c!)? out_=None, bool enable_batch_invariant=False", "").replace(", )", ")"),
    "prefill": PREFILL_SCHEMA.replace(", Tensor(a!)? out_", ""),
}


@pytest.mark.parametrize("provider", [OWN_OUTPUT], indirect=True)
def test_a_build_that_allocates_its_output(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    scene = mixed(provider, heads=64)
    check(scene.run(), scene.expected())
    assert kernels.decodes[0]["out"] is None
    assert kernels.prefills[0]["out"] is None


@pytest.mark.parametrize("second", [C4, C128])
@pytest.mark.parametrize("gathers", [True, False])
def test_the_workspace_is_allocated_with_the_builder(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch, second: Any, gathers: bool
) -> None:
    monkeypatch.setattr(flashmla_provider, "gathers", lambda call: gathers)
    scene = mixed(provider, second=second)
    workspace = scene.builder.provider._workspace(scene.device)
    before = {name: buffer.data_ptr() for name, buffer in workspace._buffers.items()}
    group, positions = scene.metadata.compressed["second"], torch.tensor([scene.token(t)[1] for t in range(117)])
    scene.run()
    if second is C128:
        scene.run(compressed=(scene.second_cache, group.rows, group.lens))
    for width in (40, 64):
        local = torch.arange(width).repeat(scene.tokens, 1)
        scene.run(compressed=scene.topk(local, positions, distinct=True))
    after = {name: buffer.data_ptr() for name, buffer in workspace._buffers.items()}
    # How many pages a second cache has is not known before; whole prefills from pages are not what a step takes.
    later = ("columns of second",) if gathers else ("direct",)
    assert {name: at for name, at in after.items() if not name.startswith(later)} == {
        name: at for name, at in before.items() if not name.startswith(later)
    }


@pytest.mark.parametrize(("second", "tokens", "gathered"), [(C4, 64, False), (C4, 65, True), (None, 5, True)])
def test_short_prefills_with_a_second_cache_read_their_pages(
    provider: ProviderUnderTest, kernels: FakeKernels, second: Any, tokens: int, gathered: bool
) -> None:
    """As measured; and from buffers that were reserved with the builder."""
    scene = Scene(provider, [1, tokens], [300, 500], second=second)
    workspace = scene.builder.provider._workspace(scene.device)
    before = {name: buffer.data_ptr() for name, buffer in workspace._buffers.items()}
    local = local_entries(scene) if second else None
    compressed = None if local is None else scene.topk(local)
    check(scene.run(compressed=compressed), scene.expected(None if local is None else seen_by(scene, local)))
    assert (len(kernels.prefills), len(kernels.decodes)) == ((1, 1) if gathered else (0, 2))
    after = {name: buffer.data_ptr() for name, buffer in workspace._buffers.items() if name in before}
    assert after == before


# Prefill.


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("second", [None, C4, C128])
def test_both_forms_of_prefill(
    provider: ProviderUnderTest, kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch, gathers: bool, second: Any
) -> None:
    monkeypatch.setattr(flashmla_provider, "gathers", lambda call: gathers)
    scene = mixed(provider, second=second)
    compressed, seen = None, None
    if second is not None:
        local = local_entries(scene)
        compressed, seen = scene.topk(local), seen_by(scene, local)
    check(scene.run(compressed=compressed), scene.expected(seen))
    assert bool(kernels.prefills) == gathers
    assert len(kernels.decodes) == (1 if gathers else 2)


@pytest.mark.parametrize("second", [None, C4, C128])
def test_the_triton_kernels_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: FakeKernels, second: Any
) -> None:
    """The same with the kernels that a GPU runs, interpreted."""
    pytest.importorskip("triton")
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    monkeypatch.setattr(flashmla_provider, "gathers", lambda call: True)
    with fake_backend(tmp_path, kernels, tools=triton_tools()) as backend:
        under_test = ProviderUnderTest("flashmla", backend, "cpu")
        scene = Scene(under_test, [1, 3, 10], [130, 5, 200], second=second, heads=2, config={"k": 2})
        compressed, seen = None, None
        if second is not None:
            local = local_entries(scene)
            compressed, seen = scene.topk(local), seen_by(scene, local)
            if second is C128:
                group = scene.metadata.compressed["second"]
                compressed = (scene.second_cache, group.rows, group.lens)
                seen = seen_by(scene, torch.arange(64).expand(scene.tokens, -1))
        check(scene.run(compressed=compressed), scene.expected(seen))
        assert kernels.prefills


def test_p4_combined_rows_are_aligned_and_as_wide_as_the_kernel_wants(
    provider: ProviderUnderTest, kernels: FakeKernels
) -> None:
    scene = mixed(provider, second=C4)
    local = local_entries(scene, 100)
    check(scene.run(compressed=scene.topk(local)), scene.expected(seen_by(scene, local)))
    (call,) = kernels.prefills
    assert call["indices"].shape == (110, 1, 256)
    assert call["indices"].stride(0) * 4 % 16 == 0


def test_p2_chunks_of_one_request_each(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    """With the smallest budget three prefills go in several chunks through one workspace, padding comes out zero."""
    config = {"prefill_chunk_size": 1, "max_model_len": 512, "max_num_batched_tokens": 256}
    scene = Scene(
        provider, [1, 60, 90, 70], [130, 500, 400, 300], second=C4, batch={"padding": 5}, config=config
    )  # fmt: skip
    local = local_entries(scene)
    result = scene.run(compressed=scene.topk(local))
    scene_seen: list[torch.Tensor | None] = []
    for t in range(221):
        request, position = scene.token(t)
        chosen = [entry for entry in local[t].tolist() if 0 <= entry < (position + 1) // 4]
        scene_seen.append(torch.cat([scene.window(t), scene.entries[request][chosen]]))
    check(result, scene.expected([*scene_seen, *[None] * 5]))
    assert len(kernels.prefills) == 3
    assert len({call["kv"].data_ptr() for call in kernels.prefills}) == 1


def test_p1_zero_token_requests_between_prefills(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    scene = Scene(provider, [20, 0, 0, 30, 0], [60, 40, 0, 30, 9])
    check(scene.run(), scene.expected())
    assert [call["q"].shape[0] for call in kernels.prefills] == [20, 30]


def test_pages_shared_between_requests_at_any_column(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are looked up in the token's own table, whichever request put a page down last."""
    monkeypatch.setattr(flashmla_provider, "gathers", lambda call: True)
    scene = Scene(provider, [9, 9], [600, 600], second=C4)
    local = torch.randint(0, 140, (18, 20), generator=torch.Generator().manual_seed(3))
    compressed, seen = scene.topk(local), seen_by(scene, local)
    scene.second_table[1] = scene.second_table[0].flip(0)
    scene.metadata = scene.build()
    out, lse = scene.run(compressed=compressed)
    expected = scene.expected(seen)
    assert lse is not None
    check(AttentionResult(out[:9], lse[:9]), (expected[0][:9], expected[1][:9]))


def test_a_second_cache_of_no_known_group_is_read_from_its_pages(
    provider: ProviderUnderTest, kernels: FakeKernels
) -> None:
    scene = mixed(provider, second=C4)
    local = local_entries(scene)
    compressed, seen = scene.topk(local), seen_by(scene, local)
    scene.metadata.compressed = {}
    check(scene.run(compressed=compressed), scene.expected(seen))
    assert not kernels.prefills


def test_layers_of_a_further_window_group_gather_as_well(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    """The second caches of a step serve the layers of each of its window groups."""
    scene = mixed(provider, second=C4)
    spec, settings = scene.cache.get_kv_cache_spec(scene.settings), scene.settings
    builder = provider.backend.get_builder_cls()(
        spec, ["layers.0"], settings, scene.device, num_pages=scene.num_pages,
        compressed_groups=[CompressedGroup("second", 4, 256)], swa_groups=[SwaGroup("other")],
    )  # fmt: skip
    slots = scene.spec.slot_mapping()
    step = builder.build(
        0, scene.spec.metadata("cpu"),
        groups={"other": (scene.spec.block_table(), slots), "second": (scene.second_table, slots)},
    )  # fmt: skip
    scene.metadata = step.groups["other"]
    local = local_entries(scene)
    check(scene.run(compressed=scene.topk(local)), scene.expected(seen_by(scene, local)))
    assert len(kernels.prefills) == 1
    assert len(kernels.decodes) == 1


@pytest.mark.parametrize("gathers", [True, False])
def test_p5_an_image_that_a_chunk_resumes_inside(
    provider: ProviderUnderTest, kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    """Prefix 300: 277 positions are gathered, so no row starts below 173; rows inside the image look ahead to 400."""
    monkeypatch.setattr(flashmla_provider, "gathers", lambda call: gathers)
    images = {"batch": {"spans": {0: [(100, 400)]}}, "config": {"max_image_tokens": 384}}
    scene = Scene(provider, [150], [450], heads=1, **images)
    keys = scene.history[0]
    seen = [keys[173:401] if 300 + t <= 400 else scene.window(t) for t in range(150)]
    check(scene.run(), scene.expected(seen))
    used = kernels.prefills if gathers else kernels.decodes
    assert [call["indices"].shape[2] for call in used] == [512]


@pytest.mark.parametrize("gathers", [True, False])
def test_steps_of_two_builders_take_turns(
    provider: ProviderUnderTest, kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    """Both are at their first build; what is made once a step is not the other's."""
    monkeypatch.setattr(flashmla_provider, "gathers", lambda call: gathers)
    scenes = [Scene(provider, [20], [700], second=C4), Scene(provider, [30], [400], second=C4)]
    for _ in range(2):
        for scene in scenes:
            local = local_entries(scene)
            check(scene.run(compressed=scene.topk(local)), scene.expected(seen_by(scene, local)))
            check(scene.run(), scene.expected())


@pytest.mark.parametrize("gathers", [True, False])
def test_prefill_layers_of_a_step_share_their_plan(
    provider: ProviderUnderTest, kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    monkeypatch.setattr(flashmla_provider, "gathers", lambda call: gathers)
    scene = Scene(provider, [20], [700])
    for _ in range(3):
        check(scene.run(), scene.expected())
    assert kernels.planned == (0 if gathers else 1)


# Refusals.


def view(pages: int, stride: int, offset: int = 0) -> PageView:
    storage = torch.zeros(pages * stride + 64, dtype=torch.uint8)
    skew = -storage.data_ptr() % 16
    rows = storage[skew + offset :].as_strided((pages, 64, 584), (stride, 584, 1))
    return PageView.of(rows, get_layout("fp8_ds_mla"), 64)


def test_page_strides_that_the_kernels_cannot_take_are_refused() -> None:
    assert cache_of(view(3, 37440), "100").stride() == (37440, 584, 584, 1)
    assert cache_of(view(3, 37456), "90").stride()[0] == 37456
    for arch, stride, legal in (("100", 37456, "a multiple of 576"), ("90", 37448, "a multiple of 16")):
        with pytest.raises(CacheError) as error:
            cache_of(view(3, stride), arch)
        assert error.value.field == "cache page stride"
        assert legal in str(error.value.legal)
        assert str(stride) in str(error.value.found)
    with pytest.raises(CacheError) as error:
        cache_of(view(3, 37440, offset=8), "90")
    assert error.value.field == "cache address"


def test_c3_a_stride_of_many_layers_and_the_cache_is_viewed_not_copied() -> None:
    pages = view(2, 1435968)
    cache = cache_of(pages, "90")
    assert cache.shape == (2, 64, 1, 584)
    assert cache.data_ptr() == pages.data.data_ptr()
    assert cache_of(pages, "90") is cache


def test_a_ratio_that_no_layer_has_is_refused(provider: ProviderUnderTest, kernels: FakeKernels) -> None:
    scene = Scene(provider, [1], [300], second=(8, "fp8_ds_mla", 256))
    with pytest.raises(ProviderError) as error:
        scene.run(compressed=scene.topk(torch.arange(5)[None]))
    assert (error.value.field, error.value.found) == ("compressed[0].ratio", 8)
    assert not kernels.decodes


def test_doctor_and_builders_tell_why_flashmla_is_not_taken(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "flashmla")
    with pytest.raises(ProviderError, match=r"batch_invariant is set.*splits keys by batch on sm90"):
        Scene(provider, [1], [5], config={"batch_invariant": True})
