"""The layers of a fuzzed model: their caches, filled from content keys, and attention beside a float64 oracle."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from swa_backend.attention import AttentionResult, attend
from swa_backend.backend import Backend
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.cache import CompressedCache, DeepseekV4SWACache, PagedCache
from swa_backend.cache_layout import HEAD_DIM, get_layout
from swa_backend.fuzz.case import Case
from swa_backend.fuzz.check import MismatchError
from swa_backend.fuzz.pages import MAIN, SECOND, group_of
from swa_backend.fuzz.rows import Right, slots_of
from swa_backend.fuzz.step import Kind, Step
from swa_backend.groups import CompressedGroup, SwaGroup
from swa_backend.layer_types import LayerType
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.pages import element_dtype
from swa_backend.platform import CacheRole
from swa_backend.replay.content import Content, DataMode
from swa_backend.replay.hashing import mix, salt
from swa_backend.replay.oracle import Oracle
from swa_backend.topk import map_topk
from swa_backend.write import write_kv

MAX_ROW_ERROR = 4e-3
MAX_LSE_ERROR = 1e-4
_HEADS = 8  # compared of each token, others for the next one
_POISON = 0xFF  # NaN as a value or as a scale of every layout
_SCALE: float = HEAD_DIM**-0.5
Write = Callable[[torch.Tensor, PagedCache, torch.Tensor], None]


class Model:
    """A layer of every type that a case has, and the builder that serves them."""

    def __init__(self, case: Case, backend: Backend, device: torch.device) -> None:
        knobs = case.knobs
        self.case, self.knobs, self.device = case, knobs, device
        self.config = knobs.config()
        self.types = (LayerType.SWAONLY, *(LayerType(group_of(ratio)) for ratio in knobs.ratios))
        layout = get_layout(knobs.layout, backend.cache_dialect(CacheRole.SWA))
        self.windows = {
            kind: DeepseekV4SWACache(
                HEAD_DIM,
                knobs.window,
                element_dtype(layout),
                f"{kind}.window",
                None,
                backend,
                knobs.page_tokens,
                layout,
            )
            for kind in self.types
        }
        self.compressed = {
            kind: CompressedCache(
                kind.ratio, self.config.compressed_layout, knobs.compressed_page_tokens, f"{kind}.c", None, backend
            )
            for kind in self.types
            if kind.ratio
        }
        for cache in (*self.windows.values(), *self.compressed.values()):
            self._bind(cache)
        self.builder: DeepseekSparseSWAMetadataBuilder = backend.get_builder_cls()(
            self.windows[LayerType.SWAONLY].get_kv_cache_spec(self.config),
            [cache.prefix for cache in self.windows.values()],
            self.config,
            device,
            num_pages=knobs.pages,
            compressed_groups=[
                CompressedGroup(group_of(ratio), ratio, knobs.compressed_page_tokens, knobs.pages)
                for ratio in knobs.ratios
            ],
            swa_groups=[SwaGroup(SECOND, knobs.second_page_tokens, knobs.pages)] if knobs.second_page_tokens else [],
        )
        self.backend = backend
        # Caches, contents and top-k picks that no graph keeps come from the case's seed alone.
        self.content = Content(DataMode.EXACT, case.seed % 2**31, knobs.heads, device)
        self.sinks = {kind: self.content.attn_sink(kind) for kind in self.types}
        layouts = [cache.layout for cache in self.windows.values()]
        second = [cache.layout for cache in self.compressed.values()] or layouts
        self.oracle = Oracle(DataMode.EXACT, case.seed % 2**31, layouts[0], second[0], knobs.heads, {})

    def _bind(self, cache: PagedCache) -> None:
        cache.bind_kv_cache(cache.allocate(self.knobs.pages, self.device))
        cache.pages.data.fill_(_POISON)

    def layers_of(self, step: Step) -> tuple[LayerType, ...]:
        """Layers that take part: the draft's have no compressed cache."""
        return self.types if step.kind is Kind.TARGET else (LayerType.SWAONLY,)

    def keys_of(self, step: Step) -> np.ndarray:
        """Content keys of the step's tokens, padding left out."""
        drafted = step.kind is not Kind.TARGET
        keys = np.empty(len(step.row), dtype=np.uint64)
        for row, part in enumerate(step.parts):
            if part.request is not None and part.count:
                keys[step.starts[row] : step.starts[row + 1]] = step.content(row, drafted)[part.start : part.end]
        return keys

    def entry_keys(self, step: Step, row: int, entries: np.ndarray, ratio: int) -> np.ndarray:
        """Content keys of complete compressed entries [n] of a row's request."""
        tokens = step.content(row, drafted=False)[entries[:, None] * ratio + np.arange(ratio)]
        keys: np.ndarray = mix(mix(tokens).sum(axis=1, dtype=np.uint64) ^ salt("entry", ratio))
        return keys

    def write(self, step: Step, keys: np.ndarray, write: Write = write_kv) -> None:
        """Store the step's keys in every layer's window, and the entries that they complete."""
        real = len(step.row)
        stored = torch.from_numpy(step.stored).to(self.device)
        for kind in self.layers_of(step):
            rows = torch.zeros(step.num_tokens, HEAD_DIM, dtype=torch.bfloat16, device=self.device)
            rows[:real] = self.content.rows(keys, kind)
            write(rows, self.windows[kind], stored)
            if kind.ratio:
                self._write_entries(step, kind, write)

    def _write_entries(self, step: Step, kind: LayerType, write: Write) -> None:
        """Where they belong by the pages that the request really has, whatever the table of this step says."""
        ratio, per_page = kind.ratio, self.knobs.compressed_page_tokens // kind.ratio
        keys, slots = [], []
        for row, part in enumerate(step.parts):
            if part.request is None:
                continue
            entries = np.arange(part.start // ratio, part.end // ratio)
            if len(entries):
                keys.append(self.entry_keys(step, row, entries, ratio))
                slots.append(slots_of(step.pages[group_of(ratio)], row, entries, per_page, self.knobs.pages))
        if keys:
            rows = self.content.rows(np.concatenate(keys), kind, entry=True)
            write(rows, self.compressed[kind], torch.from_numpy(np.concatenate(slots)).to(self.device))

    def queries(self, step: Step, keys: np.ndarray, kind: LayerType) -> torch.Tensor:
        """[T, heads, 512] bf16; padding has some query too."""
        padded = np.concatenate([keys, np.arange(step.num_tokens - len(keys), dtype=np.uint64)])
        return self.content.queries(padded, kind)

    def picks(self, step: Step, kind: LayerType, dice: random.Random) -> np.ndarray | None:
        """[T, K] int32: what an indexer may give, -1 and entries that are not complete among it; None without one."""
        if not kind.indexed:
            return None
        rng = np.random.default_rng(dice.getrandbits(32))
        picks = np.full((step.num_tokens, self.knobs.topk), -1, dtype=np.int32)
        for token in range(step.num_tokens):
            complete = (int(step.position[token]) + 1) // kind.ratio if token < len(step.row) else 5
            some = rng.permutation(complete)[: self.knobs.topk]
            own = rng.permutation(self.knobs.topk)[: len(some)]
            picks[token, own] = some
            if rng.random() < 0.1:
                picks[token, int(rng.integers(self.knobs.topk))] = rng.choice((complete, 2**31 - 1, -(2**31), -5))
        return picks

    def attend(
        self, step: Step, metadata: DeepseekSparseSWAMetadata, kind: LayerType, q: torch.Tensor,
        picks: torch.Tensor | None, positions: torch.Tensor,
    ) -> AttentionResult:  # fmt: skip
        """One layer over the step; ``picks`` [T, K] and ``positions`` [T] are on the device."""
        second = None
        if kind.ratio:
            group = metadata.compressed[group_of(kind.ratio)]
            rows, lens = group.rows, group.lens
            if picks is not None:
                rows, lens = map_topk(
                    picks, metadata.token_to_req_indices, positions, group.block_table, group.entries_per_page,
                    metadata.is_valid_token, group.ratio, num_pages=self.knobs.pages, backend=self.backend,
                )  # fmt: skip
            assert rows is not None
            assert lens is not None
            second = (self.compressed[kind], rows, lens)
        return attend(
            q, metadata, self.windows[kind], self.sinks[kind], compressed=second, return_lse=step.number % 2 == 0
        )

    def compare(
        self, step: Step, right: Right, keys: np.ndarray, kind: LayerType, picks: np.ndarray | None,
        result: AttentionResult, tokens: list[int],
    ) -> None:  # fmt: skip
        """Compare chosen tokens, some heads of each, and that padding gave zeros.

        Raises:
            MismatchError: the first difference.
        """
        valid = torch.from_numpy(right.valid[MAIN]).to(self.device)
        if bool((result.out[~valid] != 0).any()):  # NaN is not 0 either
            raise MismatchError(f"{kind}: a token without a slot has an output other than 0")
        index = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        out = result.out.index_select(0, index).double().cpu().numpy()
        lse = None if result.lse is None else result.lse.index_select(0, index).double().cpu().numpy()
        for i, token in enumerate(tokens):
            every = self.knobs.heads
            heads = np.unique((np.arange(_HEADS) * max(every // _HEADS, 1) + token + step.number) % every)
            want, want_lse = self._right_output(step, right, keys, kind, picks, token, heads)
            error = np.linalg.norm(out[i][heads] - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
            if not (error <= MAX_ROW_ERROR).all():
                raise MismatchError(
                    f"{kind}: output of token {token} (row {int(step.row[token])}, position "
                    f"{int(step.position[token])}) has relative error {float(error.max()):.1e}"
                )
            if lse is not None and not np.allclose(lse[i][heads], want_lse, rtol=0, atol=MAX_LSE_ERROR):
                found = lse[i][heads[0]]
                raise MismatchError(
                    f"{kind}: lse of token {token}, head {heads[0]}, is {found:.6f}, must be {want_lse[0]:.6f}"
                )

    def _right_output(
        self, step: Step, right: Right, keys: np.ndarray, kind: LayerType, picks: np.ndarray | None, token: int,
        heads: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """float64 output [n, 512] and lse [n] of n heads of one token."""
        row, position = int(step.row[token]), int(step.position[token])
        knobs, seen = self.knobs, [np.empty((0, HEAD_DIM))]
        if right.valid[MAIN][token]:
            content = step.content(row, step.kind is not Kind.TARGET)
            sees = right.sees[token]
            sees = sees[slots_of(step.tables[MAIN], row, sees, knobs.page_tokens, knobs.pages) >= 0]
            seen.append(self.oracle.keys_of(content[sees], kind, entry=False).numpy())
            if kind.ratio:
                entries = np.arange((position + 1) // kind.ratio)
                if picks is not None:
                    entries = picks[token][(picks[token] >= 0) & (picks[token] < len(entries))].astype(np.int64)
                per_page = knobs.compressed_page_tokens // kind.ratio
                table = step.tables[group_of(kind.ratio)]
                entries = entries[slots_of(table, row, entries, per_page, knobs.pages) >= 0]
                own = self.entry_keys(step, row, entries, kind.ratio)
                seen.append(self.oracle.keys_of(own, kind, entry=True).numpy())
        k = np.concatenate(seen)
        if not len(k):
            return np.zeros((len(heads), HEAD_DIM)), np.full(len(heads), -np.inf)
        q = self.content.queries(keys[token : token + 1], kind)[0].double().cpu().numpy()[heads]
        logits = _SCALE * (q @ k.T)
        peak = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - peak)
        total = weights.sum(axis=1, keepdims=True)
        sink = np.exp(self.sinks[kind].double().cpu().numpy()[heads, None] - peak)
        return weights @ k / (total + sink), (peak + np.log(total))[:, 0]
