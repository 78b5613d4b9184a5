"""What is known of compressed rows that `map_topk` wrote, so that a provider need not clean them again.

The mark sits on the tensor object of the slots. It speaks for the contents as `map_topk` left them: a change by torch
since, other lengths beside the rows, another step's validity or another cache void it. Whoever overwrites the rows by
other means (a kernel of one's own) passes another tensor object, for example ``slots.view_as(slots)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from swa_backend.capture import capture_id
from swa_backend.step import next_number

if TYPE_CHECKING:
    from swa_backend.metadata import DeepseekSparseSWAMetadata

_ATTRIBUTE = "_swa_rows_mark"


class RowsMark(NamedTuple):
    """Rows hold slots of the cache packed to the left, then -1; a padded token's length is 0.

    Attributes:
        positions: [T] int32 or int64; row t names the first ``(positions[t] + 1) // ratio`` entries of its request.
        ratio: tokens per entry.
        lens: [T] int32, the lengths that were written beside the rows.
        is_valid: [T] bool, which tokens have entries.
        num_slots: every entry is below it.
        counted: whether torch counts changes of these tensors, as it does not in inference mode.
        versions: its counts for rows, lens and positions, added up: each only ever grows.
        positions_version: that of the positions.
        capture: number of the graph capture that the rows were written in, 0 outside; they are only known in there.
        distinct: whether the caller promised that no entry occurs twice in a row.
        number: when; see `swa_backend.step.next_number`.
    """

    positions: torch.Tensor
    ratio: int
    lens: torch.Tensor
    is_valid: torch.Tensor
    num_slots: int
    counted: bool
    versions: int
    positions_version: int
    capture: int
    distinct: bool
    number: int


def version_of(tensor: torch.Tensor) -> int:
    """Counts torch's changes of a tensor in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def mark_rows(
    slots: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    is_valid: torch.Tensor,
    ratio: int,
    num_slots: int | None,
    *,
    distinct: bool,
) -> None:
    """Note that `map_topk` has just written ``slots`` and ``lens``; ``num_slots`` None = the cache was not known."""
    mark = None
    if num_slots is not None:
        counted = not (slots.is_inference() or lens.is_inference() or positions.is_inference())
        position = positions._version if counted else 0
        versions = slots._version + lens._version + position if counted else 0
        mark = RowsMark(
            positions, ratio, lens, is_valid, num_slots, counted, versions, position, capture_id(slots), distinct,
            next_number(),
        )  # fmt: skip
    setattr(slots, _ATTRIBUTE, mark)


def mark_of(
    slots: torch.Tensor, lens: torch.Tensor, ratio: int, num_slots: int, metadata: DeepseekSparseSWAMetadata
) -> RowsMark | None:
    """The mark of rows, if it still holds for a step and a cache; None if nothing is known of them.

    Tensors with a mark have the types, shapes and device that `map_topk` checked.
    """
    mark: RowsMark | None = getattr(slots, _ATTRIBUTE, None)
    if (
        mark is None
        or mark.lens is not lens
        or mark.num_slots > num_slots
        or mark.ratio != ratio
        or mark.is_valid is not metadata.is_valid_token
        or mark.number <= metadata.generation  # of an earlier step
        or (mark.counted and mark.versions != slots._version + lens._version + mark.positions._version)
    ):
        return None
    return mark
