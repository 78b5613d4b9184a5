"""Fuzzing: random histories of a whole engine, every step of them checked against slow oracles.

A *case* (`swa_backend.fuzz.case`) says what an engine lives through: its settings and its requests. `engine` turns it
into steps, `rows` says what the metadata of each step must be, `model` runs caches and attention beside a float64
oracle. A case that fails is shrunk (`shrink`) and saved as JSON, which runs again on any platform.

Needs numpy, and nothing of the command line.
"""

from swa_backend.fuzz.campaign import Failure, FuzzReport, run_fuzz
from swa_backend.fuzz.case import Case, Profile, load_case, random_case
from swa_backend.fuzz.runner import CaseFailedError, Mode, Tally, run_case
from swa_backend.fuzz.shrink import shrink

__all__ = [
    "Case",
    "CaseFailedError",
    "Failure",
    "FuzzReport",
    "Mode",
    "Profile",
    "Tally",
    "load_case",
    "random_case",
    "run_case",
    "run_fuzz",
    "shrink",
]
