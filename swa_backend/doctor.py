"""What is installed, what this machine offers, and why each platform and attention provider is or is not used.

Unlike importing the library, asking for a report may initialise the device driver: it lists the devices.
"""

from __future__ import annotations

import platform as host
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from swa_backend.backend import Backend
from swa_backend.discovery import Registration, run_probe
from swa_backend.errors import PlatformError
from swa_backend.machine import Machine
from swa_backend.platform import CacheRole
from swa_backend.provider import AttentionProvider, AttentionShape
from swa_backend.provider_choice import ATTENTION_VARIABLE, forced_provider
from swa_backend.registry import chosen, get_backend, registry


@dataclass(frozen=True, slots=True)
class ProviderReport:
    """One attention provider: for each packaged model the reasons against it, empty where the provider serves it."""

    name: str
    models: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class BackendReport:
    """The providers of one platform, in order of preference; ``problem`` when they cannot be loaded."""

    platform: str
    target: str | None
    providers: tuple[ProviderReport, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class PlatformReport:
    """One registered platform as its probe sees this machine."""

    name: str
    origin: str
    usable: bool
    preferred: bool
    auto_rank: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `swa-backend doctor` prints.

    Attributes:
        chosen: platform of this process, None if none could be chosen; ``why`` and ``error`` say why or why not.
        versions: of this library and of what it runs on; None = not installed.
        torch_build: toolkits that torch was built for.
        environment: variables that are set and that this library, a device runtime or torch's threads read.
        devices: what torch finds, one line a device.
        platforms: every registration, those that cannot be loaded included.
        backends: the providers of each usable platform, or of the one asked for.
    """

    chosen: str | None
    why: str | None
    error: str | None
    versions: Mapping[str, str | None]
    torch_build: Mapping[str, str]
    environment: Mapping[str, str]
    devices: tuple[str, ...]
    platforms: tuple[PlatformReport, ...]
    backends: tuple[BackendReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return asdict(self)

    def problem_of_forced_provider(self) -> str | None:
        """What is wrong with ``SWA_BACKEND_ATTENTION`` if it names a provider that no platform of the report has."""
        forced = forced_provider()
        names = sorted({one.name for backend in self.backends for one in backend.providers})
        if not forced or not names or forced in names:
            return None
        return f"{ATTENTION_VARIABLE}: found {forced!r}; legal: {', '.join(names)}. Name one of them, or unset it."


def examine(platform: str | None = None, target: str | None = None) -> Report:
    """Look at everything.

    Args:
        platform: report the providers of this platform only.
        target: report what the platform offers for this chip instead of the device of this machine.

    Raises:
        PlatformError: ``platform`` or ``target`` is given, and `get_backend` refuses it.
    """
    asked = get_backend(platform, target) if platform is not None or target is not None else None
    name = why = error = None
    try:
        name, why = chosen().platform.name, chosen().why
    except PlatformError as failure:
        error = str(failure)
    registrations = registry().all()
    platforms = tuple(_examine_platform(one) for one in registrations)
    backends = [asked] if asked is not None else [get_backend(one.name) for one in platforms if one.usable]
    machine = Machine.here()
    return Report(
        chosen=name,
        why=why,
        error=error,
        versions=_versions(machine),
        torch_build={toolkit: built for toolkit, built in machine.torch_build.items() if built},
        environment=_environment(machine.env),
        devices=_devices(),
        platforms=platforms,
        backends=tuple(_examine_backend(backend) for backend in backends),
    )


def _examine_platform(found: Registration) -> PlatformReport:
    if found.platform is None:
        return PlatformReport(found.name, found.origin, False, False, None, (f"cannot be loaded: {found.problem}",))
    probe = run_probe(found.platform)
    return PlatformReport(
        found.name, found.origin, probe.usable, probe.preferred, found.platform.auto_rank, tuple(probe.reasons)
    )


def _examine_backend(backend: Backend) -> BackendReport:
    target = None if backend.target is None else str(backend.target)
    try:
        shapes = _shapes(backend)
        providers = tuple(
            ProviderReport(one.name, {model: _reasons_against(one, shape) for model, shape in shapes.items()})
            for one in backend.providers
        )
    except Exception as error:  # a report is most wanted where something is broken
        return BackendReport(backend.name, target, (), f"{type(error).__name__}: {error}")
    return BackendReport(backend.name, target, providers, None)


def _reasons_against(provider: AttentionProvider, shape: AttentionShape) -> tuple[str, ...]:
    forced = forced_provider()
    reasons = tuple(provider.supports(shape))
    return reasons if forced in ("", provider.name) else (f"{ATTENTION_VARIABLE} names {forced!r}", *reasons)


def _shapes(backend: Backend) -> dict[str, AttentionShape]:
    """What a builder for each packaged model would ask of a provider, all heads on one rank."""
    from swa_backend.cache_layout import get_layout
    from swa_backend.config import BackendConfig, SchedulerConfig
    from swa_backend.model_config import ModelConfig, packaged_models

    shapes = {}
    for name in packaged_models():
        model = ModelConfig.packaged(name)
        scheduler = SchedulerConfig(max_model_len=model.window_size, max_num_seqs=1, max_num_batched_tokens=1)
        config = BackendConfig(model, scheduler)
        compressed = any(layer_type.compressed for layer_type in model.present_layer_types)
        second = get_layout(config.compressed_layout, backend.cache_dialect(CacheRole.COMPRESSED))
        shapes[name] = AttentionShape(
            num_heads=config.num_heads,
            head_dim=model.head_dim,
            swa_layout=get_layout(config.cache_layout, backend.cache_dialect(CacheRole.SWA)),
            swa_page_tokens=config.page_tokens,
            compressed_layouts=(second,) if compressed else (),
            decode_widths=(model.window_size,),
            batch_invariant=config.batch_invariant,
        )
    return shapes


def _versions(machine: Machine) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"swa-backend": _version("swa-backend"), "python": host.python_version()}
    versions["torch"] = machine.torch_version
    try:
        # Its distribution has several names, so the module is asked.
        versions["triton"] = str(import_module("triton").__version__)
    except Exception:
        versions["triton"] = None
    versions |= {name: _version(name) for name in ("numpy", "typer", "rich")}
    versions["system"] = host.platform()
    return versions


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(("SWA_BACKEND_", "OMP_")) or name.endswith("_VISIBLE_DEVICES")
    }


def _devices() -> tuple[str, ...]:
    import torch

    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return ()
        module = torch.get_device_module(accelerator)
        found = [module.get_device_properties(index) for index in range(torch.accelerator.device_count())]
        return tuple(f"{accelerator.type}:{index} {one.name}" for index, one in enumerate(found))
    except Exception as error:
        return (f"torch cannot list the devices: {type(error).__name__}: {error}",)
