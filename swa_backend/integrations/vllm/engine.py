"""This process's platform with the attention left to the engine: for builders whose metadata vLLM's own layers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NoReturn

from swa_backend.backend import Backend
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.errors import ProviderError
from swa_backend.provider import AttentionCall, AttentionProvider, AttentionShape


class EngineAttention(AttentionProvider):
    """Takes every shape and computes nothing."""

    name = "vllm"

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        """No reason against any shape: vLLM has chosen its own attention."""
        return ()

    def decode(self, call: AttentionCall) -> None:
        """Refuse: vLLM's layers compute their attention themselves."""
        _refuse()

    def prefill(self, call: AttentionCall) -> None:
        """Refuse: vLLM's layers compute their attention themselves."""
        _refuse()


def _refuse() -> NoReturn:
    raise ProviderError(
        "attention",
        found="attend() over metadata that was built for vLLM's own attention",
        legal="SWA_BACKEND_VLLM=attention",
        fix="Set that mode to run attention through this library.",
    )


@cache
def with_engine_attention(backend: Backend) -> Backend:
    """The backend's platform, operations included, with the engine's attention as its only provider."""
    return Backend(replace(backend.platform, load_providers=lambda target: (EngineAttention(),)), backend.target)


@cache
def builder_class(backend: Backend, ragged: bool) -> type[DeepseekSparseSWAMetadataBuilder]:
    """The platform's builder class, with ragged copies of the rows or without."""
    own = backend.get_builder_cls()
    return type(own.__name__, (own,), {"wants_ragged_rows": ragged, "__module__": own.__module__})
