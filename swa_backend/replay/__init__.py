"""Replaying a request trace through scheduler, paged caches, metadata build and attention, checked on the way.

Needs numpy, and nothing of the command line.
"""

from swa_backend.replay.options import Attention, ReplayOptions, Verify
from swa_backend.replay.report import ReplayReport, StepTimes
from swa_backend.replay.runner import run_replay

__all__ = ["Attention", "ReplayOptions", "ReplayReport", "StepTimes", "Verify", "run_replay"]
