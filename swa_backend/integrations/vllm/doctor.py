"""What ``swa-backend doctor --vllm`` tells: whether the plugin can be switched on in the vLLM that is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from swa_backend.errors import ConfigError
from swa_backend.integrations.vllm.plugin import VARIABLE, Mode, examine, read_mode
from swa_backend.integrations.vllm.surface import ATTENTION_CLASSES, BUILDERS, SERIES

GROUP = "vllm.general_plugins"
_ALLOWED = "VLLM_PLUGINS"


@dataclass(frozen=True, slots=True)
class VllmReport:
    """What was found.

    Attributes:
        version: of the vLLM that is installed, ``none`` without.
        supported: release series that the plugin was made for.
        requested: value of ``SWA_BACKEND_VLLM``, None if it is not set.
        plugin: reasons why vLLM would not load the plugin; empty when it would.
        modes: for each mode the reasons why it is refused; empty where it is taken.
        replaces: for each mode what it replaces.
    """

    version: str
    supported: tuple[str, ...]
    requested: str | None
    plugin: tuple[str, ...]
    modes: Mapping[str, tuple[str, ...]]
    replaces: Mapping[str, tuple[str, ...]]

    @property
    def problem(self) -> str | None:
        """Why vLLM would not run as the variable asks; None if it would, or if nothing is asked for."""
        if self.requested is None:
            return None
        try:
            mode = read_mode(self.requested)
        except ConfigError as error:
            return str(error)
        reasons = (*self.plugin, *self.modes[mode])
        return f"{VARIABLE}={mode}: {'; '.join(reasons)}" if reasons else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return asdict(self)


def examine_vllm(
    load: Callable[[str], ModuleType] = importlib.import_module,
    env: Mapping[str, str] = os.environ,
    points: Iterable[EntryPoint] | None = None,
) -> VllmReport:
    """Look at vLLM. Nothing is replaced, but vLLM is imported, which takes a while.

    Args:
        load: imports a module of vLLM's.
        env: the environment.
        points: entry points of vLLM's plugin group; by default those of every installed distribution.
    """
    found = [one.name for one in (entry_points(group=GROUP) if points is None else points)]
    plugin = []
    if "swa_backend" not in found:
        plugin.append(f"no entry point swa_backend in the group {GROUP}: install swa-backend where vLLM runs")
    allowed = env.get(_ALLOWED)
    if allowed is not None and "swa_backend" not in allowed.split(","):
        plugin.append(f"{_ALLOWED}={allowed!r} leaves it out: add swa_backend")
    version, modes = "none", {}
    for mode in Mode:
        version, reasons = examine(mode, load)
        modes[str(mode)] = tuple(reasons)
    builders = tuple(f"{name} ({kind})" for name, kind in BUILDERS.items())
    attention = tuple(f"{module}.{name}.forward_mqa" for module, name in ATTENTION_CLASSES.items())
    return VllmReport(
        version=version,
        supported=SERIES,
        requested=env.get(VARIABLE, "").strip() or None,
        plugin=tuple(plugin),
        modes=modes,
        replaces={str(Mode.METADATA): builders, str(Mode.ATTENTION): (*builders, *attention)},
    )
