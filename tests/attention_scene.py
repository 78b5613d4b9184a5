"""A batch over caches whose content is known: what the attention suite calls, and what should come out.

Expected values come from a plain history: the keys of each request by position, in float64, without pages or rows.
Memory that no token may see is filled with NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from swa_backend.attention import AttentionResult, attend
from swa_backend.backend import Backend
from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.cache_layout import get_layout
from swa_backend.groups import CompressedGroup
from swa_backend.pages import element_dtype
from swa_backend.reference.codec import write_kv
from swa_backend.topk import map_topk
from tests.oracle_attention import Floats, Keys, attention, relative_error, worst_row_error
from tests.support import Batch, make_config

W = 128
INF = math.inf
SCALE = 512**-0.5
HEADS = 8


@dataclass(frozen=True)
class ProviderUnderTest:
    """A provider to run the suite on.

    Attributes:
        name: as ``SWA_BACKEND_ATTENTION`` names it; the fixture sets that variable.
        backend: the platform that has it.
        device: where its tensors live.
        swa_layouts: layouts of the window cache that it reads.
        compressed_layouts: (window, compressed) layouts that it reads together.
        batch_invariant: whether it serves the batch-invariant mode.
    """

    name: str
    backend: Backend
    device: str
    swa_layouts: tuple[str, ...] = ("fp8_ds_mla",)
    layout_pairs: tuple[tuple[str, str], ...] = (("fp8_ds_mla", "fp8_ds_mla"),)
    batch_invariant: bool = True


def random_keys(count: int, seed: int) -> torch.Tensor:
    """[count, 512] bf16 keys that every writable layout stores exactly: four significant bits, one octave of scale."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randint(8, 16, (count, 512), generator=generator) / 8
    sign = torch.randint(0, 2, (count, 512), generator=generator) * 2 - 1
    octave = torch.randint(-2, 2, (count, 512), generator=generator)
    return (sign * mantissa * 2.0**octave).bfloat16()


def floats(tensor: torch.Tensor) -> Floats:
    return tensor.detach().cpu().double().numpy()


def check(result: AttentionResult, expected: tuple[Floats, Floats]) -> None:
    """Within the accuracy bound; exactly 0 and -inf for a token without entries."""
    out, lse = floats(result.out), expected[1]
    assert relative_error(out, expected[0]) <= 3e-3
    assert worst_row_error(out, expected[0]) <= 4e-3
    assert result.lse is not None
    found = floats(result.lse)
    assert np.array_equal(np.isneginf(found), np.isneginf(lse))
    seen = ~np.isneginf(lse)
    assert np.abs(found[seen] - lse[seen]).max(initial=0.0) <= 1e-4


@dataclass
class Scene:
    """Caches filled from a history, a batch over them, and what the batch's tokens should see."""

    provider: ProviderUnderTest
    queries: Sequence[int]
    seqs: Sequence[int]
    heads: int = HEADS
    layout: str = "fp8_ds_mla"
    second: tuple[int, str, int] | None = None  # ratio, layout, page tokens of a compressed cache
    batch: dict[str, Any] = field(default_factory=dict)  # further arguments of Batch
    config: dict[str, Any] = field(default_factory=dict)  # further arguments of make_config
    poison: int = 0xFF

    def __post_init__(self) -> None:
        self.device = torch.device(self.provider.device)
        self.settings = make_config(
            num_heads=self.heads,
            cache_layout=self.layout,
            **({"compressed_layout": self.second[1]} if self.second else {}),
            **self.config,
        )
        self.spec = Batch(self.queries, self.seqs, page_tokens=self.settings.page_tokens, **self.batch)
        table = self.spec.block_table()
        self.num_pages = int(table.max()) + 2 if table.numel() else 2
        layout = get_layout(self.layout)
        scale = torch.tensor([1 / 32], device=self.device) if layout.scale_format == "tensor" else None
        self.cache = DeepseekV4SWACache(
            512,
            W,
            element_dtype(layout),
            "layers.0",
            None,
            self.provider.backend,
            block_size=self.settings.page_tokens,
            layout=layout,
            scale=scale,
        )
        bind(self.cache, self.num_pages, self.device, self.poison)
        self.history = [random_keys(seq, 100 + r) for r, seq in enumerate(self.seqs)]
        self._write_window(table)
        groups = []
        if self.second:
            ratio, name, page_tokens = self.second
            groups = [CompressedGroup("second", ratio, page_tokens)]
            self._make_second(ratio, name, page_tokens)
        builder_cls = self.provider.backend.get_builder_cls()
        self.builder = builder_cls(
            self.cache.get_kv_cache_spec(self.settings),
            ["layers.0"],
            self.settings,
            self.device,
            num_pages=self.num_pages,
            compressed_groups=groups,
        )
        self.metadata = self.build()
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(self.tokens, self.heads, 512, generator=generator).bfloat16().to(self.device)
        self.sink = torch.linspace(-2, 2, self.heads, device=self.device)

    @property
    def tokens(self) -> int:
        return self.metadata.num_tokens

    def build(self) -> Any:
        groups = None
        if self.second:
            groups = {"second": (self.second_table.to(self.device), self.spec.slot_mapping().to(self.device))}
        return self.builder.build(0, self.spec.metadata(str(self.device)), groups=groups)

    def _write_window(self, table: torch.Tensor) -> None:
        """The keys that some token's window reaches; older ones stay poisoned."""
        for r, (query, seq) in enumerate(zip(self.queries, self.seqs, strict=True)):
            positions = torch.arange(max(seq - query - W, 0), seq)
            page = table[r, positions // self.settings.page_tokens].long()
            slots = torch.where(page < 0, -1, page * self.settings.page_tokens + positions % self.settings.page_tokens)
            write_kv(self.history[r][positions].to(self.device), self.cache.pages, slots.to(self.device))

    def _make_second(self, ratio: int, name: str, page_tokens: int) -> None:
        """Complete entries in pages of their own."""
        entries = page_tokens // ratio
        columns = max(-(-seq // page_tokens) for seq in self.seqs) + 1
        self.second_table = torch.randperm(len(self.seqs) * columns, generator=torch.Generator().manual_seed(2))
        self.second_table = self.second_table.int().reshape(-1, columns) + 1
        layout = get_layout(name)
        self.second_cache = CompressedCache(
            ratio,
            layout,
            page_tokens,
            "layers.0.second",
            None,
            self.provider.backend,
            scale=torch.tensor([1 / 32], device=self.device) if layout.scale_format == "tensor" else None,
        )
        bind(self.second_cache, int(self.second_table.max()) + 2, self.device, self.poison)
        self.entries = [random_keys(seq // ratio, 500 + r) for r, seq in enumerate(self.seqs)]
        for r, keys in enumerate(self.entries):
            at = torch.arange(len(keys))
            slots = self.second_table[r, at // entries].long() * entries + at % entries
            write_kv(keys.to(self.device), self.second_cache.pages, slots.to(self.device))

    def token(self, t: int) -> tuple[int, int]:
        """(request, position) of a real token."""
        starts = np.cumsum([0, *self.queries])
        request = int(np.searchsorted(starts, t, side="right")) - 1
        return request, self.seqs[request] - self.queries[request] + t - int(starts[request])

    def window(self, t: int) -> torch.Tensor:
        request, position = self.token(t)
        return self.history[request][max(position - W + 1, 0) : position + 1]

    def topk(
        self, local: torch.Tensor, positions: torch.Tensor | None = None, **options: Any
    ) -> tuple[CompressedCache, torch.Tensor, torch.Tensor]:
        """The ``compressed`` argument for request-local entries [T, K]; further arguments go to `map_topk`."""
        assert self.second is not None
        found = [self.token(t)[1] if t < sum(self.queries) else 0 for t in range(self.tokens)]
        positions = torch.tensor(found, device=self.device) if positions is None else positions
        slots, lens = map_topk(
            local.int().to(self.device),
            self.metadata.token_to_req_indices,
            positions,
            self.second_table.to(self.device),
            self.second_cache.entries_per_page,
            self.metadata.is_valid_token,
            self.second[0],
            self.second_cache.pages.num_pages,
            backend=self.provider.backend,
            **options,
        )
        return self.second_cache, slots, lens

    def expected(self, seen: Sequence[torch.Tensor | None] | None = None, sink: torch.Tensor | None = None) -> Any:
        """float64 (out, lse) where token t sees the keys ``seen[t]``, by default its window; None = nothing."""
        if seen is None:
            real = sum(self.queries)
            seen = [self.window(t) if t < real else None for t in range(self.tokens)]
        sinks = floats(self.sink if sink is None else sink).tolist()
        rows = [attend_plainly(floats(self.q[t]), keys, sinks) for t, keys in enumerate(seen)]
        return np.concatenate([out for out, _ in rows]), np.concatenate([lse for _, lse in rows])

    def run(self, **options: Any) -> AttentionResult:
        arguments = {"q": self.q, "attn_sink": self.sink, "return_lse": True, **options}
        return attend(arguments.pop("q"), self.metadata, self.cache, arguments.pop("attn_sink"), **arguments)


def attend_plainly(q: Floats, keys: torch.Tensor | None, sinks: Sequence[float]) -> tuple[Floats, Floats]:
    """One token, [h, 512], over a list of keys."""
    table = floats(keys) if keys is not None else np.zeros((0, 512))
    return attention(q[None], [Keys(table, [range(len(table))], [len(table)])], sinks, SCALE)


def bind(cache: DeepseekV4SWACache | CompressedCache, num_pages: int, device: torch.device, poison: int) -> None:
    """Bind pages whose every byte is ``poison``; 0xFF is NaN in every layout's values or scales."""
    tensor = cache.allocate(num_pages, device)
    cache.bind_kv_cache(tensor)
    cache.pages.data.fill_(poison)


MIXED = {"queries": [1, 3, 2, 1, 40, 70], "seqs": [130, 5, 700, 1, 40, 200]}


def mixed(provider: ProviderUnderTest, **options: Any) -> Scene:
    """Decodes of one to three tokens, then a fresh prefill and a resumed one."""
    return Scene(provider, **MIXED, config={"k": 2, **options.pop("config", {})}, **options)
