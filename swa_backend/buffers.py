"""The builder's device memory: allocated once, so that every view handed out keeps its address.

Outputs of all groups of a kind are stacked, so that one base address and a group's number find each of them. Sliding
window groups come first and compressed ones after them, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swa_backend._math import cdiv, ceil_to
from swa_backend.cache_layout import SLOT_LIMIT
from swa_backend.config import BackendConfig
from swa_backend.errors import BatchError
from swa_backend.groups import CompressedGroup, SwaGroup
from swa_backend.layer_types import LayerType

ROW_BLOCK = 64  # widths of rows of complete entries are whole blocks of keys


@dataclass(frozen=True, slots=True)
class GroupPages:
    """How one cache group is paged. Page numbers at or past ``num_pages`` give -1; every slot fits int32."""

    name: str
    page_entries: int  # tokens (sliding window) or compressed entries of a page
    num_pages: int
    ratio: int = 0  # tokens of a compressed entry; 0 = sliding-window group
    full_row: int = -1  # which of the stacked ``full_rows`` is this group's; -1 if an indexer picks its entries


@dataclass(frozen=True, slots=True)
class RaggedBuffers:
    """Rows without their gaps: entries of row i of group g are ``indices[g, indptr[g, i]:indptr[g, i + 1]]``."""

    indices: torch.Tensor  # [groups, max_tokens * width] int32; only the first indptr[-1] of a step mean anything
    indptr: torch.Tensor  # [groups, max_tokens + 1] int32


@dataclass(frozen=True)
class IndexBuffers:
    """Everything a build writes, for G sliding-window and C compressed groups, F of them with full rows."""

    window: int
    max_image_tokens: int
    max_tokens: int
    groups: list[GroupPages]  # sliding-window groups, then compressed ones; only page counts ever change
    num_swa_groups: int
    group_table: torch.Tensor  # [G + C, 4] int32 on the device: page entries, pages, ratio, full row
    token_to_req: torch.Tensor  # [max_tokens] int32
    left_visible: torch.Tensor | None  # [max_tokens] int32, only with bidirectional images
    right_visible: torch.Tensor | None
    gather_lens: torch.Tensor  # [max_num_seqs] int32
    no_replay: torch.Tensor  # [max_num_seqs] int32 zeros
    is_valid: torch.Tensor  # [G, max_tokens] bool
    decode_indices: torch.Tensor  # [G, max_tokens, window] int32
    noncausal_indices: torch.Tensor | None  # [G, max_tokens, non-causal width] int32, only with DSpark
    decode_lens: torch.Tensor  # [G, max_tokens] int32; zero past a step's decode tokens if it has any
    prefill_indices: torch.Tensor  # [G, max_tokens, window + max_image_tokens] int32
    prefill_lens: torch.Tensor  # [G, max_tokens] int32
    decode_ragged: RaggedBuffers | None
    prefill_ragged: RaggedBuffers | None
    compressed_slots: torch.Tensor  # [C, max_tokens] int64
    full_rows: torch.Tensor  # [F, max_tokens, width] int32; -1 past a row's length up to a multiple of 64
    full_lens: torch.Tensor  # [F, max_tokens] int32

    @classmethod
    def allocate(
        cls,
        config: BackendConfig,
        swa_groups: Sequence[SwaGroup],
        compressed_groups: Sequence[CompressedGroup],
        device: torch.device,
        *,
        ragged: bool,
    ) -> IndexBuffers:
        """Allocate for every step that ``config`` allows.

        Raises:
            BatchError: a group's cache has 2^31 slots or more.
        """
        tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        window, noncausal, prefill = config.model.window_size, config.non_causal_width, config.prefill_width
        swa, images = len(swa_groups), config.max_image_tokens > 0
        groups = _pages(swa_groups, compressed_groups)
        full = sum(group.full_row >= 0 for group in groups)
        full_width = ceil_to(cdiv(config.scheduler.max_model_len, LayerType.C128A.ratio), ROW_BLOCK)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def empty_rows(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, -1, dtype=dtype, device=device)

        def ragged_rows(width: int) -> RaggedBuffers | None:
            return RaggedBuffers(zeros(swa, tokens * width), zeros(swa, tokens + 1)) if ragged else None

        buffers = cls(
            window=window,
            max_image_tokens=config.max_image_tokens,
            max_tokens=tokens,
            groups=groups,
            num_swa_groups=swa,
            group_table=zeros(len(groups), 4),
            token_to_req=zeros(tokens),
            left_visible=zeros(tokens) if images else None,
            right_visible=zeros(tokens) if images else None,
            gather_lens=zeros(seqs),
            no_replay=zeros(seqs),
            is_valid=zeros(swa, tokens, dtype=torch.bool),
            decode_indices=empty_rows(swa, tokens, window),
            noncausal_indices=empty_rows(swa, tokens, noncausal) if noncausal else None,
            decode_lens=zeros(swa, tokens),
            prefill_indices=empty_rows(swa, tokens, prefill),
            prefill_lens=zeros(swa, tokens),
            decode_ragged=ragged_rows(max(window, noncausal)),
            prefill_ragged=ragged_rows(prefill),
            compressed_slots=empty_rows(len(compressed_groups), tokens, dtype=torch.int64),
            full_rows=empty_rows(full, tokens, full_width if full else 0),
            full_lens=zeros(full, tokens),
        )
        buffers._upload_group_table()
        return buffers

    def set_num_pages(self, group: str, num_pages: int) -> None:
        """Take over how many pages a group's cache has; the buffers, and graphs that use them, stay as they are.

        Raises:
            BatchError: the group is unknown, or its cache has 2^31 slots or more.
        """
        for number, pages in enumerate(self.groups):
            if pages.name == group:
                self.groups[number] = replace(pages, num_pages=_page_limit(group, num_pages, pages.page_entries))
                self._upload_group_table()
                return
        raise BatchError(
            "group",
            found=repr(group),
            legal=sorted(pages.name for pages in self.groups),
            fix="Name a group of this builder.",
        )

    def _upload_group_table(self) -> None:
        rows = [[pages.page_entries, pages.num_pages, pages.ratio, pages.full_row] for pages in self.groups]
        self.group_table.copy_(torch.tensor(rows, dtype=torch.int32))


def _pages(swa_groups: Sequence[SwaGroup], compressed_groups: Sequence[CompressedGroup]) -> list[GroupPages]:
    pages = [
        GroupPages(g.name, g.page_tokens or 0, _page_limit(g.name, g.num_pages, g.page_tokens or 0)) for g in swa_groups
    ]
    full = 0
    for group in compressed_groups:
        whole = group.ratio == LayerType.C128A.ratio
        limit = _page_limit(group.name, group.num_pages, group.entries_per_page)
        pages.append(GroupPages(group.name, group.entries_per_page, limit, group.ratio, full if whole else -1))
        full += whole
    return pages


def _page_limit(group: str, num_pages: int | None, page_entries: int) -> int:
    """Pages of a group, or the most that leave every slot in int32."""
    if num_pages is None:
        return (SLOT_LIMIT - 1) // page_entries
    if not isinstance(num_pages, int) or num_pages < 0 or num_pages * page_entries >= SLOT_LIMIT:
        raise BatchError(
            f"num_pages of group {group!r}",
            found=f"{num_pages!r} pages of {page_entries} entries",
            legal=f"an int >= 0, fewer than {SLOT_LIMIT} slots in all",
            fix="Split the cache: slots are int32 indices on the device.",
        )
    return num_pages
