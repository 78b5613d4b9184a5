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

GROUPS = 8
"""Cache groups of one launch (`swa_backend.kernels.metadata.MAX_GROUPS`)."""

_WRAPPED = "__swa_backend_wrapped__"


class SharedBatch:
    """The builds of one batch that are launched together.

    Attributes:
        common: vLLM's batch, as the first builder got it.
        replay_start: likewise.
        builders: of each group.
        groups: (builder, vLLM's batch, object that was handed out) of each group.
        read: launches what was noted, if that has not happened, and fills the objects.
    """

    __slots__ = ("builders", "common", "finish", "groups", "launched", "read", "replay_start")

    def __init__(self, common: Any, replay_start: torch.Tensor | None) -> None:
        self.common = common
        self.replay_start = replay_start
        self.builders: list[Any] = []
        self.groups: list[tuple[Any, Any, Any]] = []
        self.launched = False
        self.finish: Callable[[], None] | None = None
        self.read = self._read

    def takes(self, builder: Any, common: Any, replay_start: torch.Tensor | None) -> bool:
        """Whether this builder's batch is the one here, in everything but block table and slots."""
        builders = self.builders
        return (
            builder.group_kind is builders[0].group_kind
            and not self.launched
            and len(builders) < GROUPS
            and builder not in builders
            and _same_batch(self.common, common)
            and (replay_start is self.replay_start or _same(self.replay_start, replay_start))
        )

    def launch(self) -> None:
        """Launch what was noted, once."""
        if not self.launched:
            self.launched = True
            self.finish = self.builders[0].launch_together(self)

    def _read(self) -> None:
        self.launch()
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


def _same_batch(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if (
        one.query_start_loc is other.query_start_loc
        and one.seq_lens is other.seq_lens
        and one.query_start_loc_cpu is other.query_start_loc_cpu
        and one.seq_lens_cpu_upper_bound is other.seq_lens_cpu_upper_bound
        and one.num_actual_tokens == other.num_actual_tokens
        and one.causal is other.causal
        and one.mm_req_doc_ranges is other.mm_req_doc_ranges
    ):
        return True  # what vLLM's loops do
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
    for batch in reversed(batches or ()):
        if batch.takes(builder, common, replay_start):
            break
    else:
        batch = SharedBatch(common, replay_start)
        if batches is not None:
            batches.append(batch)
    made = new_pending(builder.classes, batch.read)
    batch.builders.append(builder)
    batch.groups.append((builder, common, made))
    if batches is None:
        batch.launch()
    return made


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
