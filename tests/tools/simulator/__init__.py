"""Run Triton kernels as AMD code on this CPU: ``with simulate("hip:gfx942"): kernel.on(device, ..).launch(..)``.

Proved by it: everything that Triton's AMD back end does down to LLVM IR, with layouts, masks, barriers, shared memory
and matrix instructions. Not proved: LLVM's code generation for AMD, timing, and memory order between workgroups.
"""

from tests.tools.simulator.build import why_not
from tests.tools.simulator.driver import SimulatingDriver, simulate
from tests.tools.simulator.translate import SimulationError

__all__ = ["SimulatingDriver", "SimulationError", "simulate", "why_not"]
