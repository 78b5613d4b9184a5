"""Compiling while vLLM starts, so that nothing compiles while it serves: as soon as a builder is constructed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.backend import Backend
    from swa_backend.config import BackendConfig


@cache
def warm_builds(backend: Backend, config: BackendConfig, device: torch.device, *, ragged: bool) -> tuple[str, ...]:
    """Compile and load every key of the metadata kernel that a configuration can need on a GPU, once.

    Returns:
        Kernel and key of each; none on a device that is no GPU.
    """
    if device.type != "cuda":
        return ()
    assert backend.operations is not None  # imports Triton, or says what is missing
    from swa_backend.kernels.jit import mark_warm
    from swa_backend.kernels.metadata import build_metadata

    dialects = {role: backend.cache_dialect(role) for role in CacheRole}
    keys = [key for key in build_metadata.keys(config, dialects) if key["RAGGED"] == ragged]
    launchers = [build_metadata.on(device, **key) for key in keys]
    mark_warm(False)
    for launcher in launchers:
        launcher.compile()
    mark_warm()  # from here on SWA_BACKEND_JIT_STRICT=1 makes any other key an error
    return tuple(map(str, launchers))


@cache
def warm_attention(backend: Backend, config: BackendConfig, device: torch.device) -> tuple[str, ...]:
    """Compile and load every key that attention of a configuration can need on a GPU, once.

    Returns:
        Kernel and key of each; none on a device that is no GPU.
    """
    return tuple(backend.warmup(config, device=device)) if device.type == "cuda" else ()
