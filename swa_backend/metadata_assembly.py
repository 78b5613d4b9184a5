"""Puts a step's metadata object together from the batch, the split and views of the persistent buffers.

Views are remembered by their length: slicing a tensor costs the host about as much as everything else a step does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swa_backend.batch import CommonAttentionMetadata
from swa_backend.buffers import IndexBuffers, RaggedBuffers
from swa_backend.metadata import BuildCount, CompressedGroupMetadata, DeepseekSparseSWAMetadata
from swa_backend.split import Split
from swa_backend.step import BuildStep

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig
    from swa_backend.provider import AttentionProvider, AttentionShape

_REMEMBERED = 1024  # lengths of each kind


class PrefillHostLens(NamedTuple):
    """Host [num_prefills] int32 lengths of the prefill requests; replay starts where they are known."""

    seq_lens: torch.Tensor
    query_lens: torch.Tensor
    replay_start: torch.Tensor | None


class _Rows(NamedTuple):
    indices: torch.Tensor
    lens: torch.Tensor
    ragged_indices: torch.Tensor | None
    ragged_indptr: torch.Tensor | None


class _CompressedRows(NamedTuple):
    slot_mapping: torch.Tensor
    rows: torch.Tensor | None
    lens: torch.Tensor | None


class RowViews:
    """Views of an `IndexBuffers` by length; each method returns one entry for every group of its kind."""

    def __init__(self, buffers: IndexBuffers) -> None:
        self.buffers = buffers
        remember = lru_cache(maxsize=_REMEMBERED)
        self.decode: Callable[[int, bool], tuple[_Rows, ...]] = remember(self._decode)
        self.prefill: Callable[[int], tuple[_Rows, ...]] = remember(self._prefill)
        self.valid: Callable[[int], tuple[torch.Tensor, ...]] = remember(self._valid)
        self.compressed: Callable[[int], tuple[_CompressedRows, ...]] = remember(self._compressed)
        self.token_to_req: Callable[[int], torch.Tensor] = remember(lambda n: buffers.token_to_req[:n])
        self.gather_lens: Callable[[int], torch.Tensor] = remember(lambda n: buffers.gather_lens[:n])
        self.no_replay: Callable[[int], torch.Tensor] = remember(lambda n: buffers.no_replay[:n])

    def _decode(self, tokens: int, causal: bool) -> tuple[_Rows, ...]:
        buffers = self.buffers
        wide = buffers.noncausal_indices
        return self._rows(
            buffers.decode_indices if causal or wide is None else wide,
            buffers.decode_lens,
            buffers.decode_ragged,
            tokens,
        )

    def _prefill(self, tokens: int) -> tuple[_Rows, ...]:
        buffers = self.buffers
        return self._rows(buffers.prefill_indices, buffers.prefill_lens, buffers.prefill_ragged, tokens)

    def _rows(
        self, indices: torch.Tensor, lens: torch.Tensor, ragged: RaggedBuffers | None, tokens: int
    ) -> tuple[_Rows, ...]:
        """Ragged views span every entry the rows could have; how many there are is only known on the device."""
        width = indices.shape[2]
        return tuple(
            _Rows(
                indices[group, :tokens].unsqueeze(1),
                lens[group, :tokens],
                None if ragged is None else ragged.indices[group, : tokens * width],
                None if ragged is None else ragged.indptr[group, : tokens + 1],
            )
            for group in range(self.buffers.num_swa_groups)
        )

    def _valid(self, tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(self.buffers.is_valid[:, :tokens].unbind(0))

    def _compressed(self, tokens: int) -> tuple[_CompressedRows, ...]:
        buffers = self.buffers
        return tuple(
            _CompressedRows(
                buffers.compressed_slots[number, :tokens],
                buffers.full_rows[pages.full_row, :tokens] if pages.full_row >= 0 else None,
                buffers.full_lens[pages.full_row, :tokens] if pages.full_row >= 0 else None,
            )
            for number, pages in enumerate(buffers.groups[buffers.num_swa_groups :])
        )


class MetadataAssembler:
    """Makes the metadata objects of one builder.

    What follows from the split alone is put together once a split and copied from then on.
    """

    def __init__(
        self,
        buffers: IndexBuffers,
        config: BackendConfig,
        provider: AttentionProvider,
        shape: AttentionShape,
        builds: BuildCount,
    ) -> None:
        self._buffers = buffers
        self._builds = builds
        self._config = config
        self._provider = provider
        self._shape = shape
        self._views = RowViews(buffers)
        self._template: Callable[[Split, bool], tuple[DeepseekSparseSWAMetadata, ...]] = lru_cache(_REMEMBERED)(
            self._make_template
        )

    def __call__(
        self,
        batch: CommonAttentionMetadata,
        split: Split,
        step: BuildStep,
        prefill: PrefillHostLens | None,
    ) -> DeepseekSparseSWAMetadata:
        """The metadata of a step's main group, with those of its further groups inside; none has plans yet."""
        tokens, buffers = step.num_tokens, self._buffers
        given: dict[str, Any] = {
            "seq_lens": batch.seq_lens,
            "query_start_loc": batch.query_start_loc,
            "query_start_loc_cpu": batch.query_start_loc_cpu,
            "max_decode_query_len": min(batch.max_query_len, self._config.decode_threshold),
            "max_seq_len": batch.max_seq_len,
            "generation": self._builds.value,
            "step": step,
        }
        if batch.replay_start is not None:
            given["replay_start"] = batch.replay_start
        if prefill is not None:
            given["prefill_seq_lens"] = batch.seq_lens[split.num_decodes :]
            given["prefill_seq_lens_cpu"] = prefill.seq_lens
            given["prefill_query_lens_cpu"] = prefill.query_lens
            given["prefill_replay_start_cpu"] = prefill.replay_start
        if step.spans is not None and buffers.left_visible is not None and buffers.right_visible is not None:
            given["prefill_left_visible"] = buffers.left_visible[:tokens]
            given["prefill_right_visible"] = buffers.right_visible[:tokens]
        made = []
        for template, (table, slots) in zip(self._template(split, batch.causal), step.groups, strict=False):
            own = slots if slots.shape[0] == tokens else slots[:tokens]
            made.append(template.with_values(given, block_table=table, slot_mapping=own, _chunk_plans={}))
        main = made[0]
        if len(made) > 1:
            main.groups = {buffers.groups[group].name: made[group] for group in range(1, len(made))}
        if len(buffers.groups) > len(made):
            compressed = _compressed(step, self._views)
            for one in made:
                one.compressed = compressed
        return main

    def _make_template(self, split: Split, causal: bool) -> tuple[DeepseekSparseSWAMetadata, ...]:
        """For each sliding-window group a metadata object without what only a batch brings."""
        views, buffers, config = self._views, self._buffers, self._config
        tokens = split.num_decode_tokens + split.num_prefill_tokens
        valid = views.valid(tokens)
        from_batch: dict[str, Any] = dict.fromkeys(
            (
                "block_table",
                "slot_mapping",
                "seq_lens",
                "query_start_loc",
                "query_start_loc_cpu",
                "max_decode_query_len",
            )
        )
        made = []
        for group, decode in enumerate(views.decode(split.num_decode_tokens, causal)):
            template = DeepseekSparseSWAMetadata(
                block_size=buffers.groups[group].page_entries,
                is_valid_token=valid[group],
                token_to_req_indices=views.token_to_req(tokens),
                decode_swa_indices=decode.indices,
                decode_swa_lens=decode.lens,
                decode_swa_width=decode.indices.shape[2],
                window_size=buffers.window,
                causal=causal,
                num_decodes=split.num_decodes,
                num_prefills=split.num_prefills,
                num_decode_tokens=split.num_decode_tokens,
                num_prefill_tokens=split.num_prefill_tokens,
                replay_start=views.no_replay(split.num_decodes + split.num_prefills),
                provider=self._provider,
                shape=self._shape,
                validate=config.validate,
                builds=self._builds,
                decode_swa_ragged_indices=decode.ragged_indices,
                decode_swa_ragged_indptr=decode.ragged_indptr,
                **from_batch,
            )
            if split.num_prefills:
                rows = views.prefill(split.num_prefill_tokens)[group]
                template.prefill_swa_indices = rows.indices
                template.prefill_swa_lens = rows.lens
                template.prefill_swa_ragged_indices = rows.ragged_indices
                template.prefill_swa_ragged_indptr = rows.ragged_indptr
                template.prefill_gather_lens = views.gather_lens(split.num_prefills)
                template.prefill_window_size = config.model.window_size
                template.prefill_max_model_len = config.scheduler.max_model_len
                template.prefill_max_num_batched_tokens = config.scheduler.max_num_batched_tokens
            made.append(template)
        return tuple(made)


def _compressed(step: BuildStep, views: RowViews) -> dict[str, CompressedGroupMetadata]:
    buffers, first = views.buffers, views.buffers.num_swa_groups
    made = {}
    for number, rows in enumerate(views.compressed(step.num_tokens), first):
        pages = buffers.groups[number]
        made[pages.name] = CompressedGroupMetadata(
            name=pages.name,
            ratio=pages.ratio,
            block_table=step.groups[number][0],
            page_tokens=pages.page_entries * pages.ratio,
            entries_per_page=pages.page_entries,
            compressed_slot_mapping=rows.slot_mapping,
            rows=rows.rows,
            lens=rows.lens,
        )
    return made
