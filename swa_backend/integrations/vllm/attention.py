"""Mode ``attention``: decode and prefill of vLLM's DeepSeek-V4 layers through this library's providers.

What a layer keeps of vLLM's: projections, norms, RoPE, the write of its caches, the indexer, the compressor and the
output projection. What is replaced is ``forward_mqa``, between the query and the attention output. Caches are read
where vLLM put them. A layer that no provider serves keeps vLLM's attention, and the log says which and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swa_backend.errors import SwaBackendError
from swa_backend.integrations.vllm.layer import Layer
from swa_backend.integrations.vllm.settings import attention_config, cache_spec, layout_of
from swa_backend.integrations.vllm.surface import ATTENTION_CLASSES, BACKEND, find
from swa_backend.platform import CacheRole
from swa_backend.provider_choice import attention_shape, choose_provider, forced_provider
from swa_backend.registry import get_backend

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.integrations.vllm.plugin import Activation
    from swa_backend.provider import AttentionProvider

FORWARD_CONTEXT = "vllm.forward_context"
PLATFORMS = "vllm.platforms"
_LAYER = "swa_backend_layer"


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
