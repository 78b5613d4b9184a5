"""The plugin inside an installed vLLM, without a GPU: loaded by vLLM's own loader, built from vLLM's own objects.

Needs vLLM and this project installed in one environment, as the row ``vllm`` of the matrix sets up.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.integrations.vllm import plugin
from swa_backend.integrations.vllm.attention import (
    _LAYER,
    VllmAttention,
    attention_reasons,
    replace_attention,
)
from swa_backend.integrations.vllm.builder import Builds, Replacements
from swa_backend.integrations.vllm.layer import Layer
from swa_backend.integrations.vllm.readers import READ_BY
from swa_backend.integrations.vllm.shared_step import SharedBatch
from swa_backend.integrations.vllm.surface import (
    ATTENTION_CLASSES,
    BUILDERS,
    METADATA_FIELDS,
    RAGGED_FIELDS,
    SPARSE_SWA,
    STEP_FUNCTIONS,
    find,
)
from swa_backend.registry import get_backend
from tests.attention_scene import ProviderUnderTest, Scene
from tests.support import Batch, GoldenCase, golden_cases, load_golden
from tests.test_vllm_attention import check, complete, picked
from tests.test_vllm_builder import check_recorded, options_of, same

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")

CONFIGS = Path(__file__).parent / "golden" / "configs"
CASES = golden_cases("metadata")
CPU = torch.device("cpu")

WITHOUT = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("swa_backend", "swa_backend_vllm")))
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.worker.gpu import attn_utils
print(sparse_swa.DeepseekV4SWACache.get_attn_backend.__module__, attn_utils.build_attn_metadata.__module__)
print(hasattr(attn_utils.build_attn_metadata, "__wrapped__"))
"""


def test_without_the_variable_nothing_changes() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SWA_BACKEND")}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-3:] == [
        "swa_backend_vllm",
        f"{SPARSE_SWA} vllm.v1.worker.gpu.attn_utils",
        "False",
    ], done.stderr


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """vLLM with the plugin switched on; its ``sparse_swa``, whose plans are stand-ins: FlashMLA needs a GPU."""
    plugins = importlib.import_module("vllm.plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWA_BACKEND_VLLM", "metadata")
        patch.setenv("SWA_BACKEND_PLATFORM", "cpu")
        patch.setattr(plugins, "plugins_loaded", False)
        _stand_in_for_amd(patch)
        assert plugin.activation() is None
        plugins.load_general_plugins()
        sparse_swa = importlib.import_module(SPARSE_SWA)
        patch.setattr(sparse_swa, "get_mla_metadata", lambda *args: (SimpleNamespace(), None))
        for name in STEP_FUNCTIONS:
            importlib.import_module(name)
        yield sparse_swa


def _stand_in_for_amd(patch: pytest.MonkeyPatch) -> None:
    """vLLM's AMD modules ask their platform for the chip while they are imported."""
    platform = ModuleType("vllm.platforms.rocm")

    def answer(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *args, **kwargs: False) if name.startswith("on_") else False

    platform.__getattr__ = answer  # type: ignore[method-assign]
    importlib.import_module("vllm.platforms")
    patch.setitem(sys.modules, platform.__name__, platform)


@pytest.fixture(scope="module")
def engine(vllm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's real configuration of DeepSeek-V4-Flash."""
    return make_engine(tmp_path_factory.mktemp("model"), "deepseek-v4-flash.json", 8192)


def make_engine(folder: Path, name: str, max_model_len: int) -> Any:
    config = importlib.import_module("vllm.config")
    raw = json.loads((CONFIGS / name).read_text())
    raw.pop("quantization_config", None)  # of the weights, which nobody loads
    if raw["model_type"] == "deepseek_v41":  # vLLM takes its keys from under text_config alone
        nested = {key: raw.pop(key) for key in list(raw) if key not in ("model_type", "architectures", "vision_config")}
        raw["text_config"] = nested
    (folder / "config.json").write_text(json.dumps(raw))
    model = config.ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_model_len
    )
    scheduler = config.SchedulerConfig(
        max_model_len=max_model_len, max_num_seqs=64, max_num_batched_tokens=1024, is_encoder_decoder=False
    )
    made = config.VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        device_config=config.DeviceConfig("cpu"),
        cache_config=config.CacheConfig(cache_dtype="fp8_ds_mla"),
    )
    shutil.rmtree(folder)
    return made


@pytest.fixture
def case_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets vLLM's configuration to a recorded case's."""

    def change(case: GoldenCase) -> Any:
        options = options_of(case)
        hf = engine.model_config.hf_config
        monkeypatch.setattr(hf, "sliding_window", options["window"])
        monkeypatch.setattr(hf, "compress_ratios", options["compress_ratios"], raising=False)
        monkeypatch.setattr(hf, "vision_n_layers", int(options["max_image_tokens"] > 0), raising=False)
        monkeypatch.setattr(hf, "vision_max_n_token", options["max_image_tokens"], raising=False)
        monkeypatch.setattr(engine.model_config, "max_model_len", options["max_model_len"])
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            monkeypatch.setattr(engine.scheduler_config, name, options[name])
        speculative = None
        if options["k"]:
            speculative = SimpleNamespace(
                num_speculative_tokens=options["k"],
                parallel_drafting=options["parallel_drafting"],
                use_dspark=lambda: options["dspark"],
            )
        monkeypatch.setattr(engine, "speculative_config", speculative)
        # Only the first model runner doubles the threshold for parallel drafting.
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0" if options["parallel_drafting"] else "1")
        return engine

    return change


def cache_of(vllm: Any, engine: Any, prefix: str, backend: type | None = None, block_size: int = 64) -> Any:
    """vLLM's own cache layer."""
    config = importlib.import_module("vllm.config")
    with config.set_current_vllm_config(engine):
        engine.compilation_config.static_forward_context.pop(prefix, None)
        return vllm.DeepseekV4SWACache(
            512, 128, torch.uint8, prefix, engine.cache_config, backend_cls=backend, block_size=block_size
        )


def common(ours: Any, **changed: Any) -> Any:
    """vLLM's ``CommonAttentionMetadata`` from one of this library's batches."""
    made = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    names = {field.name for field in fields(made) if hasattr(ours, field.name)}
    return made(**{name: getattr(ours, name) for name in names} | changed)


def test_the_plugin_is_loaded_and_the_classes_are_swapped(vllm: Any, engine: Any) -> None:
    done = plugin.activation()
    assert done is not None
    assert (done.mode, done.version) == ("metadata", importlib.import_module("vllm").__version__)
    swapped = 0
    for name, kind in BUILDERS.items():
        module_name, _, builder_name = name.rpartition(".")
        module = importlib.import_module(module_name)
        original = getattr(module, builder_name)
        for backend in [one for one in vars(module).values() if _makes(one, original)] or [None]:
            if backend is None and original is not vllm.DeepseekSparseSWAMetadataBuilder:
                backend = type("Chosen", (vllm.DeepseekSparseSWABackend,), {"get_builder_cls": lambda o=original: o})
            found = cache_of(vllm, engine, f"layers.{name}", backend).get_attn_backend()
            assert found.get_name() == "DEEPSEEK_SPARSE_SWA"
            builder_cls = found.get_builder_cls()
            assert builder_cls is not original
            assert issubclass(builder_cls, original)
            if kind == "dense":
                assert builder_cls._cudagraph_support is original._cudagraph_support
            assert builder_cls.supports_draft_decode_metadata_update
            swapped += 1
    assert swapped >= len(BUILDERS)


def _makes(backend: Any, builder_cls: type) -> bool:
    """Whether a class is a window backend that names this builder."""
    if not isinstance(backend, type) or not hasattr(backend, "get_builder_cls"):
        return False
    try:
        return backend.get_builder_cls() is builder_cls
    except (ImportError, NotImplementedError):
        return False


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_recorded_case_from_vllms_own_objects(path: Path, vllm: Any, case_engine: Any) -> None:
    case = load_golden(path)
    engine = case_engine(case)
    cache = cache_of(vllm, engine, "layers.0", block_size=case["inputs/block_size"])
    cache.window_size = case["inputs/window_size"]
    backend = cache.get_attn_backend()
    spec = cache.get_kv_cache_spec(engine)
    builder = backend.get_builder_cls()(spec, ["layers.0"], engine, CPU)
    batch = common(case.batch())
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=batch)
    check_recorded(case, metadata)
    assert isinstance(metadata, vllm.DeepseekSparseSWAMetadata)
    for name in {name for names in READ_BY.values() for name in names.split()} - RAGGED_FIELDS:
        getattr(metadata, name)
    for name in ("slot_mapping", "seq_lens", "query_start_loc", "query_start_loc_cpu"):
        assert getattr(metadata, name) is getattr(batch, name)
    assert metadata.block_table is batch.block_table_tensor
    assert builder.decode_threshold == case["expected/decode_threshold"]
    for key, plan in (case.get("expected/chunk_plans") or {}).items():
        ratio, size, flag = key.split("/")
        compressed = {"None": None, "True": True, "False": False}[flag]
        found = metadata.get_prefill_chunk_plan(
            compress_ratio=int(ratio), prefill_chunk_size=int(size), has_compressed=compressed
        )
        assert [list(chunk) for chunk in found] == plan


@pytest.mark.parametrize("module", ["vllm.models.deepseek_v4.amd.rocm", "vllm.models.deepseek_v41.amd.rocm"])
def test_vllms_amd_builders_make_the_recorded_ragged_rows(module: str, vllm: Any, case_engine: Any) -> None:
    name = next(name for name in BUILDERS if name.startswith(module))
    original = find(importlib.import_module(module), name.removeprefix(f"{module}."))
    chosen = type("Chosen", (vllm.DeepseekSparseSWABackend,), {"get_builder_cls": staticmethod(lambda: original)})
    seen = 0
    for path in CASES[::5]:
        case = load_golden(path)
        if module.startswith("vllm.models.deepseek_v41") and set(case["inputs/compress_ratios"]) - {0, 1, 2}:
            continue
        engine = case_engine(case)
        cache = cache_of(vllm, engine, "layers.0", chosen, block_size=case["inputs/block_size"])
        builder = cache.get_attn_backend().get_builder_cls()(cache.get_kv_cache_spec(engine), ["a"], engine, CPU)
        metadata = builder.build(0, common(case.batch()))
        for part in ("decode", "prefill"):
            if case.get(f"expected/{part}_ragged_indptr") is None:
                continue
            indptr = getattr(metadata, f"{part}_swa_ragged_indptr")
            assert indptr.tolist() == case[f"expected/{part}_ragged_indptr"].tolist()
            indices = getattr(metadata, f"{part}_swa_ragged_indices")[: indptr[-1]]
            assert indices.tolist() == case[f"expected/{part}_ragged_indices"].tolist()
            seen += 1
    assert seen or module.startswith("vllm.models.deepseek_v41")


def test_vllms_own_loop_builds_eight_groups_in_one_launch(
    vllm: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`build_attn_metadata` of the second model runner, over real attention groups."""
    group_cls = importlib.import_module("vllm.v1.worker.utils").AttentionGroup
    utils = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
    caches = [cache_of(vllm, engine, f"layers.{number}") for number in range(8)]
    groups = []
    for number, cache in enumerate(caches):
        group = group_cls(cache.get_attn_backend(), [cache.prefix], cache.get_kv_cache_spec(engine), number)
        group.create_metadata_builders(engine, CPU, kernel_block_size=64)
        groups.append([group])
    ours = Batch([1, 1, 40], [130, 20, 300]).metadata()
    tables = [ours.block_table_tensor + 10 * number for number in range(8)]
    slots = torch.stack([ours.slot_mapping + 640 * number for number in range(8)])
    for name, path in STEP_FUNCTIONS.items():
        assert hasattr(find(sys.modules[name], path), "__wrapped__"), name
    state = importlib.import_module("vllm.v1.worker.gpu.model_states.default")
    assert state.build_attn_metadata is utils.build_attn_metadata  # imported by name, and replaced there, too
    counted: list[int] = []
    original = Builds.launch

    def launch(builds: Builds, batch: SharedBatch) -> Any:
        counted.append(len(batch.builders))
        return original(builds, batch)

    monkeypatch.setattr(Builds, "launch", launch)
    for capturing in (False, True):
        made = utils.build_attn_metadata(
            attn_groups=groups,
            num_reqs=3,
            num_tokens=42,
            query_start_loc_gpu=ours.query_start_loc,
            query_start_loc_cpu=ours.query_start_loc_cpu,
            max_query_len=40,
            seq_lens=ours.seq_lens,
            max_seq_len=300,
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[c.prefix]) for c in caches]),
            seq_lens_cpu_upper_bound=ours.seq_lens_cpu_upper_bound,
            for_cudagraph_capture=capturing,
        )
    assert counted == [8, 8]
    for number, cache in enumerate(caches):
        alone = (
            groups[0][0]
            .get_metadata_builder()
            .build(0, common(ours, block_table_tensor=tables[number], slot_mapping=slots[number]))
        )
        same(made[cache.prefix], alone)


def test_v41_builders_take_vllms_v41_configuration(vllm: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "deepseek-v4.1-flash.json", 8192)
    module = importlib.import_module("vllm.models.deepseek_v41.nvidia.flashmla")
    cache = cache_of(vllm, engine, "layers.0", module.DeepseekV4FlashMLAAttention.swa_backend_cls)
    builder = cache.get_attn_backend().get_builder_cls()(cache.get_kv_cache_spec(engine), ["layers.0"], engine, CPU)
    ours = Batch([1, 40], [130, 300], replay=[0, 100]).metadata()
    metadata = builder.build(0, common(ours), replay_start=ours.replay_start)
    state = importlib.import_module("vllm.models.deepseek_v41.nvidia.model_state")
    handed = state.ReplayAttnMetadata(ours.replay_start).get_extra_attn_kwargs(builder, 2)
    assert handed["replay_start"].tolist() == [0, 100]  # vLLM takes it for one of its own
    assert metadata.replay_start is ours.replay_start
    present = {kind for kind in ("swaonly", "c1a", "c2a", "c4a") if getattr(metadata, f"tile_sched_{kind}")}
    assert present == builder._layer_types


def test_every_field_that_vllm_reads_is_listed(vllm: Any) -> None:
    """Attributes of whatever vLLM's source annotates, casts or names as sliding-window metadata."""
    root = Path(str(importlib.import_module("vllm").__file__)).parent
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((root / "models").rglob("deepseek_v4*/**/*.py")):
        if "xpu" not in path.parts:
            found["vllm." + ".".join(path.relative_to(root).with_suffix("").parts)] |= _reads(path)
    found[SPARSE_SWA] |= _reads(Path(str(vllm.__file__)))
    for module, names in found.items():
        listed = set(READ_BY.get(module, "").split())
        assert names == listed, module
    known = METADATA_FIELDS | RAGGED_FIELDS | {"get_prefill_chunk_plan"}
    assert {name for names in found.values() for name in names} <= known


def _reads(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {"swa_metadata"}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and _is_metadata(node.annotation):
            names.add(node.arg)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_metadata(node.value):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    if path.name == "mono_decode.py":
        names.add("swa")
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }


def _is_metadata(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return "SparseSWAMetadata" in text and "Builder" not in text


def test_the_names_of_the_attention_mode_are_there(vllm: Any) -> None:
    assert attention_reasons(importlib.import_module) == []
    for module, name in ATTENTION_CLASSES.items():
        assert find(importlib.import_module(module), f"{name}.forward_mqa") is not None


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_vllms_own_layer_attends_through_this_library(
    ratio: int, vllm: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer and a cache of vLLM's classes, over pages of known content; expected values in float64."""
    provider = ProviderUnderTest("reference", get_backend("cpu"), "cpu")
    second = {"second": (ratio, "fp8_ds_mla", 256)} if ratio > 1 else {}
    scene = Scene(provider, [1, 1, 9], [130, 700, 300], heads=64, **second)
    owner = VllmAttention(importlib.import_module)
    flashmla = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    # A subclass, so that vLLM's own class stays as it is.
    owner.layer_cls = type("Layer", (flashmla.DeepseekV4FlashMLAAttention,), {"__module__": flashmla.__name__})
    replace_attention(owner, plugin.Activation(plugin.Mode.ATTENTION, "0.33.0"))
    cache = cache_of(vllm, engine, "layers.0.swa_cache", flashmla.DeepseekSparseSWAFlashMLABackend)
    cache.bind_kv_cache(scene.cache.kv_cache.unsqueeze(1))
    layer = owner.layer_cls.__new__(owner.layer_cls)
    torch.nn.Module.__init__(layer)
    picks, seen = picked(scene) if ratio == 4 else (None, complete(scene) if ratio == 128 else None)
    for name, value in {
        "prefix": "layers.0",
        "compress_ratio": ratio,
        "swa_cache_layer": cache,
        "attn_sink": torch.nn.Parameter(scene.sink, requires_grad=False),
        "scale": 512**-0.5,
        "topk_indices_buffer": picks,
        "kv_cache": scene.second_cache.kv_cache if second else torch.tensor([]),
    }.items():
        setattr(layer, name, value)
    object.__setattr__(layer, _LAYER, Layer(layer, engine, owner))
    builder_cls = Replacements(vllm, owner).builder(flashmla.DeepseekSparseSWAFlashMLAMetadataBuilder)
    builder = builder_cls(cache.get_kv_cache_spec(engine), [cache.prefix], engine, CPU)
    metadata = builder.build(0, common(scene.spec.metadata()))
    assert builder.swa_config.num_heads == 64
    assert builder.swa_config.model.compress_ratios[:4] == (0, 0, 4, 128)
    context = {cache.prefix: metadata}
    if second:
        sparse = importlib.import_module("vllm.models.deepseek_v4.sparse_mla")
        context["layers.0"] = sparse.DeepseekV4FlashMLAMetadata(
            num_reqs=3,
            max_query_len=9,
            max_seq_len=700,
            num_actual_tokens=11,
            query_start_loc=metadata.query_start_loc,
            slot_mapping=torch.full((11,), -1),
            block_table=scene.second_table,
            req_id_per_token=metadata.token_to_req_indices,
            block_size=256,
            topk_tokens=64,
            c128a_global_decode_topk_indices=torch.zeros(2, 1, 128) if ratio == 128 else None,
        )
    forward_context = importlib.import_module("vllm.forward_context")
    monkeypatch.setattr(forward_context, "_forward_context", SimpleNamespace(attn_metadata=context))
    output = torch.full_like(scene.q, torch.nan)
    positions = torch.tensor([scene.token(t)[1] for t in range(11)])
    with torch.inference_mode():
        layer.forward_mqa(scene.q, None, positions, output)
    check(output, scene.expected(seen))
