"""20,000 captured decode steps among eager ones: device and host memory stay as they are, and results too."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from swa_backend.cache import PagedCache
from swa_backend.fuzz.batches import Batch
from swa_backend.fuzz.case import Case, Knobs, RequestSpec
from swa_backend.fuzz.engine import Engine
from swa_backend.fuzz.model import Model
from swa_backend.fuzz.step import Step
from swa_backend.layer_types import LayerType
from swa_backend.registry import get_backend
from swa_backend.write import write_kv

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


@dataclass
class Inputs:
    """A step on the device: its batch, what each cache is given, queries, picks and positions."""

    step: Step
    batch: Batch
    writes: list[tuple[torch.Tensor, PagedCache, torch.Tensor]]
    q: torch.Tensor
    picks: torch.Tensor | None
    positions: torch.Tensor

    def picks_for(self, kind: LayerType) -> torch.Tensor | None:
        return self.picks if kind.indexed else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that a graph reads."""
        batch = self.batch.metadata
        own = [batch.query_start_loc, batch.seq_lens, batch.block_table_tensor, batch.slot_mapping, batch.replay_start]
        for table, slots in (self.batch.groups or {}).values():
            own += [table, slots]
        return [tensor for tensor in (*own, self.q, self.picks, self.positions) if tensor is not None]


class Soak:
    """Steps of an engine's history, the captured ones from a graph and an eager one after every tenth of them.

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
        for cache in (*self.model.windows.values(), *self.model.compressed.values()):
            cache.pages.data.zero_()  # not every step of the history runs: some pages are never written
        self.inputs = self._inputs(Engine(case))
        self.static = next(one for one in self.inputs if one.step.captured)
        self._fixed = [tensor.clone() for tensor in self.static.tensors]  # the graph's own are overwritten
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._launch(self.static)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self._launch(self.static)

    def _inputs(self, engine: Engine) -> list[Inputs]:
        made: list[Inputs] = []
        captured = 0
        while captured < ROUND:
            step = engine.step()
            assert step is not None, "the history is too short"
            if len(step.row) and (step.captured or 10 * (len(made) - captured) < captured):
                made.append(self._input(step))
                captured += step.captured
            engine.finish(step)
        return made

    def _input(self, step: Step) -> Inputs:
        model = self.model
        keys, writes = model.keys_of(step), []

        def record(rows: torch.Tensor, cache: PagedCache, slots: torch.Tensor) -> None:
            writes.append((rows.clone(), cache, slots.clone()))

        model.write(step, keys, write=record)
        kinds = [kind for kind in model.layers_of(step) if kind.indexed]
        picks = model.picks(step, kinds[0], random.Random(step.number)) if kinds else None
        positions = np.zeros(step.num_tokens, dtype=np.int64)
        positions[: len(step.position)] = step.position
        return Inputs(
            step,
            Batch.of(step, self.device),
            writes,
            model.queries(step, keys, model.types[0]),
            None if picks is None else torch.from_numpy(picks).to(self.device),
            torch.from_numpy(positions).to(self.device),
        )

    def _launch(self, one: Inputs) -> list[torch.Tensor]:
        """Build and attend with every layer; outputs of the layers."""
        batch, step = one.batch, one.step
        if step.captured:
            shape = len(step.parts), step.num_tokens
            metadata = self.model.builder.capture_build(*shape, batch.metadata, groups=batch.groups)
        else:
            metadata = self.model.builder.build(0, batch.metadata, groups=batch.groups)
        return [
            self.model.attend(step, metadata, kind, one.q, one.picks_for(kind), one.positions).out
            for kind in self.model.layers_of(step)
        ]

    def round(self) -> list[torch.Tensor]:
        """All steps once; outputs of every tenth captured one."""
        kept: list[torch.Tensor] = []
        for number, one in enumerate(self.inputs):
            for rows, cache, slots in one.writes:
                write_kv(rows, cache, slots)
            if not one.step.captured:
                self._launch(one)
                continue
            source = self._fixed if one is self.static else one.tensors
            for target, value in zip(self.static.tensors, source, strict=True):
                target.copy_(value)
            self.graph.replay()
            if number % 10 == 0:
                kept += [out.clone() for out in self.results]
        torch.cuda.synchronize()
        return kept


def test_20000_captured_steps_leave_memory_as_it_was() -> None:
    soak = Soak()
    for _ in range(2):  # caches fill, and what is made once is made
        soak.round()
    first = soak.round()
    last = soak.round()
    gc.collect()
    device, host = device_bytes(), host_bytes()
    for number in range(REPLAYS // ROUND):
        del last
        last = soak.round()
        if number % 20 == 0:
            print(
                f"{number * ROUND} replays, host {host_bytes() / MEGABYTE:.1f} MiB, device {device_bytes()}", flush=True
            )
    gc.collect()
    after, host_after = device_bytes(), host_bytes()
    print(f"device {device} -> {after}, host {host / MEGABYTE:.1f} -> {host_after / MEGABYTE:.1f} MiB")
    assert after[0] == device[0], "torch has allocated more"
    assert after[1] == device[1], "torch has reserved more"
    assert after[2] - device[2] < 2 * MEGABYTE, "the driver or a library has taken more of the device"
    assert host_after - host < 8 * MEGABYTE, "the host's memory has grown"
    assert len(first) == len(last) > 20
    for one, other in zip(first, last, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16)), "a step gives another result than before"
