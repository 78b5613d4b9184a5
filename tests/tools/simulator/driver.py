"""A Triton driver under which a launch on CPU tensors compiles for an AMD chip and executes the result on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from swa_backend.kernels.offline import OfflineDriver, compile_only
from swa_backend.platform import Target
from tests.tools.simulator.build import SimulatedKernel
from tests.tools.simulator.translate import SimulationError

SIMULATED = ("hip:gfx942", "hip:gfx950")


class SimulatingDriver(OfflineDriver):
    """An `OfflineDriver` whose launches happen."""

    def __init__(self, target: Target | str, *, backwards: bool = False) -> None:
        super().__init__(target)
        if str(self.target) not in SIMULATED:
            raise SimulationError(f"{self.target} is not simulated, only {', '.join(SIMULATED)}")
        self._backwards = backwards
        self._kernels: dict[int, SimulatedKernel] = {}

    def on_launch(self, metadata: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any]) -> None:
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments.values()]
        self._kernel_of(metadata).run(grid, values, backwards=self._backwards)

    def _kernel_of(self, metadata: Any) -> SimulatedKernel:
        found = self._kernels.get(id(metadata))
        if found is None:
            compiled = next(kernel for kernel in self.compiled if kernel.metadata is metadata)
            found = self._kernels[id(metadata)] = SimulatedKernel(compiled)
        return found


@contextmanager
def simulate(target: Target | str, *, backwards: bool = False) -> Iterator[SimulatingDriver]:
    """Within this context ``kernel[grid](cpu tensors)`` is compiled for ``target`` and executed in simulation.

    Args:
        target: ``hip:gfx942`` or ``hip:gfx950``.
        backwards: let the last wave of a workgroup go first: finds what only the usual order makes right.

    Raises:
        SimulationError: a kernel cannot be simulated, has a race in shared memory, or a barrier not all reach.
    """
    driver = SimulatingDriver(target, backwards=backwards)
    with compile_only(driver):
        yield driver
