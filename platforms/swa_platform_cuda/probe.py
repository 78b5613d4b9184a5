"""Whether this machine has an NVIDIA GPU that the installed torch can use, and which chips can be built for."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING

from swa_backend.machine import Machine
from swa_backend.platform import Probe, Target

if TYPE_CHECKING:
    import torch

_NODES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl")
_WSL_NODE = "/dev/dxg"
_DRIVER_LIBRARY = "libcuda.so.1"
_NVML_LIBRARY = "libnvidia-ml.so.1"
_VISIBILITY = ("CUDA_VISIBLE_DEVICES",)
_OLDEST_ARCH = 80


def probe(machine: Machine | None = None) -> Probe:
    """Usable and preferred when torch is built for CUDA and a device is present and not hidden.

    Neither the driver nor a vendor package is touched, and it is never asked how many devices there are.
    """
    machine = machine or Machine.here()
    reasons: list[str] = []
    version = machine.built_for("cuda")
    built = f"torch {machine.torch_version} is built for CUDA {version}"
    reasons.append(built if version else f"torch {machine.torch_version} is not built for CUDA")
    present, seen = _find_device(machine)
    reasons.append(seen)
    hidden = machine.hidden_by(_VISIBILITY)
    reasons.extend(f"{setting} hides every device" for setting in hidden)
    usable = bool(version) and present and not hidden
    return Probe(usable=usable, preferred=usable, reasons=tuple(reasons))


def _find_device(machine: Machine) -> tuple[bool, str]:
    nodes = machine.nodes(_NODES)
    if nodes:
        return True, f"an NVIDIA device is present ({nodes[0]})"
    if machine.nodes((_WSL_NODE,)):
        if machine.load_library(_DRIVER_LIBRARY) is not None:
            return True, f"an NVIDIA device is present ({_WSL_NODE} and {_DRIVER_LIBRARY})"
        return False, f"no NVIDIA device: {_WSL_NODE} is present, {_DRIVER_LIBRARY} is not"
    if _nvml_has_device(machine):
        return True, "an NVIDIA device is present (NVML reports it)"
    return False, f"no NVIDIA device: none of {', '.join((*_NODES, _WSL_NODE))}, none known to NVML"


def _nvml_has_device(machine: Machine) -> bool:
    """Ask the management library, which opens no context; anything that goes wrong there means no."""
    nvml = machine.load_library(_NVML_LIBRARY)
    if nvml is None:
        return False
    try:
        if nvml.nvmlInit_v2() != 0:
            return False
        count = ctypes.c_uint(0)
        try:
            return nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0
        finally:
            nvml.nvmlShutdown()
    except (AttributeError, OSError):
        return False


def check_target(target: Target) -> tuple[str, ...]:
    """Reasons why a chip cannot be built for; empty when it can."""
    reasons: list[str] = []
    if target.vendor != "cuda":
        reasons.append(f"the vendor is {target.vendor!r}, not 'cuda'")
    if not re.fullmatch(r"[0-9]{2,3}", target.arch):
        reasons.append(f"the compute capability {target.arch!r} is not written as two or three digits, such as '90'")
    elif int(target.arch) < _OLDEST_ARCH:
        reasons.append(f"the compute capability {target.arch} is below {_OLDEST_ARCH}, the first with bf16")
    return tuple(reasons)


def reasons_against(target: Target | None, device: torch.device | None) -> tuple[str, ...]:
    """Reasons why kernels cannot be compiled for the target's chip, else for a device's; none where neither is known.

    A device's driver is asked: for a builder, not for a probe.
    """
    if target is None:
        if device is None or device.type != "cuda":
            return ()
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        target = Target("cuda", f"{major}{minor}")
    return check_target(target)
