"""What a history is made of: an engine's settings and its requests, as plain data that JSON holds.

Nothing random is stored but a seed: whatever happens in step s to request r is drawn from (seed, s, r), so that a case
with a request less, or with fewer steps, is much the same history.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from swa_backend.config import BackendConfig, ImageMode, ModelConfig, SchedulerConfig, SpeculativeConfig
from swa_backend.errors import TraceError
from swa_backend.layer_types import ModelVersion
from swa_backend.replay.hashing import mix_int

FORMAT = 1


class Profile(StrEnum):
    """Which settings histories have: ``any`` that the library takes, or those that vendors' kernels are made for."""

    ANY = "any"
    CHIP = "chip"


@dataclass(frozen=True, slots=True)
class Knobs:
    """Settings of the engine; chances are in per mille a step.

    Attributes:
        window, page_tokens, heads, topk: of the model and its window cache.
        pages: pages of every cache.
        drafts, parallel, dspark: speculative decoding, as in `SpeculativeConfig`; 0 drafts nothing.
        image_tokens: longest image that is seen in both directions; 0 leaves images causal.
        newer: model version V4.1, which has ratios of 1 and 2 too and whose images stay causal.
        layout: of the window caches; compressed ones have the version's.
        ratios: compressed caches.
        compressed_page_tokens: tokens that a page of a compressed cache stands for.
        second_page_tokens: page size of a further sliding-window group; 0 without one.
        max_tokens, max_seqs, max_len: the scheduler's limits.
        acceptance: per cent of drafts that are right.
        preempt, drain: a running request loses its pages; all running requests end.
        holes: a table misses a page that a token sees, or names one past the cache.
        foreign: a token of the step belongs to another rank: it has no slot here.
        hostile: tokens of padding have slots, padded requests any length.
        captured: a step of decodes alone is padded to the shape that a graph has.
        validate: validation mode, under which such a history must pass.
    """

    window: int = 128
    page_tokens: int = 64
    pages: int = 40
    heads: int = 4
    topk: int = 64
    drafts: int = 0
    parallel: bool = False
    dspark: bool = False
    image_tokens: int = 0
    newer: bool = False
    layout: str = "fp8_ds_mla"
    ratios: tuple[int, ...] = ()
    compressed_page_tokens: int = 256
    second_page_tokens: int = 0
    max_tokens: int = 64
    max_seqs: int = 8
    max_len: int = 1024
    acceptance: int = 70
    preempt: int = 20
    drain: int = 5
    holes: int = 0
    foreign: int = 0
    hostile: int = 0
    captured: int = 0
    validate: bool = False

    @property
    def threshold(self) -> int:
        """Longest query that counts as a decode."""
        return 1 + (2 if self.parallel else 1) * self.drafts

    def config(self) -> BackendConfig:
        """The library's configuration for these settings."""
        speculative = None
        if self.drafts:
            speculative = SpeculativeConfig(self.drafts, parallel_drafting=self.parallel, dspark=self.dspark)
        model = ModelConfig(
            name="fuzz",
            version=ModelVersion.V4_1 if self.newer else ModelVersion.V4,
            num_hidden_layers=1 + len(self.ratios),
            num_heads=self.heads,
            head_dim=512,
            rope_dim=64,
            window_size=self.window,
            index_topk=self.topk,
            max_position_embeddings=self.max_len,
            compress_ratios=(0, *self.ratios),
            image_mode=ImageMode.BIDIRECTIONAL if self.image_tokens else ImageMode.NONE,
            max_image_tokens=self.image_tokens,
        )
        return BackendConfig(
            model,
            SchedulerConfig(self.max_len, self.max_seqs, self.max_tokens),
            speculative=speculative,
            page_tokens=self.page_tokens,
            cache_layout=self.layout,
            validate=self.validate,
        )


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request.

    Attributes:
        number: its name, which stays when others are left out.
        arrival: step at which it begins to wait.
        prompt, output: tokens.
        family, shared: its first ``shared`` tokens are those of every request of the family.
        images: inclusive positions (first, last) of the images in its prompt.
    """

    number: int
    arrival: int
    prompt: int
    output: int
    family: int = 0
    shared: int = 0
    images: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Case:
    """A history: a seed, settings, requests, and after how many steps it ends at the latest."""

    seed: int
    knobs: Knobs
    requests: tuple[RequestSpec, ...]
    steps: int

    def to_json(self) -> str:
        """The case as a JSON document."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "case") -> Case:
        """Read what `to_json` made.

        Raises:
            TraceError: naming ``origin`` and the key at fault.
        """
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict) or raw.get("format") != FORMAT:
                raise ValueError(f"no case of format {FORMAT}")
            known = {field.name for field in fields(Knobs)}
            if unknown := sorted(raw["knobs"].keys() - known):
                raise ValueError(f"unknown settings {', '.join(unknown)}")
            knobs = Knobs(**{**raw["knobs"], "ratios": tuple(raw["knobs"].get("ratios", ()))})
            requests = tuple(
                RequestSpec(**{**one, "images": tuple((int(a), int(b)) for a, b in one.get("images", ()))})
                for one in raw["requests"]
            )
            return cls(int(raw["seed"]), knobs, requests, int(raw["steps"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(
                origin,
                found=f"{type(error).__name__}: {error}",
                legal=f"a case that `swa-backend fuzz` saved (format {FORMAT})",
                fix="Pass such a file; its seed makes it again: swa-backend fuzz --seed N.",
            ) from None


def load_case(path: Path) -> Case:
    """The case in a file.

    Raises:
        TraceError: it holds no case.
        OSError: it cannot be read.
    """
    try:
        return Case.from_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        return Case.from_json("", str(path))


def random_case(seed: int, profile: Profile = Profile.ANY, steps: int = 80) -> Case:
    """A history drawn from ``seed``; the same one for the same arguments."""
    dice = random.Random(mix_int(seed, 0xCA5E))
    knobs = _random_knobs(dice, profile)
    families = dice.randint(1, 3)
    longest = min(knobs.max_len, _longest_fit(knobs)) - 1
    requests = []
    arrival = 0
    for number in range(dice.randint(2, 14)):
        arrival += dice.choice((0, 0, 1, dice.randint(0, 12)))
        size = dice.choice((6, 40, 200, longest, longest))
        prompt = dice.randint(1, max(min(size, longest - 1), 1))
        output = dice.randint(1, max(min(longest - prompt, dice.choice((3, 20, 60))), 1))
        shared = dice.choice((0, prompt, dice.randint(0, prompt)))
        images = _images(dice, prompt, knobs.image_tokens or dice.choice((0, 0, 30)))
        requests.append(RequestSpec(number, arrival, prompt, output, dice.randrange(families), shared, images))
    return Case(seed, knobs, tuple(requests), steps)


def _random_knobs(dice: random.Random, profile: Profile) -> Knobs:
    chip = profile is Profile.CHIP
    window = 128 if chip or dice.random() < 0.5 else dice.choice((16, 31, 64, 200))
    page_tokens = dice.choice((64, 64, 256) if chip else (32, 64, 96, 128))
    drafts = dice.choice((0, 1, 2, 3, 5, 7))
    style = dice.random() if drafts else 0.0
    newer = not chip and dice.random() < 0.25
    ratios: tuple[int, ...] = dice.choice(((), (4,), (128,), (4, 128)))
    if newer:
        ratios = dice.choice(((1,), (2,), (1, 4), (2, 128)))
    max_seqs = dice.choice((1, 3, 8, 16))
    threshold = 1 + 2 * drafts
    holes = dice.choice((0, 0, 150))
    foreign, hostile = dice.choice((0, 0, 200)), dice.choice((0, 0, 300))
    return Knobs(
        window=window,
        page_tokens=page_tokens,
        pages=dice.choice((12, 24, 60)),
        heads=dice.choice((8, 64, 128)) if chip else dice.choice((1, 2, 4)),
        topk=64 if chip else dice.choice((1, 24, 64)),
        drafts=drafts,
        parallel=style > 0.75,
        dspark=0.4 < style <= 0.75,
        image_tokens=0 if newer else dice.choice((0, 0, 24) if chip else (0, 0, 24, 150)),  # a chip: few compile keys
        newer=newer,
        layout="fp8_ds_mla" if chip else dice.choice(("fp8_ds_mla", "fp8_ds_mla", "fp8_ds_mla_v41", "bf16")),
        ratios=ratios,
        compressed_page_tokens=dice.choice((128, 256)),
        second_page_tokens=dice.choice((0, 0, 32, 64)),
        max_tokens=dice.choice((max_seqs * threshold, max_seqs * threshold + 40, 160)) if max_seqs < 8 else 272,
        max_seqs=max_seqs,
        max_len=dice.choice((300, 1000, 1600)),
        acceptance=dice.choice((0, 50, 90, 100)),
        preempt=dice.choice((0, 30, 150)),
        drain=dice.choice((0, 10, 60)),
        holes=holes,
        foreign=foreign,
        hostile=hostile,
        captured=dice.choice((0, 500, 900)),
        validate=not holes and not hostile and dice.random() < 0.5,
    )


def _longest_fit(knobs: Knobs) -> int:
    """Tokens of a request that fits every cache even alone, drafts and all."""
    smallest = min(knobs.page_tokens, knobs.second_page_tokens or knobs.page_tokens)
    whole = knobs.pages * knobs.compressed_page_tokens if knobs.ratios else knobs.max_len
    # A window group holds the window, a step's tokens and the pages that both begin and end in.
    if (knobs.pages - 2) * smallest < knobs.window + knobs.max_tokens + 1:
        whole = min(whole, knobs.pages * smallest)
    return whole


def _images(dice: random.Random, prompt: int, longest: int) -> tuple[tuple[int, int], ...]:
    images, at = [], 0
    while longest and dice.random() < 0.7 and at < prompt:
        first = at + dice.randint(0, 60)
        last = first + dice.randint(1, longest) - 1
        if last < prompt:
            images.append((first, last))
        at = last + 1
    return tuple(images)


def fit(requests: Sequence[RequestSpec], knobs: Knobs) -> tuple[RequestSpec, ...]:
    """Those requests that the settings can serve; shrinking makes settings smaller."""
    longest = min(knobs.max_len, _longest_fit(knobs))
    return tuple(
        request
        for request in requests
        if request.total <= longest
        and all(last - first < (knobs.image_tokens or last + 1) for first, last in request.images)
    )
