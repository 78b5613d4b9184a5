"""Compile the Triton kernels for a chip that this machine does not have.

Triton's just-in-time path asks a driver for the target, then specialises, compiles and stores the binary under a key
made of the compiler, the target, the options, the environment and the specialisation. `compile_only` puts a driver in
place that answers for another chip: the library's own launch code runs unchanged on CPU or meta tensors, everything up
to the binary happens as it would on that chip, the chip's limits are enforced, and nothing is launched. A process that
has the chip then finds the binaries in the same cache.

What has to be equal on both machines is listed by `cache_conditions`, stored beside the binaries, and compared by
`cache_mismatches`. One thing is not part of the key and still decides: Triton's group files name the stored files by
absolute path, so a cache that moves has to be told where it will be (``mounted_at``, or `rebase_cache` afterwards).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler.compiler import make_backend
from triton.runtime import driver as triton_driver
from triton.runtime.cache import triton_key
from triton.runtime.errors import OutOfResources

from swa_backend.errors import ConfigError, PlatformError
from swa_backend.platform import Target


@dataclass(frozen=True, slots=True)
class Chip:
    """Limits of one chip that the compiler itself does not check.

    Attributes:
        warp_size: work-items that run in lockstep.
        shared_bytes: shared memory (NVIDIA, opt-in maximum) or LDS (AMD) that one block may use, in bytes.
        max_threads: work-items of one block.
        tensor_columns: columns of tensor memory; 0 where the chip has none.
    """

    warp_size: int
    shared_bytes: int
    max_threads: int = 1024
    tensor_columns: int = 0


CHIPS: Mapping[str, Chip] = {
    "cuda:80": Chip(32, 166_912),
    "cuda:86": Chip(32, 101_376),
    "cuda:89": Chip(32, 101_376),
    "cuda:90": Chip(32, 232_448),
    "cuda:100": Chip(32, 232_448, tensor_columns=512),
    "cuda:103": Chip(32, 232_448, tensor_columns=512),
    "cuda:120": Chip(32, 101_376),
    "hip:gfx90a": Chip(64, 65_536),
    "hip:gfx942": Chip(64, 65_536),
    "hip:gfx950": Chip(64, 163_840),
    "hip:gfx1100": Chip(32, 65_536),
    "hip:gfx1201": Chip(32, 65_536),
}


def chip_for(target: Target | str) -> tuple[Target, Chip]:
    """The parsed target and its limits.

    Raises:
        PlatformError: the text is no target, or the chip is not in the table.
    """
    parsed = Target.parse(target) if isinstance(target, str) else target
    chip = CHIPS.get(str(parsed))
    if chip is None:
        raise PlatformError(
            "target", found=str(parsed), legal=", ".join(CHIPS), fix="Name one of these chips, or add its limits."
        )
    return parsed, chip


def triton_target(target: Target | str) -> Any:
    """What the chip's own driver would report to Triton (a ``GPUTarget``)."""
    parsed, chip = chip_for(target)
    arch = int(parsed.arch) if parsed.vendor == "cuda" else parsed.arch
    return GPUTarget(parsed.vendor, arch, chip.warp_size)


# A driver gets a device number that no process can have: Triton keeps compiled kernels per device number, and those
# of two targets, or of a target and the machine's own GPU, must not meet.
_device_numbers = itertools.count(1 << 20)


class _DeviceUtils:
    """What Triton asks of a driver's C helpers on the way to a launch."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._chip.shared_bytes,
            "max_num_regs": 65_536,
            "multiprocessor_count": 1,
            "warpSize": self._chip.warp_size,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        # No module handle: Triton 3.9 unloads one when the kernel is collected, perhaps under another driver.
        return None, None, 0, 0, self._chip.max_threads

    def unload_module(self, module: object) -> None:
        pass


class OfflineDriver(DriverBase):  # type: ignore[misc]
    """A Triton driver for a chip that is not here. Made active by `compile_only`.

    Attributes:
        target: the chip.
        chip: its limits.
        compiled: every ``CompiledKernel`` made or found in the cache while active, in order.
        launches: kernel name and grid of every launch asked for, in order.
    """

    def __init__(self, target: Target | str) -> None:
        super().__init__()
        self.target, self.chip = chip_for(target)
        self.compiled: list[Any] = []
        self.launches: list[tuple[str, tuple[int, int, int]]] = []
        self.utils = _DeviceUtils(self.chip)
        self._device = next(_device_numbers)
        self._functions: list[Any] = []

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return triton_target(self.target)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        arch = int(self.target.arch) if self.target.vendor == "cuda" else 0
        return arch // 10, arch % 10

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """For autotuned kernels: compiles every candidate and calls them all equally fast."""

        def measure(call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: object) -> list[float]:
            call()
            return [1.0] * len(quantiles or (1,))

        return measure

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: object) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The launcher that Triton makes for a compiled kernel: notes the launch and hands it to `on_launch`."""
        names = [name for name, type_ in source.signature.items() if type_ != "constexpr"]
        positions = [i for i, type_ in enumerate(source.signature.values()) if type_ != "constexpr"]

        def launch(grid_x: int, grid_y: int, grid_z: int, *rest: Any) -> None:
            # Stream, function, packed metadata, launch metadata and two hooks come before the arguments.
            arguments = rest[6:]
            grid = (grid_x, grid_y, grid_z)
            self.launches.append((metadata.name, grid))
            self.on_launch(metadata, grid, {n: arguments[i] for n, i in zip(names, positions, strict=True)})

        return launch

    def on_launch(self, metadata: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any]) -> None:
        """Called for every launch with the runtime arguments by name; does nothing here."""

    def check_limits(self, kernel: Any) -> None:
        """Refuse a kernel that the chip could not launch.

        Raises:
            triton.runtime.errors.OutOfResources: too much shared memory or tensor memory, or too many threads.
        """
        metadata = kernel.metadata
        threads = metadata.num_warps * self.chip.warp_size
        columns = getattr(metadata, "tmem_size", None) or 0
        for used, limit, what in (
            (metadata.shared, self.chip.shared_bytes, "shared memory"),
            (columns, self.chip.tensor_columns, "tensor memory"),
            (threads, self.chip.max_threads, "threads"),
        ):
            if used > limit:
                raise OutOfResources(used, limit, f"{what} ({metadata.name} on {self.target})")

    def _before_compile(self, function: Any) -> None:
        if function not in self._functions:
            self._functions.append(function)

    def _after_compile(self, function: Any, key: Any) -> None:
        kernel = function.device_caches[self._device][0][key]
        self.compiled.append(kernel)
        self.check_limits(kernel)

    def _forget(self) -> None:
        """Take out of Triton's objects what points at this driver."""
        for function in self._functions:
            function.device_caches.pop(self._device, None)
        for kernel in self.compiled:
            kernel._run = None


@contextmanager
def compile_only(
    target: Target | str | OfflineDriver,
    *,
    cache: Path | str | None = None,
    mounted_at: Path | str | None = None,
) -> Iterator[OfflineDriver]:
    """Within this context ``kernel[grid](...)`` and ``kernel.warmup(...)`` compile for ``target`` and launch nothing.

    Tensors may be on the CPU or on the meta device. Their dtype, the alignment of their address and (on AMD) whether
    their storage exceeds 2 GiB are what the kernel is specialised on, as on the chip itself: a view into a large cache
    has to be given as a view into storage of that size, which on the meta device costs nothing.

    Args:
        target: ``"cuda:90"``, ``"hip:gfx942"``, ..., or a driver of a subclass.
        cache: Triton cache to fill; None leaves Triton's own setting.
        mounted_at: path under which the fleet will see ``cache``; None if it is the same.

    Raises:
        PlatformError: unknown target.
        ConfigError: Triton is set to interpret kernels or to override the target.
        triton.runtime.errors.OutOfResources: a kernel exceeds what the chip has.
    """
    driver = target if isinstance(target, OfflineDriver) else OfflineDriver(target)
    for variable, is_set in (
        ("TRITON_INTERPRET", knobs.runtime.interpret),
        ("TRITON_OVERRIDE_ARCH", knobs.runtime.override_arch),
    ):
        if is_set:
            raise ConfigError(variable, found="set", legal="unset", fix="Compile in a process without this variable.")
    previous_driver = triton_driver._active
    with _compile_hooks(driver), knobs.cache.scope():
        if cache is not None:
            rebase_cache(cache)  # what an earlier call stored for elsewhere has to be found here too
            knobs.cache.dir = str(Path(cache).absolute())
        triton_driver.set_active(driver)
        try:
            yield driver
            if cache is not None:
                _write_conditions(Path(cache), driver.target)
        finally:
            if cache is not None:
                rebase_cache(cache, mounted_at)
            triton_driver._active = previous_driver
            driver._forget()


@contextmanager
def _compile_hooks(driver: OfflineDriver) -> Iterator[None]:
    runtime = knobs.runtime
    earlier_before, earlier_after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def before(**event: Any) -> Any:
        if triton_driver._active is driver:  # else a driver inside this one's context is compiling
            driver._before_compile(event["fn"].jit_function)
        return earlier_before(**event) if earlier_before else None

    def after(**event: Any) -> Any:
        if triton_driver._active is driver:
            driver._after_compile(event["fn"].jit_function, event["compile"]["key"])
        return earlier_after(**event) if earlier_after else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after
    try:
        yield
    finally:
        if runtime.jit_cache_hook is before:
            runtime.jit_cache_hook = earlier_before
        if runtime.jit_post_compile_hook is after:
            runtime.jit_post_compile_hook = earlier_after


def rebase_cache(directory: Path | str, mounted_at: Path | str | None = None) -> int:
    """Make a Triton cache findable under another path.

    Args:
        directory: the cache.
        mounted_at: absolute path at which processes will see it; None: where it is now.

    Returns:
        Number of kernels.
    """
    root = Path(directory).absolute()
    seen_at = Path(mounted_at) if mounted_at is not None else root
    groups = sorted(root.glob("*/__grp__*.json"))
    for group in groups:
        folder = seen_at / group.parent.name
        stored = json.loads(group.read_text())
        stored["child_paths"] = {name: str(folder / name) for name in stored["child_paths"]}
        fresh = group.with_name(f".{group.name}.{os.getpid()}")
        fresh.write_text(json.dumps(stored))
        fresh.replace(group)
    return len(groups)


def cache_conditions(target: Target | str) -> dict[str, str]:
    """What a process must share with this one to find its kernels, by a short name for each condition."""
    environment = {name: value for name, value in sorted(get_cache_invalidating_env_vars().items()) if value}
    return {
        "library version": version("swa-backend"),
        "Triton version": triton.__version__,
        "Triton build": triton_key(),
        "compiler back end": make_backend(triton_target(target)).hash(),
        # For AMD, Triton 3.6 puts the path of its device libraries into the key.
        "Triton's folder": str(Path(triton.__file__).parent),
        "compiler environment": json.dumps(environment),
    }


def cache_mismatches(directory: Path | str, target: Target | str) -> tuple[str, ...]:
    """Reasons why kernels stored in ``directory`` for ``target`` would not be found by this process; empty if none."""
    parsed, _ = chip_for(target)
    path = _conditions_path(Path(directory), parsed)
    if not path.exists():
        return (f"{directory} was not filled for {parsed}",)
    stored: dict[str, str] = json.loads(path.read_text())
    return tuple(
        f"{name}: filled with {_short(stored.get(name))}, here {_short(value)}"
        for name, value in cache_conditions(parsed).items()
        if stored.get(name) != value
    )


def _short(value: str | None, width: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[: width // 2]}...{text[-width // 2 :]}"


def _conditions_path(directory: Path, target: Target) -> Path:
    return directory / f"swa_backend-{target.vendor}-{target.arch}.json"


def _write_conditions(directory: Path, target: Target) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _conditions_path(directory, target).write_text(json.dumps(cache_conditions(target), indent=1))
