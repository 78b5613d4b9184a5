"""Two integer helpers that every page, width and budget computation uses."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Quotient of ``a / b`` rounded up, for ``b > 0``."""
    return -(-a // b)


def ceil_to(a: int, multiple: int) -> int:
    """``a`` rounded up to a multiple of ``multiple``."""
    return cdiv(a, multiple) * multiple
