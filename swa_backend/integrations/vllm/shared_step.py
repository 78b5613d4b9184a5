"""Builders that vLLM calls one after the other for the same batch build it together.

vLLM calls the builder of each cache group in turn, each with its own block table and slots. No builder learns from its
call which others will follow, so the loops around those calls (`surface.STEP_FUNCTIONS`) are wrapped: inside, a build
only notes what it was given and hands out an object that is not filled yet; when the loop returns, the groups of a
batch are built in one launch (of at most `GROUPS` of them). Whoever reads an object earlier makes the build happen
then. Outside of such a loop a build is launched at once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from swa_backend.errors import ConfigError
from swa_backend.integrations.vllm.metadata import new_pending
from swa_backend.integrations.vllm.surface import STEP_FUNCTIONS, find

if TYPE_CHECKING:
    import torch

    from swa_backend.metadata import DeepseekSparseSWAMetadata

GROUPS = 8
"""Cache groups of one launch (`swa_backend.kernels.metadata.MAX_GROUPS`)."""

_WRAPPED = "__swa_backend_wrapped__"


class SharedBatch:
    """The builds of one batch that are launched together.

    It does not know the objects that were handed out for it, since they know it: a step leaves no circle of references
    behind, and what a step held is free as soon as the next one has taken its place.

    Attributes:
        builders: of each group, in the order in which vLLM called them.
        commons: vLLM's batch of each group.
        replay_start: as the first builder got it.
    """

    __slots__ = ("_assemble", "_ours", "builders", "commons", "launched", "replay_start")

    def __init__(self, replay_start: torch.Tensor | None) -> None:
        self.builders: list[Any] = []
        self.commons: list[Any] = []
        self.replay_start = replay_start
        self.launched = False
        self._assemble: Callable[[], tuple[DeepseekSparseSWAMetadata, ...]] | None = None
        self._ours: tuple[DeepseekSparseSWAMetadata, ...] = ()

    def takes(self, builder: Any, common: Any, replay_start: torch.Tensor | None) -> bool:
        """Whether this builder's batch is the one here, in everything but block table and slots."""
        builders, first = self.builders, self.commons[0]
        return (
            builder.group_kind is builders[0].group_kind
            and not self.launched
            and len(builders) < GROUPS
            and builder not in builders
            and _equals(first, common)
            and (replay_start is self.replay_start or _same(self.replay_start, replay_start))
        )

    def launch(self) -> None:
        """Launch what was noted, once."""
        if not self.launched:
            self.launched = True
            self._assemble = self.builders[0].launch_together(self)

    def ours(self, group: int) -> DeepseekSparseSWAMetadata:
        """This library's metadata of a group; launches what was noted, if that has not happened."""
        self.launch()
        if self._assemble is not None:
            self._ours, self._assemble = self._assemble(), None
        return self._ours[group]


def _equals(one: Any, other: Any) -> bool:
    return (
        one.num_reqs == other.num_reqs
        and one.num_actual_tokens == other.num_actual_tokens
        and one.max_query_len == other.max_query_len
        and one.causal is other.causal
        and one.mm_req_doc_ranges is other.mm_req_doc_ranges
        and _same(one.query_start_loc, other.query_start_loc)
        and _same(one.seq_lens, other.seq_lens)
        and _same(one.query_start_loc_cpu, other.query_start_loc_cpu)
        and _same(one.seq_lens_cpu_upper_bound, other.seq_lens_cpu_upper_bound)
    )


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
        and one.device == other.device
    )


class _Step(threading.local):
    """What this thread has open; ``batches`` is None outside of vLLM's loops."""

    batches: list[SharedBatch] | None = None


_step = _Step()


def note(builder: Any, common: Any, replay_start: torch.Tensor | None) -> Any:
    """Note a build and return the object that it will fill. Outside of vLLM's loops it is launched at once."""
    batches = _step.batches
    if batches:
        # What nearly every call finds: the batch of the call before, made of the same objects.
        batch = batches[-1]
        builders, first = batch.builders, batch.commons[0]
        if not (
            first.seq_lens is common.seq_lens
            and first.query_start_loc is common.query_start_loc
            and first.query_start_loc_cpu is common.query_start_loc_cpu
            and first.seq_lens_cpu_upper_bound is common.seq_lens_cpu_upper_bound
            and first.num_actual_tokens == common.num_actual_tokens
            and first.max_query_len == common.max_query_len
            and first.causal is common.causal
            and first.mm_req_doc_ranges is common.mm_req_doc_ranges
            and builder.group_kind is builders[0].group_kind
            and replay_start is batch.replay_start
            and not batch.launched
            and len(builders) < GROUPS
            and builder not in builders
        ):
            batch = _open(batches, builder, common, replay_start)
    else:
        batch = _open(batches, builder, common, replay_start)
    group = len(batch.builders)
    batch.builders.append(builder)
    batch.commons.append(common)
    if batches is None:
        batch.launch()
    return new_pending(builder.pending_cls, batch, group)


def _open(
    batches: list[SharedBatch] | None, builder: Any, common: Any, replay_start: torch.Tensor | None
) -> SharedBatch:
    for batch in batches or ():
        if batch.takes(builder, common, replay_start):
            return batch
    batch = SharedBatch(replay_start)
    if batches is not None:
        batches.append(batch)
    return batch


def together(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loop of vLLM's: builds inside it are launched when it returns."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _step.batches is not None:
            return original(*args, **kwargs)
        batches = _step.batches = []
        try:
            result = original(*args, **kwargs)
        finally:
            _step.batches = None
        for batch in batches:
            batch.launch()
        return result

    setattr(wrapper, _WRAPPED, True)
    return wrapper


def wrap_loops() -> tuple[str, ...]:
    """Wrap the loops of the model runners that are imported by now, wherever they are known by name.

    Returns:
        Those that were wrapped by this call.

    Raises:
        ConfigError: a model runner is there, but not its loop.
    """
    wrapped = []
    for module_name, path in STEP_FUNCTIONS.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        original = find(module, path)
        if original is None:
            raise ConfigError(
                module_name,
                found=f"no {path}",
                legal="the function that calls the metadata builders of every cache group",
                fix="Unset SWA_BACKEND_VLLM: this vLLM is laid out in another way.",
            )
        if not getattr(original, _WRAPPED, False):
            _replace(module, path, original)
            wrapped.append(f"{module_name}.{path}")
    return tuple(wrapped)


def _replace(module: ModuleType, path: str, original: Any) -> None:
    owner_path, _, name = path.rpartition(".")
    wrapper = together(original)
    if owner_path:
        setattr(find(module, owner_path), name, wrapper)
        return
    # Other modules may have imported the function by name.
    for one in list(sys.modules.values()):
        if isinstance(one, ModuleType) and vars(one).get(name) is original:
            setattr(one, name, wrapper)
