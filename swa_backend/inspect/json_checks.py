"""Reading parsed JSON piece by piece; whatever is wrong is named by its path in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swa_backend._checks import INT32_MAX, is_int, show
from swa_backend.errors import BatchError


def read_object(field: str, given: Any, legal: Sequence[str]) -> Mapping[str, Any]:
    """An object that has no other key than ``legal`` ones."""
    keys = ", ".join(legal) or "no key"
    if not isinstance(given, Mapping):
        raise refuse(field, "nothing" if given is None else type(given).__name__, f"an object with {keys}")
    for key in given:
        if key not in legal:
            raise refuse(f"{field}.{key}", "a key that means nothing here", keys)
    return given


def read_int(given: Mapping[str, Any], key: str, default: Any, where: str = "batch", minimum: int = 0) -> Any:
    """The integer at ``key``, ``default`` where it is missing or null."""
    value = given.get(key)
    if value is None:
        return default
    if not is_int(value) or not minimum <= value <= INT32_MAX:
        field = key if where == key else f"{where}.{key}"
        raise refuse(field, show(value), f"an integer from {minimum} to {INT32_MAX}")
    return value


def read_ints(
    field: str, given: Any, count: int | None = None, minimum: int = 0, maximum: int = INT32_MAX
) -> list[int]:
    """A list of integers in a range, ``count`` of them if that is given."""
    legal = f"a list of {'' if count is None else f'{count} '}integers from {minimum} to {maximum}"
    if not isinstance(given, list):
        raise refuse(field, "nothing" if given is None else type(given).__name__, legal)
    for i, value in enumerate(given):
        if not is_int(value) or not minimum <= value <= maximum:
            raise refuse(f"{field}[{i}]", show(value), f"an integer from {minimum} to {maximum}")
    if count is not None and len(given) != count:
        raise refuse(field, f"{len(given)} numbers", legal)
    return given


def read_matrix(field: str, given: Any, rows: int) -> torch.Tensor:
    """[rows, n] int32 from lists of one length."""
    if not isinstance(given, list) or len(given) != rows:
        found = f"{len(given)} rows" if isinstance(given, list) else type(given).__name__
        raise refuse(field, found, f"a list of {rows} rows")
    checked = [read_ints(f"{field}[{i}]", row, minimum=-INT32_MAX - 1) for i, row in enumerate(given)]
    width = len(checked[0]) if checked else 0
    for i, row in enumerate(checked):
        if len(row) != width:
            raise refuse(f"{field}[{i}]", f"{len(row)} numbers", f"{width}, as in row 0; fill up with -1")
    return torch.tensor(checked, dtype=torch.int32).reshape(rows, width)


def refuse(field: str, found: object, legal: object) -> BatchError:
    """The error for a value at a place of the file."""
    return BatchError(field, found=found, legal=legal, fix="The form is described in swa_backend.inspect.batch_file.")
