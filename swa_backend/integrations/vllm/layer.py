"""One of vLLM's attention layers over a step: its caches, its compressed entries, and the call of this library."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from swa_backend._math import cdiv, ceil_to
from swa_backend.attention import attend
from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.capture import capture_id
from swa_backend.errors import ProviderError
from swa_backend.integrations.vllm.engine import EngineAttention, keep_vllms
from swa_backend.integrations.vllm.metadata import OURS
from swa_backend.integrations.vllm.settings import layout_of
from swa_backend.metadata import CompressedGroupMetadata, DeepseekSparseSWAMetadata
from swa_backend.platform import CacheRole
from swa_backend.registry import get_backend
from swa_backend.topk import map_topk

if TYPE_CHECKING:
    from swa_backend.integrations.vllm.attention import VllmAttention

_STEP = "swa_backend_step"
_RATIOS = (4, 128)
_ROW_MULTIPLE = 128  # to which vLLM pads the width of rows of complete entries


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
            width = ceil_to(cdiv(config.scheduler.max_model_len, 128), _ROW_MULTIPLE)
            self._rows = _rows_buffer(device, tokens, width)
            self._counting = _counting(device, width)

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
            topk = self._counting[:, :width].expand(tokens, width)
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
