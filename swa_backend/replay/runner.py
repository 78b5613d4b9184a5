"""The replay itself: read, schedule, write, build, attend, check, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from swa_backend.backend import Backend
from swa_backend.config import BackendConfig
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.problems import Problems, count_problems
from swa_backend.registry import get_backend
from swa_backend.replay.blocks import BlockManager, PageKeys
from swa_backend.replay.content import Content, DataMode
from swa_backend.replay.history import Histories
from swa_backend.replay.layers import Layers, group_specs
from swa_backend.replay.options import ReplayOptions, Verify
from swa_backend.replay.oracle import Oracle
from swa_backend.replay.report import ReplayReport, StepTimes
from swa_backend.replay.scheduler import Scheduler, SchedulerLimits, Work
from swa_backend.replay.step import Step, make_step
from swa_backend.replay.step_check import StepOracle, StepRows
from swa_backend.replay.traces import Request, Trace, read_trace, resolve_trace

Progress = Callable[[int, int, str], None]


def run_replay(options: ReplayOptions, progress: Progress | None = None) -> ReplayReport:
    """Replay a trace and check what the library makes of it.

    Args:
        options: what to run.
        progress: called after every step with (tokens done, tokens of the trace, what is going on).

    Raises:
        ConfigError: a setting is out of range or does not fit the model or the trace.
        TraceError: the trace cannot be read, or has a bad row.
        PlatformError: the platform is not registered or not usable.
        ProviderError: no attention provider of the platform serves the model.
    """
    start = time.perf_counter()
    backend = get_backend(options.platform)
    model = options.read_model()
    layer_types = options.layer_types(model)
    options.backend_config(model, 1)  # settings that do not fit the model are told before the trace is read
    limit = options.max_model_len or model.max_position_embeddings
    trace = read_trace(
        resolve_trace(options.trace),
        max_requests=options.request_limit,
        max_model_len=limit,
        skip_bad_rows=options.skip_bad_rows,
    )
    config = options.backend_config(model, max(request.total_length for request in trace.requests))
    replay = _Replay(options, trace, layer_types, config, backend)
    with count_problems() if options.validate else nullcontext() as problems:
        replay.run(progress)
    return replay.report(time.perf_counter() - start, problems)


@dataclass(slots=True)
class _Counts:
    """Sums over the steps so far."""

    tokens: int = 0
    rejected: int = 0
    build: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)
    peak_pages: dict[str, int] = field(default_factory=dict)


class _Replay:
    """Everything that lives as long as one replay."""

    def __init__(
        self,
        options: ReplayOptions,
        trace: Trace,
        layer_types: Sequence[LayerType],
        config: BackendConfig,
        backend: Backend,
    ) -> None:
        self.options = options
        self.trace = trace
        self.config = config
        self.device = torch.device(backend.platform.device_type)
        seed, num_pages = options.seed, options.num_pages(trace.requests)
        self.histories = Histories(trace.requests, seed, {kind.ratio for kind in layer_types if kind.compressed})
        self.groups = group_specs(layer_types, config, num_pages)
        self.manager = BlockManager(self.groups, config.scheduler.max_model_len, seed)
        keys = PageKeysOf(self.histories, self.manager)
        self.scheduler = Scheduler(trace.requests, self.manager, keys, self._limits())
        content = Content(DataMode(options.data), seed, config.num_heads, self.device)
        self.layers = _allocate(lambda: Layers(layer_types, config, backend, content, num_pages, seed), num_pages)
        self.rows = StepRows(self.groups, self.histories, config.model.window_size, self.device)
        self.oracle = self._make_oracle() if options.runs_attention else None
        self.counts = _Counts(peak_pages={group.name: 0 for group in self.groups})

    def _limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.options.max_seqs,
            max_num_batched_tokens=self.options.max_batched_tokens,
            decode_threshold=self.config.decode_threshold,
            drafts=self.options.drafts,
            acceptance=self.options.acceptance,
            seed=self.options.seed,
        )

    def _make_oracle(self) -> StepOracle:
        layers, options = self.layers.layers, self.options
        compressed = [layer.compressed.layout for layer in layers if layer.compressed is not None]
        oracle = Oracle(
            DataMode(options.data),
            options.seed,
            layers[0].window.layout,
            compressed[0] if compressed else layers[0].window.layout,
            self.config.num_heads,
            {layer.type: layer.attn_sink for layer in layers},
            device=self.device,
        )
        return StepOracle(
            oracle,
            self.histories,
            self.config.model.window_size,
            Verify(options.verify),
            sum(request.total_length for request in self.trace.requests),
            options.seed,
        )

    def run(self, progress: Progress | None) -> None:
        total = sum(request.total_length for request in self.trace.requests)
        while work := self.scheduler.step():
            self._note_pages()
            self._run_step(work)
            self.scheduler.finish(work)
            if progress is not None:
                waiting = sum(state.request.total_length for state in self.scheduler.waiting)
                left = sum(state.request.total_length - state.computed for state in self.scheduler.running)
                text = f"step {len(self.counts.build)}, {self.scheduler.stats.finished} requests finished"
                progress(total - waiting - left, total, text)

    def _run_step(self, work: Sequence[Work]) -> None:
        counts = self.counts
        for one in work:
            if one.rejected:
                self.histories.reject(one.request, one.end - one.rejected, one.rejected)
        step = make_step(work, self.manager, self.histories, self.device)
        start = time.perf_counter()
        metadata = self.layers.build(step)
        counts.build.append(time.perf_counter() - start)
        self.layers.write(step, metadata, self.histories)
        self._attend(step, metadata)
        self.histories.restore()
        counts.tokens += step.num_tokens
        counts.rejected += sum(one.rejected for one in work)

    def _attend(self, step: Step, metadata: DeepseekSparseSWAMetadata) -> None:
        """Map top-k picks and run attention, timed; check the rows of both, and outputs."""
        picks = self.layers.choose(step)
        self._synchronize()
        start = time.perf_counter()
        picked = {kind: self.layers.map_picks(kind, own, step, metadata) for kind, own in picks.items()}
        self._synchronize()
        seconds = time.perf_counter() - start
        self.rows.check(step, metadata, picks, picked)
        if self.oracle is None:
            return
        tokens = self.oracle.choose(step)
        self.oracle.verdict.tokens += len(tokens)
        for layer in self.layers.layers:
            q = self.layers.content.queries(step.keys, layer.type)
            self._synchronize()
            start = time.perf_counter()
            out = self.layers.attend(layer, step, metadata, q, picked.get(layer.type))
            self._synchronize()
            seconds += time.perf_counter() - start
            self.oracle.compare(step, tokens, layer.type, out, picks.get(layer.type))
        self.counts.attention.append(seconds)

    def _note_pages(self) -> None:
        for name, peak in self.counts.peak_pages.items():
            self.counts.peak_pages[name] = max(peak, self.manager.held(name))

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def report(self, seconds: float, problems: Problems | None) -> ReplayReport:
        trace, stats, counts, rows = self.trace, self.scheduler.stats, self.counts, self.rows.verdict
        outputs = self.oracle.verdict if self.oracle is not None else None
        verified = outputs.tokens if outputs is not None else 0
        return ReplayReport(
            trace=trace.path,
            trace_format=trace.format,
            model=self.config.model.name,
            platform=self.layers.backend.name,
            provider=self.layers.builder.provider.name,
            layers=tuple(layer.type.value for layer in self.layers.layers),
            data=str(self.options.data),
            seed=self.options.seed,
            requests=stats.finished,
            skipped_rows=trace.bad_rows,
            steps=len(counts.build),
            tokens=counts.tokens,
            prompt_tokens=sum(request.input_length for request in trace.requests),
            output_tokens=sum(request.output_length for request in trace.requests),
            rejected_drafts=counts.rejected,
            preemptions=stats.preemptions,
            reused_tokens=stats.reused_tokens,
            build=StepTimes.of(counts.build),
            attention=StepTimes.of(counts.attention),
            pages={group.name: group.num_pages for group in self.groups},
            peak_pages=dict(counts.peak_pages),
            tokens_verified=verified,
            output_mismatches=outputs.mismatches if outputs is not None else 0,
            worst_error=outputs.worst_error if outputs is not None and verified else None,
            rows_checked=rows.rows,
            row_mismatches=rows.mismatches,
            seconds=seconds,
            examples=(
                *rows.examples,
                *(outputs.examples if outputs is not None else ()),
                *(problems.texts() if problems is not None else ()),
            ),
            problems=None if problems is None else {kind.value: count for kind, count in problems.counts.items()},
        )


def _allocate(make: Callable[[], Layers], num_pages: int) -> Layers:
    """``make()``, with memory that runs out told as what asked for it."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:  # PyTorch's allocators raise a plain RuntimeError on a host
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        raise ConfigError(
            "pages",
            found=f"{num_pages} pages of each cache, which could not be allocated",
            legal="what fits the memory of the device",
            fix="Lower --pages or --max-batched-tokens.",
        ) from error


class PageKeysOf:
    """Content keys of a request's full pages, made once for each request."""

    def __init__(self, histories: Histories, manager: BlockManager) -> None:
        self._histories = histories
        self._manager = manager
        self._made: dict[int, PageKeys] = {}

    def __call__(self, request: Request) -> PageKeys:
        if request.id not in self._made:
            chain: np.ndarray = self._histories.chain(request.id)
            self._made[request.id] = {
                name: chain[group.page_tokens - 1 :: group.page_tokens].tolist()
                for name, group in self._manager.groups.items()
            }
        return self._made[request.id]
