"""20,000 captured decode steps among eager ones: device and host memory stay as they are, and results too."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend.fuzz.batches import Batch
from swa_backend.fuzz.case import Case, Knobs, RequestSpec
from swa_backend.fuzz.engine import Engine
from swa_backend.fuzz.model import Model
from swa_backend.fuzz.runner import _Graph, _padded
from swa_backend.fuzz.step import Step
from swa_backend.registry import get_backend

pytestmark = pytest.mark.gpu

REPLAYS = 20_000
ROUND = 100  # captured steps that are repeated
MEGABYTE = 2**20


def host_bytes() -> int:
    """Memory of this process that is resident and its own, not shared with a file."""
    resident, shared = (int(word) for word in Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * 4096


def device_bytes() -> tuple[int, int, int]:
    """Allocated and reserved by torch, and used on the device by whomever."""
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free


class Soak:
    """Steps of an engine's history, the captured ones from a graph and an eager one after every fifth of them.

    Every round repeats them over the same caches.
    """

    def __init__(self) -> None:
        knobs = Knobs(
            heads=64, drafts=2, ratios=(4, 128), max_tokens=48 + 128, max_seqs=16, max_len=1000, pages=60,
            captured=900, preempt=20, drain=0, compressed_page_tokens=256,
        )  # fmt: skip
        requests = tuple(RequestSpec(i, i, 20 + 97 * i % 300, 40 + i % 70, i % 3, i % 20) for i in range(200))
        case = Case(7, knobs, requests, 10_000)
        self.device = torch.device("cuda:0")
        self.model = Model(case, get_backend("rocm" if torch.version.hip else "cuda"), self.device)
        self.model.sinks = {kind: sink.clone() for kind, sink in self.model.sinks.items()}
        self.steps = self._steps(Engine(case))
        first = next(step for step in self.steps if step.captured)
        self.graph = _Graph(self.model, first, Batch.of(first, self.device), attention=True)
        self.inputs = [self._inputs(step) for step in self.steps]

    @staticmethod
    def _steps(engine: Engine) -> list[Step]:
        steps: list[Step] = []
        captured = 0
        while captured < ROUND:
            step = engine.step()
            assert step is not None, "the history is too short"
            engine.finish(step)
            eager = len(steps) - captured
            if len(step.row) and (step.captured or 5 * eager < captured):
                steps.append(step)
                captured += step.captured
        return steps

    def _inputs(self, step: Step) -> tuple[Any, ...]:
        """What stays the same each round: keys, picks and, for an eager step, its batch and positions."""
        dice = random.Random(step.number)
        keys = self.model.keys_of(step)
        picks = {kind: self.model.picks(step, kind, dice) for kind in self.model.layers_of(step)}
        if step.captured:
            return keys, picks, None, None
        positions = torch.from_numpy(_padded(step.position, step.num_tokens)).to(self.device)
        return keys, picks, Batch.of(step, self.device), positions

    def round(self) -> list[torch.Tensor]:
        """All steps once; outputs of every tenth captured one."""
        kept = []
        for step, (keys, picks, batch, positions) in zip(self.steps, self.inputs, strict=True):
            self.model.write(step, keys)
            if step.captured:
                self.graph.replay(step, keys, picks)
                if step.number % 10 == 0:
                    kept += [result.out.clone() for result in self.graph.results.values()]
                continue
            metadata = self.model.builder.build(0, batch.metadata, groups=batch.groups)
            for kind in self.model.layers_of(step):
                own = None if picks[kind] is None else torch.from_numpy(picks[kind]).to(self.device)
                self.model.attend(step, metadata, kind, self.model.queries(step, keys, kind), own, positions)
        torch.cuda.synchronize()
        return kept


def test_20000_captured_steps_leave_memory_as_it_was() -> None:
    soak = Soak()
    for _ in range(2):  # caches fill, and what is made once is made
        soak.round()
    first = soak.round()
    gc.collect()
    torch.cuda.synchronize()
    device, host = device_bytes(), host_bytes()
    peak = 0
    for number in range(REPLAYS // ROUND):
        last = soak.round()
        if number % 20 == 0:
            peak = max(peak, host_bytes())
    gc.collect()
    torch.cuda.synchronize()
    after, host_after = device_bytes(), host_bytes()
    print(f"device {device} -> {after}, host {host / MEGABYTE:.1f} -> {host_after / MEGABYTE:.1f} MiB")
    assert after[0] - device[0] <= sum(one.nbytes for one in last), "torch's allocations have grown"
    assert after[1] == device[1], "torch has reserved more"
    assert after[2] - device[2] < 2 * MEGABYTE, "the driver or a library has taken more of the device"
    assert host_after - host < 8 * MEGABYTE, "the host's memory has grown"
    assert len(first) == len(last) > 20
    for one, other in zip(first, last, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16)), "a step gives another result than before"
