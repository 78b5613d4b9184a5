"""The pages of one cache group: who holds them, which content they keep, and which one goes next."""

from __future__ import annotations

import random
from collections import OrderedDict

from swa_backend.errors import CacheError


class PagePool:
    """Pages ``0..num_pages-1`` with reference counts and content keys.

    A page is *held* (referenced by at least one table), *kept* (not held, but its content can still be found by key)
    or *blank*. Blank pages are handed out first, in an order scrambled by ``seed`` so that a wrong page number never
    happens to be right; then kept ones, the longest unused first.
    """

    def __init__(self, num_pages: int, seed: int = 0) -> None:
        self.num_pages = num_pages
        self._random = random.Random(seed)
        self._blank = list(range(num_pages))
        self._random.shuffle(self._blank)
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_pages
        self._key_of: dict[int, int] = {}
        self._page_of: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._blank) + len(self._kept)

    @property
    def held(self) -> int:
        """Pages that tables reference."""
        return self.num_pages - self.available

    def take(self) -> int:
        """A page for new content, held once.

        Raises:
            CacheError: none is available; nothing has changed.
        """
        if not self.available:
            raise CacheError(
                "pages",
                found=f"all {self.num_pages} pages held",
                legal="a page that is not held",
                fix="Release pages first: end or preempt a request, or make the pool larger.",
            )
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        self._refs[page] = 1
        return page

    def knows(self, key: int) -> bool:
        """Whether a page keeps this content."""
        return key in self._page_of

    def share(self, key: int) -> int:
        """Hold the page that keeps this content once more; it must be known."""
        page = self._page_of[key]
        if self._refs[page] == 0:
            del self._kept[page]
        self._refs[page] += 1
        return page

    def publish(self, page: int, key: int) -> None:
        """Let a held page be found by its content; the first page of equal content wins."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, page: int) -> None:
        """Hold a page once less; unheld, it is kept as the most recently used if its content has a key."""
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._put_blank(page)

    def is_shared(self, page: int) -> bool:
        """Whether more than one table references the page."""
        return self._refs[page] > 1

    def check(self, references: dict[int, int]) -> list[str]:
        """What is wrong, given how often each page stands in tables; empty if nothing is."""
        wrong = []
        blank = set(self._blank)
        if len(blank) != len(self._blank):
            wrong.append("a blank page is listed twice")
        for page in range(self.num_pages):
            places = (page in blank) + (page in self._kept) + (self._refs[page] > 0)
            if places != 1:
                wrong.append(f"page {page} is in {places} places of blank, kept, held")
            if self._refs[page] != references.get(page, 0):
                wrong.append(f"page {page} is held {self._refs[page]} times, is in {references.get(page, 0)} tables")
            if page in blank and page in self._key_of:
                wrong.append(f"blank page {page} has a key")
            if page in self._kept and page not in self._key_of:
                wrong.append(f"kept page {page} has no key")
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            wrong.append("keys and pages do not match")
        return wrong

    def _put_blank(self, page: int) -> None:
        self._blank.append(page)
        other = self._random.randrange(len(self._blank))
        self._blank[-1], self._blank[other] = self._blank[other], self._blank[-1]

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
