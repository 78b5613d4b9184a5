"""The two paged caches of a layer: the sliding window, and the compressed entries."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swa_backend._memory import allocating
from swa_backend.backend import PAGE_TOKENS_MULTIPLE
from swa_backend.cache_layout import HEAD_DIM, Dialect, PageLayout, check_layout, get_layout
from swa_backend.cache_spec import KVCacheSpec
from swa_backend.errors import CacheError
from swa_backend.pages import PageView, check_num_slots, check_scale, element_dtype
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.backend import Backend

__all__ = ["CacheConfig", "CompressedCache", "DeepseekV4SWACache", "KVCacheSpec", "PagedCache"]

_T = TypeVar("_T")
_DEFAULT_LAYOUT = {
    torch.uint8: "fp8_ds_mla",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_per_tensor",
}


@dataclass(slots=True)
class CacheConfig:
    """The context in which layers are constructed: every cache by its prefix, each prefix once.

    An engine's own configuration object serves as well; it is given the attribute ``layers`` if it has none.
    """

    layers: dict[str, object] = field(default_factory=dict)


class PagedCache:
    """What both caches share: a layout, the pages once they are bound, and the backend that reads and writes them.

    Attributes:
        prefix: name of the layer's cache, unique in its context.
        role: sliding-window or compressed cache.
        layout: byte layout of its pages, dialect included.
        dtype: dtype of its tensor.
        entries_per_page: tokens or compressed entries that a page holds.
        backend: descriptor of the platform whose operations serve it.
        scale: float32 [1] of a per-tensor fp8 cache; None for other layouts.
    """

    role: CacheRole

    def __init__(
        self,
        prefix: str,
        layout: PageLayout,
        dtype: torch.dtype,
        entries_per_page: int,
        cache_config: Any,
        backend: Backend,
        scale: torch.Tensor | None,
    ) -> None:
        self.prefix = _require_prefix(prefix)
        self.layout = layout
        self.dtype = dtype
        self.entries_per_page = entries_per_page
        self.backend = backend
        self.scale = scale
        self._kv_cache: torch.Tensor | None = None
        self._pages: PageView | None = None
        if scale is not None:
            check_scale(scale, layout)
        _register(self, cache_config)

    @property
    def kv_cache(self) -> torch.Tensor:
        """The bound tensor as [pages, entries, n].

        For a planar layout (``fp8_ds_mla``) only its address and ``stride(0)`` mean anything: data rows and scale rows
        lie apart, so it cannot be indexed by token. Read it through `pages`.

        Raises:
            CacheError: nothing is bound.
        """
        return self._bound(self._kv_cache)

    @property
    def pages(self) -> PageView:
        """The bound pages, as kernels take them.

        Raises:
            CacheError: nothing is bound.
        """
        pages = self._pages
        return self._bound(pages) if pages is None else pages

    def bind_kv_cache(self, tensor: torch.Tensor) -> None:
        """Take the engine's memory; binding again replaces it.

        A per-tensor fp8 cache that was given no scale gets the scale 1.

        Args:
            tensor: [pages, 1, entries, n] or [pages, entries, n] of the cache's dtype (n = 512) or uint8 (n = bytes of
                an entry). Pages may lie further apart than they are long; see `allocate` for a fitting tensor.

        Raises:
            CacheError: the tensor does not fit the layout; see `PageView.of`.
        """
        scale = self.scale
        if scale is None and self.layout.scale_format == "tensor" and isinstance(tensor, torch.Tensor):
            scale = torch.ones(1, dtype=torch.float32, device=tensor.device)
        pages = PageView.of(tensor, self.layout, self.entries_per_page, scale)
        self._pages, self._kv_cache, self.scale = pages, tensor[:, 0] if tensor.ndim == 4 else tensor, scale

    def allocate(self, num_pages: int, device: torch.device | str) -> torch.Tensor:
        """Make a zeroed tensor that `bind_kv_cache` takes; binds nothing.

        Args:
            num_pages: pages.
            device: where to put them.

        Returns:
            [num_pages, 1, entries, n] of the cache's dtype, its pages padded to the alignment.

        Raises:
            CacheError: no page, or 2^31 slots and more.
        """
        _require_int("num_pages", num_pages)
        check_num_slots(num_pages, self.entries_per_page)
        size = self.dtype.itemsize
        page, row = self.layout.page_bytes(self.entries_per_page) // size, self.layout.bytes_per_token // size
        total = num_pages * page * size
        fix = "Allocate fewer pages, or free memory first; `swa-backend plan-memory` says how many fit."
        with allocating(CacheError, "num_pages", f"{num_pages} pages, {total} bytes on {device}", fix):
            pool = torch.zeros(total, dtype=torch.uint8, device=device).view(self.dtype)
        entries = self.entries_per_page
        return pool.as_strided((num_pages, 1, entries, row), (page, entries * row, row, 1))

    def _bound(self, value: _T | None) -> _T:
        if value is None:
            raise CacheError(
                f"cache {self.prefix!r}",
                found="no memory bound",
                legal="a bound cache",
                fix="Call bind_kv_cache(tensor) first.",
            )
        return value


class DeepseekV4SWACache(PagedCache):
    """The last ``window_size`` tokens of a layer, one entry a token.

    Args:
        head_dim: values per token; 512.
        window_size: tokens that a query sees.
        dtype: uint8 (packed layouts), bfloat16 or float8_e4m3fn (one scale for the cache). It picks the default
            layout; how bytes are read is decided by the layout alone.
        prefix: name of the cache.
        cache_config: the context that keeps prefixes unique, a `CacheConfig` or an engine's own object (see there);
            None for a cache on its own.
        backend_cls: descriptor of the platform; None takes the chosen one (`get_backend`).
        block_size: tokens a page, a multiple of 32.
        layout: layout name (in the platform's dialect for this role) or a `PageLayout`; None takes ``fp8_ds_mla``,
            ``bf16`` or ``fp8_per_tensor`` by dtype.
        scale: float32 [1] for ``fp8_per_tensor``; None takes 1 when the cache is bound.

    Raises:
        CacheError: a value is not legal, they contradict each other, or the prefix is taken.
    """

    role = CacheRole.SWA

    def __init__(
        self,
        head_dim: int,
        window_size: int,
        dtype: torch.dtype,
        prefix: str,
        cache_config: Any,
        backend_cls: Backend | None = None,
        block_size: int = 64,
        layout: str | PageLayout | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        if head_dim != HEAD_DIM:
            raise CacheError("head_dim", found=head_dim, legal=HEAD_DIM, fix="Only heads of 512 values are supported.")
        self.window_size = _require_int("window_size", window_size)
        self.block_size = _require_page_tokens(block_size)
        if not isinstance(dtype, torch.dtype) or dtype not in _DEFAULT_LAYOUT:
            raise CacheError(
                "dtype",
                found=dtype,
                legal="torch.uint8, torch.bfloat16 or torch.float8_e4m3fn",
                fix="Pass uint8 for the packed fp8 layouts.",
            )
        backend = _backend(backend_cls)
        chosen = _resolve(_DEFAULT_LAYOUT[dtype] if layout is None else layout, backend.cache_dialect(self.role))
        _check_dtype(dtype, chosen)
        if not chosen.writable:
            raise CacheError(
                "layout",
                found=chosen.name,
                legal="a layout that can be written",
                fix=f"{chosen.name} is read only, for a CompressedCache.",
            )
        super().__init__(prefix, chosen, dtype, block_size, cache_config, backend, scale)

    def get_kv_cache_spec(self, config: object = None) -> KVCacheSpec:
        """Sizes for the engine's memory manager; ``config`` is accepted because engines pass theirs, and not read."""
        return KVCacheSpec(self.role, self.layout, self.block_size, self.dtype, sliding_window=self.window_size)


class CompressedCache(PagedCache):
    """The compressed entries of a layer, each standing for ``ratio`` tokens.

    Args:
        ratio: tokens per entry.
        layout: layout name (in the platform's dialect for this role) or a `PageLayout`.
        page_tokens: tokens that a page stands for, a multiple of ``ratio``; the page holds ``page_tokens // ratio``
            entries, any number from 1 on.
        prefix: name of the cache.
        cache_config: the context that keeps prefixes unique, a `CacheConfig` or an engine's own object (see there);
            None for a cache on its own.
        backend_cls: descriptor of the platform; None takes the chosen one (`get_backend`).
        scale: float32 [1] for ``fp8_per_tensor``; None takes 1 when the cache is bound.

    Raises:
        CacheError: a value is not legal, they contradict each other, or the prefix is taken.
    """

    role = CacheRole.COMPRESSED

    def __init__(
        self,
        ratio: int,
        layout: str | PageLayout,
        page_tokens: int,
        prefix: str,
        cache_config: Any = None,
        backend_cls: Backend | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        self.ratio = _require_int("ratio", ratio)
        self.page_tokens = _require_int("page_tokens", page_tokens)
        if page_tokens % ratio:
            raise CacheError(
                "page_tokens",
                found=page_tokens,
                legal=f"a multiple of the ratio {ratio}",
                fix="Choose a page that holds whole compressed entries.",
            )
        backend = _backend(backend_cls)
        chosen = _resolve(layout, backend.cache_dialect(self.role))
        super().__init__(prefix, chosen, element_dtype(chosen), page_tokens // ratio, cache_config, backend, scale)

    def get_kv_cache_spec(self, config: object = None) -> KVCacheSpec:
        """Sizes for the engine's memory manager; ``config`` is accepted because engines pass theirs, and not read."""
        return KVCacheSpec(self.role, self.layout, self.page_tokens, self.dtype, compress_ratio=self.ratio)


def _require_int(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise CacheError(name, found=repr(value), legal="an int >= 1", fix=f"Pass {name} as a positive Python int.")


def _require_prefix(prefix: object) -> str:
    if isinstance(prefix, str) and prefix:
        return prefix
    raise CacheError("prefix", found=repr(prefix), legal="a name", fix="Name the cache after its layer.")


def _require_page_tokens(block_size: object) -> int:
    if isinstance(block_size, int) and block_size > 0 and block_size % PAGE_TOKENS_MULTIPLE == 0:
        return block_size
    raise CacheError(
        "block_size",
        found=repr(block_size),
        legal=f"a multiple of {PAGE_TOKENS_MULTIPLE}: 32, 64, 96, 128, 256, ...",
        fix=f"Choose such a page size; attention kernels read a window page {PAGE_TOKENS_MULTIPLE} tokens at a time.",
    )


def _backend(given: Backend | None) -> Backend:
    if given is not None:
        if not hasattr(given, "cache_dialect"):
            raise CacheError(
                "backend_cls",
                found=repr(given),
                legal="what get_backend(name) returned, or None",
                fix="Pass the descriptor, not its name.",
            )
        return given
    from swa_backend.registry import get_backend

    return get_backend()


def _resolve(layout: str | PageLayout, dialect: Dialect) -> PageLayout:
    return get_layout(layout, dialect) if isinstance(layout, str) else check_layout("layout", layout)


def _check_dtype(dtype: torch.dtype, layout: PageLayout) -> None:
    if dtype != element_dtype(layout):
        raise CacheError(
            "dtype",
            found=dtype,
            legal=f"{element_dtype(layout)} for the layout {layout.name}",
            fix="Let dtype and layout say the same thing.",
        )


def _register(cache: PagedCache, context: Any) -> None:
    if context is None:
        return
    layers = getattr(context, "layers", None)
    if layers is None:
        # Any failure means the same: an object that cannot carry an attribute. A validating class may raise its own.
        with suppress(Exception):
            context.layers = layers = {}
    if not isinstance(layers, dict):
        raise CacheError(
            "cache_config",
            found=type(context).__name__,
            legal="a CacheConfig, an object that can keep a dict `layers`, or None",
            fix="Pass one CacheConfig() to every layer of a model.",
        )
    if cache.prefix in layers:
        raise CacheError(
            "prefix",
            found=f"{cache.prefix!r}, which another layer of this context has",
            legal="a prefix of its own for each cache",
            fix="Name the cache after its layer.",
        )
    layers[cache.prefix] = cache
