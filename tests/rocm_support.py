"""The ROCm platform, whole, with its tensors where the tests run kernels: interpreted, simulated, or on another GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from swa_backend.backend import Backend
from swa_backend.config import BackendConfig
from swa_backend.platform import Target
from swa_platform_rocm import PLATFORM
from tests.support import make_builder

GFX942, GFX950 = "hip:gfx942", "hip:gfx950"


def rocm_backend(device: torch.device | str, target: str = GFX942) -> Backend:
    """The platform for a chip, with its own builder, Triton kernels and providers; only the device type is another."""
    return Backend(replace(PLATFORM, device_type=torch.device(device).type), Target.parse(target))


def rocm_builder(config: BackendConfig, device: torch.device, target: str = GFX942, **options: Any) -> Any:
    """A builder of the platform; typed as Any, so that tests index its optional fields."""
    return make_builder(config, backend=rocm_backend(device, target), device=str(device), **options)
