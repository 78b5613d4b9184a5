"""Device memory for the partial results of split rows: reserved once, shared by all layers, which run in turn."""

from __future__ import annotations

import torch

from swa_backend.cache_layout import HEAD_DIM


class Partials:
    """Room for the partial results of ``programs`` programs of ``heads`` heads on one device.

    Attributes:
        programs: how many programs' results fit.
        sums: [programs, heads, 512] float32: sums of weighted keys, not divided.
        peaks: [programs, 2, heads] float32: largest logit in base 2, sum of the weights.
    """

    __slots__ = ("heads", "peaks", "programs", "sums")

    def __init__(self, programs: int, heads: int, device: torch.device) -> None:
        self.programs = programs
        self.heads = heads
        self.sums = torch.empty((programs, heads, HEAD_DIM), dtype=torch.float32, device=device)
        self.peaks = torch.empty((programs, 2, heads), dtype=torch.float32, device=device)
