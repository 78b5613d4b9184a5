"""vLLM's attention layers through this library's providers: outputs against float64, caches and steps as vLLM's are."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.errors import ConfigError, ProviderError
from swa_backend.integrations.vllm import attention as module
from swa_backend.integrations.vllm import engine as engine_module
from swa_backend.integrations.vllm import layer as layer_module
from swa_backend.integrations.vllm import plugin
from swa_backend.integrations.vllm.metadata import MADE_BY, OURS
from swa_backend.integrations.vllm.plugin import Mode, activate, examine
from swa_backend.registry import get_backend
from tests.attention_scene import ProviderUnderTest, Scene, floats, mixed
from tests.oracle_attention import relative_error, worst_row_error
from tests.vllm_fake import FLASHMLA, ROCM, Fake, batch_of, spec, vllm_config

CONFIGS = Path(__file__).parent / "golden" / "configs"
CPU = torch.device("cpu")
PROVIDER = ProviderUnderTest("reference", get_backend("cpu"), "cpu")
SWA, LAYER = "layers.0.swa_cache", "layers.0"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a process that has replaced and told nothing yet."""
    monkeypatch.setattr(plugin, "_done", None)
    monkeypatch.setattr(engine_module, "_told", set())
    monkeypatch.setenv("SWA_BACKEND_PLATFORM", "cpu")
    layer_module._rows_buffer.cache_clear()
    yield
    layer_module._rows_buffer.cache_clear()


def engine(**options: Any) -> SimpleNamespace:
    """vLLM's configuration of DeepSeek-V4-Flash with eight heads on this rank."""
    made = vllm_config(max_model_len=8192, max_num_batched_tokens=512, **options)
    hf = json.loads((CONFIGS / "deepseek-v4-flash.json").read_text())
    hf["num_attention_heads"] = 64
    made.model_config.hf_config = SimpleNamespace(**hf, vision_max_n_token=0)
    made.parallel_config.tensor_parallel_size = 8
    return made


class Step:
    """One layer of a fake vLLM over the caches of a scene, and the metadata of the scene's batch."""

    def __init__(self, scene: Scene, fake: Fake, ratio: int = 1, picks: torch.Tensor | None = None) -> None:
        self.scene, self.fake, self.ratio = scene, fake, ratio
        self.config = engine(k=2)
        name = ROCM if fake.rocm else FLASHMLA
        cache_spec = spec(block_size=64)
        swa = SimpleNamespace(
            prefix=SWA,
            window_size=128,
            dtype=torch.uint8,
            kv_cache=scene.cache.kv_cache,
            get_kv_cache_spec=lambda config: cache_spec,
        )
        self.device = scene.device
        buffer = torch.full((512, 64 if picks is None else picks.shape[1]), -1, dtype=torch.int32, device=self.device)
        if picks is not None:
            buffer[: len(picks)] = picks.to(self.device)
        layer = SimpleNamespace(
            compress_ratio=ratio,
            swa_cache_layer=swa,
            attn_sink=torch.nn.Parameter(scene.sink),
            scale=512**-0.5,
            topk_indices_buffer=buffer,
            kv_cache=scene.second_cache.kv_cache if scene.second else torch.tensor([]),
            n_local_heads=scene.heads,
            rope_head_dim=64,
            rotary_emb=SimpleNamespace(cos_sin_cache=torch.zeros(1)),
            _wo_a_fp8_weight=None,
        )
        layer_cls = module.find(fake.load(name), module.ATTENTION_CLASSES[name])
        self.layer = layer_cls(self.config, LAYER, layer)
        backend = next(one for key, one in vars(fake.load(name)).items() if key.endswith("Backend"))
        builder_cls = fake.sparse_swa.DeepseekV4SWACache(backend).get_attn_backend().get_builder_cls()
        self.builder = builder_cls(cache_spec, [SWA], self.config, self.device)
        # As an engine's tables, at one address for life: captured graphs read them there.
        self.second_table = scene.second_table.to(self.device) if scene.second else None
        self.build()

    def build(self) -> None:
        batch = batch_of(self.scene.spec.metadata(str(self.device)))
        self.metadata = self.builder.build(0, batch)
        self.fake.context = {SWA: self.metadata}
        if self.scene.second:
            ratio, _, page_tokens = self.scene.second
            width = 128
            decodes = self.metadata.num_decode_tokens
            self.fake.context[LAYER] = SimpleNamespace(
                block_table=self.second_table,
                block_size=page_tokens,
                slot_mapping=torch.full((self.scene.tokens,), -1, device=self.device),
                c128a_global_decode_topk_indices=torch.zeros(decodes, 1, width) if ratio == 128 and decodes else None,
                c128a_prefill_topk_indices=torch.zeros(1, width) if ratio == 128 else None,
            )

    def positions(self, extra: int = 0) -> torch.Tensor:
        real = sum(self.scene.queries)
        found = [self.scene.token(t)[1] if t < real else 0 for t in range(self.scene.tokens + extra)]
        return torch.tensor(found, device=self.device)

    def run(self, extra: int = 0) -> torch.Tensor:
        """The layer's output; rows past the step are there with ``extra``."""
        q = torch.cat([self.scene.q, self.scene.q.new_ones(extra, *self.scene.q.shape[1:])])
        output = torch.full_like(q, torch.nan)
        self.layer.forward_mqa(q, None, self.positions(extra), output)
        return output


def check(output: torch.Tensor, expected: tuple[Any, Any]) -> None:
    found = floats(output)
    assert relative_error(found, expected[0]) <= 3e-3
    assert worst_row_error(found, expected[0]) <= 4e-3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake().install(monkeypatch)
    activate("attention", made.load)
    return made


def test_what_was_replaced_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm"):
        done = activate("attention", Fake().install(monkeypatch).load)
    assert done.mode is Mode.ATTENTION
    assert f"{FLASHMLA}.DeepseekV4FlashMLAAttention.forward_mqa" in done.replaced
    assert "forward_mqa" in caplog.text


def test_window_layers(fake: Fake) -> None:
    scene = mixed(PROVIDER, batch={"padding": 3})
    step = Step(scene, fake)
    output = step.run(extra=4)
    check(output[: scene.tokens], scene.expected())
    assert torch.equal(output[scene.tokens - 3 :], torch.zeros_like(output[scene.tokens - 3 :]))


def picked(scene: Scene) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(what an indexer leaves in its buffer [T, 64], the keys that each token sees)."""
    rng = np.random.default_rng(3)
    picks = torch.full((scene.tokens, 64), -1, dtype=torch.int32)
    seen = []
    for t in range(scene.tokens):
        request, position = scene.token(t)
        count = (position + 1) // 4
        chosen = rng.permutation(count)[:64]
        # Behind them what a short context leaves there: entries that are not complete yet.
        picks[t, : len(chosen)] = torch.from_numpy(chosen)
        if len(chosen) < 64:
            picks[t, len(chosen)] = count
        seen.append(torch.cat([scene.window(t), scene.entries[request][chosen]]))
    return picks, seen


def complete(scene: Scene) -> list[torch.Tensor]:
    """The keys that each token sees of its window and of all complete entries of 128 tokens."""
    found = []
    for t in range(scene.tokens):
        request, position = scene.token(t)
        found.append(torch.cat([scene.window(t), scene.entries[request][: (position + 1) // 128]]))
    return found


def test_layers_with_picked_entries(fake: Fake) -> None:
    scene = mixed(PROVIDER, second=(4, "fp8_ds_mla", 256))
    picks, seen = picked(scene)
    step = Step(scene, fake, 4, picks)
    check(step.run(), scene.expected(seen))
    check(step.run(), scene.expected(seen))  # another layer of the step


def test_layers_with_complete_entries(fake: Fake) -> None:
    scene = mixed(PROVIDER, second=(128, "fp8_ds_mla", 256))
    seen = complete(scene)
    step = Step(scene, fake, 128)
    assert max((position + 1) // 128 for _, position in map(scene.token, range(scene.tokens))) == 5
    check(step.run(), scene.expected(seen))
    group = fake.context[LAYER]
    mapped = vars(group)[layer_module._STEP]
    check(step.run(), scene.expected(seen))
    assert vars(group)[layer_module._STEP] is mapped  # once a step
    step.build()
    check(step.run(), scene.expected(seen))
    assert vars(fake.context[LAYER])[layer_module._STEP] is not mapped


def test_decodes_alone_after_an_update(fake: Fake) -> None:
    scene = Scene(PROVIDER, [1, 1], [130, 40], config={"k": 2})
    step = Step(scene, fake)
    check(step.run(), scene.expected())
    step.builder.update_draft_decode_metadata(step.metadata)
    check(step.run(), scene.expected())


def test_the_amd_layer_undoes_its_position_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Fake(rocm=True).install(monkeypatch)
    calls = []

    def undo(rows: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, dim: int) -> None:
        calls.append((rows.shape, positions.tolist(), dim))
        rows.mul_(-1)

    made.load(ROCM).rocm_inverse_rope_rows_ = undo  # type: ignore[attr-defined]
    activate("attention", made.load)
    scene = mixed(PROVIDER)
    step = Step(scene, made)
    output = step.run()
    check(-output, scene.expected())
    assert calls == [(output.shape, step.positions().tolist(), 64)]
    step.layer._wo_a_fp8_weight = torch.zeros(1)  # the projection does it
    check(step.run(), scene.expected())


def test_caches_that_vllm_binds_again_are_taken_again(fake: Fake) -> None:
    scene = mixed(PROVIDER)
    step = Step(scene, fake)
    check(step.run(), scene.expected())
    moved = scene.cache.allocate(scene.num_pages, "cpu")
    moved.untyped_storage().copy_(scene.cache.kv_cache.untyped_storage())
    scene.cache.kv_cache.untyped_storage().fill_(255)
    step.layer.swa_cache_layer.kv_cache = moved.squeeze(1)
    check(step.run(), scene.expected())


def test_pages_that_share_blocks_with_other_layers(fake: Fake) -> None:
    """vLLM packs the pages of several layers into one block: the distance between pages is the block's."""
    scene = mixed(PROVIDER)
    page = scene.cache.kv_cache.stride(0)
    packed = torch.full((scene.num_pages, 3 * page), 255, dtype=torch.uint8)
    packed[:, page : 2 * page] = scene.cache.kv_cache.as_strided((scene.num_pages, page), (page, 1))
    step = Step(scene, fake)
    step.layer.swa_cache_layer.kv_cache = packed.as_strided((scene.num_pages, 64, 584), (3 * page, 584, 1), page)
    check(step.run(), scene.expected())


def test_a_profiling_run_writes_zeros(fake: Fake) -> None:
    step = Step(mixed(PROVIDER), fake)
    fake.context = None
    assert not step.run().any()


def test_metadata_of_vllms_own_attention_is_refused(fake: Fake) -> None:
    step = Step(mixed(PROVIDER), fake)
    fake.context = {SWA: fake.sparse_swa.DeepseekSparseSWAMetadata(None, None, 0)}
    with pytest.raises(ProviderError, match=SWA):
        step.run()


def test_the_builder_chooses_the_layers_provider_and_gives_its_plans(fake: Fake) -> None:
    step = Step(mixed(PROVIDER), fake)
    ours = getattr(step.metadata, OURS)
    assert ours.provider.name == "reference"
    assert getattr(step.metadata, MADE_BY)[0].builder.config.num_heads == 8
    assert step.builder.swa_config.model.name != "vLLM"
    assert step.builder.swa_config.compressed_layout == "fp8_ds_mla"


def test_layers_that_nothing_serves_keep_vllms_attention_and_say_so(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.VllmAttention, "choose", lambda *args: module.Choice(None, None, ("no kernel for it",)))
    with caplog.at_level(logging.WARNING, "vllm"):
        step = Step(mixed(PROVIDER), fake)
        Step(mixed(PROVIDER), fake)
    assert (step.run() == 7).all()
    assert step.builder.swa_config.model.name == "vLLM"
    told = [record.message for record in caplog.records]
    assert told == ["layers of ratio 1 keep vLLM's attention: no kernel for it"]


def test_a_ratio_that_the_plugin_does_not_know(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm"):
        step = Step(mixed(PROVIDER), fake, ratio=2)
    assert (step.run() == 7).all()
    assert "ratio is 2" in caplog.text


def test_builders_of_other_layers_build_for_vllms_attention(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm"):
        builder_cls = fake.sparse_swa.DeepseekV4SWACache().get_attn_backend().get_builder_cls()
        builder = builder_cls(spec(), ["layer"], engine(), CPU)
    assert builder.swa_config.model.name == "vLLM"
    assert "keep vLLM's attention" in caplog.text


def test_the_reference_is_not_taken_for_a_gpu(fake: Fake) -> None:
    owner = module.VllmAttention(fake.load)
    assert owner.choose(engine(), spec(), CPU).reasons == ()
    reasons = owner.choose(engine(), spec(), torch.device("cuda", 0)).reasons
    assert reasons  # on this machine there is no such platform, or nothing but the reference


@pytest.mark.parametrize(
    ("name", "gone", "reason"),
    [
        (FLASHMLA, "DeepseekV4FlashMLAAttention", "cannot be imported"),
        ("vllm.forward_context", "get_forward_context", "no get_forward_context"),
        ("vllm.v1.attention.backend", "max_decode_query_len", "no max_decode_query_len"),
    ],
)
def test_a_vllm_without_what_attention_needs_is_refused(name: str, gone: str, reason: str) -> None:
    fake = Fake()
    delattr(fake.load(name), gone)
    assert any(reason in one for one in examine(Mode.ATTENTION, fake.load)[1])
    assert not examine(Mode.METADATA, fake.load)[1]
    with pytest.raises(ConfigError):
        activate("attention", fake.load)
