"""One step of a replayed trace, without caches and attention: schedule up to it, keep what goes into the builder."""

from __future__ import annotations

import torch

from swa_backend.errors import ConfigError
from swa_backend.inspect.step_input import CompressedInput, StepInput
from swa_backend.replay.blocks import BlockManager
from swa_backend.replay.content import TopkChooser
from swa_backend.replay.history import Histories
from swa_backend.replay.layers import group_specs
from swa_backend.replay.options import ReplayOptions
from swa_backend.replay.runner import PageKeysOf
from swa_backend.replay.scheduler import Scheduler, SchedulerLimits, Work
from swa_backend.replay.step import WINDOW_GROUP, make_step
from swa_backend.replay.traces import read_trace, resolve_trace


def step_of_trace(options: ReplayOptions, number: int) -> StepInput:
    """The step with this number, from 1 on, of the replay that ``swa-backend replay`` runs with the same options.

    Raises:
        ConfigError: a setting does not fit, or the replay has fewer steps.
        TraceError: the trace cannot be read.
    """
    model = options.read_model()
    layer_types = options.layer_types(model)
    path = resolve_trace(options.trace)
    trace = read_trace(
        path,
        max_requests=options.request_limit,
        max_model_len=options.max_model_len or model.max_position_embeddings,
        skip_bad_rows=options.skip_bad_rows,
    )
    config = options.backend_config(model, max(request.total_length for request in trace.requests))
    pages = options.num_pages(trace.requests)
    groups = {group.name: group for group in group_specs(layer_types, config, pages)}
    histories = Histories(trace.requests, options.seed, {kind.ratio for kind in layer_types if kind.compressed})
    manager = BlockManager(list(groups.values()), config.scheduler.max_model_len, options.seed)
    limits = SchedulerLimits(
        options.max_seqs, options.max_batched_tokens, config.decode_threshold, options.drafts, options.acceptance,
        options.seed,
    )  # fmt: skip
    scheduler = Scheduler(trace.requests, manager, PageKeysOf(histories, manager), limits)
    work = _work_of_step(scheduler, number)
    for one in work:
        if one.rejected:
            histories.reject(one.request, one.end - one.rejected, one.rejected)
    cpu = torch.device("cpu")
    step = make_step(work, manager, histories, cpu)
    compressed = {}
    for kind in layer_types:
        if kind.compressed:
            table, slots = step.groups[kind.value]
            chooser = TopkChooser(kind, model.index_topk, options.seed, cpu) if kind.indexed else None
            picks = None if chooser is None else chooser.choose(step.keys, (step.positions + 1) // kind.ratio)
            compressed[kind] = CompressedInput(groups[kind.value].page_tokens, pages, table, slots, picks)
    return StepInput(f"step {number} of {path.name}", config, step.batch, groups[WINDOW_GROUP].num_pages, compressed)


def _work_of_step(scheduler: Scheduler, number: int) -> list[Work]:
    for done in range(number):
        work = scheduler.step()
        if not work:
            raise ConfigError(
                "step", found=number, legal=f"1 to {done}, the steps of this replay", fix="Name a step that it has."
            )
        if done + 1 < number:
            scheduler.finish(work)
    return work
