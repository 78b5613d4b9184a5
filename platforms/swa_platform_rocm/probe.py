"""Whether this machine has an AMD GPU that the installed torch can use, and which chips can be built for."""

from __future__ import annotations

import re

from swa_backend.machine import Machine
from swa_backend.platform import Probe, Target

_NODES = ("/dev/kfd",)
# HIP reads the last one too, so that code written for the other vendor keeps working.
_VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_SAME_MEANING = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def probe(machine: Machine | None = None) -> Probe:
    """Usable and preferred when torch is built for HIP and a device is present and not hidden.

    Neither the driver nor a vendor package is touched, and it is never asked how many devices there are.
    """
    machine = machine or Machine.here()
    reasons: list[str] = []
    version = machine.built_for("hip")
    built = f"torch {machine.torch_version} is built for HIP {version}"
    reasons.append(built if version else f"torch {machine.torch_version} is not built for HIP")
    nodes = machine.nodes(_NODES)
    reasons.append(f"an AMD device is present ({nodes[0]})" if nodes else f"no AMD device: no {', '.join(_NODES)}")
    hidden = machine.hidden_by(_VISIBILITY)
    reasons.extend(f"{setting} hides every device" for setting in hidden)
    if version:
        reasons.extend(_conflict(machine))
    usable = bool(version and nodes and not hidden)
    return Probe(usable=usable, preferred=usable, reasons=tuple(reasons))


def _conflict(machine: Machine) -> tuple[str, ...]:
    """Two variables of one meaning that differ: which of them counts depends on who reads them."""
    first, second = (machine.env.get(name) for name in _SAME_MEANING)
    if first is None or second is None or first == second:
        return ()
    settings = " and ".join(f"{name}={machine.env[name]!r}" for name in _SAME_MEANING)
    return (f"{settings} contradict each other; set one of them, or both alike",)


def check_target(target: Target) -> tuple[str, ...]:
    """Reasons why a chip cannot be built for; empty when it can."""
    reasons: list[str] = []
    if target.vendor != "hip":
        reasons.append(f"the vendor is {target.vendor!r}, not 'hip'")
    if not re.fullmatch(r"gfx[0-9a-f]{3,5}", target.arch):
        reasons.append(f"the architecture {target.arch!r} is not written as 'gfx' and its number, such as 'gfx942'")
    return tuple(reasons)
