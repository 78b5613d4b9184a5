"""Runs one history through the library and checks every step of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from swa_backend.attention import AttentionResult
from swa_backend.backend import Backend
from swa_backend.fuzz.batches import Batch
from swa_backend.fuzz.case import Case
from swa_backend.fuzz.check import MismatchError, check_metadata
from swa_backend.fuzz.engine import Counts, Engine
from swa_backend.fuzz.model import Model
from swa_backend.fuzz.rows import Right, right_metadata
from swa_backend.fuzz.step import Kind, Step
from swa_backend.layer_types import LayerType
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.replay.hashing import mix_int

_SAMPLE = 3  # tokens of a step whose outputs are compared
_STABLE = (
    "is_valid_token",
    "token_to_req_indices",
    "decode_swa_indices",
    "decode_swa_lens",
    "prefill_swa_indices",
    "prefill_swa_lens",
    "prefill_gather_lens",
    "prefill_left_visible",
    "decode_swa_ragged_indices",
    "decode_swa_ragged_indptr",
)


class Mode(StrEnum):
    """Whether decode steps are launched one by one, or replayed from a graph (without a GPU: built for one)."""

    EAGER = "eager"
    CAPTURED = "captured"


class CaseFailedError(Exception):
    """A history went wrong.

    Attributes:
        step: number of the step.
        text: what was found.
    """

    def __init__(self, step: int, text: str) -> None:
        super().__init__(f"step {step}: {text}")
        self.step, self.text = step, text


@dataclass(slots=True)
class Tally:
    """What was checked: builds and updates, tokens, index rows, (token, layer) outputs, steps of captured shape."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    outputs: int = 0
    captured: int = 0
    engine: Counts = field(default_factory=Counts)


def run_case(
    case: Case, backend: Backend, device: torch.device, mode: Mode = Mode.EAGER, *, attention: bool = True
) -> Tally:
    """Run a history and check every step.

    Args:
        case: the history.
        backend: the platform under test.
        device: where its tensors live.
        mode: how decode steps of the captured shape run.
        attention: also write caches and run attention.

    Raises:
        CaseFailedError: a step's result is wrong, or the library raised.
    """
    run = _Run(case, backend, device, mode, attention)
    while (step := run.engine.step()) is not None:
        try:
            run.step(step)
            problems = run.engine.tables.check()
            if problems:
                raise RuntimeError(f"the engine's own books are wrong: {problems[0]}")
        except Exception as error:
            kind = "" if isinstance(error, MismatchError) else f"{type(error).__name__}: "
            raise CaseFailedError(step.number, f"{kind}{error}") from error
        run.engine.finish(step)
    run.tally.engine = run.engine.counts
    return run.tally


class _Run:
    def __init__(self, case: Case, backend: Backend, device: torch.device, mode: Mode, attention: bool) -> None:
        self.case, self.device, self.mode, self.attention = case, device, mode, attention
        self.engine = Engine(case)
        self.model = Model(case, backend, device)
        self.tally = Tally()
        self._addresses: dict[str, int] = {}
        self._graph: _Graph | None = None

    def step(self, step: Step) -> None:
        """Build, write, attend, check; then advance a draft step as often as it says."""
        dice = random.Random(mix_int(self.case.seed, step.number, 0xC4EC))
        right = right_metadata(step, self.case.knobs)
        batch = Batch.of(step, self.device)
        if step.captured:
            self._captured(step, right, batch, dice)
            return
        metadata = self.model.builder.build(0, batch.metadata, groups=batch.groups)
        self._check(step, right, metadata)
        if self.attention:
            self._attend(step, right, metadata, dice)
        for _ in range(step.updates if step.num_tokens else 0):
            step = step.advanced(self.case, self.engine.tables, dice)
            batch.take(step)
            self.model.builder.update_draft_decode_metadata(metadata)
            right = right_metadata(step, self.case.knobs)
            self._check(step, right, metadata)
            if self.attention:
                self._attend(step, right, metadata, dice)

    def _captured(self, step: Step, right: Right, batch: Batch, dice: random.Random) -> None:
        self.tally.captured += 1
        if self.mode is Mode.EAGER or self.device.type != "cuda":
            metadata = self.model.builder.capture_build(
                len(step.parts), step.num_tokens, batch.metadata, groups=batch.groups
            )
            self._check(step, right, metadata)
            if self.attention:
                self._attend(step, right, metadata, dice)
            return
        keys = self.model.keys_of(step)
        picks = {kind: self.model.picks(step, kind, dice) for kind in self.model.types}
        if self.attention:
            self.model.write(step, keys)
        if self._graph is None:
            self._graph = _Graph(self.model, step, batch, attention=self.attention)
        self._graph.replay(step, keys, picks)
        self._check(step, right, self._graph.metadata)
        for kind, result in self._graph.results.items():
            self._compare(step, right, keys, kind, picks[kind], result, dice)

    def _check(self, step: Step, right: Right, metadata: DeepseekSparseSWAMetadata) -> None:
        self.tally.steps += 1
        self.tally.tokens += step.num_tokens
        self.tally.rows += check_metadata(metadata, step, right, self.case.knobs, self.model.builder)
        for name in _STABLE:
            tensor = getattr(metadata, name)
            if tensor is None or not tensor.numel():
                continue
            key = f"{name} {step.causal}" if name == "decode_swa_indices" else name
            if self._addresses.setdefault(key, tensor.data_ptr()) != tensor.data_ptr():
                raise MismatchError(f"{name} has moved in memory")

    def _attend(self, step: Step, right: Right, metadata: DeepseekSparseSWAMetadata, dice: random.Random) -> None:
        if not step.num_tokens:
            return
        keys = self.model.keys_of(step)
        self.model.write(step, keys)
        positions = torch.from_numpy(_padded(step.position, step.num_tokens)).to(self.device)
        for kind in self.model.layers_of(step):
            picks = self.model.picks(step, kind, dice)
            on_device = None if picks is None else torch.from_numpy(picks).to(self.device)
            q = self.model.queries(step, keys, kind)
            result = self.model.attend(step, metadata, kind, q, on_device, positions)
            self._compare(step, right, keys, kind, picks, result, dice)

    def _compare(
        self, step: Step, right: Right, keys: np.ndarray, kind: LayerType, picks: np.ndarray | None,
        result: AttentionResult, dice: random.Random,
    ) -> None:  # fmt: skip
        count = len(step.row)
        tokens = sorted({0, count - 1, *(dice.randrange(count) for _ in range(_SAMPLE - 2))}) if count else []
        self.model.compare(step, right, keys, kind, picks, result, tokens)
        self.tally.outputs += len(tokens)


class _Graph:
    """A captured decode step: build, top-k mapping and attention of every layer."""

    def __init__(self, model: Model, step: Step, batch: Batch, *, attention: bool) -> None:
        self._model, self._batch = model, batch
        tokens, knobs = step.num_tokens, model.knobs
        device = model.device
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._queries = {
            kind: torch.zeros(tokens, knobs.heads, 512, dtype=torch.bfloat16, device=device) for kind in model.types
        }
        self._picks = {
            kind: torch.full((tokens, knobs.topk), -1, dtype=torch.int32, device=device)
            for kind in model.types
            if kind.indexed
        }
        self.results: dict[LayerType, AttentionResult] = {}

        def launch() -> DeepseekSparseSWAMetadata:
            metadata = model.builder.capture_build(len(step.parts), tokens, batch.metadata, groups=batch.groups)
            for kind in model.types if attention else ():
                self.results[kind] = model.attend(
                    step, metadata, kind, self._queries[kind], self._picks.get(kind), self._positions
                )
            return metadata

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.metadata = launch()

    def replay(self, step: Step, keys: np.ndarray, picks: dict[LayerType, np.ndarray | None]) -> None:
        """Run it on another step of the same shape."""
        self._batch.take(step)
        self._positions.copy_(torch.from_numpy(_padded(step.position, step.num_tokens)))
        for kind, q in self._queries.items():
            q.copy_(self._model.queries(step, keys, kind))
            own = picks[kind]
            if own is not None:
                self._picks[kind].copy_(torch.from_numpy(own))
        self._graph.replay()


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    padded = np.zeros(length, dtype=np.int64)
    padded[: len(values)] = values
    return padded


def launcher(backend: Backend, device: torch.device, mode: Mode, *, attention: bool = True) -> Callable[[Case], Tally]:
    """`run_case` with everything but the case settled."""
    return lambda case: run_case(case, backend, device, mode, attention=attention)


__all__ = ["CaseFailedError", "Kind", "Mode", "Tally", "launcher", "run_case"]
