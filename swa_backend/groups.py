"""Further cache groups that a builder serves in the same build as its main one."""

from __future__ import annotations

from dataclasses import dataclass

from swa_backend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SwaGroup:
    """A further sliding-window cache group: other layers, other pages, the same batch.

    Attributes:
        name: key in ``build(groups=...)`` and in ``metadata.groups``.
        page_tokens: tokens per page; None = as the main group.
        num_pages: pages of the cache, None until it is known.
    """

    name: str
    page_tokens: int | None = None
    num_pages: int | None = None


@dataclass(frozen=True, slots=True)
class CompressedGroup:
    """A compressed cache group.

    Attributes:
        name: key in ``build(groups=...)`` and in ``metadata.compressed``.
        ratio: tokens per entry.
        page_tokens: tokens that a page stands for, a multiple of ``ratio``.
        num_pages: pages of the cache, None until it is known.

    Raises:
        ConfigError: the ratio is not positive, or a page does not hold whole entries.
    """

    name: str
    ratio: int
    page_tokens: int
    num_pages: int | None = None

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise ConfigError(
                f"compressed_groups[{self.name!r}].ratio", found=self.ratio, legal=">= 1", fix="Pass tokens per entry."
            )
        if self.page_tokens < self.ratio or self.page_tokens % self.ratio:
            raise ConfigError(
                f"compressed_groups[{self.name!r}].page_tokens",
                found=self.page_tokens,
                legal=f"a positive multiple of the ratio {self.ratio}",
                fix="Choose a page size that holds whole compressed entries.",
            )

    @property
    def entries_per_page(self) -> int:
        return self.page_tokens // self.ratio
