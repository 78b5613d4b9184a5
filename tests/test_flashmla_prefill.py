"""FlashMLA's prefill over gathered keys and straight from the pages. Fake kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

for helper in ("attention_scene", "flashmla_fake", "flashmla_scene"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.attention import AttentionResult  # noqa: E402
from swa_backend.groups import CompressedGroup, SwaGroup  # noqa: E402
from swa_platform_cuda import flashmla_provider  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, check, mixed  # noqa: E402
from tests.flashmla_fake import FakeKernels, fake_backend, triton_tools  # noqa: E402
from tests.flashmla_scene import *  # noqa: E402, F403
from tests.flashmla_scene import C4, C128, local_entries, seen_by  # noqa: E402


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
