"""Further cache groups that a builder serves in the same build as its main one."""

from __future__ import annotations

from dataclasses import dataclass

from swa_backend._checks import require_int, require_type
from swa_backend.config import PAGE_TOKENS_MULTIPLE
from swa_backend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SwaGroup:
    """A further sliding-window cache group: other layers, other pages, the same batch.

    Attributes:
        name: key in ``build(groups=...)`` and in ``metadata.groups``.
        page_tokens: tokens per page, a multiple of 32; None = as the main group.
        num_pages: pages of the cache, None until it is known.

    Raises:
        ConfigError: the name is no string, or the page size not a multiple of 32.
    """

    name: str
    page_tokens: int | None = None
    num_pages: int | None = None

    def __post_init__(self) -> None:
        require_type("swa_groups name", self.name, str)
        field = f"swa_groups[{self.name!r}].page_tokens"
        if self.page_tokens is not None and require_int(field, self.page_tokens) % PAGE_TOKENS_MULTIPLE:
            raise ConfigError(
                field,
                found=self.page_tokens,
                legal=f"a multiple of {PAGE_TOKENS_MULTIPLE}",
                fix="Pass the page size of the group's caches.",
            )


@dataclass(frozen=True, slots=True)
class CompressedGroup:
    """A compressed cache group.

    Attributes:
        name: key in ``build(groups=...)`` and in ``metadata.compressed``.
        ratio: tokens per entry.
        page_tokens: tokens that a page stands for, a multiple of ``ratio``.
        num_pages: pages of the cache, None until it is known.

    Raises:
        ConfigError: the name is no string, the ratio not positive, or a page does not hold whole entries.
    """

    name: str
    ratio: int
    page_tokens: int
    num_pages: int | None = None

    def __post_init__(self) -> None:
        require_type("compressed_groups name", self.name, str)
        require_int(f"compressed_groups[{self.name!r}].ratio", self.ratio, fix="Pass tokens per entry.")
        field = f"compressed_groups[{self.name!r}].page_tokens"
        if require_int(field, self.page_tokens) % self.ratio:
            raise ConfigError(
                field,
                found=self.page_tokens,
                legal=f"a positive multiple of the ratio {self.ratio}",
                fix="Choose a page size that holds whole compressed entries.",
            )

    @property
    def entries_per_page(self) -> int:
        return self.page_tokens // self.ratio
