"""From an indexer's top-k result to slots of the compressed cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from swa_backend._memory import overlap
from swa_backend.batch import check_tensor
from swa_backend.errors import BatchError, ValidationError
from swa_backend.problems import Problem, broken
from swa_backend.row_marks import mark_rows
from swa_backend.validation import validating

if TYPE_CHECKING:
    from swa_backend.backend import Backend


class TopkSlots(NamedTuple):
    """Entries of the compressed cache that each token sees, as `attend` takes them.

    Attributes:
        slots: [T, K] int32, packed to the left in the indexer's order, -1 past ``lens``.
        lens: [T] int32.
    """

    slots: torch.Tensor
    lens: torch.Tensor


def map_topk(
    topk: torch.Tensor,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    entries_per_page: int,
    is_valid: torch.Tensor,
    ratio: int,
    num_pages: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: Backend | None = None,
    distinct: bool = False,
) -> TopkSlots:
    """Map request-local compressed positions to slots; pack what survives to the left, in its order, and count it.

    An entry is dropped if it is negative or not complete at its token (``>= (position + 1) // ratio``), if its row or
    column lies outside the table's logical shape, or if its page is negative or at or past ``num_pages``. A token that
    is not valid, or whose request is not in the table, keeps nothing.

    Args:
        topk: [T, K] int32, -1 = none, in any order.
        token_to_req: [T] int32, request of each token (``metadata.token_to_req_indices``).
        positions: [T] int32 or int64, absolute position of each token.
        block_table: [R, C] int32, pages of the compressed cache's own group; any row stride.
        entries_per_page: entries that a page of that cache holds.
        is_valid: [T] bool (``metadata.is_valid_token``).
        ratio: tokens per entry.
        num_pages: pages of that cache; None if unknown.
        out: (slots [T, K] int32, lens [T] int32) to write, apart from ``topk``; None allocates them. Given to `attend`
            as these same tensor objects, they are not cleaned again (`swa_backend.row_marks`).
        backend: whose operations run; None takes the chosen platform's.
        distinct: a promise that no entry occurs twice in a row, as in every top-k result; it lets the layers of a step
            share one plan. Checked only under ``SWA_BACKEND_VALIDATE=1``, which reads the device.

    Returns:
        What was written.

    Raises:
        BatchError: a dtype, device, shape or number is wrong.
        ValidationError: in validation mode, an entry occurs twice in a row that was promised distinct.
    """
    if not isinstance(distinct, bool):
        raise BatchError("distinct", found=type(distinct).__name__, legal="True or False", fix="Pass a bool.")
    check_tensor("topk", topk, torch.int32, (-1, -1), _device_of(topk))
    tokens, width = topk.shape
    device = topk.device
    check_tensor("token_to_req", token_to_req, torch.int32, (tokens,), device)
    wide = isinstance(positions, torch.Tensor) and positions.dtype == torch.int64
    check_tensor("positions", positions, torch.int64 if wide else torch.int32, (tokens,), device)
    check_tensor("block_table", block_table, torch.int32, (-1, -1), device)
    check_tensor("is_valid", is_valid, torch.bool, (tokens,), device)
    _check_number("entries_per_page", entries_per_page, 1)
    _check_number("ratio", ratio, 1)
    if num_pages is not None:
        _check_number("num_pages", num_pages, 0)
    if out is None:
        slots, lens = torch.empty_like(topk, memory_format=torch.contiguous_format), topk.new_empty(tokens)
    else:
        if not isinstance(out, tuple) or len(out) != 2:
            raise BatchError(
                "out", found=type(out).__name__, legal="(slots, lens), or None", fix="Pass the two buffers as a tuple."
            )
        slots, lens = out
        check_tensor("out[0]", slots, torch.int32, (tokens, width), device)
        check_tensor("out[1]", lens, torch.int32, (tokens,), device)
        _check_apart(slots, lens, topk)
    if backend is None:
        from swa_backend.registry import get_backend

        backend = get_backend()
    elif not hasattr(backend, "operations"):
        raise BatchError(
            "backend",
            found=type(backend).__name__,
            legal="what get_backend(name) returned, or None",
            fix="Pass the descriptor, not its name.",
        )
    if distinct and validating(False, topk):
        _validate_distinct(topk)
    if tokens:
        backend.operations.map_topk(
            topk, token_to_req, positions, block_table, entries_per_page, is_valid, ratio, num_pages, slots, lens
        )
    num_slots = None if num_pages is None else num_pages * entries_per_page
    mark_rows(slots, lens, positions, is_valid, ratio, num_slots, distinct=distinct)
    return TopkSlots(slots, lens)


def _check_apart(slots: torch.Tensor, lens: torch.Tensor, topk: torch.Tensor) -> None:
    if slots.shape[0] > 1 and slots.stride(0) < slots.shape[1]:
        raise BatchError(
            "out[0]",
            found=f"strides {slots.stride()}, with rows that share memory",
            legal=f"rows at least {slots.shape[1]} apart",
            fix="Pass a buffer of its own, not an expanded one.",
        )
    for field, written in (("out[0]", slots), ("out[1]", lens)):
        if _lies_outside(written, topk):
            continue
        if overlap(written, topk):
            raise BatchError(
                field,
                found="memory that topk spans",
                legal="memory apart from topk",
                fix="Keep the slots and lengths apart from the positions.",
            )


def _lies_outside(written: torch.Tensor, topk: torch.Tensor) -> bool:
    """True for two tensors without gaps, as they nearly always are, one of which ends before the other begins."""
    if not (written.is_contiguous() and topk.is_contiguous()):
        return False
    begin, other = written.data_ptr(), topk.data_ptr()
    return begin + written.nbytes <= other or other + topk.nbytes <= begin


def _device_of(tensor: object) -> torch.device:
    return tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")


def _check_number(field: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise BatchError(
            field, found=repr(value), legal=f"an int >= {minimum}", fix="Pass the host value as a Python int."
        )


def _validate_distinct(topk: torch.Tensor) -> None:
    """Refuse the first row that holds an entry twice."""
    ordered = topk.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    wrong = twice.any(dim=1)
    if bool(wrong.any()):
        token = int(wrong.int().argmax())
        entry = int(ordered[token, 1:][twice[token]][0])
        broken(
            Problem.ROWS,
            ValidationError(
                f"topk[{token}]",
                found=f"entry {entry} twice",
                legal="distinct entries, as distinct=True promises",
                fix="Pass distinct=False, or picks without repeats: a shared plan would not fit them.",
            ),
            int(wrong.sum()),
        )
