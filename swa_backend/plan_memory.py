"""How much memory the caches of a model take: bytes a token by layer type, and the tokens that fit.

A layer's window cache is its own. Compressed entries may be shared: where a model names source layers, only those have
a compressed cache, and each layer reads that of the last source at or before it. Key and value heads are one head, so
every tensor-parallel rank holds all of this. Pages are counted as the cache specs have them, padding included.

What the engine keeps beside these caches (indexer keys, compressor states, weights) is not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from swa_backend._checks import is_int, show
from swa_backend._math import cdiv
from swa_backend.cache_layout import SLOT_LIMIT, get_layout
from swa_backend.chunk_plan import workspace_bytes
from swa_backend.config import BackendConfig
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType
from swa_backend.model_config import ModelConfig

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{name}I": 1024**power for power, name in enumerate("KMGT", 1)}
CONTEXTS = (4096, 32_768, 131_072, 1_048_576)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Caches that are alike: the window caches of a layer type, or its compressed ones.

    Attributes:
        layer_type: the layer type.
        cache: ``window`` or ``compressed``.
        layers: layers of the type that are counted.
        caches: caches that they have; fewer than layers where entries are shared.
        layout: byte layout of a page.
        page_tokens: tokens that a page stands for.
        entries: entries of a page.
        page_bytes: bytes of a page.
        kept_tokens: tokens before the next one that a request still needs; None: all of them.
    """

    layer_type: LayerType
    cache: str
    layers: int
    caches: int
    layout: str
    page_tokens: int
    entries: int
    page_bytes: int
    kept_tokens: int | None

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that a token takes in one of these caches while its page is kept."""
        return Fraction(self.page_bytes, self.page_tokens)

    def pages_of(self, tokens: int, step_tokens: int) -> int:
        """Pages of one cache that a request of so many tokens holds at most, while pages behind its window go."""
        every = cdiv(tokens, self.page_tokens)
        if self.kept_tokens is None:
            return every
        # The worst alignment: the first token that is still seen is the last of its page.
        return min(every, cdiv(self.kept_tokens - 1 + step_tokens, self.page_tokens) + 1)


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests of one length that fit when window pages are given back as a request moves on."""

    context: int
    bytes_per_request: int
    requests: int

    @property
    def tokens(self) -> int:
        return self.requests * self.context


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a model's caches on one rank.

    Attributes:
        model: its name.
        caches: every kind of cache.
        memory: bytes for the caches.
        kept_tokens: tokens that fit when every page of every cache is kept, as a prefix cache does.
        fits: requests that fit by context length, window pages behind a request given back.
        workspace: bytes of the prefill workspace beside the caches, at most.
    """

    model: str
    caches: tuple[CacheKind, ...]
    memory: int
    kept_tokens: int
    fits: tuple[Fit, ...]
    workspace: int

    def bytes_per_token(self, cache: str | None = None) -> Fraction:
        """Bytes that a token takes in all caches of a kind, or in all."""
        own = (one for one in self.caches if cache in (None, one.cache))
        return sum((one.caches * one.bytes_per_token for one in own), Fraction(0))

    def to_dict(self) -> dict[str, Any]:
        caches = [
            {**asdict(one), "bytes_per_token": float(one.bytes_per_token),
             "bytes_per_token_all": float(one.caches * one.bytes_per_token)}
            for one in self.caches
        ]  # fmt: skip
        return {
            "model": self.model,
            "caches": caches,
            "bytes_per_token": {
                "window": float(self.bytes_per_token("window")),
                "compressed": float(self.bytes_per_token("compressed")),
                "all": float(self.bytes_per_token()),
            },
            "memory": self.memory,
            "kept_tokens": self.kept_tokens,
            "fits": [{**asdict(fit), "tokens": fit.tokens} for fit in self.fits],
            "workspace_bytes": self.workspace,
        }


def plan_memory(
    config: BackendConfig, memory: int, compressed_page_tokens: int = 256, *, draft_layers: bool = False
) -> MemoryPlan:
    """Plan the caches of a configuration.

    Args:
        config: model, page size, layouts; the longest context and the drafts of a step.
        memory: bytes for the caches.
        compressed_page_tokens: tokens that a page of a compressed cache stands for.
        draft_layers: count the draft layers that the model lists after its trunk too.

    Raises:
        ConfigError: a page does not hold whole entries, or a layer has no source for its compressed entries.
    """
    caches = tuple(_caches(config, compressed_page_tokens, draft_layers))
    block = math.lcm(*(one.page_tokens for one in caches))
    block_bytes = sum(one.caches * block // one.page_tokens * one.page_bytes for one in caches)
    most = min((SLOT_LIMIT - 1) // one.entries * one.page_tokens for one in caches)  # slots are 32-bit
    contexts = [context for context in CONTEXTS if context < config.scheduler.max_model_len]
    fits = []
    for context in (*contexts, config.scheduler.max_model_len):
        taken = sum(one.caches * one.pages_of(context, config.decode_threshold) * one.page_bytes for one in caches)
        fits.append(Fit(context, taken, memory // taken))
    return MemoryPlan(
        config.model.name,
        caches,
        memory,
        min(memory // block_bytes * block, most // block * block),
        tuple(fits),
        workspace_bytes(config),
    )


def _caches(config: BackendConfig, compressed_page_tokens: int, draft_layers: bool) -> Iterator[CacheKind]:
    model = config.model
    layers = model.layer_types if draft_layers else model.trunk_layer_types
    window, second = get_layout(config.cache_layout), get_layout(config.compressed_layout)
    sources = _sources(model, layers)
    for kind in (kind for kind in LayerType if kind in layers):
        count = layers.count(kind)
        yield CacheKind(
            kind, "window", count, count, window.name, config.page_tokens, config.page_tokens,
            window.page_bytes(config.page_tokens), model.window_size - 1,
        )  # fmt: skip
        if kind.compressed:
            if not is_int(compressed_page_tokens) or compressed_page_tokens < 1 or compressed_page_tokens % kind.ratio:
                raise ConfigError(
                    "compressed_page_tokens",
                    found=show(compressed_page_tokens),
                    legal=f"a positive multiple of {kind.ratio}, the ratio of the {kind} layers",
                    fix="Choose a page that holds whole entries.",
                )
            entries = compressed_page_tokens // kind.ratio
            yield CacheKind(
                kind, "compressed", count, sources.count(kind), second.name, compressed_page_tokens, entries,
                second.page_bytes(entries), None,
            )  # fmt: skip


def _sources(model: ModelConfig, layers: tuple[LayerType, ...]) -> list[LayerType]:
    """Layer type of every layer that has a compressed cache of its own."""
    if not model.kv_source_layer_ids:
        return [kind for kind in layers if kind.compressed]
    source: LayerType | None = None
    found = []
    for layer, kind in enumerate(layers):
        if layer in model.kv_source_layer_ids:
            source = kind
            found.append(kind)
        if kind.compressed and kind is not source:
            raise ConfigError(
                "kv_source_layer_ids",
                found=f"{list(model.kv_source_layer_ids)}, of which layer {layer} ({kind}) would read "
                f"{'none' if source is None else f'entries of a {source} layer'}",
                legal="for each layer with a compressed cache, a last source at or before it of the same type",
                fix="Correct kv_source_layer_ids in the model config.",
            )
    return [kind for kind in found if kind.compressed]


def parse_size(text: str) -> int:
    """Bytes of a size such as ``80GiB``, ``141GB``, ``512 MiB`` or ``1000``.

    Raises:
        ConfigError: another form, or nothing at all.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?)?B?\s*", text, re.IGNORECASE | re.ASCII)
    size = int(Fraction(match[1]) * _UNITS[(match[2] or "").upper()]) if match and len(match[1]) < 30 else 0
    if size < 1:
        raise ConfigError(
            "memory", found=show(text), legal="a size such as 80GiB, 141GB or 512MiB", fix="Write a number and a unit."
        )
    return size
