"""What FlashMLA's provider asks of the kernels: padding, buffers, refusals. Fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

for helper in ("attention_scene", "flashmla_fake", "flashmla_scene"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.cache_layout import get_layout  # noqa: E402
from swa_backend.errors import CacheError, ProviderError  # noqa: E402
from swa_backend.pages import PageView  # noqa: E402
from swa_platform_cuda import flashmla_provider  # noqa: E402
from swa_platform_cuda.flashmla_forms import cache_of  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, check, mixed  # noqa: E402
from tests.flashmla_fake import DECODE_SCHEMA, PREFILL_SCHEMA, FakeKernels  # noqa: E402
from tests.flashmla_scene import *  # noqa: E402, F403
from tests.flashmla_scene import C4, C128, seen_by  # noqa: E402


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
