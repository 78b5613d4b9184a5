"""Stand-ins for machines, platforms and entry points."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from swa_backend.backend import Backend
from swa_backend.discovery import Registry
from swa_backend.machine import Machine
from swa_backend.platform import NoTileScheduler, Platform, Probe
from swa_backend.reference.provider import ReferenceAttention
from swa_backend.registry import get_backend

OWN = "swa-backend"


def fake_machine(
    *,
    cuda: str | None = None,
    hip: str | None = None,
    nodes: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    libraries: Mapping[str, Any] | None = None,
) -> Machine:
    """A machine with exactly these device nodes, variables and shared libraries, and a torch built for these."""
    return Machine(
        env=dict(env or {}),
        torch_version="2.13.0",
        torch_build={"cuda": cuda, "hip": hip},
        glob=lambda pattern: [node for node in nodes if fnmatch.fnmatchcase(node, pattern)],
        load_library=dict(libraries or {}).get,
    )


def fake_nvml(devices: int, *, init: int = 0) -> SimpleNamespace:
    """The management library as `ctypes` shows it."""

    def get_count(pointer: Any) -> int:
        pointer._obj.value = devices
        return 0

    return SimpleNamespace(nvmlInit_v2=lambda: init, nvmlDeviceGetCount_v2=get_count, nvmlShutdown=lambda: 0)


def fake_platform(
    name: str, *, usable: bool = True, preferred: bool = True, rank: int | None = None, **fields: Any
) -> Platform:
    """A platform that says this about itself and supplies nothing."""
    probe = Probe(usable=usable, preferred=preferred, reasons=(f"{name} says {usable}/{preferred}",))
    nothing: dict[str, Callable[..., Any]] = {
        "probe": lambda: probe,
        "load_builder": lambda: object,
        "load_operations": lambda: None,
        "load_scheduler": lambda target: NoTileScheduler(),
        "load_providers": lambda target: (),
    }
    return Platform(name=name, device_type="cpu", auto_rank=rank, **(nothing | fields))


@dataclass
class FakePoint:
    """An entry point whose object is given, or made by ``loader``."""

    name: str
    thing: Any = None
    distribution: str = "acme-kit"
    loader: Callable[[], Any] | None = None
    loads: list[str] = field(default_factory=list)

    @property
    def module(self) -> str:
        return f"{self.name}_module"

    @property
    def value(self) -> str:
        return f"{self.module}:PLATFORM"

    @property
    def dist(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.distribution, version="1.5")

    def load(self) -> Any:
        self.loads.append(self.name)
        return self.thing if self.loader is None else self.loader()


def own(platform: Platform) -> FakePoint:
    """A platform that comes with the library."""
    return FakePoint(platform.name, platform, OWN)


def registry_of(*points: FakePoint) -> Registry:
    return Registry(points)  # type: ignore[arg-type]


class Plan:
    """A plan holder that a kernel would fill."""


class PlanScheduler:
    """A fresh plan for every layer type."""

    def fresh_plans(self, layer_types: Sequence[Any]) -> Mapping[Any, Plan]:
        return {layer_type: Plan() for layer_type in layer_types}


class PlanningAttention(ReferenceAttention):
    """The reference, as if its kernels took plans."""

    takes_plans = True


def planning_backend() -> Backend:
    """The CPU platform with kernels that take plans."""
    changes: dict[str, Any] = {
        "load_scheduler": lambda target: PlanScheduler(),
        "load_providers": lambda target: (PlanningAttention(),),
    }
    return Backend(replace(get_backend("cpu").platform, **changes))
