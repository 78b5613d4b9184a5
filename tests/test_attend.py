"""`attend` on the providers of this machine's CPU platform, and its refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.attention_scene", "tests.attention_suite")

from swa_backend.attention import attend  # noqa: E402
from swa_backend.cache import CompressedCache, DeepseekV4SWACache  # noqa: E402
from swa_backend.cache_layout import get_layout  # noqa: E402
from swa_backend.errors import BatchError, CacheError, SwaBackendError, ValidationError  # noqa: E402
from swa_backend.pages import element_dtype  # noqa: E402
from swa_backend.registry import get_backend  # noqa: E402
from tests.attention_scene import HEADS, ProviderUnderTest, Scene, bind, mixed  # noqa: E402
from tests.attention_suite import *  # noqa: E402, F403
from tests.support import Batch  # noqa: E402

LAYOUTS = ("fp8_ds_mla", "fp8_ds_mla_v41", "bf16", "fp8_per_tensor")


def reference() -> ProviderUnderTest:
    return ProviderUnderTest(
        "reference",
        get_backend("cpu"),
        "cpu",
        swa_layouts=LAYOUTS,
        layout_pairs=tuple((first, second) for first in LAYOUTS for second in LAYOUTS),
    )


@pytest.fixture(params=[reference], ids=lambda make: make.__name__)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    under_test: ProviderUnderTest = request.param()
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", under_test.name)
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    return under_test


def refusal(scene: Scene, **options: Any) -> SwaBackendError:
    out = torch.full_like(scene.q, 7.0)
    with pytest.raises(SwaBackendError) as error:
        scene.run(**{"out": out, **options})
    assert torch.all(out == 7.0), "a refused call writes nothing"
    return error.value


class TestQueryChecks:
    @pytest.mark.parametrize(
        "bad",
        [
            lambda q: q.float(),
            lambda q: q.half(),
            lambda q: q[:, 0],
            lambda q: q[..., :448],
            lambda q: q[..., :448].contiguous(),
            lambda q: q[..., None],
            lambda q: q.reshape(-1, 512),
            lambda q: q[:, :0],
            lambda q: q[:-1],
            lambda q: q[:, :4],
            lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
            lambda q: q.tolist(),
            lambda q: q.to("meta"),
        ],
    )
    def test_q(self, provider: ProviderUnderTest, bad: Any) -> None:
        scene = Scene(provider, [1, 3], [20, 3])
        with pytest.raises(BatchError) as error:
            scene.run(q=bad(scene.q), attn_sink=scene.sink[: 4 if bad(scene.q[:1]) is None else None])
        assert error.value.field in ("q", "attn_sink")

    @pytest.mark.parametrize(
        "bad",
        [
            None,
            0.5,
            torch.zeros(HEADS).bfloat16(),
            torch.zeros(HEADS).double(),
            torch.zeros(HEADS + 1),
            torch.zeros(HEADS, 1),
            torch.zeros(2 * HEADS)[::2],
        ],
    )
    def test_sink(self, provider: ProviderUnderTest, bad: Any) -> None:
        error = refusal(Scene(provider, [1], [20]), attn_sink=bad)
        assert (type(error), error.field) == (BatchError, "attn_sink")

    @pytest.mark.parametrize("bad", [math.nan, math.inf, 1e39, 10**400, True, "1", torch.tensor(1.0)])
    def test_scale(self, provider: ProviderUnderTest, bad: Any) -> None:
        error = refusal(Scene(provider, [1], [20]), scale=bad)
        assert (type(error), error.field) == (BatchError, "scale")

    @pytest.mark.parametrize(
        "bad",
        [
            lambda q: torch.empty_like(q, device="meta"),
            lambda q: q.float(),
            lambda q: q[:-1].clone(),
            lambda q: q,
            lambda q: q.flip(0)[:1].expand(q.shape),
            lambda q: q.clone()[:, :1].expand(q.shape),
            lambda q: torch.as_strided(q.clone(), q.shape, (HEADS * 512, 500, 1)),
            lambda q: 0,
        ],
    )
    def test_out(self, provider: ProviderUnderTest, bad: Any) -> None:
        scene = Scene(provider, [1, 3], [20, 3])
        with pytest.raises(BatchError) as error:
            scene.run(out=bad(scene.q))
        assert error.value.field == "out"

    def test_gradients_are_not_recorded(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1, 3], [20, 3])
        expected = scene.run().out
        result = scene.run(
            q=scene.q.clone().requires_grad_(),
            attn_sink=torch.nn.Parameter(scene.sink.clone()),
            out=torch.empty_like(scene.q).requires_grad_(),
            return_lse=True,
        )
        assert torch.equal(result.out.detach(), expected)
        assert result.lse is not None
        assert not result.lse.requires_grad

    def test_out_beside_q_in_one_buffer(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1, 3], [20, 3])
        buffer = torch.zeros(9, HEADS, 512, dtype=torch.bfloat16)
        buffer[:4] = scene.q
        assert torch.equal(scene.run(q=buffer[:4], out=buffer[4:8]).out, scene.run().out)
        with pytest.raises(BatchError, match="apart from q"):
            scene.run(q=buffer[:4], out=buffer[3:7])

    def test_out_by_head(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1, 3], [20, 3])
        out = torch.zeros(HEADS, 4, 512, dtype=torch.bfloat16).transpose(0, 1)
        assert torch.equal(scene.run(out=out).out, scene.run().out)


class TestCacheChecks:
    def test_not_a_cache(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1], [20], second=(4, "fp8_ds_mla", 256))
        for bad in (None, scene.cache.kv_cache, scene.second_cache):
            with pytest.raises(CacheError) as error:
                attend(scene.q, scene.metadata, bad, scene.sink)  # type: ignore[arg-type]
            assert error.value.field == "cache"

    def test_unbound(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1], [20])
        with pytest.raises(CacheError):
            attend(
                scene.q,
                scene.metadata,
                DeepseekV4SWACache(512, 128, torch.uint8, "x", None, provider.backend),
                scene.sink,
            )

    def test_another_page_size(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1], [20])
        other = DeepseekV4SWACache(512, 128, torch.uint8, "x", None, provider.backend, block_size=32)
        bind(other, 4, scene.device, 0)
        with pytest.raises(CacheError) as error:
            attend(scene.q, scene.metadata, other, scene.sink)
        assert error.value.field == "cache.block_size"

    def test_compressed_must_be_cache_rows_and_lens(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1, 3], [20, 3], second=(4, "fp8_ds_mla", 256))
        cache, rows, lens = scene.topk(torch.zeros(4, 6))
        unbound = CompressedCache(4, "fp8_ds_mla", 256, "x", None, provider.backend)
        for bad, kind, field in (
            ((rows, lens), BatchError, "compressed"),
            (cache, BatchError, "compressed"),
            ((scene.cache, rows, lens), CacheError, "compressed[0]"),
            ((unbound, rows, lens), CacheError, None),
            ((cache, rows.long(), lens), BatchError, "compressed[1] (rows)"),
            ((cache, rows[:3], lens), BatchError, "compressed[1] (rows)"),
            ((cache, rows[:, :0], lens), BatchError, "compressed[1] (rows)"),
            ((cache, rows[:, None], lens), BatchError, "compressed[1] (rows)"),
            ((cache, rows[:, ::2], lens), BatchError, "compressed[1] (rows)"),
            ((cache, rows, lens.long()), BatchError, "compressed[2] (lens)"),
            ((cache, rows, lens[:3]), BatchError, "compressed[2] (lens)"),
            ((cache, rows, lens.tolist()), BatchError, "compressed[2] (lens)"),
        ):
            error = refusal(scene, compressed=bad)
            assert type(error) is kind
            assert field in (error.field, None)

    def test_more_compressed_rows_than_tokens(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1, 3], [20, 3], second=(4, "fp8_ds_mla", 256))
        cache, rows, lens = scene.topk(torch.zeros(4, 6))
        longer = (cache, torch.cat([rows, rows]), torch.cat([lens, lens + 99]))
        assert torch.equal(scene.run(compressed=longer).out, scene.run(compressed=(cache, rows, lens)).out)

    def test_a_provider_that_cannot_mix_layouts_is_not_asked_to(self, provider: ProviderUnderTest) -> None:
        class Picky:
            name, takes_plans = "picky", False

            def supports(self, shape: Any) -> list[str]:
                return ["it reads one layout"] if {*shape.compressed_layouts} != {shape.swa_layout} else []

        scene = Scene(provider, [1], [20], second=(4, "bf16", 256))
        compressed = scene.topk(torch.zeros(1, 6))
        scene.run(compressed=compressed)
        metadata = dataclasses.replace(scene.metadata, provider=Picky())
        metadata.shape = None
        scene.metadata = metadata
        error = refusal(scene, compressed=compressed)
        assert isinstance(error, CacheError)
        assert "it reads one layout" in str(error)


class TestValidation:
    def scene(self, provider: ProviderUnderTest) -> Scene:
        return Scene(
            provider, [1, 3], [200, 3], second=(4, "fp8_ds_mla", 256), batch={"padding": 1}, config={"validate": True}
        )

    def test_a_sound_call_passes(self, provider: ProviderUnderTest) -> None:
        scene = self.scene(provider)
        compressed = scene.topk(torch.arange(5).repeat(5, 1))
        scene.run(compressed=compressed)
        scene.run(compressed=compressed, attn_sink=torch.full_like(scene.sink, -math.inf))

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_sinks(self, provider: ProviderUnderTest, bad: float) -> None:
        scene = self.scene(provider)
        scene.sink[3] = bad
        error = refusal(scene)
        assert (type(error), error.field) == (ValidationError, "attn_sink[3]")

    def test_rows_and_lens(self, provider: ProviderUnderTest) -> None:
        scene = self.scene(provider)
        cache, rows, lens = scene.topk(torch.arange(5).repeat(5, 1))
        slots = cache.pages.num_slots
        rows[0, 3] = slots
        error = refusal(scene, compressed=(cache, rows, lens))
        assert (error.field, error.found) == ("compressed rows of token 0 (request 0)", slots)
        rows[0, 3] = -1
        lens[0] = 6
        error = refusal(scene, compressed=(cache, rows, lens))
        assert (error.field, error.found) == ("compressed lens of token 0 (request 0)", 6)
        lens[0] = 5
        lens[4] = 1
        assert refusal(scene, compressed=(cache, rows, lens)).field == "compressed lens of token 4 (request 0)"
        lens[4] = 0
        scene.run(compressed=(cache, rows, lens))

    def test_window_rows_and_lens(self, provider: ProviderUnderTest) -> None:
        scene = self.scene(provider)
        scene.metadata.prefill_swa_lens[1] = 129
        assert refusal(scene).field == "prefill_swa lens of token 2 (request 1)"
        scene.metadata.prefill_swa_lens[1] = 2
        scene.metadata.decode_swa_indices[0, 0, 5] = -2
        assert refusal(scene).field == "decode_swa rows of token 0 (request 0)"
        scene.metadata.decode_swa_indices[0, 0, 5] = -1
        scene.metadata.prefill_swa_indices[0, 0, 1] = 2**31 - 1  # past the row's length
        scene.run()


@pytest.mark.parametrize("layout", ["fp8_ds_mla_v41", "bf16", "fp8_per_tensor"])
def test_c5_a_cache_of_another_layout_than_the_builders_is_refused(provider: ProviderUnderTest, layout: str) -> None:
    """Not read as if it were the builder's, whatever the provider can read."""
    scene = mixed(provider)
    form = get_layout(layout)
    other = DeepseekV4SWACache(512, 128, element_dtype(form), "x", None, provider.backend, block_size=64, layout=form)
    bind(other, scene.num_pages, scene.device, 0)
    with pytest.raises(CacheError, match=layout) as error:
        attend(scene.q, scene.metadata, other, scene.sink)
    assert "fp8_ds_mla" in str(error.value.legal)


class TestMetadataChecks:
    def test_not_what_a_builder_made(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1], [20])
        for bad in (scene.spec.metadata(), scene.metadata.decode_swa_indices, 0, ()):
            with pytest.raises(BatchError) as error:
                attend(scene.q, bad, scene.cache, scene.sink)  # type: ignore[arg-type]
            assert error.value.field == "metadata"

    def test_another_device(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1], [20])
        elsewhere = dataclasses.replace(scene.metadata, is_valid_token=scene.metadata.is_valid_token.to("meta"))
        with pytest.raises(BatchError) as error:
            attend(scene.q, elsewhere, scene.cache, scene.sink)
        assert (error.value.field, error.value.found) == ("metadata", "a step on meta")

    def test_prefill_tokens_without_rows(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1, 5], [20, 5])
        scene.metadata.prefill_swa_indices = None
        error = refusal(scene)
        assert (type(error), error.field) == (BatchError, "metadata")

    def test_a_step_that_a_later_build_has_overwritten(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1, 5], [20, 5])
        scene.run()
        later = scene.builder.build(0, Batch([1], [9]).metadata(str(scene.device)))
        error = refusal(scene)
        assert (type(error), error.field) == (BatchError, "metadata")
        scene.builder.update_draft_decode_metadata(later)
        assert refusal(scene).field == "metadata"

    def test_other_heads_than_the_builder_was_told_of(self, provider: ProviderUnderTest) -> None:
        scene = Scene(provider, [1], [20])
        with pytest.raises(BatchError) as error:
            scene.run(q=scene.q[:, :4], attn_sink=scene.sink[:4])
        assert error.value.field == "q"
        assert "8" in str(error.value.legal)
