"""Continuous batching in a closed loop: requests enter in trace order as soon as there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from swa_backend.errors import ConfigError
from swa_backend.replay.blocks import BlockManager, PageKeys
from swa_backend.replay.hashing import mix_int
from swa_backend.replay.traces import Request


class Kind(IntEnum):
    """What a request does in a step, in the order of a batch."""

    DECODE = 0
    EXTEND = 1  # a piece of prompt no longer than the decode threshold
    PREFILL = 2


@dataclass(slots=True, eq=False)
class RequestState:
    """A request on its way."""

    request: Request
    computed: int = 0  # tokens whose keys are final
    generated: int = 0  # output tokens that are known

    @property
    def known(self) -> int:
        """Tokens that are known; the last one is computed next."""
        return self.request.input_length + self.generated

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.computed == self.known - 1


@dataclass(frozen=True, slots=True)
class Work:
    """One request in a step.

    Attributes:
        state: the request.
        start: its first position in the step, the context before it.
        count: its tokens in the step.
        rejected: how many of them, at the end, are drafts that turn out wrong.
        kind: what it does.
    """

    state: RequestState
    start: int
    count: int
    rejected: int
    kind: Kind

    @property
    def request(self) -> int:
        return self.state.request.id

    @property
    def end(self) -> int:
        """Context length at the end of the step, drafts included."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Settings of the loop.

    Attributes:
        max_num_seqs: requests of a step.
        max_num_batched_tokens: tokens of a step.
        decode_threshold: longest query that belongs to the decode part of a batch.
        drafts: draft tokens of a decoding request and step.
        acceptance: probability that a draft is right when all before it were.
        seed: decides which drafts are right.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    decode_threshold: int = 1
    drafts: int = 0
    acceptance: float = 0.7
    seed: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """What happened so far."""

    preemptions: int = 0
    reused_tokens: int = 0  # tokens that were not computed because their prefix was known
    prompt_tokens: int = 0  # tokens of admitted requests that were looked up
    finished: int = 0


@dataclass(slots=True)
class _Budget:
    tokens: int
    work: list[Work] = field(default_factory=list)

    def add(self, work: Work) -> None:
        self.work.append(work)
        self.tokens -= work.count

    def drop(self, state: RequestState) -> None:
        """Take back the work of a request that lost its pages."""
        self.tokens += sum(work.count for work in self.work if work.state is state)
        self.work = [work for work in self.work if work.state is not state]


class Scheduler:
    """Decides each step's batch.

    Args:
        requests: the trace.
        manager: the block manager.
        keys: content keys of a request's pages, by group.
        limits: settings.

    Raises:
        ConfigError: a request needs more pages than a group has, even alone.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        manager: BlockManager,
        keys: Callable[[Request], PageKeys],
        limits: SchedulerLimits,
    ) -> None:
        self.manager = manager
        self.limits = limits
        self.stats = SchedulerStats()
        self.running: list[RequestState] = []
        self.waiting: deque[RequestState] = deque(RequestState(request) for request in requests)
        self._keys = keys
        for request in requests:
            self._require_fit(request)

    def step(self) -> list[Work]:
        """The next batch, decodes first, then short extends, then prefills; empty when every request is finished."""
        budget = _Budget(self.limits.max_num_batched_tokens)
        preemptions = self.stats.preemptions
        for state in list(self.running):
            if state.decoding:
                self._decode(state, budget)
        for state in list(self.running):
            if not state.decoding:
                self._prefill(state, budget)
        if self.stats.preemptions == preemptions:
            while self.waiting and budget.tokens and len(self.running) < self.limits.max_num_seqs:
                if not self._admit(budget):
                    break
        if not budget.work and (self.running or self.waiting):
            raise RuntimeError("the scheduler found no work although requests are left")
        return sorted(budget.work, key=lambda work: work.kind)  # stable: admission order within a kind

    def finish(self, batch: Sequence[Work]) -> None:
        """Take a step's batch as computed."""
        for work in batch:
            state = work.state
            state.computed = work.end - work.rejected
            if work.kind is Kind.DECODE:
                state.generated += work.count - work.rejected
            elif state.computed == state.known:
                state.generated += 1  # the last prompt token yields the first output token
            self.manager.advance(work.request, state.computed)
            if state.generated == state.request.output_length:
                self.running.remove(state)
                self.manager.end(work.request)
                self.stats.finished += 1

    def _decode(self, state: RequestState, budget: _Budget) -> None:
        left = state.request.output_length - state.generated
        count = 1 + min(self.limits.drafts, left - 1)
        if count > budget.tokens or state not in self.running:
            return
        start = state.computed
        while not self.manager.extend(state.request.id, start + count):
            if not self._preempt_for(state, budget):
                return
        budget.add(Work(state, start, count, self._rejected(state, count - 1), Kind.DECODE))

    def _prefill(self, state: RequestState, budget: _Budget) -> None:
        if not budget.tokens or state not in self.running:
            return
        while not (count := self._chunk(state, budget)):
            if not self._preempt_for(state, budget):
                return
        self._add_chunk(state, count, budget)

    def _admit(self, budget: _Budget) -> bool:
        """Start the next waiting request if all of it would fit now; False if it must wait."""
        state = self.waiting[0]
        request = state.request
        state.computed = self.manager.begin(request.id, self._keys(request), state.known - 1)
        count = self._chunk(state, budget)
        if not count or not self._fits_whole(state):
            self.manager.end(request.id)
            state.computed = 0
            return False
        self.waiting.popleft()
        self.running.append(state)
        self.stats.reused_tokens += state.computed
        self.stats.prompt_tokens += state.known
        self._add_chunk(state, count, budget)
        return True

    def _add_chunk(self, state: RequestState, count: int, budget: _Budget) -> None:
        self.manager.extend(state.request.id, state.computed + count)
        kind = Kind.EXTEND if count <= self.limits.decode_threshold else Kind.PREFILL
        budget.add(Work(state, state.computed, count, 0, kind))

    def _chunk(self, state: RequestState, budget: _Budget) -> int:
        room = self.manager.room(state.request.id) - state.computed
        return min(state.known - state.computed, budget.tokens, room)

    def _fits_whole(self, state: RequestState) -> bool:
        """Whether the groups that keep everything have pages for all known tokens.

        Without this a request would often start only to be preempted in the middle of its prompt.
        """
        return state.known <= self.manager.room(state.request.id, windows=False)

    def _preempt_for(self, state: RequestState, budget: _Budget) -> bool:
        """Free the pages of the newest request; False if that was ``state`` itself.

        The oldest request is never preempted for another, so there is always progress.
        """
        victim = self.running.pop()
        budget.drop(victim)
        self.manager.end(victim.request.id)
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.stats.preemptions += 1
        return victim is not state

    def _rejected(self, state: RequestState, drafts: int) -> int:
        """Drafts of this step that are wrong: all from the first wrong one on."""
        for i in range(drafts):
            draw = mix_int(self.limits.seed, state.request.id, state.computed, i) / 2**64
            if draw >= self.limits.acceptance:
                return drafts - i
        return 0

    def _require_fit(self, request: Request) -> None:
        step_tokens = max(1 + self.limits.drafts, self.limits.decode_threshold)
        for name, group in self.manager.groups.items():
            needed = group.pages_needed(request.total_length, step_tokens)
            if needed > group.num_pages:
                raise ConfigError(
                    f"pages of the cache group {name!r}",
                    found=f"{group.num_pages} pages of {group.page_tokens} tokens",
                    legal=f"at least {needed}: request {request.id} (line {request.line}) has "
                    f"{request.total_length} tokens",
                    fix="Raise --pages, or leave the requests out with a smaller --max-model-len and --skip-bad-rows.",
                )
