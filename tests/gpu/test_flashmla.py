"""FlashMLA itself, on a GPU: recorded cases, the semantic suite, captured graphs.

The library comes from where the provider looks for it, in the simplest case the file that the environment variable
SWA_BACKEND_FLASHMLA_LIBRARY names. Without one every test fails, with each candidate's reasons.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

for helper in ("attention_scene", "attention_suite", "flashmla_golden", "gpu.captured_step"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.cache import DeepseekV4SWACache  # noqa: E402
from swa_backend.layer_types import LayerType  # noqa: E402
from swa_backend.registry import get_backend  # noqa: E402
from swa_backend.write import write_kv as store_keys  # noqa: E402
from swa_platform_cuda import flashmla_provider  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, check, mixed  # noqa: E402
from tests.attention_suite import *  # noqa: E402, F403
from tests.flashmla_golden import *  # noqa: E402, F403
from tests.gpu.captured_step import Model, check_replays  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "flashmla")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    return ProviderUnderTest("flashmla", get_backend("cuda"), "cuda:0", batch_invariant=False)


@pytest.mark.parametrize("second", [None, (4, "fp8_ds_mla", 256), (128, "fp8_ds_mla", 256)])
def test_both_forms_of_prefill(provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch, second: Any) -> None:
    scene = mixed(provider, second=second, heads=64)
    compressed, seen = None, []
    if second is not None:
        local = torch.randint(-3, 190, (scene.tokens, 64), generator=torch.Generator().manual_seed(7))
        compressed = scene.topk(local)
        group = scene.metadata.compressed["second"]
        if second[0] == 128:
            compressed = (scene.second_cache, group.rows, group.lens)
    for t in range(scene.tokens):
        request, position = scene.token(t)
        keys = [scene.window(t)]
        if second is not None:
            complete = range((position + 1) // second[0])
            picked = complete if second[0] == 128 else [entry for entry in local[t].tolist() if entry in complete]
            keys.append(scene.entries[request][list(picked)])
        seen.append(torch.cat(keys))
    for gathers in (True, False):
        monkeypatch.setattr(flashmla_provider, "gathers", lambda call, gathers=gathers: gathers)
        check(scene.run(compressed=compressed), scene.expected(seen))


def test_g5_g6_t3_a_captured_step_equals_an_eager_one_bit_for_bit(provider: ProviderUnderTest) -> None:
    check_replays()


def test_c1_slots_on_both_sides_of_2_gib(provider: ProviderUnderTest) -> None:
    """Page 57,358 holds the byte 2^31: rows name the slots around it, those of the next pages, the last of the pool."""
    pages = 64_000  # 2.2 GiB
    scene = Scene(provider, [1] * 4, [20] * 4, heads=64)
    cache = DeepseekV4SWACache(512, 128, torch.uint8, "large", None, provider.backend, block_size=64)
    cache.bind_kv_cache(cache.allocate(pages, scene.device))
    starts = [3_670_902, 3_670_966, 3_671_030, pages * 64 - 20]
    for row, (start, keys) in enumerate(zip(starts, scene.history, strict=True)):
        slots = torch.arange(start, start + 20, device=scene.device)
        store_keys(keys.to(scene.device), cache, slots)
        scene.metadata.decode_swa_indices[row, 0, :20] = slots.int()
    low = torch.arange(20, device=scene.device)  # where a 32-bit offset would land
    store_keys(torch.full((20, 512), torch.nan, device=scene.device).bfloat16(), cache, low)
    scene.cache = cache
    check(scene.run(), scene.expected())


def test_t1_a_step_of_60_layers_plans_once_for_each_type(provider: ProviderUnderTest) -> None:
    model = Model()
    model.change([100, 5000], 0)
    metadata, _ = model.step(layers=20)
    kinds = (LayerType.SWAONLY, LayerType.C4A, LayerType.C128A)
    assert [metadata.plans[kind].filled for kind in kinds] == [1, 1, 1]
    model.change([4000, 5000], 0)
    later, _ = model.step()
    assert [later.plans[kind].filled for kind in kinds] == [1, 1, 1]
    assert later.plans[LayerType.C4A] is not metadata.plans[LayerType.C4A]


def test_decode_writes_in_place_and_allocates_no_workspace_later(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1] * 4, [300] * 4, heads=64)
    workspace = scene.builder.provider._workspace(scene.device)
    before = {name: buffer.data_ptr() for name, buffer in workspace._buffers.items()}
    check(scene.run(), scene.expected())
    after = {name: buffer.data_ptr() for name, buffer in workspace._buffers.items()}
    assert after == before
