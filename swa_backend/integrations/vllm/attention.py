"""Mode ``attention``: decode and prefill of vLLM's DeepSeek-V4 layers through this library's providers.

What a layer keeps of vLLM's: projections, norms, RoPE, the write of its caches, the indexer, the compressor and the
output projection. What is replaced is ``forward_mqa``, between the query and the attention output. Caches are read
where vLLM put them. A layer that no provider serves keeps vLLM's attention, and the log says which and why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swa_backend.attention import attend
from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.capture import capture_id
from swa_backend.errors import ProviderError, SwaBackendError
from swa_backend.integrations.vllm.engine import EngineAttention
from swa_backend.integrations.vllm.metadata import OURS
from swa_backend.integrations.vllm.settings import attention_config, cache_spec, layout_of
from swa_backend.integrations.vllm.surface import ATTENTION_CLASSES, BACKEND, find
from swa_backend.metadata import CompressedGroupMetadata, DeepseekSparseSWAMetadata
from swa_backend.platform import CacheRole
from swa_backend.provider_choice import attention_shape, choose_provider, forced_provider
from swa_backend.registry import get_backend
from swa_backend.topk import map_topk

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.integrations.vllm.plugin import Activation
    from swa_backend.provider import AttentionProvider

FORWARD_CONTEXT = "vllm.forward_context"
PLATFORMS = "vllm.platforms"
_LAYER = "swa_backend_layer"
_STEP = "swa_backend_step"
_RATIOS = (4, 128)
_ROW_MULTIPLE = 128  # to which vLLM pads the width of rows of complete entries

logger = logging.getLogger("vllm.swa_backend")


class Choice(NamedTuple):
    """What serves a kind of layer: settings and provider, or the reasons why nothing does."""

    config: BackendConfig | None
    provider: AttentionProvider | None
    reasons: tuple[str, ...]


class VllmAttention:
    """The attention classes of one vLLM, on the platform of this process.

    Args:
        load: imports a module of vLLM's.
    """

    def __init__(self, load: Callable[[str], ModuleType]) -> None:
        rocm = load(PLATFORMS).current_platform.is_rocm()
        self.module_name = next(name for name in ATTENTION_CLASSES if (".amd." in name) == rocm)
        self.module = load(self.module_name)
        self.layer_cls: Any = getattr(self.module, ATTENTION_CLASSES[self.module_name])
        self.forward_context = load(FORWARD_CONTEXT)
        self.backend_module = load(BACKEND)

    def serves(self, builder_cls: type) -> bool:
        """Whether a builder is one of these layers', by the module that it comes from."""
        return any(one.__module__ == self.module_name for one in builder_cls.__mro__)

    def choose(self, engine: Any, spec: Any, device: torch.device) -> Choice:
        """What serves layers of an engine whose sliding-window cache has this spec."""
        backend = get_backend()
        try:
            layout = layout_of(spec, backend.cache_dialect(CacheRole.SWA))
            parallel = getattr(engine, "parallel_config", None)
            ranks = getattr(parallel, "tensor_parallel_size", 1)
            heads = self.layer_cls.get_padded_num_q_heads(engine.model_config.hf_config.num_attention_heads // ranks)
            threshold = self.backend_module.max_decode_query_len(engine)
            config = attention_config(engine, heads, threshold, spec.block_size, layout)
            own = cache_spec(spec, config, backend.cache_dialect(CacheRole.SWA))
            provider = choose_provider(backend, attention_shape(config, own, backend, device))
        except SwaBackendError as error:
            return Choice(None, None, (str(error),))
        if provider.name == "reference" and device.type != "cpu" and not forced_provider():
            return Choice(None, None, (f"no provider but the slow reference serves them on {device}",))
        return Choice(config, provider, ())


class Layer:
    """One of vLLM's attention layers: its caches as this library reads them, and the rows of its second cache.

    Args:
        layer: vLLM's.
        engine: vLLM's ``VllmConfig``.
        owner: whose layers these are.
    """

    def __init__(self, layer: Any, engine: Any, owner: VllmAttention) -> None:
        self.ratio = 0 if layer.compress_ratio <= 1 else int(layer.compress_ratio)
        self.prefix = layer.swa_cache_layer.prefix
        device = layer.attn_sink.device
        spec = layer.swa_cache_layer.get_kv_cache_spec(engine)
        config, provider, reasons = owner.choose(engine, spec, device)
        if self.ratio and self.ratio not in _RATIOS:
            reasons = (*reasons, f"their compression ratio is {self.ratio}, not one of {_RATIOS}")
        self.serves = config is not None and provider is not None and not reasons
        if config is None or provider is None or reasons:
            keep_vllms(f"layers of ratio {layer.compress_ratio}", reasons)
            return
        self._backend = get_backend()
        self._layout = layout_of(spec, self._backend.cache_dialect(CacheRole.SWA))
        self._second_layout = self._layout.with_dialect(self._backend.cache_dialect(CacheRole.COMPRESSED))
        self._bound: tuple[object, ...] | None = None
        # Now, while the model is loaded: vLLM measures this memory before it sizes its caches.
        provider.reserve(config, device)
        tokens = config.scheduler.max_num_batched_tokens
        if self.ratio == 4:
            self._rows = _rows_buffer(device, tokens, layer.topk_indices_buffer.shape[-1])
        elif self.ratio == 128:
            width = -(-config.scheduler.max_model_len // 128)
            self._rows = _rows_buffer(device, tokens, -(-width // _ROW_MULTIPLE) * _ROW_MULTIPLE)

    def attend(self, layer: Any, q: torch.Tensor, positions: torch.Tensor, output: torch.Tensor, context: Any) -> None:
        """The layer's attention over a step.

        Args:
            layer: vLLM's.
            q: [T', heads, 512] bf16.
            positions: [T'] int64.
            output: [T', heads, 512] bf16, written.
            context: vLLM's metadata of the step by cache prefix.

        Raises:
            ProviderError: the step's metadata was not built for this library's attention.
        """
        ours = getattr(context.get(self.prefix), OURS, None)
        if not isinstance(ours, DeepseekSparseSWAMetadata) or isinstance(ours.provider, EngineAttention):
            raise ProviderError(
                f"metadata of {self.prefix}",
                found="what a builder of vLLM's attention made",
                legal="metadata of the plugin's own builder",
                fix="Set SWA_BACKEND_VLLM=metadata, and report this.",
            )
        window, second = self._caches(layer, context)
        if second is None:
            attend(q, ours, window, layer.attn_sink, layer.scale, out=output)
            return
        metadata, rows, lens = self._second_rows(layer, ours, second, positions, context[layer.prefix])
        attend(q, metadata, window, layer.attn_sink, layer.scale, (second, rows, lens), out=output)

    def _caches(self, layer: Any, context: Any) -> tuple[DeepseekV4SWACache, CompressedCache | None]:
        """The layer's caches, bound to the tensors that vLLM has bound by now."""
        tensors = [layer.swa_cache_layer.kv_cache, *([layer.kv_cache] if self.ratio else [])]
        key = tuple((one.data_ptr(), one.shape, one.stride()) for one in tensors)
        if self._bound is None or self._bound[0] != key:
            swa = layer.swa_cache_layer
            window = DeepseekV4SWACache(
                512, swa.window_size, swa.dtype, self.prefix, None, self._backend, tensors[0].shape[1], self._layout
            )
            window.bind_kv_cache(tensors[0])
            second = None
            if self.ratio:
                page_tokens = tensors[1].shape[1] * self.ratio
                second = CompressedCache(
                    self.ratio, self._second_layout, page_tokens, f"{layer.prefix}.compressed", None, self._backend
                )
                second.bind_kv_cache(tensors[1])
            self._bound = (key, window, second)
        _, found, other = self._bound
        return found, other  # type: ignore[return-value]

    def _second_rows(
        self,
        layer: Any,
        ours: DeepseekSparseSWAMetadata,
        cache: CompressedCache,
        positions: torch.Tensor,
        group: Any,
    ) -> tuple[DeepseekSparseSWAMetadata, torch.Tensor, torch.Tensor]:
        """The step's metadata with the layer's compressed group, and the entries that each token sees.

        Picked entries (ratio 4) are mapped for every layer, complete ones (128) once a step and group.
        """
        tokens = ours.num_tokens
        step = getattr(group, _STEP, None)
        key = (ours, ours.generation, capture_id(positions))
        known = step is not None and step[0][0] is ours and step[0][1:] == key[1:]
        if known and self.ratio == 128:
            return step[1]  # type: ignore[index,no-any-return]
        if self.ratio == 4:
            topk = layer.topk_indices_buffer[:tokens]
        else:
            complete = group.c128a_global_decode_topk_indices
            width = (complete if complete is not None else group.c128a_prefill_topk_indices).shape[-1]
            topk = _counting(positions.device, width).expand(tokens, width)
        rows = self._rows[0][: tokens * topk.shape[1]].view(tokens, topk.shape[1])
        lens = self._rows[1][:tokens]
        map_topk(
            topk,
            ours.token_to_req_indices,
            positions[:tokens],
            group.block_table,
            cache.entries_per_page,
            ours.is_valid_token,
            self.ratio,
            num_pages=cache.pages.num_pages,
            out=(rows, lens),
            backend=self._backend,
            distinct=True,
        )
        if known:
            return step[1][0], rows, lens  # type: ignore[index]
        own = CompressedGroupMetadata(
            name=f"c{self.ratio}a",
            ratio=self.ratio,
            block_table=group.block_table[: ours.num_decodes + ours.num_prefills],
            page_tokens=cache.page_tokens,
            entries_per_page=cache.entries_per_page,
            compressed_slot_mapping=group.slot_mapping,
            rows=rows if self.ratio == 128 else None,
            lens=lens if self.ratio == 128 else None,
        )
        found = ours.with_values({}, compressed={own.name: own}), rows, lens
        setattr(group, _STEP, (key, found))
        return found


@functools.cache
def _rows_buffer(device: torch.device, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [tokens * width], lens [tokens]) int32 that layers share: one runs after the other."""
    rows = torch.full((tokens * width,), -1, dtype=torch.int32, device=device)
    return rows, torch.zeros(tokens, dtype=torch.int32, device=device)


@functools.cache
def _counting(device: torch.device, width: int) -> torch.Tensor:
    """[1, width] int32: 0, 1, 2, .."""
    return torch.arange(width, dtype=torch.int32, device=device).unsqueeze(0)


_told: set[tuple[str, tuple[str, ...]]] = set()


def keep_vllms(what: str, reasons: tuple[str, ...]) -> None:
    """Tell, once for the same reasons, that something keeps vLLM's attention."""
    if (what, reasons) not in _told:
        _told.add((what, reasons))
        logger.warning("%s keep vLLM's attention: %s", what, "; ".join(reasons))


def attention_reasons(load: Callable[[str], ModuleType]) -> list[str]:
    """What is missing for mode ``attention``."""
    try:
        owner = VllmAttention(load)
    except Exception as error:  # vLLM's modules load compiled code, and may raise anything
        return [f"the attention classes cannot be imported: {type(error).__name__}: {error}"]
    reasons = [
        f"{owner.module_name} has no {ATTENTION_CLASSES[owner.module_name]}.{name}"
        for name in ("forward_mqa", "get_padded_num_q_heads")
        if find(owner.layer_cls, name) is None
    ]
    if find(owner.forward_context, "get_forward_context") is None:
        reasons.append(f"{FORWARD_CONTEXT} has no get_forward_context")
    if find(owner.backend_module, "max_decode_query_len") is None:
        reasons.append(f"{BACKEND} has no max_decode_query_len")
    return reasons


def replace_attention(owner: VllmAttention, done: Activation) -> None:
    """Have the layers of this platform's attention class attend through this library."""
    layer_cls = owner.layer_cls
    construct, forward = layer_cls.__init__, layer_cls.forward_mqa

    @functools.wraps(construct)
    def initialise(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, vllm_config, *args, **kwargs)
        object.__setattr__(self, _LAYER, Layer(self, vllm_config, owner))

    @functools.wraps(forward)
    def forward_mqa(self: Any, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: Any) -> None:
        own: Layer = getattr(self, _LAYER)
        if not own.serves:
            forward(self, q, kv, positions, output)
            return
        context = owner.forward_context.get_forward_context().attn_metadata
        if not isinstance(context, Mapping):
            output.zero_()  # a profiling run; what attention takes was reserved when the layer was made
            return
        own.attend(self, q, positions, output, context)
        _finish(owner, self, positions, output)

    layer_cls.__init__, layer_cls.forward_mqa = initialise, forward_mqa
    done.replaced[f"{owner.module_name}.{layer_cls.__name__}.forward_mqa"] = "swa_backend's attention providers"


def _finish(owner: VllmAttention, layer: Any, positions: torch.Tensor, output: torch.Tensor) -> None:
    """What vLLM's AMD layers do to their output: undo the position encoding, unless the projection does it."""
    undo = getattr(owner.module, "rocm_inverse_rope_rows_", None)
    if undo is not None and layer._wo_a_fp8_weight is None:
        rows = output[:, : layer.n_local_heads, :]
        undo(rows, positions, layer.rotary_emb.cos_sin_cache, layer.rope_head_dim)
