"""The engine whose life is fuzzed: continuous batching over paged caches, with everything that may happen to it.

It never refuses a case: what cannot be done in a step is left out, so that shrinking may change anything.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from swa_backend.fuzz.case import Case, RequestSpec, fit
from swa_backend.fuzz.pages import Tables, group_specs
from swa_backend.fuzz.step import Kind, Part, Step
from swa_backend.replay.blocks import PageKeys
from swa_backend.replay.hashing import mix, mix_int, salt

_ARRIVALS, _PREEMPT, _DRAIN, _PLAN, _REQUEST, _DRESS = range(6)


@dataclass(eq=False, slots=True)
class Request:
    """A request on its way.

    Attributes:
        number, spec: which one.
        right: [total] content keys of its tokens.
        target, draft: [max_len] content keys that the layers of the model, and those of its draft, have in the cache.
        computed: tokens whose keys are final.
        generated: output tokens that are known.
        replay_start: first position that its window pages hold.
    """

    number: int
    spec: RequestSpec
    right: np.ndarray
    target: np.ndarray
    draft: np.ndarray
    keys: PageKeys
    computed: int = 0
    generated: int = 0
    replay_start: int = 0

    @property
    def known(self) -> int:
        return self.spec.prompt + self.generated

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.computed == self.known - 1


@dataclass(slots=True)
class Counts:
    """What happened so far: requests that lost their pages, that ended early, that finished; prompt tokens that a known
    prefix spared, prefixes whose window was computed again; wrong drafts; steps of a draft's token, of a draft block,
    with images."""

    preemptions: int = 0
    drained: int = 0
    finished: int = 0
    reused: int = 0
    replayed: int = 0
    rejected: int = 0
    draft_steps: int = 0
    draft_blocks: int = 0
    image_steps: int = 0


@dataclass(slots=True)
class _Plan:
    parts: list[Part] = field(default_factory=list)
    left: int = 0

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.left -= part.count

    def drop(self, request: Request) -> None:
        self.left += sum(part.count for part in self.parts if part.request is request)
        self.parts = [part for part in self.parts if part.request is not request]


class Engine:
    """One history, step by step: ``step()``, then ``finish(step)``."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.knobs = case.knobs
        self.counts = Counts()
        self.tables = Tables(group_specs(case.knobs), case.knobs.max_len, seed=case.seed % 2**31)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        specs = fit(case.requests, case.knobs)
        self._coming = deque(sorted((self._request(spec) for spec in specs), key=_arrival))
        self._number = -1

    def step(self) -> Step | None:
        """The next batch, perhaps an empty one; None when the history is over."""
        self._number += 1
        if self._number >= self.case.steps or not (self.running or self.waiting or self._coming):
            return None
        while self._coming and self._coming[0].spec.arrival <= self._number:
            self.waiting.append(self._coming.popleft())
        self._misfortunes()
        dice = self._dice(_PLAN)
        kind = self._kind(dice)
        parts = self._target_parts(dice) if kind is Kind.TARGET else self._draft_parts(kind, dice)
        step = Step.dress(self.case, self.tables, self._number, kind, parts, self._dice(_DRESS))
        self.counts.draft_steps += kind is Kind.DRAFT and bool(parts)
        self.counts.draft_blocks += kind is Kind.BLOCK and bool(parts)
        self.counts.image_steps += step.spans is not None
        return step

    def finish(self, step: Step) -> None:
        """Take a step as computed."""
        if step.kind is not Kind.TARGET:
            return
        for part in step.parts:
            request = part.request
            if request is None or not part.count:
                continue
            decoding = request.decoding
            request.computed = part.end - part.rejected
            self.counts.rejected += part.rejected
            if decoding:
                request.generated += part.count - part.rejected
            elif request.computed == request.known:
                request.generated += 1
            self.tables.advance(request.number, request.computed)
            if request.generated >= request.spec.output:
                self._remove(request)
                self.counts.finished += 1

    def _dice(self, *parts: int) -> random.Random:
        return random.Random(mix_int(self.case.seed, self._number, *parts))

    def _kind(self, dice: random.Random) -> Kind:
        if not self.knobs.drafts or not any(request.decoding for request in self.running) or dice.random() < 0.6:
            return Kind.TARGET
        return Kind.BLOCK if self.knobs.dspark else Kind.DRAFT

    def _misfortunes(self) -> None:
        """Lost pages and ends before their time."""
        dice = self._dice(_PREEMPT)
        if self.running and dice.random() * 1000 < self.knobs.preempt:
            self._preempt(dice.choice(self.running))
        dice = self._dice(_DRAIN)
        if self.running and dice.random() * 1000 < self.knobs.drain:
            for request in list(self.running):
                self._remove(request)
                self.counts.drained += 1

    def _target_parts(self, dice: random.Random) -> list[Part]:
        """Decodes with their drafts, pieces of prompts, now and then a request that has nothing to do."""
        knobs = self.knobs
        budget = knobs.max_tokens if dice.random() < 0.5 else dice.randint(1, knobs.max_tokens)
        plan = _Plan(left=budget)
        idle: list[Part] = []
        for request in list(self.running):
            if request not in self.running:
                continue
            own = self._dice(_REQUEST, request.number)
            if own.random() < 0.08:
                idle.append(Part(request, request.computed, 0))
            elif request.decoding:
                self._decode(request, plan, own)
            else:
                self._chunk(request, plan, own)
        while self.waiting and plan.left > 0 and len(self.running) < knobs.max_seqs and self._admit(plan):
            pass
        parts = sorted(plan.parts, key=lambda part: part.count > knobs.threshold)
        if dice.random() < 0.1:
            dice.shuffle(parts)  # no engine does that; the split is defined all the same
        for part in idle:
            if part.request in self.running:
                parts.insert(dice.randint(0, len(parts)), part)
        return parts

    def _decode(self, request: Request, plan: _Plan, dice: random.Random) -> None:
        left = request.spec.output - request.generated
        drafts = min(dice.randint(0, self.knobs.threshold - 1), left - 1, plan.left - 1)
        start = request.computed
        if drafts < 0 or not self._extend(request, start + 1 + drafts, plan):
            return
        wrong = next((i for i in range(drafts) if dice.random() * 100 >= self.knobs.acceptance), drafts)
        plan.add(Part(request, start, 1 + drafts, drafts - wrong))
        self._compute(request, start, 1 + drafts, drafts - wrong)

    def _chunk(self, request: Request, plan: _Plan, dice: random.Random) -> None:
        wanted = min(request.known - request.computed, plan.left)
        if wanted > 1 and dice.random() < 0.4:
            wanted = dice.randint(1, wanted)
        count = min(wanted, self.tables.room(request.number) - request.computed)
        if count < 1:
            if wanted < 1 or not self._extend(request, request.computed + 1, plan):
                return
            count = 1
        self.tables.extend(request.number, request.computed + count)
        plan.add(Part(request, request.computed, count))
        self._compute(request, request.computed, count, 0)

    def _extend(self, request: Request, tokens: int, plan: _Plan) -> bool:
        """Pages for ``tokens`` tokens, taken from the newest request if they have run out."""
        while not self.tables.extend(request.number, tokens):
            victim = self.running[-1]
            plan.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, plan: _Plan) -> bool:
        request = self.waiting[0]
        dice = self._dice(_ARRIVALS, request.number)
        limit = request.known - 1
        if dice.random() < 0.5:
            start = self.tables.begin_replayed(request.number, request.keys, limit, self.knobs.window)
            request.replay_start = start
            self.counts.replayed += start > 0
        else:
            start = self.tables.begin(request.number, request.keys, limit)
            request.replay_start = 0
            self.counts.reused += start
        room = self.tables.room(request.number) - start
        if room < 1 or request.known > self.tables.room(request.number, windows=False):
            self.tables.end(request.number)
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.computed = start
        for content in (request.target, request.draft):  # what was computed before a preemption is gone
            content[: request.spec.total] = request.right
        self._chunk(request, plan, dice)
        return True

    def _draft_parts(self, kind: Kind, dice: random.Random) -> list[Part]:
        """Requests that decode, a token or a block each, behind what is final."""
        parts: list[Part] = []
        left = self.knobs.max_tokens
        for request in [one for one in self.running if one.decoding]:
            block = kind is Kind.BLOCK
            count = dice.randint(1, self.knobs.drafts) if block else 1
            end = request.computed + (count if block else self.knobs.drafts) + (1 if block else 0)
            if count > left or end > self.knobs.max_len or dice.random() < 0.1:
                continue
            if not self.tables.extend(request.number, end):
                continue
            parts.append(Part(request, request.computed, count))
            left -= count
            positions = slice(request.computed, end)
            wrong = mix(request.target[positions] ^ salt(self.case.seed, "draft", self._number))
            request.draft[positions] = wrong
        return parts

    def _compute(self, request: Request, start: int, count: int, rejected: int) -> None:
        """Put the content that a step computes where attention will look for it."""
        end = start + count
        request.target[start:end] = request.right[start:end]
        if rejected:
            wrong = slice(end - rejected, end)
            request.target[wrong] = mix(request.right[wrong] ^ salt(self.case.seed, "rejected", self._number))
        request.draft[start:end] = request.target[start:end]

    def _preempt(self, request: Request) -> None:
        self._remove(request)
        request.computed = request.replay_start = 0
        self.waiting.appendleft(request)
        self.counts.preemptions += 1

    def _remove(self, request: Request) -> None:
        self.running.remove(request)
        self.tables.end(request.number)

    def _request(self, spec: RequestSpec) -> Request:
        streams = np.full(spec.total, salt(self.case.seed, "own", spec.number), dtype=np.uint64)
        streams[: spec.shared] = salt(self.case.seed, "family", spec.family)
        right = mix(streams ^ mix(np.arange(spec.total, dtype=np.uint64)))
        chain = mix(np.cumsum(mix(right), dtype=np.uint64))
        keys = {
            name: chain[group.page_tokens - 1 :: group.page_tokens].tolist()
            for name, group in self.tables.groups.items()
        }
        empty = np.zeros(self.knobs.max_len + 1, dtype=np.uint64)
        empty[: spec.total] = right
        return Request(spec.number, spec, right, empty, empty.copy(), keys)


def _arrival(request: Request) -> tuple[int, int]:
    return request.spec.arrival, request.number
