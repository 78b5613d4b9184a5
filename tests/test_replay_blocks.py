"""The block manager against a slow model: cache contents by slot, and prefix hits found by looking at every page."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.replay.blocks import BlockManager, GroupSpec
from swa_backend.replay.pool import PagePool

MAX_LEN = 64
BLOCK = 8  # tokens of a shared piece of content
GROUPS = (GroupSpec("window", 4, 14, window=6), GroupSpec("all", 8, 10), GroupSpec("coarse", 16, 6))


def content(documents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What stands at each position: everything from the start to it, so that equal means an equal prefix."""
    tokens = [(documents[p // BLOCK], p) for p in range(len(documents) * BLOCK)]
    return [tuple(part for token in tokens[: p + 1] for part in token) for p in range(len(tokens))]


def page_keys(prefixes: list[tuple[int, ...]], group: GroupSpec) -> list[int]:
    return [hash(prefixes[p]) for p in range(group.page_tokens - 1, len(prefixes), group.page_tokens)]


@dataclass
class Model:
    """Runs a manager and keeps what lies in every slot of every group."""

    groups: tuple[GroupSpec, ...] = GROUPS
    memory: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    prefixes: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = BlockManager(self.groups, MAX_LEN, seed=5)
        self.memory = {group.name: {} for group in self.groups}
        self.next_request = 0

    def begin(self, documents: tuple[int, ...]) -> None:
        prefixes = content(documents)
        keys = {group.name: page_keys(prefixes, group) for group in self.groups}
        limit = len(prefixes) - 1
        expected = self.longest_known(keys, limit)
        request, self.next_request = self.next_request, self.next_request + 1
        hit = self.manager.begin(request, keys, limit)
        assert hit == expected
        self.hits.append(hit)
        self.prefixes[request], self.computed[request] = prefixes, hit

    def longest_known(self, keys: dict[str, list[int]], limit: int) -> int:
        """The longest hit for which every page that a next token may see is known, by trying them all."""
        known = {g.name: [self.manager.pools[g.name].knows(key) for key in keys[g.name]] for g in self.groups}
        best = 0
        for hit in range(limit + 1):
            if any(hit % group.page_tokens for group in self.groups):
                continue
            if all(
                known[g.name][p // g.page_tokens]
                for g in self.groups
                for p in range(0 if g.window is None else max(hit - g.window + 1, 0), hit)
            ):
                best = hit
        return best

    def run(self, request: int, wanted: int, kept: int) -> None:
        """Compute up to ``wanted`` more tokens, of which the last few may be drafts that are thrown away."""
        start = self.computed[request]
        end = min(start + wanted, len(self.prefixes[request]))
        room = self.manager.room(request)
        before = self.snapshot()
        if not self.manager.extend(request, end):
            assert end > room
            assert self.snapshot() == before  # nothing changed
            return
        assert end <= room
        for group in self.groups:
            for p in range(start, end):
                self.memory[group.name][self.slot(group, request, p)] = self.prefixes[request][p]
        self.computed[request] = end - min(kept, end - start - 1) if end > start else start
        for group in self.groups:  # drafts that are wrong leave rubbish behind
            for p in range(self.computed[request], end):
                self.memory[group.name][self.slot(group, request, p)] = ()
        self.manager.advance(request, self.computed[request])

    def finish(self, request: int) -> None:
        self.manager.end(request)
        del self.prefixes[request], self.computed[request]

    def slot(self, group: GroupSpec, request: int, position: int) -> int:
        page = int(self.manager.tables(group.name, [request])[0, position // group.page_tokens])
        assert 0 <= page < group.num_pages
        return page * group.page_tokens + position % group.page_tokens

    def snapshot(self) -> list[object]:
        running = list(self.prefixes)
        return [
            (self.manager.pools[g.name].available, self.manager.tables(g.name, running).tolist()) for g in self.groups
        ]

    def check(self) -> None:
        """Every token that a next one may see is where the tables say; pages in use are those that tables need."""
        assert self.manager.check() == []
        for group in self.groups:
            pages = set()
            for request, computed in self.computed.items():
                first = 0 if group.window is None else max(computed - group.window + 1, 0)
                for p in range(first, computed):
                    slot = self.slot(group, request, p)
                    pages.add(slot // group.page_tokens)
                    assert self.memory[group.name].get(slot) == self.prefixes[request][p]
            # Beside these only pages that a rejected draft, or the next tokens, were given.
            spare = self.manager.held(group.name) - len(pages)
            assert 0 <= spare <= len(self.computed) * (1 + 8 // group.page_tokens + 1)


documents = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN // BLOCK).map(tuple)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), documents, st.just(0)),
        st.tuples(st.just("run"), st.integers(0, 9), st.tuples(st.integers(1, 20), st.integers(0, 6))),
        st.tuples(st.just("run"), st.integers(0, 9), st.tuples(st.integers(1, 20), st.just(0))),
        st.tuples(st.just("finish"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_no_page_is_lost_or_wrongly_shared(steps):
    model = Model()
    for kind, what, amount in steps:
        running = sorted(model.prefixes)
        if kind == "begin":
            if len(running) < 4:
                model.begin(what)
        elif running and kind == "run":
            model.run(running[what % len(running)], *amount)
        elif running:
            model.finish(running[what % len(running)])
        model.check()
    for request in sorted(model.prefixes):
        model.finish(request)
    for group in GROUPS:
        pool = model.manager.pools[group.name]
        assert (pool.held, pool.available) == (0, group.num_pages)
        assert sorted(pool.take() for _ in range(group.num_pages)) == list(range(group.num_pages))


def run_all(model: Model, documents: tuple[int, ...]) -> int:
    """Run a request to its end and finish it; returns its prefix hit."""
    model.begin(documents)
    request = max(model.prefixes)
    while model.computed[request] < len(model.prefixes[request]):
        model.run(request, 8, 0)
        model.check()
    model.finish(request)
    return model.hits[-1]


class TestPrefixReuse:
    def test_known_prefix_is_shared(self):
        model = Model()
        assert run_all(model, (1, 1, 1, 1)) == 0
        assert run_all(model, (1, 1, 1, 1)) == 16  # not all 32: at least one token has to be computed
        assert run_all(model, (1, 1, 2, 2)) == 16
        assert run_all(model, (1, 2, 1, 1)) == 0

    def test_two_running_requests_hold_the_same_pages(self):
        model = Model()
        model.begin((1, 1, 1))
        model.run(0, 20, 0)
        model.begin((1, 1, 2))
        assert model.hits == [0, 16]
        tables = model.manager.tables("all", [0, 1])
        assert tables[0, :2].tolist() == tables[1, :2].tolist()
        model.run(1, 8, 0)
        assert model.manager.tables("all", [1])[0, 2] != tables[0, 2]
        model.check()

    def test_hit_counts_only_as_far_as_the_trailing_window_is_alive(self):
        """The wide groups still know 32 tokens; without the window's pages before 32 only 16 count, or none."""
        groups = (GroupSpec("window", 4, 8, window=6), GroupSpec("all", 8, 30), GroupSpec("coarse", 16, 30))
        model = Model(groups)
        run_all(model, (1, 1, 1, 1, 1))
        assert run_all(model, (1, 1, 1, 1, 1)) == 32
        model = Model(groups)
        run_all(model, (1, 1, 1, 1, 1))
        run_all(model, (2, 2, 2, 2, 2))  # takes every window page
        model.begin((1, 1, 1, 1, 1))
        assert model.hits[-1] == 0
        assert model.manager.pools["all"].knows(page_keys(content((1,) * 5), groups[1])[3])

    def test_released_window_page_is_not_needed_for_a_hit(self):
        """A hit at 32 needs window pages of positions 27..31 only, though those before are blank or gone."""
        groups = (GroupSpec("window", 4, 6, window=6), GroupSpec("all", 8, 30), GroupSpec("coarse", 16, 30))
        model = Model(groups)
        assert run_all(model, (1, 1, 1, 1, 1)) == 0
        keys = page_keys(content((1,) * 5), groups[0])
        assert not model.manager.pools["window"].knows(keys[0])
        assert run_all(model, (1, 1, 1, 1, 1)) == 32

    def test_rejected_drafts_are_not_published(self):
        model = Model()
        model.begin((1, 1, 1))
        model.run(0, 16, 5)  # 11 tokens are final
        assert model.computed[0] == 11
        keys = page_keys(content((1, 1, 1)), GROUPS[1])
        assert [model.manager.pools["all"].knows(key) for key in keys] == [True, False, False]


def test_tables_hold_garbage_outside_live_columns():
    manager = BlockManager(GROUPS, MAX_LEN, seed=1)
    manager.begin(0, {group.name: [] for group in GROUPS}, 0)
    manager.extend(0, 8)
    dead = manager.tables("window", [0])[0, 2:]
    assert (dead != -1).any()
    assert (dead >= GROUPS[0].num_pages).any()  # page numbers that no cache has
    assert manager.tables("window", []).shape == (0, MAX_LEN // 4)


class TestGroupSpec:
    @pytest.mark.parametrize("window", [2, 6, 128])
    @pytest.mark.parametrize("page_tokens", [1, 4, 64])
    def test_first_page(self, window, page_tokens):
        group = GroupSpec("g", page_tokens, 1, window=window)
        for computed in range(300):
            seen = range(max(computed - (window - 1), 0), computed + 1)  # by the next token
            assert group.first_page(computed) == seen[0] // page_tokens

    def test_pages_needed_is_what_a_lone_request_takes_at_worst(self):
        for page_tokens, window, tokens, step in [(4, 6, 40, 1), (4, 6, 40, 3), (4, 2, 40, 5), (8, 6, 5, 1)]:
            group = GroupSpec("g", page_tokens, 100, window=window)
            worst = 0
            for computed in range(tokens):
                end = min(computed + step, tokens)
                first = max(computed - window + 1, 0) // page_tokens
                worst = max(worst, -(-end // page_tokens) - first)
            assert worst <= group.pages_needed(tokens, step) <= worst + 1


@dataclass
class SlowPool:
    """Blank pages as a set, kept ones as a list, oldest first, references counted one by one."""

    blank: set[int]
    kept: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)  # a page once for each holder
    key_of: dict[int, int] = field(default_factory=dict)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "publish", "release"]), st.integers(0, 30)), max_size=80))
def test_pool_against_a_slow_one(steps):
    size = 5
    pool, slow = PagePool(size, seed=3), SlowPool(set(range(size)))
    for kind, number in steps:
        held = sorted(slow.holders)
        if kind == "take" and pool.available:
            page = pool.take()
            if slow.blank:
                assert page in slow.blank
                slow.blank.remove(page)
            else:
                assert page == slow.kept.pop(0)
                del slow.key_of[page]
            slow.holders.append(page)
        elif kind == "share" and slow.key_of:
            page = sorted(slow.key_of)[number % len(slow.key_of)]
            assert pool.share(slow.key_of[page]) == page
            if page in slow.kept:
                slow.kept.remove(page)
            slow.holders.append(page)
        elif kind == "publish" and held:
            page, key = held[number % len(held)], number % 7
            pool.publish(page, key)
            if page not in slow.key_of and key not in slow.key_of.values():
                slow.key_of[page] = key
        elif kind == "release" and held:
            page = held[number % len(held)]
            pool.release(page)
            slow.holders.remove(page)
            if page not in slow.holders:
                if page in slow.key_of:
                    slow.kept.append(page)
                else:
                    slow.blank.add(page)
        assert pool.available == len(slow.blank) + len(slow.kept)
        assert pool.held == len(set(slow.holders))
        assert [pool.knows(key) for key in range(7)] == [key in slow.key_of.values() for key in range(7)]
        assert [pool.is_shared(page) for page in range(size)] == [slow.holders.count(page) > 1 for page in range(size)]
        assert pool.check({page: slow.holders.count(page) for page in slow.holders}) == []


def test_checks_find_what_is_wrong():
    """The checks that other tests rely on do see a lost page, a stolen page and a page shared while it is written."""
    model = Model()
    model.begin((1, 1, 1))
    model.run(0, 10, 0)
    pool = model.manager.pools["all"]
    page = int(model.manager.tables("all", [0])[0, 1])
    pool._refs[page] += 1
    assert any("held 2 times" in text for text in model.manager.check())
    assert any("which others hold" in text for text in model.manager.check())
    pool._refs[page] = 0
    assert any("0 places" in text for text in model.manager.check())
    row = model.manager._tables[0].rows["all"].columns
    row[1] = row[0]
    assert any("one page in two columns" in text for text in model.manager.check())
    row[1] = np.int32(99)
    assert any("outside the cache" in text for text in model.manager.check())
