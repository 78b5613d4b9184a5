"""One step as the engine hands it to the library: lengths, tables and slots on the host, dressed up with padding."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from swa_backend._math import cdiv
from swa_backend.fuzz.case import Case, Knobs
from swa_backend.fuzz.pages import MAIN, SECOND, Tables

if TYPE_CHECKING:
    from swa_backend.fuzz.engine import Request

Spans = Mapping[int, Sequence[tuple[int, int]]]
_WILD_PAGES = (-1, -7, 2**31 - 1)


class Kind(Enum):
    """A step of the model, a draft step of one token a request, or a draft block that sees itself whole."""

    TARGET = "target"
    DRAFT = "draft"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Part:
    """What one request does: ``count`` tokens from position ``start`` on, the last ``rejected`` of them wrong drafts.

    Without a request it is a row of padding, whose context ends at ``start``.
    """

    request: Request | None
    start: int
    count: int
    rejected: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of R requests and T tokens, everything on the host.

    Attributes:
        number, kind, parts: what happens.
        num_tokens: T, padding included.
        max_query_len, max_seq_len: as passed, at least the largest.
        causal: False for a draft block.
        captured: whether it has the shape of the captured graph.
        spans: images by number in the batch; None passes none.
        replay: [R] first positions that window pages hold; None passes none.
        tables: [R, C] int32 of each group as passed, with holes and garbage.
        pages: the same without holes: where the requests' content really is.
        slots: [T] int64 of each window group as passed; -1 for padding and for tokens of other ranks.
        stored: [T] int64 main slots where the token's keys really go, whoever writes them; -1 for padding.
        row: [tokens of requests] row of each token.
        position: [tokens of requests] its position.
        updates: how often a draft step's metadata is advanced in place.
    """

    number: int
    kind: Kind
    parts: Sequence[Part]
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool
    captured: bool
    spans: Spans | None
    replay: np.ndarray | None
    tables: Mapping[str, np.ndarray]
    pages: Mapping[str, np.ndarray]
    slots: Mapping[str, np.ndarray]
    stored: np.ndarray
    row: np.ndarray
    position: np.ndarray
    updates: int

    @property
    def queries(self) -> np.ndarray:
        return np.array([part.count for part in self.parts], dtype=np.int32)

    @property
    def seqs(self) -> np.ndarray:
        return np.array([part.end for part in self.parts], dtype=np.int32)

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)

    def content(self, row: int, drafted: bool) -> np.ndarray:
        """Content keys by position of a row's request, in the model's layers or those of the draft."""
        request = self.parts[row].request
        assert request is not None
        return request.draft if drafted else request.target

    @classmethod
    def dress(cls, case: Case, tables: Tables, number: int, kind: Kind, parts: list[Part], dice: random.Random) -> Step:
        """Give a batch its padding, its tables and what else an engine may bring."""
        knobs = case.knobs
        parts = list(parts)
        longest = max((part.count for part in parts), default=0)
        decodes = longest <= knobs.threshold
        captured = (
            kind is Kind.TARGET
            and decodes
            and knobs.max_seqs * knobs.threshold <= knobs.max_tokens
            and dice.random() * 1000 < knobs.captured
        )
        hostile = dice.random() * 1000 < knobs.hostile
        room = knobs.max_seqs - len(parts)
        padded = room if captured else min(room, dice.choice((0, 0, 0, 2)))
        for _ in range(padded):
            parts.append(Part(None, dice.randint(0, knobs.max_len) if hostile else 0, 0))
        mapped = sum(part.count for part in parts)
        limit = knobs.max_tokens
        if decodes and kind is not Kind.BLOCK:
            limit = min(limit, knobs.max_seqs * knobs.threshold)
        tokens = limit if captured else min(limit, mapped + dice.choice((0, 0, 1, 7, limit)))
        longest_passed = longest if captured or kind is Kind.BLOCK else min(longest + dice.choice((0, 0, 3)), limit)
        if not parts:
            tokens = 0
        spans, replay = None, None
        if kind is not Kind.BLOCK and not captured:
            images = {i: part.request.spec.images for i, part in enumerate(parts) if part.request}
            spans = {i: own for i, own in images.items() if own} or None
        starts = np.array([part.request.replay_start if part.request else 0 for part in parts], dtype=np.int32)
        if captured or starts.any() or dice.random() < 0.2:
            replay = starts
        plain = cls(
            number,
            kind,
            parts,
            tokens,
            longest_passed,
            min(max((part.end for part in parts), default=0) + dice.choice((0, 9)), knobs.max_len),
            kind is not Kind.BLOCK,
            captured,
            spans,
            replay,
            {},
            {},
            {},
            np.empty(0, dtype=np.int64),
            np.repeat(np.arange(len(parts)), [part.count for part in parts]),
            np.concatenate([np.arange(part.start, part.end) for part in parts] or [np.empty(0, dtype=np.int64)]),
            {Kind.TARGET: 0, Kind.DRAFT: knobs.drafts - 1, Kind.BLOCK: 1}[kind],
        )
        return plain._with_pages(knobs, tables, dice, hostile)

    def advanced(self, case: Case, tables: Tables, dice: random.Random) -> Step:
        """The same batch a position later, as an engine advances it in place between draft steps."""
        parts = [part if part.request is None else replace(part, start=part.start + 1) for part in self.parts]
        moved = replace(self, parts=parts, position=self.position + 1)
        return moved._with_pages(case.knobs, tables, dice, hostile=False, keep_columns=True)

    def _with_pages(
        self, knobs: Knobs, tables: Tables, dice: random.Random, hostile: bool, keep_columns: bool = False
    ) -> Step:
        """Tables as passed, and where tokens go."""
        rng = np.random.default_rng(dice.getrandbits(32))
        given, pages, slots = {}, {}, {}
        holes = dice.random() * 1000 < knobs.holes
        foreign = rng.random(len(self.row)) < (0.3 if dice.random() * 1000 < knobs.foreign else 0.0)
        stored = np.empty(0, dtype=np.int64)
        for name, group in tables.groups.items():
            table = self._table(name, tables, cdiv(knobs.max_len, group.page_tokens), rng)
            pages[name] = table.copy()
            if name in (MAIN, SECOND):
                page = table[self.row, self.position // group.page_tokens].astype(np.int64)
                own = np.full(self.num_tokens, -1, dtype=np.int64)
                own[: len(self.row)] = page * group.page_tokens + self.position % group.page_tokens
                if name == MAIN:
                    stored = own.copy()
                own[: len(self.row)][foreign] = -1
                if hostile:
                    own[len(self.row) :] = rng.integers(-3, knobs.pages * group.page_tokens * 2, self.num_tokens)[
                        len(self.row) :
                    ]
                slots[name] = own
            if holes:
                gone = rng.random(table.shape) < 0.15
                table[gone] = rng.choice((*_WILD_PAGES, knobs.pages, knobs.pages + 1), size=int(gone.sum()))
            given[name] = table
            if holes and not self.captured and not keep_columns and rng.random() < 0.3:
                given[name] = table[:, : int(rng.integers(0, table.shape[1] + 1))]
            if keep_columns:
                given[name] = table[:, : self.tables[name].shape[1]]
        return replace(self, tables=given, pages=pages, slots=slots, stored=stored)

    def _table(self, group: str, tables: Tables, columns: int, rng: np.random.Generator) -> np.ndarray:
        """[R, columns] page numbers; rows of padding hold garbage."""
        table = rng.integers(-1, 2**31 - 1, (len(self.parts), columns), dtype=np.int32)
        for row, part in enumerate(self.parts):
            if part.request is not None:
                table[row] = tables.tables(group, [part.request.number])[0]
        return table
