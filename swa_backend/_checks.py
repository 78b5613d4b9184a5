"""Checks of single values that the configuration classes share; each raises `ConfigError`."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from swa_backend.errors import ConfigError

INT32_MAX = 2**31 - 1

E = TypeVar("E", bound=StrEnum)


def show(value: object) -> str:
    """``repr(value)`` cut to one readable length, for an error message; never raises."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a foreign object's faulty repr
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 80 else text[:77] + "..."


def is_int(value: object) -> bool:
    """True for an integer; bool, which Python counts among them, is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_int(field: str, value: object, *, minimum: int = 1, maximum: int = INT32_MAX, fix: str = "") -> int:
    """``value`` if it is an integer in ``[minimum, maximum]``; by default what int32 device tensors can hold."""
    if isinstance(value, int) and is_int(value) and minimum <= value <= maximum:
        return value
    raise ConfigError(
        field,
        found=show(value),
        legal=f"an integer from {minimum} to {maximum}" if minimum < maximum else f"the integer {maximum}",
        fix=fix or f"Set {field} to an integer in that range.",
    )


def require_bool(field: str, value: object) -> bool:
    """``value`` if it is True or False; 0 and 1 are refused."""
    if isinstance(value, bool):
        return value
    raise ConfigError(field, found=show(value), legal="True or False", fix=f"Pass {field} as a bool.")


def require_enum(field: str, value: object, enum: type[E]) -> E:
    """The member of ``enum`` that ``value`` is or names."""
    if isinstance(value, str) and value in list(enum):
        return enum(value)
    legal = ", ".join(repr(str(member)) for member in enum)
    raise ConfigError(field, found=show(value), legal=legal, fix=f"Pass a {enum.__name__}.")


def require_type(field: str, value: object, kind: type) -> None:
    """Refuse ``value`` unless it is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(
            field,
            found=f"{show(value)} ({type(value).__name__})",
            legal=f"a {kind.__name__}",
            fix=f"Pass {field} as a {kind.__name__}.",
        )
