"""The engine-facing attention call: checks its arguments, then hands over to the provider that the builder chose."""

from __future__ import annotations

from typing import NamedTuple

import torch

from swa_backend.attention_checks import (
    check_caches,
    check_metadata,
    check_output,
    check_query,
    check_scale,
    is_usual,
)
from swa_backend.attention_values import validate_call
from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.cache_layout import HEAD_DIM
from swa_backend.capture import capture_id
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.provider import AttentionCall

DEFAULT_SCALE: float = HEAD_DIM**-0.5


class AttentionResult(NamedTuple):
    """Attention output of a step.

    Attributes:
        out: [T', h, 512] bf16.
        lse: [T', h] float32, ``log sum_j exp(s_j)``: natural, without the sink, -inf where nothing was seen; None
            unless asked for.
    """

    out: torch.Tensor
    lse: torch.Tensor | None


def attend(
    q: torch.Tensor,
    metadata: DeepseekSparseSWAMetadata | None,
    cache: DeepseekV4SWACache,
    attn_sink: torch.Tensor,
    scale: float | None = None,
    compressed: tuple[CompressedCache, torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> AttentionResult:
    """Attention of one layer over a whole step, its decode and its prefill tokens.

    Token t attends to the concatenation of its window entries (rows of ``metadata``) and its compressed entries. With
    ``s_j = scale * q . k_j`` and values equal to keys, ``out = sum_j exp(s_j) k_j / (sum_j exp(s_j) + exp(sink))``. An
    entry that is negative or outside its cache is skipped, one that occurs twice counts twice. A token without entries
    gets 0 and an lse of -inf, whatever its sink: so do padded tokens, and rows of ``q`` past the metadata's T tokens.
    Nothing is recorded for gradients.

    Args:
        q: [T', h, 512] bf16, T' >= T and h from 1 to 128, position encoding applied.
        metadata: what the builder made for this step and this cache group; None in a profiling run, where no cache is
            read and every row is that of a token without entries.
        cache: the layer's sliding-window cache, bound to its pages.
        attn_sink: [h] float32; +inf gives 0, -inf the plain softmax.
        scale: factor of the logits; None takes ``512 ** -0.5``.
        compressed: the layer's second cache as (cache, rows [>= T, K] int32 slots, lens [>= T] int32), None without
            one. Only the first ``lens[t]`` entries of row t are looked at; a padded token's ``lens`` is 0.
        out: [T', h, 512] bf16 to write, apart from ``q``; None allocates it.
        return_lse: also return the lse.

    Raises:
        BatchError: a type, dtype, device, shape or stride is wrong; nothing is converted.
        CacheError: a cache is not bound, not the kind or of the page size or layout that the metadata was built for.
        ValidationError: in validation mode, a value breaks a rule.
    """
    if not torch.is_grad_enabled():
        return _attend(q, metadata, cache, attn_sink, scale, compressed, out, return_lse)
    # A model's sinks are parameters, and what is written in place has no gradient.
    torch._C._set_grad_enabled(False)
    try:
        return _attend(q, metadata, cache, attn_sink, scale, compressed, out, return_lse)
    finally:
        torch._C._set_grad_enabled(True)


def _attend(
    q: torch.Tensor,
    metadata: DeepseekSparseSWAMetadata | None,
    cache: DeepseekV4SWACache,
    attn_sink: torch.Tensor,
    scale: float | None,
    compressed: tuple[CompressedCache, torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor | None,
    return_lse: bool,
) -> AttentionResult:
    if not is_usual(q, attn_sink, out):
        check_query(q, attn_sink)
        if out is not None:
            check_output(out, q)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    factor = DEFAULT_SCALE if scale is None else check_scale(scale)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    given = q.shape[0]
    tokens = 0
    if metadata is not None:
        check_metadata(metadata, q)
        capture = capture_id(q) if metadata.provider.takes_plans else 0
        pages, rows = check_caches(q, metadata, cache, compressed, capture)
        tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
        if tokens == given:
            call = AttentionCall(q, out, lse, metadata, pages, attn_sink, factor, rows, capture)
        else:
            own = None if lse is None else lse[:tokens]
            call = AttentionCall(q[:tokens], out[:tokens], own, metadata, pages, attn_sink, factor, rows, capture)
        if metadata.validate:
            validate_call(call)
        try:
            if metadata.num_decode_tokens:
                metadata.provider.decode(call)
            if metadata.num_prefill_tokens:
                metadata.provider.prefill(call)
        except BaseException:
            metadata.provider.forget()
            raise
    if tokens < given:
        out[tokens:].zero_()
        if lse is not None:
            lse[tokens:].fill_(-torch.inf)
    return AttentionResult(out, lse)
