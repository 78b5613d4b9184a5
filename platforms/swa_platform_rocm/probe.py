"""Whether this machine has an AMD GPU that the installed torch can use, and which chips can be built for."""

from __future__ import annotations

from swa_backend.machine import Machine
from swa_backend.platform import Probe, Target
from swa_platform_rocm.chips import reasons_against

_NODES = ("/dev/kfd",)
# HIP reads the last one too, so that code written for the other vendor keeps working.
_BELOW = "ROCR_VISIBLE_DEVICES"
_SAME_MEANING = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_VISIBILITY = (_BELOW, *_SAME_MEANING)


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
    past = () if hidden else _past_the_list(machine)
    if version:
        reasons.extend((*_conflict(machine), *past))
    usable = bool(version and nodes and not hidden and not past)
    return Probe(usable=usable, preferred=usable, reasons=tuple(reasons))


def _conflict(machine: Machine) -> tuple[str, ...]:
    """Two variables of one meaning that differ: which of them counts depends on who reads them."""
    first, second = (machine.env.get(name) for name in _SAME_MEANING)
    if first is None or second is None or first == second:
        return ()
    settings = " and ".join(f"{name}={machine.env[name]!r}" for name in _SAME_MEANING)
    return (f"{settings} contradict each other; set one of them, or both alike",)


def _past_the_list(machine: Machine) -> tuple[str, ...]:
    """ROCR's list comes first, and HIP counts within it: its own list ends at the first number that is too large."""
    below, named = machine.env.get(_BELOW), [name for name in _SAME_MEANING if name in machine.env]
    if below is None or not named:
        return ()
    name, left = named[0], len(below.split(","))
    first = machine.env[name].split(",", 1)[0].strip()
    if not first.isdecimal() or int(first) < left:
        return ()
    return (f"{name}={machine.env[name]!r} counts within {_BELOW}={below!r}, which leaves {left}: no device is left",)


def check_target(target: Target) -> tuple[str, ...]:
    """Reasons why a chip cannot be built for; empty when it can."""
    reasons: list[str] = []
    if target.vendor != "hip":
        reasons.append(f"the vendor is {target.vendor!r}, not 'hip'")
    reasons.extend(reasons_against(target.arch))
    return tuple(reasons)
