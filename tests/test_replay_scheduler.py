"""The scheduler: budgets, order, every token once, drafts, preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.errors import ConfigError
from swa_backend.replay.blocks import BlockManager, GroupSpec
from swa_backend.replay.scheduler import Kind, Scheduler, SchedulerLimits, Work
from swa_backend.replay.traces import Request

WINDOW = 6


def request(number: int, prompt: int, output: int, blocks: tuple[int, ...] | None = None) -> Request:
    return Request(number, number + 2, 0.0, prompt, output, blocks)


def make(
    requests: Sequence[Request], *, pages: int = 200, shared: bool = False, **limits: object
) -> tuple[Scheduler, BlockManager]:
    groups = (GroupSpec("window", 4, pages, window=WINDOW), GroupSpec("all", 8, pages))
    manager = BlockManager(groups, max(r.total_length for r in requests), seed=2)

    def keys(one: Request) -> dict[str, list[int]]:
        owner = 0 if shared else one.id + 1
        return {
            g.name: [hash((owner, p)) for p in range(g.page_tokens, one.total_length + 1, g.page_tokens)]
            for g in groups
        }

    settings = SchedulerLimits(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits})
    return Scheduler(requests, manager, keys, settings), manager


@dataclass
class Run:
    """Runs a scheduler to its end and checks every step."""

    scheduler: Scheduler
    manager: BlockManager
    limits: SchedulerLimits
    done: dict[int, int] = field(default_factory=dict)  # tokens of each running request that are final
    admitted: list[int] = field(default_factory=list)
    steps: list[list[Work]] = field(default_factory=list)
    kept: int = 0  # tokens that became final
    rejected: int = 0

    def all(self) -> Run:
        while work := self.scheduler.step():
            self.check(work)
            self.scheduler.finish(work)
            assert self.manager.check() == []
            running = {state.request.id for state in self.scheduler.running}
            for one in work:
                self.done[one.request] = one.end - one.rejected
            self.done = {number: end for number, end in self.done.items() if number in running}
            assert len(self.steps) < 5000
        assert self.scheduler.stats.finished == len({one.request for step in self.steps for one in step})
        assert all(self.manager.held(name) == 0 for name in self.manager.groups)
        return self

    def check(self, work: list[Work]) -> None:
        limits = self.limits
        assert sum(one.count for one in work) <= limits.max_num_batched_tokens
        assert len({one.request for one in work}) == len(work) <= limits.max_num_seqs
        assert [one.kind for one in work] == sorted(one.kind for one in work)
        preempted = {number for number in self.done if number in {s.request.id for s in self.scheduler.waiting}}
        for number in preempted:
            del self.done[number]
        self.admitted += sorted(one.request for one in work if one.request not in self.done)
        written: dict[str, set[int]] = {name: set() for name in self.manager.groups}
        for one in work:
            whole = one.state.request
            assert one.count >= 1
            if one.request not in self.done:
                assert one.start % 8 == 0  # where a known prefix ends
            else:
                assert one.start == self.done[one.request]  # goes on where it stopped: no token left out or repeated
            assert one.end <= whole.total_length - 1  # the last output token is never computed
            if one.kind is Kind.DECODE:
                assert one.start >= whole.input_length
                assert one.count <= 1 + limits.drafts
                assert one.rejected <= one.count - 1
            else:
                assert one.rejected == 0
                assert (one.count <= limits.decode_threshold) == (one.kind is Kind.EXTEND)
            self.check_pages(one, written)
            self.kept += one.count - one.rejected
            self.rejected += one.rejected
        self.steps.append(work)

    def check_pages(self, one: Work, written: dict[str, set[int]]) -> None:
        """Each token has a page, and no slot is written twice."""
        for name, group in self.manager.groups.items():
            table = self.manager.tables(name, [one.request])[0]
            positions = np.arange(one.start, one.end)
            pages = table[positions // group.page_tokens]
            assert ((pages >= 0) & (pages < group.num_pages)).all()
            slots = set((pages * group.page_tokens + positions % group.page_tokens).tolist())
            assert len(slots) == one.count
            assert not slots & written[name]
            written[name] |= slots


lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(
    lengths,
    st.integers(0, 3),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(4, 40),
    st.integers(1, 6),
    st.integers(10, 40),
    st.booleans(),
)
def test_every_token_is_computed_once_within_budget(trace, drafts, acceptance, budget, seqs, pages, shared):
    requests = [request(i, *lengths) for i, lengths in enumerate(trace)]
    scheduler, manager = make(
        requests, pages=pages, shared=shared, drafts=drafts, decode_threshold=1 + drafts, acceptance=acceptance,
        max_num_batched_tokens=budget, max_num_seqs=seqs,
    )
    run = Run(scheduler, manager, scheduler.limits).all()
    stats = scheduler.stats
    assert stats.finished == len(requests)
    needed = sum(r.total_length - 1 for r in requests)
    if not stats.preemptions:
        assert run.admitted == sorted(run.admitted)  # in trace order
        assert run.kept == needed - stats.reused_tokens
    else:
        assert run.kept >= needed - stats.reused_tokens
    first = list(dict.fromkeys(run.admitted))
    assert first == sorted(first)
    if acceptance == 1.0 or not drafts:
        assert run.rejected == 0


class TestOrder:
    def test_decodes_first_then_extends_then_prefills(self):
        requests = [request(0, 4, 6), request(1, 35, 2), request(2, 30, 2)]
        scheduler, manager = make(requests, decode_threshold=4, drafts=3, acceptance=0.0)
        run = Run(scheduler, manager, scheduler.limits).all()
        shown = [[(one.request, one.start, one.count, one.kind) for one in step] for step in run.steps[:4]]
        assert shown == [
            [(0, 0, 4, Kind.EXTEND), (1, 0, 28, Kind.PREFILL)],
            [(0, 4, 4, Kind.DECODE), (1, 28, 7, Kind.PREFILL), (2, 0, 21, Kind.PREFILL)],
            [(0, 5, 4, Kind.DECODE), (1, 35, 1, Kind.DECODE), (2, 21, 9, Kind.PREFILL)],
            [(0, 6, 3, Kind.DECODE), (2, 30, 1, Kind.DECODE)],
        ]

    def test_rest_of_a_prompt_that_is_short_is_an_extend(self):
        scheduler, manager = make([request(0, 34, 1)], decode_threshold=2)
        run = Run(scheduler, manager, scheduler.limits).all()
        assert [[(one.count, one.kind) for one in step] for step in run.steps] == [
            [(32, Kind.PREFILL)],
            [(2, Kind.EXTEND)],
        ]

    def test_requests_enter_in_trace_order_as_soon_as_there_is_room(self):
        requests = [request(i, 10, 3) for i in range(5)]
        scheduler, manager = make(requests, max_num_seqs=2)
        run = Run(scheduler, manager, scheduler.limits).all()
        assert [sorted(one.request for one in step) for step in run.steps] == [
            [0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 3], [4], [4], [4],
        ]


class TestDrafts:
    def rejected(self, **limits: object) -> list[tuple[int, int]]:
        scheduler, manager = make([request(0, 5, 40)], drafts=3, decode_threshold=4, **limits)
        run = Run(scheduler, manager, scheduler.limits).all()
        return [(one.count, one.rejected) for step in run.steps[1:] for one in step]

    def test_all_right(self):
        assert self.rejected(acceptance=1.0) == [(4, 0)] * 9 + [(3, 0)]

    def test_all_wrong(self):
        found = self.rejected(acceptance=0.0)
        assert len(found) == 39
        assert found[:36] == [(4, 3)] * 36
        assert found[36:] == [(3, 2), (2, 1), (1, 0)]

    def test_seeded(self):
        found = self.rejected(acceptance=0.6, seed=1)
        assert found == self.rejected(acceptance=0.6, seed=1)
        assert found != self.rejected(acceptance=0.6, seed=2)
        assert {0, 1, 2, 3} == {rejected for _, rejected in found + self.rejected(acceptance=0.6, seed=2)}


class TestPages:
    def test_newest_is_preempted_when_pages_run_out_and_starts_again(self):
        requests = [request(0, 30, 40), request(1, 30, 40)]
        scheduler, manager = make(requests, pages=12)  # of 8 tokens; both together need 18
        run = Run(scheduler, manager, scheduler.limits).all()
        assert scheduler.stats.preemptions == 1
        assert run.admitted == [0, 1, 1]
        assert scheduler.stats.finished == 2

    def test_known_prefix_is_not_computed_again(self):
        scheduler, manager = make([request(0, 30, 2), request(1, 30, 2)], shared=True, max_num_seqs=1)
        run = Run(scheduler, manager, scheduler.limits).all()
        assert scheduler.stats.reused_tokens == 24  # whole pages of 8 of the first 29 tokens
        assert [(one.start, one.count) for step in run.steps for one in step if one.request == 1] == [(24, 6), (30, 1)]

    def test_request_that_never_fits_is_refused(self):
        with pytest.raises(ConfigError) as raised:
            make([request(0, 20, 4), request(1, 80, 20)], pages=12)
        assert raised.value.field == "pages of the cache group 'all'"
        assert raised.value.legal == "at least 13: request 1 (line 3) has 100 tokens"
        make([request(0, 20, 4), request(1, 80, 20)], pages=13)
