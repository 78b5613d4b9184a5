"""What a replay is asked to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swa_backend._checks import require_bool, require_enum, require_int, show
from swa_backend._math import cdiv
from swa_backend.config import BackendConfig, SchedulerConfig, SpeculativeConfig
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType
from swa_backend.model_config import ModelConfig, packaged_models
from swa_backend.replay.content import DataMode
from swa_backend.replay.traces import Request

SAMPLE_REQUESTS = 12
DEFAULT_PAGES = 2048


class Attention(StrEnum):
    """Whether attention runs, for every token, or the replay stops at schedule, cache write and metadata build."""

    ALL = "all"
    NONE = "none"


class Verify(StrEnum):
    """Which tokens' outputs are compared with the oracle."""

    SAMPLED = "sampled"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class ReplayOptions:
    """Settings of a replay. Checks itself at construction, apart from what only the model or the trace can tell.

    Attributes:
        trace: a file, or ``azure`` or ``mooncake`` for a packaged sample; None takes the first requests of the
            packaged Azure sample.
        model: name of a packaged model in any case, or path of a Hugging Face config.
        platform: platform name; None takes the one chosen at import.
        max_requests: stop reading after this many good rows; None reads all (12 of the default trace).
        layers: layer types to run, one layer of each; None takes every type that the model has.
        attention: run attention for every token, or for none.
        verify: tokens to compare with the oracle; ``sampled`` takes the ends of every piece of prompt, a request's
            first decode, and some hundred tokens at random.
        seed: of contents, top-k choices, page numbers, draft acceptance and the sample.
        data: ``exact`` values that every cache layout holds without loss, or ``arbitrary`` ones.
        skip_bad_rows: leave malformed and too long trace rows out and count them.
        drafts: draft tokens of a decoding request and step.
        acceptance: probability that a draft is right when all before it were.
        max_batched_tokens: tokens of a step.
        max_seqs: requests of a step.
        max_model_len: tokens of the longest request; None takes what the trace needs, up to the model's limit.
        page_tokens: tokens of a window page, a multiple of 32.
        pages: pages of each cache group; None takes 2048, or more if the longest request needs them.
        cache_layout: layout of the window caches.
        compressed_layout: layout of the compressed caches; None takes the model version's. Entries of a layout that
            the library only reads are written by the replay itself.
        validate: run in validation mode, and count every broken value rule instead of stopping at the first.

    Raises:
        ConfigError: a value is out of range; names the field.
    """

    trace: str | Path | None = None
    model: str | Path = "V4-Flash"
    platform: str | None = None
    max_requests: int | None = None
    layers: Sequence[str] | None = None
    attention: str = Attention.ALL
    verify: str = Verify.SAMPLED
    seed: int = 0
    data: str = DataMode.EXACT
    skip_bad_rows: bool = False
    drafts: int = 0
    acceptance: float = 0.7
    max_batched_tokens: int = 2048
    max_seqs: int = 64
    max_model_len: int | None = None
    page_tokens: int = 64
    pages: int | None = None
    cache_layout: str = "fp8_ds_mla"
    compressed_layout: str | None = None
    validate: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("attention", Attention), ("verify", Verify), ("data", DataMode)):
            require_enum(name, getattr(self, name), kind)
        for name in ("max_batched_tokens", "max_seqs", "page_tokens"):
            require_int(name, getattr(self, name))
        for name in ("max_requests", "max_model_len", "pages"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name))
        require_int("seed", self.seed, minimum=0, maximum=2**63 - 1)
        require_int("drafts", self.drafts, minimum=0)
        require_bool("skip_bad_rows", self.skip_bad_rows)
        require_bool("validate", self.validate)
        self._check_acceptance()
        self._check_combinations()

    def _check_acceptance(self) -> None:
        value = self.acceptance
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= 1:
            raise ConfigError(
                "acceptance", found=show(value), legal="a number from 0 to 1", fix="Pass a probability."
            )

    def _check_combinations(self) -> None:
        if self.attention == Attention.NONE and self.verify == Verify.ALL:
            raise ConfigError(
                "verify",
                found="'all' with attention 'none'",
                legal="'none' or 'sampled', both of which then verify no output",
                fix="Run attention, or verify index rows only.",
            )
        if self.max_batched_tokens < 1 + self.drafts:
            raise ConfigError(
                "max_batched_tokens",
                found=self.max_batched_tokens,
                legal=f"at least {1 + self.drafts}, a decoding request with its drafts",
                fix="Raise it, or lower drafts.",
            )
        if isinstance(self.layers, str) or (self.layers is not None and not self.layers):
            raise ConfigError(
                "layers",
                found=show(self.layers),
                legal="at least one layer type, in a list",
                fix="Name the layer types to run, or leave the option out to run one layer of each.",
            )

    @property
    def runs_attention(self) -> bool:
        return self.attention == Attention.ALL

    @property
    def request_limit(self) -> int | None:
        """Requests to read at most."""
        return SAMPLE_REQUESTS if self.trace is None and self.max_requests is None else self.max_requests

    def read_model(self) -> ModelConfig:
        """The model that is meant.

        Raises:
            ConfigError: no packaged model has the name and no such file exists, or the file is not usable.
        """
        name = str(self.model)
        if name.casefold() in (known.casefold() for known in packaged_models()):
            return ModelConfig.packaged(name)
        if not Path(name).exists():
            raise ConfigError(
                "model",
                found=show(name),
                legal=f"{', '.join(packaged_models())}, or the path of a Hugging Face config",
                fix="Correct the name or the path.",
            )
        return ModelConfig.from_hf_config(name)

    def layer_types(self, model: ModelConfig) -> tuple[LayerType, ...]:
        """Layer types to run, in the order of `LayerType`.

        Raises:
            ConfigError: one that the model does not have.
        """
        present = model.present_layer_types
        if self.layers is None:
            return present
        for name in self.layers:
            if name not in present:
                raise ConfigError(
                    "layers",
                    found=show(name),
                    legal=f"{', '.join(present)} (the layer types of {model.name})",
                    fix="Name layer types of this model, separated by commas on the command line.",
                )
        return tuple(kind for kind in present if kind in self.layers)

    def backend_config(self, model: ModelConfig, longest: int) -> BackendConfig:
        """The library's configuration for a trace whose longest request has ``longest`` tokens.

        Raises:
            ConfigError: a setting does not fit the model.
        """
        return BackendConfig(
            model,
            SchedulerConfig(
                max_model_len=self.max_model_len or longest,
                max_num_seqs=self.max_seqs,
                max_num_batched_tokens=self.max_batched_tokens,
            ),
            speculative=SpeculativeConfig(self.drafts) if self.drafts else None,
            page_tokens=self.page_tokens,
            cache_layout=self.cache_layout,
            compressed_layout=self.compressed_layout,  # type: ignore[arg-type]  # None is resolved by the class
            validate=self.validate,
        )

    def num_pages(self, requests: Sequence[Request]) -> int:
        """Pages of each cache group."""
        longest = max(request.total_length for request in requests)
        return self.pages or max(DEFAULT_PAGES, cdiv(longest, self.page_tokens))
