"""Compile ahead: every key of every kernel that a configuration can need, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

# Importing a module declares its kernels.
from swa_backend.kernels import (  # noqa: F401
    cache_gather,
    cache_write,
    combine,
    metadata,
    sparse_mla,
    sparse_mla_reduce,
    sparse_mla_window_launch,
    topk,
)
from swa_backend.kernels.jit import Kernel, Launcher, all_kernels, mark_warm
from swa_backend.kernels.triton_internals import INTERPRETED, one_parse_at_a_time, target_of
from swa_backend.platform import CacheRole

if TYPE_CHECKING:
    from swa_backend.backend import Backend
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig

Progress = Callable[[int, int, str], object]
MOST_WORKERS = 16
SHARED = "swa_backend"


def warmup(
    backend: Backend,
    config: BackendConfig,
    *,
    device: torch.device | None = None,
    progress: Progress | None = None,
    cache: Path | str | None = None,
    mounted_at: Path | str | None = None,
    workers: int | None = None,
) -> tuple[str, ...]:
    """Compile every key that ``config`` can need: of the shared kernels, and of the platform's own imported so far.

    A backend with a target compiles for that chip, which need not be here, into a Triton cache. One without compiles
    for ``device`` and loads what it compiles; afterwards ``SWA_BACKEND_JIT_STRICT=1`` makes any other key an error.

    Args:
        backend: whose platform and target.
        config: the configuration.
        device: the GPU to load for; None = the current one. Without a target only.
        progress: called as ``progress(done, total, kernel and key)``.
        cache: folder of the Triton cache to fill; None = Triton's own. With a target only.
        mounted_at: where those who use the cache will see it, if elsewhere. With a target only.
        workers: keys compiled at a time; None = as many as there are processors, at most 16.

    Returns:
        Kernel and key of each, those that were compiled before included.

    Raises:
        triton.runtime.errors.OutOfResources: a kernel needs more than the chip has.
        Exception: whatever Triton's compiler raises.
    """
    dialects = {role: backend.cache_dialect(role) for role in CacheRole}
    # Another platform may have been loaded in this process; its kernels are not for this one's chips.
    packages = {SHARED, backend.get_builder_cls().__module__.partition(".")[0]}
    if backend.target is None:
        place = device if device is not None else torch.device("cpu" if INTERPRETED else "cuda")
        mark_warm(False)
        names = _compile_all(list(launchers_of(config, dialects, place, packages)), progress, workers)
        mark_warm()
        return names
    from swa_backend.kernels.offline import compile_only

    with compile_only(backend.target, cache=cache, mounted_at=mounted_at):
        launchers = list(launchers_of(config, dialects, torch.device("cpu"), packages))
        return _compile_all(launchers, progress, workers, again=True)  # perhaps for another cache than before


def launchers_of(
    config: BackendConfig, dialects: Mapping[CacheRole, Dialect], device: torch.device, packages: Collection[str]
) -> Iterable[Launcher]:
    """The launcher of every key that a configuration can need on a device, of kernels in ``packages`` that serve it."""
    index = None
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
    target = target_of(index)
    return (
        one.on(device, **key)
        for one, key in keys_of(config, dialects)
        if one.package in packages and one.serves(target)
    )


def keys_of(
    config: BackendConfig, dialects: Mapping[CacheRole, Dialect]
) -> Iterable[tuple[Kernel, Mapping[str, object]]]:
    """Every key of every kernel that a configuration can need, on any chip."""
    return ((one, key) for one in all_kernels() for key in one.keys(config, dialects))


def _compile_all(
    launchers: list[Launcher], progress: Progress | None, workers: int | None, *, again: bool = False
) -> tuple[str, ...]:
    # In a context of its own: when a kernel does not compile, Triton's mode stays on in the context that it was set in.
    with one_parse_at_a_time():
        return copy_context().run(_compile_together, launchers, progress, workers, again)


def _compile_together(
    launchers: list[Launcher], progress: Progress | None, workers: int | None, again: bool
) -> tuple[str, ...]:
    total = len(launchers)
    names = tuple(str(launcher) for launcher in launchers)
    tell: Progress = progress if progress is not None else lambda done, total, text: None
    tell(0, total, "")
    started: dict[Future[Any], list[tuple[Launcher, Any]]] = {}
    done = 0
    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, MOST_WORKERS)) as pool, _at_once(pool):
        for launcher in launchers:
            if launcher.ready and not again:
                done += 1
                tell(done, total, str(launcher))
                continue
            compiling = launcher.start_compile()
            future = getattr(compiling, "future", None)
            if future is None:  # compiled on the spot
                launcher.finish(compiling)
                done += 1
                tell(done, total, str(launcher))
            else:  # keys that come to the same code share one
                started.setdefault(future, []).append((launcher, compiling))
        for future in as_completed(started):
            for launcher, compiling in started[future]:
                launcher.finish(compiling)
                done += 1
                tell(done, total, str(launcher))
    return names


def _at_once(pool: ThreadPoolExecutor) -> Any:
    """Triton's mode in which compiling goes to a pool, where this Triton has it."""
    mode = getattr(triton, "AsyncCompileMode", None)
    return nullcontext() if mode is None or INTERPRETED else mode(pool)
