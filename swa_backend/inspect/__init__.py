"""Looking at one step: what an engine handed over, what the library made of it, and which keys each token sees."""

from swa_backend.inspect.batch_file import read_batch, save_batch
from swa_backend.inspect.report import StepReport, inspect_step
from swa_backend.inspect.step_input import CompressedInput, StepInput

__all__ = ["CompressedInput", "StepInput", "StepReport", "inspect_step", "read_batch", "save_batch"]
