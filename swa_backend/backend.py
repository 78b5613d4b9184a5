"""The descriptor that an engine holds: one platform, perhaps with an explicit target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from swa_backend.platform import CacheRole, Platform, Target, TileScheduler

if TYPE_CHECKING:
    from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig
    from swa_backend.operations import Operations
    from swa_backend.provider import AttentionProvider

BACKEND_NAME = "DEEPSEEK_SPARSE_SWA"
PAGE_TOKENS_MULTIPLE = 32
PREFERRED_PAGE_TOKENS = 256
HEAD_SIZE = 512


@dataclass(frozen=True)
class Backend:
    """Attention backend descriptor; `get_backend` makes it.

    Attributes:
        platform: the platform behind it.
        target: chip to build for without a device, or None for the device of this machine.
    """

    platform: Platform
    target: Target | None = None

    @property
    def name(self) -> str:
        return self.platform.name

    @staticmethod
    def get_name() -> str:
        """Name under which serving engines register this backend."""
        return BACKEND_NAME

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [HEAD_SIZE]

    @staticmethod
    def get_preferred_page_tokens() -> int:
        """Tokens a page that an engine should ask for when it is free to choose."""
        return PREFERRED_PAGE_TOKENS

    @staticmethod
    def supports_page_tokens(page_tokens: int) -> bool:
        """Whether kernels can read SWA pages of this many tokens: multiples of 32."""
        return page_tokens > 0 and page_tokens % PAGE_TOKENS_MULTIPLE == 0

    def get_builder_cls(self) -> type[DeepseekSparseSWAMetadataBuilder]:
        """Metadata builder class of the platform, bound to this descriptor."""
        return self._builder_cls

    @cached_property
    def _builder_cls(self) -> type[DeepseekSparseSWAMetadataBuilder]:
        builder_cls = self.platform.load_builder()
        return type(builder_cls.__name__, (builder_cls,), {"backend": self, "__module__": builder_cls.__module__})

    @cached_property
    def operations(self) -> Operations:
        return self.platform.load_operations()

    @cached_property
    def providers(self) -> tuple[AttentionProvider, ...]:
        return tuple(self.platform.load_providers(self.target))

    @cached_property
    def scheduler(self) -> TileScheduler:
        return self.platform.load_scheduler(self.target)

    def cache_dialect(self, role: CacheRole) -> Dialect:
        """fp8 dialect in which a cache of this role is written here."""
        return self.platform.cache_dialect(role, self.target)

    def warmup(self, config: BackendConfig, **options: Any) -> Sequence[str]:
        """Compile every kernel that ``config`` can need, for the target or else for this machine's device.

        Args:
            config: what keys are derived from.
            options: as the platform's warm-up takes them; ours take ``progress(done, total, text)``, and for a target
                ``cache``, a folder to fill (see `swa_backend.kernels.warmup`).

        Returns:
            Kernel and key of everything that is compiled now; empty on a platform that compiles nothing.
        """
        if self.platform.load_warmup is None:
            return ()
        names: Sequence[str] = self.platform.load_warmup()(self, config, **options)
        return names
