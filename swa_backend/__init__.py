"""DeepSeek-V4 sparse sliding-window attention for serving engines: index metadata, paged fp8 caches, attention.

Importing the package chooses the platform of the process once (`SWA_BACKEND_PLATFORM`, see `swa_backend.registry`).
Everything else is imported when its name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swa_backend.errors import (
    BatchError,
    CacheError,
    ConfigError,
    PlatformError,
    ProviderError,
    SwaBackendError,
    TraceError,
    ValidationError,
)
from swa_backend.registry import choose_at_import, get_backend

if TYPE_CHECKING:
    from swa_backend.attention import AttentionResult, attend
    from swa_backend.backend import Backend
    from swa_backend.batch import CommonAttentionMetadata
    from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
    from swa_backend.cache import CacheConfig, CompressedCache, DeepseekV4SWACache
    from swa_backend.cache_layout import Dialect, PageLayout, get_layout
    from swa_backend.cache_spec import KVCacheSpec
    from swa_backend.chunk_plan import PrefillChunk, workspace_bytes
    from swa_backend.config import BackendConfig, SchedulerConfig, SpeculativeConfig
    from swa_backend.groups import CompressedGroup, SwaGroup
    from swa_backend.layer_types import LayerType, ModelVersion, classify_layer
    from swa_backend.merge import apply_sink, merge_states
    from swa_backend.metadata import CompressedGroupMetadata, DeepseekSparseSWAMetadata
    from swa_backend.model_config import ImageMode, ModelConfig, packaged_models
    from swa_backend.operations import Operations
    from swa_backend.pages import PageView
    from swa_backend.platform import (
        CacheRole,
        NoTileScheduler,
        Platform,
        Probe,
        Target,
        TileScheduler,
    )
    from swa_backend.problems import Problem, Problems, count_problems
    from swa_backend.provider import AttentionCall, AttentionProvider, AttentionShape, CompressedRows
    from swa_backend.split import Split, split_decodes_and_prefills
    from swa_backend.topk import TopkSlots, map_topk
    from swa_backend.transcode import transcode_pages
    from swa_backend.write import gather_kv, write_kv

__all__ = [
    "AttentionCall",
    "AttentionProvider",
    "AttentionResult",
    "AttentionShape",
    "Backend",
    "BackendConfig",
    "BatchError",
    "CacheConfig",
    "CacheError",
    "CacheRole",
    "CommonAttentionMetadata",
    "CompressedCache",
    "CompressedGroup",
    "CompressedGroupMetadata",
    "CompressedRows",
    "ConfigError",
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "DeepseekV4SWACache",
    "Dialect",
    "ImageMode",
    "KVCacheSpec",
    "LayerType",
    "ModelConfig",
    "ModelVersion",
    "NoTileScheduler",
    "Operations",
    "PageLayout",
    "PageView",
    "Platform",
    "PlatformError",
    "PrefillChunk",
    "Probe",
    "Problem",
    "Problems",
    "ProviderError",
    "SchedulerConfig",
    "SpeculativeConfig",
    "Split",
    "SwaBackendError",
    "SwaGroup",
    "Target",
    "TileScheduler",
    "TopkSlots",
    "TraceError",
    "ValidationError",
    "__version__",
    "apply_sink",
    "attend",
    "classify_layer",
    "count_problems",
    "gather_kv",
    "get_backend",
    "get_layout",
    "map_topk",
    "merge_states",
    "packaged_models",
    "split_decodes_and_prefills",
    "transcode_pages",
    "workspace_bytes",
    "write_kv",
]

_NAMES = {
    "attention": ("AttentionResult", "attend"),
    "backend": ("Backend",),
    "batch": ("CommonAttentionMetadata",),
    "builder": ("DeepseekSparseSWAMetadataBuilder",),
    "cache": ("CacheConfig", "CompressedCache", "DeepseekV4SWACache"),
    "cache_layout": ("Dialect", "PageLayout", "get_layout"),
    "cache_spec": ("KVCacheSpec",),
    "chunk_plan": ("PrefillChunk", "workspace_bytes"),
    "config": ("BackendConfig", "SchedulerConfig", "SpeculativeConfig"),
    "groups": ("CompressedGroup", "SwaGroup"),
    "layer_types": ("LayerType", "ModelVersion", "classify_layer"),
    "merge": ("apply_sink", "merge_states"),
    "metadata": ("CompressedGroupMetadata", "DeepseekSparseSWAMetadata"),
    "model_config": ("ImageMode", "ModelConfig", "packaged_models"),
    "operations": ("Operations",),
    "pages": ("PageView",),
    "problems": ("Problem", "Problems", "count_problems"),
    "platform": ("CacheRole", "NoTileScheduler", "Platform", "Probe", "Target", "TileScheduler"),
    "provider": ("AttentionCall", "AttentionProvider", "AttentionShape", "CompressedRows"),
    "split": ("Split", "split_decodes_and_prefills"),
    "topk": ("TopkSlots", "map_topk"),
    "transcode": ("transcode_pages",),
    "write": ("gather_kv", "write_kv"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("swa-backend")
    elif name in _MODULE_OF:
        value = getattr(import_module(f"swa_backend.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'swa_backend' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Last, so that a platform package finds every name above when the choice imports it.
choose_at_import()
