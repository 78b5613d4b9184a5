"""Checks every index row of a step against who wrote each slot last. Knows nothing of block tables.

A map from slot to content key is updated at every write. The entries of a row must then be, in order, exactly the
slots that hold the keys which the token has to see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

_MAX_ELEMENTS = 1 << 21
MAX_EXAMPLES = 5


@dataclass(slots=True)
class RowVerdict:
    """Rows looked at, rows that are wrong, and the first few of those in words."""

    rows: int = 0
    mismatches: int = 0
    examples: list[str] = field(default_factory=list)

    def wrong(self, count: int, text: str) -> None:
        self.mismatches += count
        if count and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)


class RowCheck:
    """Owner maps of all cache groups.

    Args:
        num_slots: slots of each group.
        device: where the maps are kept and rows are checked; best where the rows are.
    """

    def __init__(self, num_slots: Mapping[str, int], device: torch.device | str = "cpu") -> None:
        self.verdict = RowVerdict()
        self.device = torch.device(device)
        # Int64 with the bits of the uint64 key; 0 is nobody (a real key is 0 once in 2^64).
        self._owner = {
            name: torch.zeros(slots, dtype=torch.int64, device=self.device) for name, slots in num_slots.items()
        }
        self._uploaded: dict[int, tuple[np.ndarray, int, torch.Tensor]] = {}

    def _keys(self, keys: np.ndarray, changes: int) -> torch.Tensor:
        """All content keys where they are looked up; copied again only when they have changed."""
        known = self._uploaded.get(id(keys))
        if known is not None and known[0] is keys and known[1] == changes:
            return known[2]
        # Without any key all counts are 0, and a key that is never compared stands in.
        tensor = torch.from_numpy(keys.view(np.int64)) if len(keys) else torch.zeros(1, dtype=torch.int64)
        tensor = tensor.to(self.device)
        if self.device.type != "cpu":  # there it is the array itself
            self._uploaded[id(keys)] = keys, changes, tensor
        return tensor

    def wrote(self, group: str, slots: np.ndarray, keys: np.ndarray) -> None:
        """Note that content ``keys`` [n] was written to ``slots`` [n]; negative slots are no write."""
        real = slots >= 0
        where = torch.from_numpy(slots[real]).to(self.device)
        self._owner[group][where] = torch.from_numpy(keys[real].view(np.int64)).to(self.device)

    def equal(self, group: str, what: str, found: np.ndarray, right: np.ndarray) -> None:
        """Compare slot numbers [n] that the library computed with those of the engine."""
        wrong = np.flatnonzero(found != right)
        if len(wrong):
            at = int(wrong[0])
            self.verdict.wrong(
                len(wrong), f"{group}: {what} of token {at} is {int(found[at])}, must be {int(right[at])}"
            )

    def runs(
        self,
        group: str,
        rows: torch.Tensor,
        lens: torch.Tensor,
        keys: np.ndarray,
        first: np.ndarray,
        count: np.ndarray,
        *,
        padded: bool = True,
        changes: int = 0,
    ) -> None:
        """Check rows that must name runs of consecutive content.

        Args:
            group: cache group that the slots belong to.
            rows: [n, width] int32 slots.
            lens: [n] int32.
            keys: all content keys; row i must hold ``keys[first[i] : first[i] + count[i]]``.
            first, count: [n].
            padded: entries past the run must be -1; False if they mean nothing.
            changes: counts changes of the keys.
        """
        n, width = rows.shape
        rows, lens = rows.to(self.device), lens.to(self.device)
        all_keys = self._keys(keys, changes)
        begin = torch.from_numpy(first.astype(np.int64)).to(self.device)
        counts = torch.from_numpy(count.astype(np.int64)).to(self.device)
        at = 0
        while at < n:
            used = width if padded else max(int(count[at : at + 4096].max()), 1)
            part = slice(at, at + max(1, min(4096, _MAX_ELEMENTS // max(used, 1))))
            self._check_part(
                group, at, rows[part, :used], lens[part], all_keys, begin[part], counts[part], padded=padded
            )
            at = min(part.stop, n)
        self.verdict.rows += n

    def _check_part(
        self,
        group: str,
        at: int,
        rows: torch.Tensor,
        lens: torch.Tensor,
        all_keys: torch.Tensor,
        begin: torch.Tensor,
        counts: torch.Tensor,
        *,
        padded: bool,
    ) -> None:
        column = torch.arange(rows.shape[1], device=self.device)
        live = column < counts[:, None]
        want = all_keys[(begin[:, None] + column).clamp_(max=len(all_keys) - 1)]
        bad = live & (self._holders(group, rows) != want)
        if padded:
            bad |= ~live & (rows != -1)
        self._note(group, at, rows, bad.any(dim=1) | (lens != counts) | (counts > rows.shape[1]), lens, counts)

    def picks(
        self,
        group: str,
        rows: torch.Tensor,
        lens: torch.Tensor,
        keys: np.ndarray,
        first: np.ndarray,
        picks: torch.Tensor,
        *,
        changes: int = 0,
    ) -> None:
        """Check rows that must name picked content, packed to the left in the order of the picks.

        Args:
            group: cache group that the slots belong to.
            rows: [n, K] int32 slots.
            lens: [n] int32.
            keys: all content keys; a pick p of row i stands for ``keys[first[i] + p]``.
            first: [n].
            picks: [n, K] int32; -1 is no pick.
            changes: counts changes of the keys.
        """
        n, width = rows.shape
        rows, lens, picks = rows.to(self.device), lens.to(self.device), picks.to(self.device)
        all_keys = self._keys(keys, changes)
        begin = torch.from_numpy(first.astype(np.int64)).to(self.device)
        column = torch.arange(width, device=self.device)
        size = max(1, _MAX_ELEMENTS // max(width, 1))
        for at in range(0, n, size):
            part = slice(at, at + size)
            row, pick = rows[part], picks[part]
            chosen = pick >= 0
            counts = chosen.sum(dim=1)
            live = column < counts[:, None]
            want = torch.zeros_like(pick, dtype=torch.int64)
            # Both masks list a row's entries from left to right, and the same number of them.
            want[live] = all_keys[(begin[part, None] + pick)[chosen]]
            bad = live & (self._holders(group, row) != want) | ~live & (row != -1)
            self._note(group, at, row, bad.any(dim=1) | (lens[part] != counts), lens[part], counts)
        self.verdict.rows += n

    def _holders(self, group: str, rows: torch.Tensor) -> torch.Tensor:
        """Content key [n, w] int64 in each slot, 0 for what is no slot of the cache."""
        owner = self._owner[group]
        slots = rows.reshape(-1)
        if bool((slots >= len(owner)).any()):
            slots = slots.masked_fill(slots >= len(owner), -1)
        held = owner.index_select(0, slots.clamp(min=0)).masked_fill_(slots < 0, 0)
        return held.view(rows.shape)

    def _note(
        self, group: str, at: int, rows: torch.Tensor, bad: torch.Tensor, lens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        wrong = int(bad.sum())
        if wrong:
            row = int(bad.nonzero()[0])
            self.verdict.wrong(
                wrong,
                f"{group}: row {at + row} with len {int(lens[row])} (must be {int(counts[row])}) does not name the "
                f"content that its token sees; slots {rows[row, :4].tolist()} ...",
            )
