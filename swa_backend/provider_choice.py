"""Which attention provider serves a builder's layers: the first of the platform with no reason against it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from swa_backend.cache_layout import get_layout
from swa_backend.errors import ProviderError
from swa_backend.platform import CacheRole
from swa_backend.provider import AttentionProvider, AttentionShape

if TYPE_CHECKING:
    from swa_backend.backend import Backend
    from swa_backend.cache_spec import KVCacheSpec
    from swa_backend.config import BackendConfig

ATTENTION_VARIABLE = "SWA_BACKEND_ATTENTION"


def attention_shape(
    config: BackendConfig, spec: KVCacheSpec, backend: Backend, device: torch.device | None
) -> AttentionShape:
    """What a builder of this configuration will ask of its provider."""
    compressed = any(layer_type.compressed for layer_type in config.model.present_layer_types)
    dialect = backend.cache_dialect(CacheRole.COMPRESSED)
    widths = (config.model.window_size, config.non_causal_width)
    return AttentionShape(
        num_heads=config.num_heads,
        head_dim=config.model.head_dim,
        swa_layout=spec.layout,
        swa_page_tokens=spec.block_size,
        compressed_layouts=(get_layout(config.compressed_layout, dialect),) if compressed else (),
        decode_widths=tuple(width for width in widths if width),
        batch_invariant=config.batch_invariant,
        device=device,
    )


def forced_provider() -> str:
    """Name of the one provider that the environment allows, empty without."""
    return os.environ.get(ATTENTION_VARIABLE, "").strip().lower()


def choose_provider(
    backend: Backend, shape: AttentionShape, among: Sequence[AttentionProvider] | None = None
) -> AttentionProvider:
    """The provider named by ``SWA_BACKEND_ATTENTION``, or the first of the platform that serves the shape.

    Args:
        backend: the platform's descriptor.
        shape: what will be asked of the provider.
        among: the platform's providers that a builder has for itself; None takes the descriptor's.

    Raises:
        ProviderError: none does, or the one named does not; with every candidate's reasons.
    """
    candidates = backend.providers if among is None else tuple(among)
    forced = forced_provider()
    if forced:
        candidates = tuple(one for one in candidates if one.name == forced)
        if not candidates:
            raise ProviderError(
                ATTENTION_VARIABLE,
                found=repr(forced),
                legal=sorted(one.name for one in backend.providers),
                fix=f"Name a provider of the platform {backend.name!r}, or unset the variable.",
            )
    refusals = []
    for provider in candidates:
        reasons = provider.supports(shape)
        if not reasons:
            return provider
        refusals.append(f"{provider.name}: {'; '.join(reasons)}")
    raise ProviderError(
        f"attention provider on {backend.name}",
        found=" | ".join(refusals) or "no provider at all",
        legal="a provider without a reason against these layers",
        fix="Change what the reasons name, or load another platform; `swa-backend doctor` lists them all.",
    )
