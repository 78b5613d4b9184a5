"""Launch layer of the Triton kernels: explicit compile keys, a registry for warm-up, and a cheap launch.

A kernel is declared once::

    @kernel(
        types={"rows": "*i32", "count": "i32", "stride": "i64"},    # every run-time argument, in order
        tuning={"cuda": Tuning(4, tiles={"TILE": 128}), "hip": Tuning(2, tiles={"TILE": 64})},
        keys=lambda config, dialects: ({"CAUSAL": c} for c in (True, False)),
    )
    def fill(rows, count, stride, CAUSAL: tl.constexpr, TILE: tl.constexpr): ...

and used through a launcher, which stands for one compile key on one device::

    launcher = fill.on(rows.device, CAUSAL=True)                    # one dictionary look-up
    launcher.launch((cdiv(n, launcher.tiles["TILE"]), 1, 1), rows, n, stride)

    bound = launcher.bind(stride)                                   # trailing arguments that rarely change
    bound.launch(grid, rows, n)                                     # per step, only the leading ones

Rules that make compilation predictable:

* The compile key is the target, the ``keys`` a caller passes to `Kernel.on`, and the tiles, warps and stages that
  `Tuning` holds for the target. Nothing else: run-time arguments are typed by ``types`` and never specialised, so
  neither a stride, a count, the value 1, alignment, nor the size of a storage compiles anything.
* Run-time arguments come first, constants (``tl.constexpr``) last. Strides and byte offsets are ``i64``, always.
* Optional tensors do not exist: pass any tensor and a constant that says not to read it. ``torch.bool`` is ``*u8``.
* Pointers carry no alignment. Where wide accesses need it, make it a key (``ALIGNED``) and hint inside the kernel.

Launching goes straight to Triton's compiled launcher. Tensors that are not on a GPU (the interpreter, compile-only
and simulating drivers), launch hooks of a profiler, or a Triton whose internals look different take Triton's own path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import triton

from swa_backend.errors import ProviderError
from swa_backend.kernels.argument_block import ArgumentBlock
from swa_backend.kernels.triton_internals import (
    INTERPRETED,
    check_dtypes,
    current_stream,
    fast_path,
    hooked,
    target_of,
)
from swa_backend.platform import CacheRole, Target

if TYPE_CHECKING:
    from swa_backend.cache_layout import Dialect
    from swa_backend.config import BackendConfig

Grid = tuple[int, int, int]
KeySource = Callable[["BackendConfig", Mapping[CacheRole, "Dialect"]], Iterable[Mapping[str, object]]]
STRICT_VARIABLE = "SWA_BACKEND_JIT_STRICT"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What differs between chips for one kernel: warps, stages, tile constants, further compiler options.

    ``spilled_bytes`` is how much of a thread's own memory the kernel may take: 0 unless it was looked at where the
    compiler spills, and found to be outside the loops that matter.
    """

    num_warps: int = 4
    num_stages: int = 2
    tiles: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    spilled_bytes: int = 0


@dataclass(slots=True)
class Stats:
    """Counters of this process: keys compiled (or found in Triton's cache) and launches made."""

    compilations: int = 0
    launches: int = 0


_stats = Stats()
_warm = False
_registry: dict[str, Kernel] = {}


def stats() -> Stats:
    """A copy of the counters."""
    return Stats(_stats.compilations, _stats.launches)


def mark_warm(warm: bool = True) -> None:
    """Declare warm-up finished: with ``SWA_BACKEND_JIT_STRICT=1`` a key first used after this is an error."""
    global _warm
    _warm = warm


def all_kernels() -> tuple[Kernel, ...]:
    """Every kernel declared by the modules imported so far, by name."""
    return tuple(_registry[name] for name in sorted(_registry))


def kernel(
    *, types: Mapping[str, str], tuning: Mapping[str, Tuning], keys: KeySource
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel.

    Args:
        types: Triton type of every run-time argument by name, in order: ``*i32``, ``i64``, ``fp32``, ..
        tuning: by ``vendor:arch``, else vendor, else ``""``. The interpreter asks for ``interpret``.
        keys: every compile key that a config can need, given the fp8 dialect of each cache role.
    """
    return lambda fn: Kernel(fn, types, tuning, keys)


def device_function(fn: Callable[..., Any]) -> Any:
    """A function called from kernels."""
    return triton.jit(fn)


class Kernel:
    """A Triton function, its argument types, its tuning, and its launchers so far."""

    def __init__(
        self, fn: Callable[..., Any], types: Mapping[str, str], tuning: Mapping[str, Tuning], keys: KeySource
    ) -> None:
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        if names[: len(types)] != tuple(types):
            raise TypeError(f"{fn.__name__}: 'types' must name the leading arguments in order, not {tuple(types)}")
        fn.__annotations__.update(types)
        self.name = fn.__name__
        self.package = fn.__module__.partition(".")[0]
        self.types = dict(types)
        self.constants = names[len(types) :]
        self.tuning = dict(tuning)
        self.keys = keys
        self.fn: Any = triton.jit(fn, do_not_specialize=list(types))
        self._launchers: dict[object, Launcher] = {}
        _registry[self.name] = self

    def serves(self, target: Target) -> bool:
        """Whether there is a tuning for a target; a kernel of one chip family has none for the others."""
        return any(name in self.tuning for name in _tuning_names(target))

    def tuning_for(self, target: Target) -> Tuning:
        """The most particular entry for a target.

        Raises:
            ProviderError: there is none.
        """
        for name in _tuning_names(target):
            if name in self.tuning:
                return self.tuning[name]
        raise ProviderError(
            f"kernel {self.name}: target",
            found=target,
            legal=", ".join(sorted(self.tuning)),
            fix="Choose a supported target, or add a tuning entry for this one.",
        )

    def on(self, device: torch.device, **key: object) -> Launcher:
        """The launcher of one key on one device (for a device that is not a GPU: on the active driver's target)."""
        index = None
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
        place = _host_place() if index is None else index
        found = self._launchers.get((place, *key.items()))
        return found if found is not None else self._make(place, index, key)

    def _make(self, place: object, index: int | None, key: Mapping[str, object]) -> Launcher:
        target = target_of(index)
        tuning = self.tuning_for(target)
        values = {**tuning.tiles, **key}
        if values.keys() != set(self.constants):
            raise TypeError(f"{self.name}: key has {sorted(values)}, the kernel's constants are {self.constants}")
        ordered = {name: values[name] for name in self.constants}
        launcher = self._launchers.setdefault(
            (place, "", *ordered.items()), Launcher(self, target, index, ordered, tuning)
        )
        self._launchers[(place, *key.items())] = launcher
        return launcher


class Launcher:
    """One compile key of a kernel on one device.

    Attributes:
        key: every constant by name, tiles included.
        tiles: the tile constants that the target's tuning chose.
    """

    __slots__ = ("_compiled", "_fast", "_options", "_ready", "_tail", "index", "kernel", "key", "target", "tiles")

    def __init__(
        self, owner: Kernel, target: Target, index: int | None, key: Mapping[str, object], tuning: Tuning
    ) -> None:
        self.kernel = owner
        self.target = target
        self.index = index
        self.key = dict(key)
        self.tiles = tuning.tiles
        self._options = {
            "num_warps": tuning.num_warps,
            "num_stages": tuning.num_stages,
            "enable_fp_fusion": True,  # said, because Triton's default is about to change
            **tuning.options,
        }
        self._tail = tuple(key.values())
        self._fast: tuple[Any, Any, Any] | None = None
        self._compiled: Any = None
        self._ready = False

    def __str__(self) -> str:
        return f"{self.kernel.name}[{self.target}]({', '.join(f'{n}={v}' for n, v in self.key.items())})"

    def launch(self, grid: Grid, *args: Any) -> None:
        """Launch on the current stream of the device. Empty grids launch nothing.

        Args:
            grid: programs in three dimensions.
            args: every run-time argument in order: tensors (or, on a GPU only, addresses) and numbers.
        """
        if self._fast is None or hooked():
            self._launch_slowly(grid, args)
        else:
            self._launch_fast(grid, args)

    def _launch_fast(self, grid: Grid, args: tuple[Any, ...]) -> None:
        _stats.launches += 1
        run, function, metadata = self._fast  # type: ignore[misc]  # the callers have looked
        index = self.index
        if torch._C._cuda_getDevice() == index:
            run(*grid, current_stream(index), function, metadata, None, None, None, *args, *self._tail)
        else:
            with torch.cuda.device(index):
                run(*grid, current_stream(index), function, metadata, None, None, None, *args, *self._tail)

    def bind(self, *trailing: Any) -> Bound:
        """Fix the last run-time arguments; tensors among them are kept alive and passed as addresses."""
        return Bound(self, trailing)

    @property
    def ready(self) -> bool:
        """Whether the key is compiled."""
        return self._ready

    @property
    def compiled(self) -> Any:
        """Triton's compiled kernel, None before and where kernels are interpreted."""
        return self._compiled

    def compile(self) -> None:
        """Compile (or find in Triton's cache) and, on a GPU, load; launches nothing. Interpreted: nothing to do.

        Raises:
            ProviderError: ``SWA_BACKEND_JIT_STRICT=1``, and warm-up has been declared finished without this key.
        """
        if not self._ready:
            self.finish(self.start_compile())

    def start_compile(self) -> Any:
        """Hand the key to Triton's compiler: a compiled kernel, or a future inside `triton.AsyncCompileMode`.

        What it returns goes to `finish`. Raises as `compile`.
        """
        if _warm and os.environ.get(STRICT_VARIABLE) == "1":
            raise ProviderError(
                f"kernel {self.kernel.name}",
                found=f"a compilation after warm-up for {self}",
                legal="keys that warm-up has compiled",
                fix=f"Report the missing key, or unset {STRICT_VARIABLE}.",
            )
        if INTERPRETED:
            return None
        args = [0] * len(self.kernel.types)
        if self.index is None:
            return self.kernel.fn.warmup(*args, *self._tail, grid=(1, 1, 1), **self._options)
        with torch.cuda.device(self.index):
            return self.kernel.fn.warmup(*args, *self._tail, grid=(1, 1, 1), **self._options)

    def finish(self, compiled: Any) -> None:
        """Take what `start_compile` returned; on a GPU, load it."""
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        if self.index is not None:
            with torch.cuda.device(self.index):
                self._fast = fast_path(compiled)
        _stats.compilations += 1
        self._ready = True
        self._compiled = compiled

    def _launch_slowly(self, grid: Grid, args: tuple[Any, ...]) -> None:
        if not self._ready:
            self.compile()
            if self._fast is not None and not hooked():
                self._launch_fast(grid, args)
                return
        if 0 in grid:
            return
        check_dtypes(self.kernel.name, self.kernel.types, args)
        _stats.launches += 1
        if self.index is None:
            self.kernel.fn[grid](*args, *self._tail, **self._options)
        else:
            with torch.cuda.device(self.index):
                self.kernel.fn[grid](*args, *self._tail, **self._options)


class Bound:
    """A launcher whose trailing run-time arguments keep their values unless a launch gives others."""

    __slots__ = ("_addresses", "_block", "_fixed", "launcher")

    def __init__(self, launcher: Launcher, fixed: tuple[Any, ...]) -> None:
        self.launcher = launcher
        self._fixed = fixed
        on_gpu = launcher.index is not None
        self._addresses = _as_addresses(fixed) if on_gpu else fixed
        self._block: ArgumentBlock | bool | None = None  # False: this kernel or driver does without

    def launch(self, grid: Grid, *leading: Any) -> None:
        """Launch with the leading run-time arguments given here (on a GPU rather addresses), the rest as bound."""
        launcher = self.launcher
        if launcher._fast is None or hooked():
            launcher._launch_slowly(grid, (*leading, *self._rest(self._fixed, leading)))
            return
        block = self._block
        if block is None:
            values = _as_addresses((*leading, *self._rest(self._addresses, leading)))
            made = ArgumentBlock.of(launcher._compiled, launcher.kernel.types, values)
            block = self._block = made if made is not None else False
        if (
            block
            and torch._C._cuda_getDevice() == launcher.index
            and block.launch(grid, current_stream(launcher.index), leading)  # type: ignore[union-attr]
        ):
            _stats.launches += 1
        else:
            launcher._launch_fast(grid, (*leading, *self._rest(self._addresses, leading)))

    def _rest(self, fixed: tuple[Any, ...], leading: tuple[Any, ...]) -> tuple[Any, ...]:
        return fixed[len(fixed) + len(leading) - len(self.launcher.kernel.types) :]


def _tuning_names(target: Target) -> tuple[str, ...]:
    return str(target), target.vendor, ""


def address(tensor: torch.Tensor) -> torch.Tensor | int:
    """What to pass for a tensor to `Bound.launch`: its address on a GPU, where that is cheapest, else itself."""
    return tensor.data_ptr() if tensor.is_cuda else tensor


def _as_addresses(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)


def _host_place() -> object:
    return "interpret" if INTERPRETED else str(target_of(None))
