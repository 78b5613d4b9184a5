"""One launch a step: binds a builder's buffers to the metadata kernel once, then passes what each step brings."""

from __future__ import annotations

from typing import Any

import torch

from swa_backend._math import cdiv
from swa_backend.buffers import IndexBuffers, RaggedBuffers
from swa_backend.errors import ConfigError
from swa_backend.kernels.jit import Bound
from swa_backend.kernels.metadata import MAX_GROUPS, ROW_BLOCK, build_metadata, metadata_key
from swa_backend.kernels.paging import table_rows
from swa_backend.step import BuildStep


class MetadataLauncher:
    """Callable that builds one step; what `swa_backend.operations.Operations.prepare_build` returns.

    Args:
        buffers: the builder's buffers, which must outlive every captured graph.

    Raises:
        ConfigError: more cache groups than one launch takes.
    """

    def __init__(self, buffers: IndexBuffers) -> None:
        if len(buffers.groups) > MAX_GROUPS:
            raise ConfigError(
                "groups",
                found=f"{len(buffers.groups)} cache groups",
                legal=f"at most {MAX_GROUPS}",
                fix="Construct a second builder for the others: groups of one builder share one launch.",
            )
        self._buffers = buffers
        self._device = buffers.token_to_req.device
        self._on_gpu = self._device.type == "cuda"
        self._num_swa = buffers.num_swa_groups
        self._num_compressed = len(buffers.groups) - buffers.num_swa_groups
        # One dummy stands for whatever a kind of step does not have.
        self._nothing = buffers.token_to_req
        tiles = 2 * buffers.num_swa_groups * buffers.max_tokens if buffers.decode_ragged is not None else 1
        self._scan = torch.zeros(tiles, dtype=torch.int64, device=self._device)
        self._launch_words = torch.tensor([1, 0], dtype=torch.int64, device=self._device)
        self._kinds: dict[tuple[bool, bool, bool], _Kind] = {}

    def __call__(self, step: BuildStep) -> None:
        images, replay = step.spans is not None, step.causal and step.replay_start is not None
        kind = self._kinds.get((step.causal, images, replay))
        if kind is None:
            kind = self._kinds[step.causal, images, replay] = self._kind(step.causal, images=images, replay=replay)
        tokens, decode_tokens = step.num_tokens, step.num_decode_tokens
        decode_tiles = cdiv(decode_tokens, kind.decode_rows)
        prefill_tiles = cdiv(tokens - decode_tokens, kind.prefill_rows)
        clear_tiles = cdiv(self._buffers.max_tokens - decode_tokens, kind.tile) if decode_tokens else 0
        token_tiles = cdiv(tokens, kind.token_rows) if self._num_compressed else 1
        gather_tiles = cdiv(step.num_reqs - step.num_decodes, kind.tile)
        programs = self._num_swa * (decode_tiles + prefill_tiles + clear_tiles) + gather_tiles
        if self._num_compressed:
            programs += self._num_compressed * token_tiles

        num_spans = 0 if step.spans is None else step.spans.shape[0]
        launch_args: list[Any] = [
            step.query_start_loc,
            step.seq_lens,
            self._nothing if step.replay_start is None else step.replay_start,
            step.spans if step.spans is not None and num_spans else self._nothing,
        ]
        if self._on_gpu:
            launch_args = [tensor.data_ptr() for tensor in launch_args]
        launch_args += (
            num_spans,
            step.num_reqs,
            step.num_decodes,
            tokens,
            decode_tokens,
            step.max_query_len or 1,
            decode_tiles,
            prefill_tiles,
            clear_tiles,
            token_tiles,
            programs,
        )
        for table, slots in step.groups:
            rows, stride = table_rows(table, self._nothing)
            if self._on_gpu:
                launch_args += (rows.data_ptr(), slots.data_ptr(), stride, table.shape[1])
            else:
                launch_args += (rows, slots, stride, table.shape[1])
        kind.bound.launch((programs, 1, 1), *launch_args)

    def _kind(self, causal: bool, *, images: bool, replay: bool) -> _Kind:
        buffers = self._buffers
        decode_indices = buffers.decode_indices
        if not causal and buffers.noncausal_indices is not None:
            decode_indices = buffers.noncausal_indices
        key: dict[str, Any] = metadata_key(
            buffers.window,
            decode_indices.shape[2],
            buffers.prefill_indices.shape[2],
            causal=causal,
            images=images,
            replay=replay,
            ragged=buffers.decode_ragged is not None,
        )
        launcher = build_metadata.on(self._device, **key)
        decode_ragged = self._ragged(buffers.decode_ragged)
        prefill_ragged = self._ragged(buffers.prefill_ragged)
        bound = launcher.bind(
            *(self._nothing, buffers.compressed_slots, 0, 0) * MAX_GROUPS,  # groups that this builder does not have
            buffers.group_table,
            buffers.token_to_req,
            self._nothing if buffers.left_visible is None else buffers.left_visible,
            self._nothing if buffers.right_visible is None else buffers.right_visible,
            buffers.gather_lens,
            buffers.is_valid,
            decode_indices,
            buffers.decode_lens,
            buffers.prefill_indices,
            buffers.prefill_lens,
            *decode_ragged,
            *prefill_ragged,
            self._scan,
            self._launch_words,
            buffers.compressed_slots,
            buffers.full_rows,
            buffers.full_lens,
            buffers.max_tokens,
            decode_ragged[0].shape[-1],
            buffers.max_tokens,
            buffers.full_rows.shape[2],
            buffers.max_image_tokens,
            self._num_swa,
            self._num_compressed,
        )
        tile = launcher.tiles["TILE"]
        return _Kind(bound, tile, key["DECODE_BLOCK"], key["PREFILL_BLOCK"])

    def _ragged(self, ragged: RaggedBuffers | None) -> tuple[torch.Tensor, torch.Tensor]:
        return (self._nothing, self._nothing) if ragged is None else (ragged.indices, ragged.indptr)


class _Kind:
    """One compile key, bound, with the rows of its tiles."""

    __slots__ = ("bound", "decode_rows", "prefill_rows", "tile", "token_rows")

    def __init__(self, bound: Bound, tile: int, decode_block: int, prefill_block: int) -> None:
        self.bound = bound
        self.tile = tile
        self.decode_rows = max(tile // decode_block, 1)
        self.prefill_rows = max(tile // prefill_block, 1)
        self.token_rows = tile // ROW_BLOCK.value
