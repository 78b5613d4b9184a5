"""How prefill requests are grouped so that their gathered bf16 keys fit one workspace of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from swa_backend._math import cdiv
from swa_backend.errors import BatchError
from swa_backend.layer_types import ModelVersion

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

BF16_BYTES = 2


class PrefillChunk(NamedTuple):
    """Requests ``first`` to ``end - 1`` (counted from the first prefill) and the rows each needs in the workspace.

    A chunk's workspace is [end - first, width, 512] bf16: compressed entries in rows 0 to ``compressed - 1``, window
    tokens from row ``compressed`` on.
    """

    first: int
    end: int
    compressed: int
    width: int


def has_compressed_cache(version: ModelVersion, ratio: int) -> bool:
    """Whether layers of this ratio have a second cache: above 1 in V4, from 1 on in V4.1."""
    return ratio > 1 or (ratio == 1 and version is ModelVersion.V4_1)


def workspace_rows(
    ratio: int,
    prefill_chunk_size: int,
    *,
    has_compressed: bool,
    window: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> int:
    """Rows of 512 bf16 values that a workspace for layers of this ratio may take."""
    compressed = cdiv(max_model_len, ratio) if has_compressed else 0
    return prefill_chunk_size * (compressed + window + max_num_batched_tokens)


def plan_prefill_chunks(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    gather_lens: Sequence[int],
    ratio: int,
    budget_rows: int,
    *,
    has_compressed: bool,
) -> list[PrefillChunk]:
    """Group consecutive requests while requests * (longest compressed part + longest gather) stays within the budget.

    A request without tokens ends the chunk before it and is skipped, so that no chunk is empty and every query token
    is covered exactly once.

    Args:
        query_lens, seq_lens, gather_lens: host lengths of the prefill requests, in tokens.
        ratio: tokens per compressed entry.
        budget_rows: see `workspace_rows`.
        has_compressed: whether a second cache is gathered.

    Raises:
        BatchError: one request alone exceeds the budget, which no legal request does.
    """
    chunks: list[PrefillChunk] = []
    first, compressed, gather = 0, 0, 0

    def close(end: int) -> None:
        if end > first:
            chunks.append(PrefillChunk(first, end, compressed, compressed + gather))

    for request, query_len in enumerate(query_lens):
        own_compressed = seq_lens[request] // ratio if has_compressed else 0
        own_gather = gather_lens[request]
        if query_len == 0:
            close(request)
            first, compressed, gather = request + 1, 0, 0
            continue
        if own_compressed + own_gather > budget_rows:
            raise BatchError(
                f"prefill request {request}",
                found=f"{own_compressed} compressed entries + {own_gather} gathered tokens",
                legal=f"at most {budget_rows} workspace rows",
                fix="Keep its length within max_model_len and its query within max_num_batched_tokens.",
            )
        grown = max(compressed, own_compressed) + max(gather, own_gather)
        if (request + 1 - first) * grown > budget_rows:
            close(request)
            first, compressed, gather = request, 0, 0
        compressed, gather = max(compressed, own_compressed), max(gather, own_gather)
    close(len(query_lens))
    return chunks


def workspace_bytes(config: BackendConfig) -> int:
    """Bytes of the prefill workspace that no legal batch of this configuration exceeds."""
    model, scheduler = config.model, config.scheduler
    rows = max(
        workspace_rows(
            ratio,
            config.prefill_chunk_size,
            has_compressed=has_compressed_cache(model.version, ratio),
            window=model.window_size,
            max_model_len=scheduler.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        for ratio in {0, *model.compress_ratios}
    )
    return rows * model.head_dim * BF16_BYTES
