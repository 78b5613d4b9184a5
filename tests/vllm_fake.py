"""Stand-ins for the parts of vLLM that the plugin touches, under vLLM's names, so that its tests need no vLLM.

They hold the attributes that the plugin reads and nothing of what vLLM computes; `install` puts them into
``sys.modules``. What the real ones look like is checked where vLLM is installed (`tests/test_vllm_real.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.integrations.vllm.surface import METADATA_FIELDS, RAGGED_FIELDS

VERSION = "0.33.0"
SPARSE_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla"
FLASHINFER_V41 = "vllm.models.deepseek_v41.nvidia.flashinfer_sparse"
ROCM = "vllm.models.deepseek_v4.amd.rocm"
ATTN_UTILS = "vllm.v1.worker.gpu.attn_utils"
MODEL_STATE = "vllm.v1.worker.gpu.model_states.default"
RUNNER = "vllm.v1.worker.gpu_model_runner"


class Plan:
    """An empty FlashMLA plan."""


@dataclass
class Batch:
    """vLLM's ``CommonAttentionMetadata``."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None


def batch_of(ours: Any, **changed: Any) -> Batch:
    """vLLM's view of one of this library's batches."""
    names = Batch.__dataclass_fields__
    return Batch(**{name: getattr(ours, name) for name in names} | changed)


def vllm_config(**options: Any) -> SimpleNamespace:
    """vLLM's configuration, as far as its window builder looks."""
    values = {"k": 0, "parallel_drafting": False, "dspark": False, "max_image_tokens": 0, "pcp": 1, **options}
    speculative = None
    if values["k"]:
        draft = SimpleNamespace(hf_config=SimpleNamespace(sample_from_anchor=values.get("sample_from_anchor", True)))
        speculative = SimpleNamespace(
            num_speculative_tokens=values["k"],
            parallel_drafting=values["parallel_drafting"],
            use_dspark=lambda: values["dspark"],
            draft_model_config=draft,
        )
    hf = SimpleNamespace(
        sliding_window=values.get("window", 128),
        compress_ratios=values.get("compress_ratios", [0, 4, 128]),
        vision_max_n_token=values["max_image_tokens"],
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=values.get("max_model_len", 8192), hf_config=hf),
        scheduler_config=SimpleNamespace(
            max_num_seqs=values.get("max_num_seqs", 64),
            max_num_batched_tokens=values.get("max_num_batched_tokens", 512),
        ),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=values["pcp"]),
        speculative_config=speculative,
    )


def spec(**options: Any) -> SimpleNamespace:
    """vLLM's ``SlidingWindowMLASpec``."""
    values = {"block_size": 64, "dtype": torch.uint8, "state_content_bytes": 584, "head_size": 512}
    return SimpleNamespace(**values | options)


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, config, device

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


def _sparse_swa() -> ModuleType:
    """The window cache, its backend, its metadata and the builder that all others derive from."""
    module = ModuleType(SPARSE_SWA)

    def get_prefill_chunk_plan(
        self: Any, compress_ratio: int, prefill_chunk_size: int, has_compressed: bool | None = None
    ) -> list[str]:
        return ["vLLM's own plan"]

    required = {"block_table", "slot_mapping", "block_size"}
    rest = [(name, Any, field(default=None)) for name in sorted(METADATA_FIELDS - required)]
    metadata = make_dataclass(
        "DeepseekSparseSWAMetadata",
        [*((name, Any) for name in sorted(required)), *rest],
        namespace={"get_prefill_chunk_plan": get_prefill_chunk_plan, "__module__": SPARSE_SWA},
    )

    class DeepseekSparseSWAMetadataBuilder(AttentionMetadataBuilder):
        _cudagraph_support = "uniform"
        supports_draft_decode_metadata_update = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            config, hf = self.vllm_config, self.vllm_config.model_config.hf_config
            self.block_size = self.kv_cache_spec.block_size
            self.max_model_len = config.model_config.max_model_len
            self.max_num_batched_tokens = tokens = config.scheduler_config.max_num_batched_tokens
            drafting = config.speculative_config
            self.num_speculative_tokens = drafting.num_speculative_tokens if drafting else 0
            twice = bool(drafting and drafting.parallel_drafting)
            self.decode_threshold = 1 + (2 if twice else 1) * self.num_speculative_tokens
            self.window_size, self.max_image_tokens = hf.sliding_window, hf.vision_max_n_token
            self.is_dspark = bool(drafting and drafting.use_dspark())
            wide = -(-(self.window_size + self.num_speculative_tokens) // 64) * 64
            self.noncausal_index_width = wide if self.is_dspark else 0
            kinds = {0: "swaonly", 1: "swaonly", 2: "c2a", 4: "c4a", 128: "c128a"}
            self._layer_types = {kinds[ratio] for ratio in hf.compress_ratios}
            self.decode_swa_indices = torch.zeros(tokens, 1, self.window_size, dtype=torch.int32, device=self.device)
            self.is_valid_token = torch.zeros(tokens, dtype=torch.bool, device=self.device)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: Any,
            fast_build: bool = False,
            replay_start: torch.Tensor | None = None,
        ) -> Any:
            return metadata(None, None, 0)

        def update_draft_decode_metadata(self, one: Any) -> None:
            raise AssertionError("vLLM's own update ran")

        def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, Plan | None]:
            kinds = ("swaonly", "c4a", "c128a", "c1a", "c2a")
            return {kind: Plan() if num_decode_tokens and kind in self._layer_types else None for kind in kinds}

    class DeepseekSparseSWABackend:
        @staticmethod
        def get_name() -> str:
            return "DEEPSEEK_SPARSE_SWA"

        @staticmethod
        def get_builder_cls() -> type:
            return DeepseekSparseSWAMetadataBuilder

    class DeepseekV4SWACache:
        def __init__(self, backend_cls: type | None = None) -> None:
            self.backend_cls = backend_cls or DeepseekSparseSWABackend

        def get_attn_backend(self) -> type:
            return self.backend_cls

    for one in (DeepseekSparseSWAMetadataBuilder, DeepseekSparseSWABackend, DeepseekV4SWACache):
        one.__module__, one.__qualname__ = SPARSE_SWA, one.__name__
        setattr(module, one.__name__, one)
    module.DeepseekSparseSWAMetadata = metadata  # type: ignore[attr-defined]
    module.get_mla_metadata = lambda *args: (Plan(), None)  # type: ignore[attr-defined]
    return module


def _leaf(module: ModuleType, sparse_swa: Any, name: str, members: dict[str, Any]) -> type:
    """A builder of one platform, with a backend beside it that names it."""
    base = sparse_swa.DeepseekSparseSWAMetadataBuilder
    made = type(name, (base,), {"__module__": module.__name__, "__qualname__": name, **members})
    setattr(module, name, made)
    backend_name = name.replace("MetadataBuilder", "Backend")
    chosen = {"get_builder_cls": staticmethod(lambda: made), "__module__": module.__name__}
    setattr(module, backend_name, type(backend_name, (sparse_swa.DeepseekSparseSWABackend,), chosen))
    return made


def _flashmla(sparse_swa: Any) -> ModuleType:
    module = ModuleType(FLASHMLA)
    _leaf(module, sparse_swa, "DeepseekSparseSWAFlashMLAMetadataBuilder", {"_cudagraph_support": "always"})
    return module


def _flashinfer_v41(sparse_swa: Any) -> ModuleType:
    """Its builder fills fields of its own after the build that it derives from."""
    module = ModuleType(FLASHINFER_V41)

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).__init__(*args, **kwargs)
        self.own_buffer = torch.zeros(self.max_num_batched_tokens, dtype=torch.int32, device=self.device)

    def build(self: Any, prefix: int, common: Any, fast_build: bool = False, replay_start: Any = None) -> Any:
        metadata = super(made, self).build(prefix, common, fast_build, replay_start)
        if metadata.num_decode_tokens:
            metadata.flashinfer_decode_topk_lens = metadata.decode_swa_lens.clamp(min=self.window_size)
        return metadata

    name = "DeepseekSparseSWAFlashInferMetadataBuilder"
    made = _leaf(module, sparse_swa, name, {"__init__": initialise, "build": build})
    return module


def _rocm(sparse_swa: Any) -> ModuleType:
    """Its builder adds ragged copies of the rows, in buffers of its own."""
    module = ModuleType(ROCM)
    ragged = make_dataclass(
        "DeepseekV4ROCMAiterSparseSWAMetadata",
        [(name, Any, field(default=None)) for name in sorted(RAGGED_FIELDS)],
        bases=(sparse_swa.DeepseekSparseSWAMetadata,),
    )

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).__init__(*args, **kwargs)
        self.decode_swa_ragged_indices_buffer = torch.zeros(9, dtype=torch.int32, device=self.device)
        self.decode_swa_ragged_indptr_buffer = torch.zeros(9, dtype=torch.int32, device=self.device)

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("vLLM's own ragged build ran")

    members = {"__init__": initialise, "build": build, "supports_draft_decode_metadata_update": False}
    made = _leaf(module, sparse_swa, "DeepseekV4ROCMAiterSparseSWAMetadataBuilder", members)
    module.DeepseekV4ROCMAiterSparseSWAMetadata = ragged  # type: ignore[attr-defined]
    return module


def _attention(module: ModuleType, name: str, heads: int) -> None:
    """An attention class whose own attention must not run."""

    def initialise(self: Any, vllm_config: Any, prefix: str, layer: Any) -> None:
        vars(self).update(vars(layer), prefix=prefix)

    def forward_mqa(self: Any, q: Any, kv: Any, positions: Any, output: Any) -> None:
        output.fill_(7)  # vLLM's own

    members = {
        "__init__": initialise,
        "__module__": module.__name__,
        "forward_mqa": forward_mqa,
        "get_padded_num_q_heads": classmethod(lambda cls, given: max(given, heads)),
    }
    setattr(module, name, type(name, (), members))


def max_decode_query_len(config: Any) -> int:
    drafting = config.speculative_config
    return 1 if drafting is None else 1 + (1 + drafting.parallel_drafting) * drafting.num_speculative_tokens


def build_attn_metadata(builders: list[Any], batches: list[Any], *, fail: bool = False, **kwargs: Any) -> list[Any]:
    """The second model runner's loop over cache groups."""
    made = [builder.build(0, batch, **kwargs) for builder, batch in zip(builders, batches, strict=True)]
    if fail:
        raise RuntimeError("a later group failed")
    return made


class GPUModelRunner:
    """The first model runner."""

    def _build_attention_metadata(self, builders: list[Any], batches: list[Any]) -> list[Any]:
        return [builder.build(0, batch) for builder, batch in zip(builders, batches, strict=True)]


@dataclass
class Fake:
    """One fake vLLM; every module is a new one."""

    version: str = VERSION
    rocm: bool = False
    heads: int = 8  # to which FlashMLA's layers are padded
    context: Any = None  # vLLM's metadata of the step by cache prefix
    modules: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sparse_swa = _sparse_swa()
        backend = ModuleType("vllm.v1.attention.backend")
        backend.AttentionMetadataBuilder = AttentionMetadataBuilder  # type: ignore[attr-defined]
        backend.CommonAttentionMetadata = Batch  # type: ignore[attr-defined]
        utils, state, runner = ModuleType(ATTN_UTILS), ModuleType(MODEL_STATE), ModuleType(RUNNER)
        utils.build_attn_metadata = state.build_attn_metadata = build_attn_metadata  # type: ignore[attr-defined]
        runner.GPUModelRunner = type("GPUModelRunner", (GPUModelRunner,), {})  # type: ignore[attr-defined]
        runner.GPUModelRunner._build_attention_metadata = GPUModelRunner._build_attention_metadata  # type: ignore[attr-defined]
        vllm = ModuleType("vllm")
        vllm.__version__ = self.version  # type: ignore[attr-defined]
        backend.max_decode_query_len = max_decode_query_len  # type: ignore[attr-defined]
        leaves = [make(sparse_swa) for make in (_flashmla, _flashinfer_v41, _rocm)]
        _attention(leaves[0], "DeepseekV4FlashMLAAttention", heads=self.heads)
        _attention(leaves[2], "DeepseekV4ROCMAiterMLAAttention", heads=1)
        context, platforms = ModuleType("vllm.forward_context"), ModuleType("vllm.platforms")
        context.get_forward_context = lambda: SimpleNamespace(attn_metadata=self.context)  # type: ignore[attr-defined]
        platforms.current_platform = SimpleNamespace(is_rocm=lambda: self.rocm)  # type: ignore[attr-defined]
        for module in (vllm, sparse_swa, backend, utils, state, runner, context, platforms, *leaves):
            self.modules[module.__name__] = module

    @property
    def sparse_swa(self) -> Any:
        return self.modules[SPARSE_SWA]

    def load(self, name: str) -> ModuleType:
        """As `importlib.import_module`."""
        try:
            module: ModuleType = self.modules[name]
        except KeyError:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None
        return module

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Fake:
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self
