"""Broken value rules: raised, or counted where somebody asked for a report.

Validation mode stops at the first broken rule. Inside `count_problems` it goes on instead, so that one run of an engine
tells everything that is wrong with it::

    with count_problems() as problems:
        ...                                     # steps, in validation mode
    print(problems.counts, problems.examples)

What a step with a broken rule gives is then what the library gives without validation: a page that is not there is no
entry, a slot past the cache stores nothing, a NaN in a key that a token sees is a NaN in its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

from swa_backend.errors import SwaBackendError

MAX_EXAMPLES = 3  # kept of each kind


class Problem(StrEnum):
    """What kind of rule is broken."""

    LENGTHS = "lengths that contradict each other"
    SLOTS = "slots outside a cache"
    PAGES = "pages outside a cache in a live window"
    NULL_PAGES = "null pages in a live window"
    ROWS = "index rows out of range"
    NAN_ROWS = "NaN rows in a cache"
    NAN_KEYS = "keys that are not finite"
    SINKS = "sinks that are not finite"
    STALE_PLANS = "stale plans"


@dataclass(slots=True)
class Problems:
    """What was counted.

    Attributes:
        counts: elements (tokens, requests, columns, plans) of each kind that break a rule.
        examples: the first errors of each kind, as they would have been raised.
    """

    counts: Counter[Problem] = field(default_factory=Counter)
    examples: dict[Problem, list[SwaBackendError]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(self, kind: Problem, error: SwaBackendError, count: int) -> None:
        """Count ``count`` elements that break the same rule; ``error`` names the first of them."""
        self.counts[kind] += count
        kept = self.examples.setdefault(kind, [])
        if len(kept) < MAX_EXAMPLES:
            kept.append(error)

    def texts(self) -> list[str]:
        """The examples as messages, kind by kind."""
        return [str(error) for errors in self.examples.values() for error in errors]


_counting: ContextVar[Problems | None] = ContextVar("swa_backend_problems", default=None)


@contextmanager
def count_problems() -> Iterator[Problems]:
    """Count broken value rules in this context (this thread's calls) instead of raising."""
    problems = Problems()
    token = _counting.set(problems)
    try:
        yield problems
    finally:
        _counting.reset(token)


def broken(kind: Problem, error: SwaBackendError, count: int = 1) -> None:
    """Raise the error, or count it where `count_problems` is at work."""
    problems = _counting.get()
    if problems is None:
        raise error
    problems.add(kind, error, count)


def counting() -> bool:
    """Whether broken rules are counted here."""
    return _counting.get() is not None
