"""This process's platform with the attention left to the engine: for builders whose metadata vLLM's own layers read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NoReturn

import torch

from swa_backend.backend import Backend
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.errors import ProviderError
from swa_backend.provider import AttentionCall, AttentionProvider, AttentionShape
from swa_backend.provider_choice import forced_provider

logger = logging.getLogger("vllm.swa_backend")  # below vLLM's own, whose handlers show it


class EngineAttention(AttentionProvider):
    """Takes every shape and computes nothing."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """``vllm``, or the provider that is forced: that choice is about attention which this is not."""
        return forced_provider() or "vllm"

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


_told: set[tuple[str, tuple[str, ...]]] = set()


def keep_vllms(what: str, reasons: tuple[str, ...]) -> None:
    """Tell, once for the same reasons, that something keeps vLLM's attention."""
    if (what, reasons) not in _told:
        _told.add((what, reasons))
        logger.warning("%s keep vLLM's attention: %s", what, "; ".join(reasons))


def first(tensor: Any, count: int) -> Any:
    """The first rows of a tensor that may have more, or of None."""
    return tensor if tensor is None or tensor.shape[0] <= count else tensor[:count]


@cache
def builder_class(backend: Backend, ragged: bool) -> type[DeepseekSparseSWAMetadataBuilder]:
    """The platform's builder class, with ragged copies of the rows or without, whose `build` only launches.

    What it returns is a function that puts the metadata together: vLLM's layers may never look at it, as when a graph
    of the whole step is replayed. Its ``groups`` are vLLM's batches of the further groups, in their order.
    """
    own: Any = backend.get_builder_cls()

    class LaunchingBuilder(own):  # type: ignore[misc]
        """Builds now, and makes the metadata object when it is asked for."""

        wants_ragged_rows = ragged

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            assemble: Any = self._assemble
            self._assemble: Any = lambda *step: partial(self._put_together, assemble, self._builds.value, *step)

        def _put_together(self, assemble: Any, number: int, *step: Any) -> Any:
            metadata = assemble(*step)
            for one in (metadata, *metadata.groups.values()):
                one.generation = number  # another build may have been launched meanwhile
            super()._give_plans(metadata)
            return metadata

        def _give_plans(self, metadata: Any) -> None:
            if not isinstance(metadata, partial):
                super()._give_plans(metadata)

        def _group_inputs(self, batch: Any, groups: Any) -> Any:
            """(block table, slot mapping) of every group."""
            inputs = [(batch.block_table_tensor, batch.slot_mapping)]
            requests, tokens, place = batch.num_reqs, batch.num_actual_tokens, batch.slot_mapping.get_device()
            for one in groups or ():
                table, slots = one.block_table_tensor, one.slot_mapping
                # In as few operations as possible; False means only that a closer look is needed.
                if not (
                    table.dtype is torch.int32
                    and slots.dtype is torch.int64
                    and table.dim() == 2
                    and table.size(0) == requests
                    and table.stride(1) == 1
                    and slots.numel() == tokens
                    and slots.is_contiguous()
                    and table.get_device() == slots.get_device() == place
                ):
                    cut = [(first(i.block_table_tensor, requests), first(i.slot_mapping, tokens)) for i in groups]
                    named = dict(zip(self._further_groups, cut, strict=True))
                    return super()._group_inputs(batch, named)  # says what is wrong, if anything
                inputs.append((table, slots))
            return tuple(inputs)

    return LaunchingBuilder
