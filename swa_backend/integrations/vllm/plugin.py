"""Switching the library on inside vLLM: the checks, the replacements, and the log line that says what was replaced."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any

from swa_backend._checks import show
from swa_backend.errors import ConfigError
from swa_backend.integrations.vllm.surface import BACKEND, SPARSE_SWA, surface_reasons, version_reasons

if TYPE_CHECKING:
    from swa_backend.integrations.vllm.attention import VllmAttention

VARIABLE = "SWA_BACKEND_VLLM"

logger = logging.getLogger("vllm.swa_backend")  # below vLLM's own, whose handlers show it


class Mode(StrEnum):
    """What the plugin replaces: the metadata builders, or these and the attention of the layers."""

    METADATA = "metadata"
    ATTENTION = "attention"


@dataclass
class Activation:
    """What one call of `activate` did.

    Attributes:
        mode: what was asked for.
        version: of vLLM.
        replaced: dotted names, each with what stands there now.
    """

    mode: Mode
    version: str
    replaced: dict[str, str] = field(default_factory=dict)


_done: Activation | None = None


def activation() -> Activation | None:
    """What this process has replaced, None if nothing."""
    return _done


def activate(value: str, load: Callable[[str], ModuleType] = importlib.import_module) -> Activation:
    """Replace what a mode names, once a process.

    Args:
        value: of ``SWA_BACKEND_VLLM``.
        load: imports a module of vLLM's.

    Raises:
        ConfigError: the value is no mode, or vLLM is not as expected; with every reason. Nothing is replaced then.
    """
    global _done
    mode = read_mode(value)
    if _done is not None:
        return _done
    version, reasons = examine(mode, load)
    if reasons:
        raise ConfigError(
            VARIABLE,
            found=f"{mode} on a vLLM that differs: {'; '.join(reasons)}",
            legal="the vLLM that the plugin was made for",
            fix=f"Install a supported vLLM, or unset {VARIABLE}.",
        )
    done = Activation(mode, version)
    attention = None
    if mode is Mode.ATTENTION:
        from swa_backend.integrations.vllm.attention import VllmAttention, replace_attention

        attention = VllmAttention(load)
        replace_attention(attention, done)
    _replace_builders(load(SPARSE_SWA), attention, done)
    _done = done
    replaced = "; ".join(f"{old}: {new}" for old, new in done.replaced.items())
    logger.info("%s=%s, vLLM %s. Replaced %s", VARIABLE, mode, version, replaced)
    return done


def read_mode(value: str) -> Mode:
    """The mode that the variable names.

    Raises:
        ConfigError: none.
    """
    name = value.strip().lower()
    if name in list(Mode):
        return Mode(name)
    raise ConfigError(
        VARIABLE,
        found=show(value),
        legal=f"{', '.join(Mode)}; unset or empty for none",
        fix="Correct or unset this environment variable.",
    )


def examine(mode: Mode, load: Callable[[str], ModuleType] = importlib.import_module) -> tuple[str, list[str]]:
    """vLLM's version, and every reason why it cannot be switched to a mode; empty when it can."""
    try:
        version = str(load("vllm").__version__)
    except Exception as error:  # a broken installation may raise anything
        return "none", [f"vLLM cannot be imported: {type(error).__name__}: {error}"]
    reasons = version_reasons(version)
    if reasons:
        return version, reasons
    try:
        reasons = surface_reasons(load(SPARSE_SWA), load(BACKEND))
    except Exception as error:
        return version, [f"{SPARSE_SWA} cannot be imported: {type(error).__name__}: {error}"]
    if mode is Mode.ATTENTION:
        from swa_backend.integrations.vllm.attention import attention_reasons

        reasons += attention_reasons(load)
    return version, reasons


def _replace_builders(sparse_swa: ModuleType, attention: VllmAttention | None, done: Activation) -> None:
    from swa_backend.integrations.vllm.builder import Replacements

    replacements = Replacements(sparse_swa, attention)
    cache_cls = sparse_swa.DeepseekV4SWACache
    original = cache_cls.get_attn_backend

    @functools.wraps(original)
    def get_attn_backend(self: Any) -> type:
        return replacements.backend(original(self))

    cache_cls.get_attn_backend = get_attn_backend
    done.replaced[f"{SPARSE_SWA}.DeepseekV4SWACache.get_attn_backend"] = "window backends with builders of swa_backend"
