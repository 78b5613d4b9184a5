"""The one family of exceptions that the library raises for a caller's mistake.

Every error names four things: the field, what was found there, what is legal, and the way out. They are kept as
attributes, so that an engine can log them apart.
"""

from __future__ import annotations


class SwaBackendError(Exception):
    """Base of every error of this library.

    Args:
        field: name of the argument, attribute, key or file position that is wrong.
        found: what was found there.
        legal: what would have been accepted.
        fix: one sentence that says what to do.
    """

    def __init__(self, field: str, *, found: object, legal: object, fix: str) -> None:
        self.field = field
        self.found = found
        self.legal = legal
        self.fix = fix
        super().__init__(f"{field}: found {found}; legal: {legal}. {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # The default pickling calls the class with the message alone, which this signature does not take.
        return _rebuild, (type(self), self.field, self.found, self.legal, self.fix)


def _rebuild(cls: type[SwaBackendError], field: str, found: object, legal: object, fix: str) -> SwaBackendError:
    return cls(field, found=found, legal=legal, fix=fix)


class ConfigError(SwaBackendError):
    """A model, scheduler, speculative or backend setting is missing, contradictory or out of range."""


class BatchError(SwaBackendError):
    """A step's batch has a wrong type, dtype, device or shape, or exceeds a capacity fixed at construction."""


class CacheError(SwaBackendError):
    """A cache, its layout, its page size or its binding is not usable."""


class PlatformError(SwaBackendError):
    """A platform is not registered, or not usable on this machine."""


class ProviderError(SwaBackendError):
    """No attention provider, or not the one asked for, can serve a call; or a plan is used where it is not valid."""


class TraceError(SwaBackendError):
    """A request trace cannot be read."""


class ValidationError(SwaBackendError):
    """A value rule is broken (validation mode only)."""
