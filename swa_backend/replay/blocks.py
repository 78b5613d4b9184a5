"""The paged block manager: which page of which cache group holds which tokens of which request.

Every group divides a request's tokens into pages of its own size. A *window* group needs only the last ``window - 1``
tokens before the next one and lets go of older pages; the others keep all. Full pages can be found by content (a key
that stands for everything from the first token to the page's last), so that a request with a known prefix starts
behind it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from swa_backend._math import cdiv
from swa_backend.replay.pool import PagePool

PageKeys = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One cache group.

    Attributes:
        name: its name.
        page_tokens: tokens that a page stands for.
        num_pages: pages of its cache.
        window: tokens that a token sees, itself included; None if it may see all before it.
    """

    name: str
    page_tokens: int
    num_pages: int
    window: int | None = None

    def first_page(self, computed: int) -> int:
        """First page that a request with ``computed`` finished tokens still needs."""
        return 0 if self.window is None else max(computed - (self.window - 1), 0) // self.page_tokens

    def pages_needed(self, tokens: int, step_tokens: int) -> int:
        """Pages without which a request of ``tokens`` tokens, ``step_tokens`` at a time, cannot run even alone."""
        if self.window is None:
            return cdiv(tokens, self.page_tokens)
        # The worst alignment: the first token that is still seen is the last of its page.
        return min(cdiv(tokens, self.page_tokens), cdiv(self.window - 2 + step_tokens, self.page_tokens) + 1)


@dataclass(slots=True)
class _Row:
    """One request's pages in one group: columns ``first .. end-1`` of ``columns`` are live."""

    columns: np.ndarray
    first: int = 0
    end: int = 0


@dataclass(slots=True)
class _Tables:
    keys: PageKeys
    rows: dict[str, _Row] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)


class BlockManager:
    """Page tables of all running requests.

    Args:
        groups: the cache groups.
        max_model_len: longest request; sizes the tables.
        seed: scrambles page order, and the garbage that dead table columns hold.
    """

    def __init__(self, groups: Sequence[GroupSpec], max_model_len: int, seed: int = 0) -> None:
        self.groups = {group.name: group for group in groups}
        self.pools = {group.name: PagePool(group.num_pages, seed + i) for i, group in enumerate(groups)}
        self.alignment = math.lcm(*(group.page_tokens for group in groups))
        self._max_model_len = max_model_len
        self._tables: dict[int, _Tables] = {}
        self._garbage = np.random.default_rng(seed)

    def begin(self, request: int, keys: PageKeys, limit: int) -> int:
        """Open tables for a request and share the pages of the longest known prefix.

        Args:
            request: its number.
            keys: for each group the content keys of its full pages, first to last.
            limit: most tokens that may count as known.

        Returns:
            Tokens of the request that need not be computed; a multiple of every group's page size.
        """
        hit = self.find_prefix(keys, limit)
        tables = _Tables(keys)
        for name, group in self.groups.items():
            row = _Row(self._dead_columns(group))
            row.first, row.end = group.first_page(hit), hit // group.page_tokens
            for column in range(row.first, row.end):
                row.columns[column] = self.pools[name].share(keys[name][column])
            tables.rows[name] = row
            tables.published[name] = row.end
        self._tables[request] = tables
        return hit

    def find_prefix(self, keys: PageKeys, limit: int) -> int:
        """Tokens of the longest prefix whose pages are all known, those before the trailing window aside."""
        limit = limit // self.alignment * self.alignment
        for name, group in self.groups.items():
            if group.window is None:
                known, pool = 0, self.pools[name]
                while known * group.page_tokens < limit and pool.knows(keys[name][known]):
                    known += 1
                limit = min(limit, known * group.page_tokens // self.alignment * self.alignment)
        while limit and not self._window_known(keys, limit):
            limit -= self.alignment
        return limit

    def _window_known(self, keys: PageKeys, hit: int) -> bool:
        return all(
            self.pools[name].knows(keys[name][column])
            for name, group in self.groups.items()
            if group.window is not None
            for column in range(group.first_page(hit), hit // group.page_tokens)
        )

    def room(self, request: int, *, windows: bool = True) -> int:
        """Tokens up to which a request's tables can be extended now.

        Args:
            request: its number.
            windows: False leaves out the window groups, whose pages come back as the request goes on.
        """
        rows = self._tables[request].rows
        return min(
            (
                (rows[name].end + self.pools[name].available) * group.page_tokens
                for name, group in self.groups.items()
                if windows or group.window is None
            ),
            default=self._max_model_len,
        )

    def extend(self, request: int, tokens: int) -> bool:
        """Give the request pages for its first ``tokens`` tokens; False, and nothing changed, if they run out."""
        if tokens > self.room(request):
            return False
        for name, row in self._tables[request].rows.items():
            pool = self.pools[name]
            for column in range(row.end, cdiv(tokens, self.groups[name].page_tokens)):
                row.columns[column] = pool.take()
                row.end = column + 1
        return True

    def advance(self, request: int, computed: int) -> None:
        """Note that ``computed`` tokens are final: publish full pages, let go of pages that left the window."""
        tables = self._tables[request]
        for name, row in tables.rows.items():
            group, pool, keys = self.groups[name], self.pools[name], tables.keys[name]
            full = computed // group.page_tokens
            for column in range(tables.published[name], full):
                pool.publish(int(row.columns[column]), keys[column])
            tables.published[name] = max(full, tables.published[name])
            first = group.first_page(computed)
            for column in range(row.first, first):
                page = int(row.columns[column])
                pool.release(page)
                if page & 1:  # the other half keep a page number that soon belongs to someone else
                    row.columns[column] = -1
            row.first = max(first, row.first)

    def end(self, request: int) -> None:
        """Let go of all pages of a request, the last ones first so that the start of a prefix is kept longest."""
        for name, row in self._tables.pop(request).rows.items():
            for column in range(row.end - 1, row.first - 1, -1):
                self.pools[name].release(int(row.columns[column]))

    def tables(self, group: str, requests: Sequence[int]) -> np.ndarray:
        """Page numbers [requests, columns] int32; columns outside a request's live ones hold garbage."""
        if not requests:
            return np.empty((0, self._columns(self.groups[group])), dtype=np.int32)
        return np.stack([self._tables[request].rows[group].columns for request in requests])

    def held(self, group: str) -> int:
        """Pages of a group in use now."""
        return self.pools[group].held

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty if pages are neither lost nor wrongly shared."""
        wrong = []
        for name, group in self.groups.items():
            references: Counter[int] = Counter()
            for request, tables in self._tables.items():
                row = tables.rows[name]
                live = row.columns[row.first : row.end].tolist()
                if len(set(live)) != len(live):
                    wrong.append(f"{name}: request {request} has one page in two columns")
                if not all(0 <= page < group.num_pages for page in live):
                    wrong.append(f"{name}: request {request} has a live column outside the cache")
                    continue
                references.update(live)
                # A page that is still being filled belongs to one request alone.
                for page in live[max(tables.published[name] - row.first, 0) :]:
                    if self.pools[name].is_shared(page):
                        wrong.append(f"{name}: request {request} writes to page {page}, which others hold")
            wrong += [f"{name}: {problem}" for problem in self.pools[name].check(dict(references))]
        return wrong

    def _columns(self, group: GroupSpec) -> int:
        return cdiv(self._max_model_len, group.page_tokens)

    def _dead_columns(self, group: GroupSpec) -> np.ndarray:
        """A table row of garbage: -1, numbers past the cache, other requests' pages."""
        columns = self._garbage.integers(-1, group.num_pages + 8, self._columns(group), dtype=np.int32)
        columns[self._garbage.random(len(columns)) < 0.1] = np.iinfo(np.int32).max
        return columns
