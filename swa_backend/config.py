"""What the library must know about an engine and the model it runs, checked once, at construction.

Everything here is immutable. Shapes and capacities of the metadata follow from a `BackendConfig` alone, so that every
buffer can be allocated before the first batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swa_backend._checks import INT32_MAX, require_bool, require_int, require_type, show
from swa_backend._math import ceil_to
from swa_backend.cache_layout import HEAD_DIM, LAYOUT_NAMES, PageLayout, get_layout
from swa_backend.errors import ConfigError
from swa_backend.layer_types import ModelVersion
from swa_backend.model_config import ImageMode, ModelConfig, packaged_models

__all__ = [
    "BackendConfig",
    "ImageMode",
    "ModelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "packaged_models",
]

VALIDATE_VARIABLE = "SWA_BACKEND_VALIDATE"
PAGE_TOKENS_MULTIPLE = 32
MAX_HEADS_PER_RANK = 128
ROPE_DIM = 64
WIDTH_MULTIPLE = 64
"""Rows of a draft block are padded to a multiple of this many entries."""

_DEFAULT_COMPRESSED_LAYOUT = {ModelVersion.V4: "fp8_ds_mla", ModelVersion.V4_1: "fp8_ds_mla_v41"}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding.

    Attributes:
        num_speculative_tokens: k, draft tokens of a request and step.
        parallel_drafting: a request drafts all k tokens at once, so that a step carries up to 2k + 1 of its tokens.
        dspark: the draft block is non-causal; each of its tokens sees the whole block.

    Raises:
        ConfigError: a value is out of range.
    """

    num_speculative_tokens: int
    parallel_drafting: bool = False
    dspark: bool = False

    def __post_init__(self) -> None:
        require_int(
            "num_speculative_tokens", self.num_speculative_tokens, fix="Pass speculative=None to draft nothing."
        )
        require_bool("parallel_drafting", self.parallel_drafting)
        require_bool("dspark", self.dspark)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the engine's scheduler.

    Attributes:
        max_model_len: tokens of the longest context.
        max_num_seqs: requests of a step.
        max_num_batched_tokens: tokens of a step; the size of every per-token buffer.

    Raises:
        ConfigError: a limit is not a positive integer.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            require_int(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Everything that shapes and capacities are derived from.

    Attributes:
        model: the model's attention.
        scheduler: the scheduler's limits.
        speculative: speculative decoding, None without.
        tensor_parallel_size: ranks that share the query heads.
        page_tokens: tokens of a page of the sliding-window cache, a multiple of 32.
        cache_layout: page layout of the sliding-window cache, one that can be written.
        compressed_layout: page layout of the compressed caches; None takes the model version's and is resolved here.
        prefill_chunk_size: requests of the longest context whose gathered keys the prefill workspace holds.
        batch_invariant: a row's result must not depend, bit for bit, on the batch it came in.
        validate: check values of every batch, not only shapes; also on when ``SWA_BACKEND_VALIDATE=1``.

    Raises:
        ConfigError: a value is out of range, or contradicts another.
    """

    model: ModelConfig
    scheduler: SchedulerConfig
    speculative: SpeculativeConfig | None = None
    tensor_parallel_size: int = 1
    page_tokens: int = 64
    cache_layout: str = "fp8_ds_mla"
    compressed_layout: str = None  # type: ignore[assignment]  # a name once constructed
    prefill_chunk_size: int = 4
    batch_invariant: bool = False
    validate: bool = False

    def __post_init__(self) -> None:
        require_type("model", self.model, ModelConfig)
        require_type("scheduler", self.scheduler, SchedulerConfig)
        if self.speculative is not None:
            require_type("speculative", self.speculative, SpeculativeConfig)
        require_int("prefill_chunk_size", self.prefill_chunk_size)
        require_bool("batch_invariant", self.batch_invariant)
        object.__setattr__(self, "validate", require_bool("validate", self.validate) or _validate_from_environment())
        if self.compressed_layout is None:
            object.__setattr__(self, "compressed_layout", _DEFAULT_COMPRESSED_LAYOUT[self.model.version])
        self._check_heads()
        self._check_layouts()
        self._check_capacities()

    def _check_heads(self) -> None:
        heads = self.model.num_heads
        ranks = require_int("tensor_parallel_size", self.tensor_parallel_size)
        if heads % ranks:
            raise ConfigError(
                "tensor_parallel_size",
                found=ranks,
                legal=f"a divisor of num_attention_heads = {heads}",
                fix="Choose a number of ranks that shares the heads evenly.",
            )
        if heads // ranks > MAX_HEADS_PER_RANK:
            raise ConfigError(
                "num_heads",
                found=f"{heads // ranks} heads a rank ({heads} over {ranks})",
                legal=f"at most {MAX_HEADS_PER_RANK} heads a rank, the widest that attention kernels take",
                fix="Raise tensor_parallel_size.",
            )

    def _check_layouts(self) -> None:
        if require_int("page_tokens", self.page_tokens) % PAGE_TOKENS_MULTIPLE:
            raise ConfigError(
                "page_tokens",
                found=self.page_tokens,
                legal=f"32, 64, 96, 128, 256 or another multiple of {PAGE_TOKENS_MULTIPLE}: kernels read "
                f"sliding-window pages in multiples of {PAGE_TOKENS_MULTIPLE} tokens",
                fix="Set the engine's page (block) size to such a multiple; 64 and 256 are usual.",
            )
        for name in ("cache_layout", "compressed_layout"):
            self._check_layout(name, getattr(self, name))

    def _check_layout(self, name: str, layout_name: str) -> None:
        writable = tuple(known for known in LAYOUT_NAMES if get_layout(known).writable)
        legal = writable if name == "cache_layout" else LAYOUT_NAMES
        if layout_name not in legal:
            raise ConfigError(
                name,
                found=show(layout_name),
                legal=", ".join(legal),
                fix="Pass one of these names; a read-only layout serves compressed caches alone.",
            )
        self._check_dims(get_layout(layout_name))

    def _check_dims(self, layout: PageLayout) -> None:
        if self.model.head_dim != HEAD_DIM:
            raise ConfigError(
                "head_dim",
                found=self.model.head_dim,
                legal=f"{HEAD_DIM}: a row of the {layout.name} layout holds {HEAD_DIM} values",
                fix="This model needs another attention backend.",
            )
        if layout.packed and self.model.rope_dim != ROPE_DIM:
            raise ConfigError(
                "rope_dim",
                found=f"{self.model.rope_dim} (the model's qk_rope_head_dim)",
                legal=f"{ROPE_DIM}: the packed layout {layout.name} is made for {HEAD_DIM - ROPE_DIM} values without "
                f"position and {ROPE_DIM} with it",
                fix="Pass an unpacked layout, such as 'bf16', for the sliding-window and the compressed caches.",
            )

    def _check_capacities(self) -> None:
        require_int(
            "max_model_len",
            self.scheduler.max_model_len,
            maximum=self.model.max_position_embeddings,
            fix="Lower it to the model's max_position_embeddings, or raise that if the model was extended.",
        )
        # Ragged rows are addressed by int32 offsets.
        widest = max(self.max_decode_width, self.prefill_width)
        require_int(
            "max_num_batched_tokens",
            self.scheduler.max_num_batched_tokens,
            maximum=INT32_MAX // widest,
            fix=f"Lower it: a step's index rows, {widest} entries a token, must be addressable with int32.",
        )

    @property
    def num_heads(self) -> int:
        """Query heads of one rank."""
        return self.model.num_heads // self.tensor_parallel_size

    @property
    def k(self) -> int:
        """Speculative tokens of a request and step; 0 without speculation."""
        return self.speculative.num_speculative_tokens if self.speculative else 0

    @property
    def dspark(self) -> bool:
        """True if draft steps may be non-causal."""
        return self.speculative is not None and self.speculative.dspark

    @property
    def decode_threshold(self) -> int:
        """Longest query, in tokens, that counts as a decode."""
        return 1 + (2 if self.speculative and self.speculative.parallel_drafting else 1) * self.k

    @property
    def causal_decode_width(self) -> int:
        """Entries of a causal decode row: W."""
        return self.model.window_size

    @property
    def non_causal_width(self) -> int:
        """Entries of a non-causal draft row: W + k, rounded up to a multiple of 64; 0 without DSpark."""
        return ceil_to(self.model.window_size + self.k, WIDTH_MULTIPLE) if self.dspark else 0

    @property
    def max_decode_width(self) -> int:
        """Entries of the widest decode row that can occur."""
        return max(self.causal_decode_width, self.non_causal_width)

    @property
    def prefill_width(self) -> int:
        """Entries of a prefill row: W, and room for the longest image span."""
        return self.model.window_size + self.max_image_tokens

    @property
    def max_image_tokens(self) -> int:
        """Tokens of the longest bidirectional image span; 0 if images are causal or there are none."""
        return self.model.max_image_tokens

    @classmethod
    def from_hf_config(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculative: SpeculativeConfig | None = None,
        tensor_parallel_size: int = 1,
        page_tokens: int = 64,
        cache_layout: str = "fp8_ds_mla",
        compressed_layout: str | None = None,
        prefill_chunk_size: int = 4,
        batch_invariant: bool = False,
        validate: bool = False,
    ) -> BackendConfig:
        """Read the model from a Hugging Face config (see `ModelConfig.from_hf_config`); the rest is as in the class.

        Raises:
            ConfigError: the model config cannot be read, or a setting is out of range.
        """
        return cls(
            model=ModelConfig.from_hf_config(source),
            scheduler=SchedulerConfig(max_model_len, max_num_seqs, max_num_batched_tokens),
            speculative=speculative,
            tensor_parallel_size=tensor_parallel_size,
            page_tokens=page_tokens,
            cache_layout=cache_layout,
            compressed_layout=compressed_layout,  # type: ignore[arg-type]  # None is resolved by the class
            prefill_chunk_size=prefill_chunk_size,
            batch_invariant=batch_invariant,
            validate=validate,
        )


def _validate_from_environment() -> bool:
    text = os.environ.get(VALIDATE_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConfigError(
            VALIDATE_VARIABLE,
            found=show(text),
            legal="1 (on), 0 or empty (off)",
            fix="Correct or unset this environment variable.",
        )
    return text == "1"
