"""The page tables of a fuzzed engine: the replay's block manager, and a prefix of which only the end is replayed."""

from __future__ import annotations

from swa_backend._math import cdiv
from swa_backend.fuzz.case import Knobs
from swa_backend.replay.blocks import BlockManager, GroupSpec, PageKeys, _Row, _Tables

MAIN = "main"
SECOND = "second"


def group_of(ratio: int) -> str:
    """Name of the compressed group of a ratio."""
    return f"c{ratio}a"


def group_specs(knobs: Knobs) -> list[GroupSpec]:
    """Every cache group of these settings, the main window group first."""
    # The first token of a draft block sees one position more than a causal one.
    window = knobs.window + (1 if knobs.dspark else 0)
    groups = [GroupSpec(MAIN, knobs.page_tokens, knobs.pages, window)]
    if knobs.second_page_tokens:
        groups.append(GroupSpec(SECOND, knobs.second_page_tokens, knobs.pages, window))
    groups += [GroupSpec(group_of(ratio), knobs.compressed_page_tokens, knobs.pages) for ratio in knobs.ratios]
    return groups


class Tables(BlockManager):
    """A `BlockManager` that can also admit a request whose window pages are gone."""

    def begin_replayed(self, request: int, keys: PageKeys, limit: int, window: int) -> int:
        """Share the pages that are known in every group that keeps everything; the window is computed again.

        Returns:
            First token to compute, ``window`` tokens before the end of the known prefix; 0, and no page shared, if
            less than that is known.
        """
        whole = {name: group for name, group in self.groups.items() if group.window is None}
        hit = limit // self.alignment * self.alignment if whole else 0
        for name, group in whole.items():
            known, pool = 0, self.pools[name]
            while known * group.page_tokens < hit and pool.knows(keys[name][known]):
                known += 1
            hit = min(hit, known * group.page_tokens // self.alignment * self.alignment)
        if hit <= window:
            hit = 0
        start = max(hit - window, 0)
        tables = _Tables(keys)
        for name, group in self.groups.items():
            row = _Row(self._dead_columns(group))
            if name in whole:
                row.end = hit // group.page_tokens
                for column in range(row.end):
                    row.columns[column] = self.pools[name].share(keys[name][column])
                tables.published[name] = row.end
            else:
                row.first = row.end = start // group.page_tokens
                tables.published[name] = cdiv(start, group.page_tokens)  # the page that it begins in stays incomplete
            tables.rows[name] = row
        self._tables[request] = tables
        return start
