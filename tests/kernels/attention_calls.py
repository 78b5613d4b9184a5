"""Calls of an attention provider over caches whose bytes an independent codec wrote, and what should come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from swa_backend.cache_layout import Dialect
from swa_backend.config import BackendConfig
from swa_backend.platform import CacheRole
from swa_backend.portable.provider import TritonAttention
from swa_backend.provider import AttentionCall, CompressedRows
from tests.independent_codec import FORMS, Array
from tests.kernels.pools import Twin, make_twin
from tests.oracle_attention import Floats, Keys, attention, relative_error, worst_row_error

SCALE = 512**-0.5


def keyed_twin(device: torch.device, name: str, dialect: str = "ocp", *, seed: int = 0, **options: Any) -> Twin:
    """A cache of random keys near 1; its padding holds 0xFF."""
    scale = {"fp8_per_tensor": 0.03}.get(name, 1.0)
    twin = make_twin(device, name, dialect, scale=scale, **options)
    pool, rng = twin.pool, np.random.default_rng(seed)
    slots = pool.pages * pool.entries
    pool.memory[:] = 0xFF
    if name == "fp4_ds_mla_v41":  # is only read: any nibbles, scales from 1/4 to 2
        for slot in range(slots):
            data, scales = pool.places(slot)
            pool.memory[data] = rng.integers(0, 256, FORMS[name].data)
            pool.memory[scales] = rng.integers(0x28, 0x40, FORMS[name].scales)
    else:
        keys = rng.standard_normal((slots, 512)).astype(np.float32)
        pool.write((keys.view(np.uint32) >> 16).astype(np.uint16), list(range(slots)))
    twin.memory.copy_(torch.from_numpy(pool.memory))
    return twin


def poison(twin: Twin, used: Sequence[Array]) -> None:
    """Fill every slot that no row names with bytes that are NaN in every layout's values or scales."""
    slots = twin.pool.pages * twin.pool.entries
    named = np.unique(np.concatenate([np.ravel(rows) for rows in used]))
    for slot in np.setdiff1d(np.arange(slots), named):
        for place in twin.pool.places(int(slot)):
            twin.pool.memory[place] = 0xFF
    twin.memory.copy_(torch.from_numpy(twin.pool.memory))


def random_rows(rng: np.random.Generator, twin: Twin, tokens: int, width: int) -> tuple[Array, Array]:
    """(slots [tokens, width] with gaps and wild entries, lens [tokens] int32 with an empty and a full row)."""
    slots = twin.pool.pages * twin.pool.entries
    rows = rng.integers(0, slots, (tokens, width)).astype(np.int32)
    wild = rng.random(rows.shape)
    rows[wild < 0.2] = -1
    rows[wild < 0.05] = slots + 7
    rows[wild < 0.02] = -(2**31)
    lens = rng.integers(1, width + 1, tokens).astype(np.int32)
    lens[-1] = 0
    lens[0] = width
    return rows, lens


@dataclass
class Case:
    """One call: window rows of one cache, perhaps compressed rows of a second; all tokens are decodes."""

    device: torch.device
    window: Twin
    rows: Array
    lens: Array
    second: Twin | None = None
    second_rows: Any = None  # as ``rows``, with a second cache
    second_lens: Any = None
    heads: int = 5
    ragged: bool = False
    batch_invariant: bool = False
    invalid: Sequence[int] = ()
    max_seq_len: int = 0
    q: torch.Tensor = field(init=False)
    sink: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.rows))
        q = torch.randn(len(self.rows), self.heads, 512, generator=generator).bfloat16()
        self.q, self.sink = q.to(self.device), torch.linspace(-2, 2, self.heads, device=self.device)

    def call(self, tokens: slice = slice(None)) -> AttentionCall:
        def on(values: Array) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[tokens])).to(self.device)

        q = self.q[tokens].contiguous()
        rows, lens = on(self.rows), on(self.lens)
        valid = torch.ones(len(self.rows), dtype=torch.bool)
        valid[list(self.invalid)] = False
        indices = indptr = None
        if self.ragged:
            live = (torch.arange(rows.shape[1], device=rows.device) < lens[:, None]) & (rows >= 0)
            indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=rows.device)
            indptr[1:] = live.sum(1).cumsum(0)
            indices = torch.full((rows.numel(),), 2**31 - 1, dtype=torch.int32, device=rows.device)
            indices[: int(indptr[-1])] = rows[live]
            rows = torch.zeros_like(rows)  # nobody looks at them
        metadata = SimpleNamespace(
            num_decode_tokens=len(q), decode_swa_indices=rows.unsqueeze(1), decode_swa_lens=lens,
            decode_swa_ragged_indices=indices, decode_swa_ragged_indptr=indptr,
            is_valid_token=valid[tokens].to(self.device), max_seq_len=self.max_seq_len,
            shape=SimpleNamespace(batch_invariant=self.batch_invariant),
        )  # fmt: skip
        second = None
        if self.second is not None:
            second = CompressedRows(self.second.view, 4, on(self.second_rows), on(self.second_lens))
        return AttentionCall(
            q=q, out=torch.full_like(q, 7.0), lse=torch.full(q.shape[:2], 7.0, device=self.device),
            metadata=metadata,  # type: ignore[arg-type]
            pages=self.window.view, attn_sink=self.sink, scale=SCALE, compressed=second,
        )  # fmt: skip

    def run(self, provider: Any, tokens: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        call = self.call(tokens)
        provider.decode(call)
        assert call.lse is not None
        return call.out, call.lse

    def expected(self) -> tuple[Floats, Floats]:
        caches = []
        for twin, rows, lens in (
            (self.window, self.rows, self.lens),
            (self.second, self.second_rows, self.second_lens),
        ):
            if twin is not None and rows is not None and lens is not None:
                seen = [0 if t in self.invalid else int(n) for t, n in enumerate(lens)]
                every = list(range(twin.pool.pages * twin.pool.entries))
                caches.append(Keys(twin.pool.read(every), rows.tolist(), seen))
        q = self.q.cpu().double().numpy()
        return attention(q, caches, self.sink.cpu().tolist(), SCALE)

    def check(self, provider: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run, then compute what is right, then compare."""
        out, lse = self.run(provider)
        right, right_lse = self.expected()
        found, found_lse = out.cpu().double().numpy(), lse.cpu().double().numpy()
        assert relative_error(found, right) <= 3e-3
        assert worst_row_error(found, right) <= 4e-3
        assert np.array_equal(np.isneginf(found_lse), np.isneginf(right_lse))
        seen = ~np.isneginf(right_lse)
        assert np.abs(found_lse[seen] - right_lse[seen]).max(initial=0.0) <= 1e-4
        return out, lse


def make_case(
    device: torch.device, window: tuple[str, str], second: tuple[str, str] | None = None, *, tokens: int = 4,
    width: int = 40, second_width: int = 30, seed: int = 0, entries: int = 16, second_entries: int = 5, **options: Any,
) -> Case:  # fmt: skip
    """Random rows over caches in which everything that no row names is NaN."""
    rng = np.random.default_rng(seed)
    twin = keyed_twin(device, *window, seed=seed, entries=entries, pages=6, gap=48 * FORMS[window[0]].align)
    rows, lens = random_rows(rng, twin, tokens, width)
    poison(twin, [rows[t, :n] for t, n in enumerate(lens)])
    if second is None:
        return Case(device, twin, rows, lens, **options)
    other = keyed_twin(device, *second, seed=seed + 1, entries=second_entries, pages=20)
    second_rows, second_lens = random_rows(rng, other, tokens, second_width)
    poison(other, [second_rows[t, :n] for t, n in enumerate(second_lens)])
    return Case(device, twin, rows, lens, other, second_rows, second_lens, **options)


def ask_for_attention(config: BackendConfig, dialects: Mapping[CacheRole, Dialect]) -> None:
    """Calls of every kind that the layers of a configuration can make: both caches, any alignment, split or not."""
    cpu = torch.device("cpu")
    layers = config.model.present_layer_types
    seconds: list[str | None] = [None]
    if any(layer.compressed for layer in layers):
        seconds.append(config.compressed_layout)
    for units in (1, 999):
        provider = TritonAttention(units=units)
        for second in seconds:
            for gap, first in ((0, 0), (8, 0), (0, 8)):
                window = make_twin(cpu, config.cache_layout, dialects[CacheRole.SWA], gap=gap, first=first)
                other = None if second is None else make_twin(cpu, second, dialects[CacheRole.COMPRESSED])
                rows = np.zeros((2, 700), np.int32)
                case = Case(cpu, window, rows, rows[:, 0], other, rows, rows[:, 0], heads=config.num_heads)
                provider.decode(case.call())
