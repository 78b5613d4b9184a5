"""When rows of `map_topk` count as clean: only while nothing that torch or the builder knows of has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.attention_scene")

from swa_backend.registry import get_backend  # noqa: E402
from swa_backend.row_marks import mark_of  # noqa: E402
from swa_backend.topk import map_topk  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene  # noqa: E402


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    return Scene(ProviderUnderTest("reference", get_backend("cpu"), "cpu"), [1, 1], [300, 90], second=(4, "bf16", 256))


def mapped(scene: Scene, positions: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    local = torch.arange(6, dtype=torch.int32).repeat(2, 1)
    positions = torch.tensor([299, 89]) if positions is None else positions
    cache = scene.second_cache
    return map_topk(
        local, scene.metadata.token_to_req_indices, positions, scene.second_table, cache.entries_per_page,
        scene.metadata.is_valid_token, 4, options.pop("num_pages", cache.pages.num_pages),
        backend=scene.provider.backend, **options,
    )  # fmt: skip


def known(scene: Scene, slots: torch.Tensor, lens: torch.Tensor, **changed: Any) -> bool:
    arguments = {"ratio": 4, "num_slots": scene.second_cache.pages.num_slots, "metadata": scene.metadata, **changed}
    return mark_of(slots, lens, **arguments) is not None


def test_fresh_rows_are_known_and_say_what_was_promised(scene: Scene) -> None:
    slots, lens = mapped(scene, distinct=True)
    mark = mark_of(slots, lens, 4, scene.second_cache.pages.num_slots, scene.metadata)
    assert mark is not None
    assert (mark.distinct, mark.ratio, mark.positions.tolist()) == (True, 4, [299, 89])
    slots, lens = mapped(scene)
    mark = mark_of(slots, lens, 4, scene.second_cache.pages.num_slots, scene.metadata)
    assert mark is not None
    assert not mark.distinct


def test_other_tensors_are_not(scene: Scene) -> None:
    slots, lens = mapped(scene)
    assert not known(scene, slots.clone(), lens)
    assert not known(scene, slots[:], lens), "the way out for rows that a kernel of one's own overwrites"
    same = lens.clone()
    while same._version < lens._version:
        same.add_(0)
    assert not known(scene, slots, same)
    assert known(scene, slots, lens)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_change_by_torch_voids_the_mark_and_mapping_again_renews_it(scene: Scene, which: int) -> None:
    positions = torch.tensor([299, 89])
    slots, lens = mapped(scene, positions)
    (slots, lens, positions)[which].add_(0)
    assert not known(scene, slots, lens)
    mapped(scene, positions, out=(slots, lens))
    assert known(scene, slots, lens)


def test_another_cache_or_ratio_is_not_what_they_were_mapped_for(scene: Scene) -> None:
    slots, lens = mapped(scene)
    count = scene.second_cache.pages.num_slots
    assert known(scene, slots, lens, num_slots=count + 1)
    assert not known(scene, slots, lens, num_slots=count - 1)
    assert not known(scene, slots, lens, ratio=128)
    unknown = mapped(scene, num_pages=None)
    assert not known(scene, *unknown)


def test_rows_of_an_earlier_step_are_not_known(scene: Scene) -> None:
    slots, lens = mapped(scene)
    scene.metadata = scene.build()
    assert not known(scene, slots, lens)
    mapped(scene, out=(slots, lens))
    assert known(scene, slots, lens)
    scene.builder.update_draft_decode_metadata(scene.metadata)
    assert not known(scene, slots, lens)


def test_rows_mapped_with_another_validity_are_not_known(scene: Scene) -> None:
    own = scene.metadata.is_valid_token
    scene.metadata.is_valid_token = own.clone()
    slots, lens = mapped(scene)
    assert known(scene, slots, lens)
    scene.metadata.is_valid_token = own
    assert not known(scene, slots, lens)


def test_inference_tensors_keep_their_mark(scene: Scene) -> None:
    with torch.inference_mode():
        slots, lens = mapped(scene, torch.tensor([299, 89]))
        assert known(scene, slots, lens)
