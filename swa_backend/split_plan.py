"""How many programs share one token's keys (split-KV), decided on the host from the chip and the live entries.

A decode of few tokens leaves most of a chip idle unless the keys of each token are shared by several programs, whose
partial results a second kernel adds up. The decision takes what the host knows of a step: programs without a split,
and the most entries that a row can have. The capacity of a buffer never counts, and nothing is read of a device. A
captured graph keeps the number it was captured with and stays right for any length: each row shares its own tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from swa_backend._math import cdiv

if TYPE_CHECKING:
    from swa_backend.platform import Target

COMPUTE_UNITS = {
    "cuda:80": 108,
    "cuda:86": 84,
    "cuda:89": 142,
    "cuda:90": 132,
    "cuda:100": 148,
    "cuda:103": 148,
    "cuda:120": 188,
    "hip:gfx942": 304,
    "hip:gfx950": 256,
}
"""Multiprocessors or compute units of the largest data-centre card of a chip, for planning without a device."""

_UNKNOWN_UNITS = 128
FIXED_KEYS = 512
"""Keys that one split of a batch-invariant step takes, whatever the batch."""


def compute_units(device: torch.device | None, target: Target | None = None) -> int:
    """Compute units (multiprocessors) of a GPU, else of the chip that a target names."""
    if device is not None and device.type == "cuda":
        return _units_of_device(torch.cuda.current_device() if device.index is None else device.index)
    return COMPUTE_UNITS.get(str(target), _UNKNOWN_UNITS)


@lru_cache
def _units_of_device(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@dataclass(frozen=True, slots=True)
class Split:
    """How the key tiles of every row of a launch are shared.

    Attributes:
        splits: programs that share the keys of one token and head tile; 1 = not split, no reduce.
        tiles: 0: split s of a row with n live tiles takes its share ``cdiv(n, splits)`` from tile ``s * share`` on.
            Above 0 (batch-invariant): split s takes the tiles ``s * tiles`` to ``(s + 1) * tiles - 1``, so that a row
            is cut at the same places in every batch; further splits of the row are empty and must add exactly nothing.
    """

    splits: int
    tiles: int = 0


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Decides the splits of one kernel on one chip.

    Attributes:
        units: compute units, from `compute_units`.
        key_tile: keys that a program takes at a time; rows of each cache are cut into whole tiles of their own.
        programs_per_unit: programs that run on a compute unit at the same time.
        start: what a program costs besides its tiles (first loads, writing its result), in tiles.
        reduce: what any split costs besides (a launch), in tiles.
        partial: what each partial result costs (written, read, added up), in tiles.
        most: most splits of a row.
        room: programs that a split launch may have, for each that the chip holds at a time; bounds the memory.
        batch_invariant: cut rows at fixed places.
    """

    units: int
    key_tile: int
    programs_per_unit: int = 1
    start: float = 0.5
    reduce: float = 0.5
    partial: float = 0.0
    most: int = 64
    room: int = 2
    batch_invariant: bool = False

    @property
    def capacity(self) -> int:
        """Partial results (one a program: head tile x 512 float32, and two numbers a head) to reserve.

        No split that `split` returns has more programs, except batch-invariant ones: those launch as many tokens at
        a time as fit, and the reserve holds at least one token's splits (see `most_fixed`).
        """
        return self.room * self.units * self.programs_per_unit

    def split(self, programs: int, entries: Sequence[int]) -> Split:
        """The split of a launch.

        Args:
            programs: tokens times head tiles, what the launch would have without a split.
            entries: for each cache the most entries that a row can have in this step, as the host knows it.
        """
        tiles = sum(cdiv(count, self.key_tile) for count in entries)
        if self.batch_invariant:
            share = max(FIXED_KEYS // self.key_tile, cdiv(tiles, self.most), 1)
            return Split(max(cdiv(tiles, share), 1), share)
        return _best(self, programs, tiles)

    def most_fixed(self, entries: Sequence[int]) -> int:
        """Splits of a batch-invariant row of this many entries a cache."""
        return cdiv(sum(cdiv(count, self.key_tile) for count in entries), max(FIXED_KEYS // self.key_tile, 1))


@lru_cache(maxsize=4096)
def _best(plan: SplitPlan, programs: int, tiles: int) -> Split:
    """The number of splits with the shortest estimated time; the smallest of equals."""
    at_a_time = plan.units * plan.programs_per_unit
    best, shortest = 1, cdiv(programs, at_a_time) * (plan.start + tiles)
    for splits in range(2, min(tiles, plan.most, plan.capacity // max(programs, 1)) + 1):
        partials = programs * splits
        time = cdiv(partials, at_a_time) * (plan.start + cdiv(tiles, splits)) + plan.reduce + partials * plan.partial
        if time < shortest:
            best, shortest = splits, time
    return Split(best)
