"""What is checked of each step: every index row against the owner map, chosen tokens' outputs against the oracle."""

from __future__ import annotations

import numpy as np
import torch

from swa_backend.layer_types import LayerType
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.replay.blocks import GroupSpec
from swa_backend.replay.hashing import mix, salt
from swa_backend.replay.history import Histories
from swa_backend.replay.layers import entry_index
from swa_backend.replay.options import Verify
from swa_backend.replay.oracle import Oracle, Verdict, compare
from swa_backend.replay.row_check import RowCheck
from swa_backend.replay.scheduler import Kind
from swa_backend.replay.step import WINDOW_GROUP, Step
from swa_backend.topk import TopkSlots

_NO_KEYS = np.empty(0, dtype=np.uint64)
SAMPLED_TOKENS = 600  # expected number of tokens sampled at random, beside the chosen ones


class StepRows:
    """Checks the index rows of every step.

    Args:
        groups: the cache groups.
        histories: content keys.
        window: tokens that a token sees, itself included.
        device: where rows are checked.
    """

    def __init__(
        self, groups: list[GroupSpec], histories: Histories, window: int, device: torch.device | str = "cpu"
    ) -> None:
        self._histories = histories
        self._window = window
        self._page_entries = {
            group.name: group.page_tokens // (LayerType(group.name).ratio if group.name != WINDOW_GROUP else 1)
            for group in groups
        }
        self._check = RowCheck({g.name: g.num_pages * self._page_entries[g.name] for g in groups}, device)
        self.verdict = self._check.verdict

    def check(
        self,
        step: Step,
        metadata: DeepseekSparseSWAMetadata,
        picks: dict[LayerType, torch.Tensor],
        picked: dict[LayerType, TopkSlots],
    ) -> None:
        """Check everything that a build and a top-k mapping made; rows of T tokens each.

        Args:
            step: the batch.
            metadata: what was built.
            picks: [T, K] request-local entries of the indexed layers.
            picked: what they were mapped to.
        """
        self._check_tokens(step, metadata)
        self._check_window(step, metadata)
        for name in metadata.compressed:
            self._check_compressed(LayerType(name), step, metadata)
        for layer, slots in picked.items():
            base = self._histories.entry_base[layer.ratio][step.request_ids]
            self._check.picks(
                layer.value,
                slots.slots,
                slots.lens,
                self._histories.entry_keys[layer.ratio],
                base,
                picks[layer],
                changes=self._histories.changes,
            )

    def _check_tokens(self, step: Step, metadata: DeepseekSparseSWAMetadata) -> None:
        equal = self._check.equal
        equal(WINDOW_GROUP, "the request", _host(metadata.token_to_req_indices), step.request)
        equal(WINDOW_GROUP, "validity", _host(metadata.is_valid_token), np.ones(step.num_tokens, dtype=bool))
        split = np.array([metadata.num_decodes, metadata.num_prefills, metadata.num_tokens])
        decodes = step.num_decodes
        right = np.array([decodes, len(step.work) - decodes, step.num_tokens])
        equal(WINDOW_GROUP, "the split (decodes, prefills, tokens), here", split, right)

    def _check_window(self, step: Step, metadata: DeepseekSparseSWAMetadata) -> None:
        self._check.wrote(WINDOW_GROUP, step.slots[WINDOW_GROUP], step.keys)
        count = np.minimum(step.positions + 1, self._window)
        first = step.token - count + 1
        border = metadata.num_decode_tokens
        parts = [(slice(0, border), metadata.decode_swa_indices, metadata.decode_swa_lens)]
        if metadata.prefill_swa_indices is not None and metadata.prefill_swa_lens is not None:
            parts.append((slice(border, step.num_tokens), metadata.prefill_swa_indices, metadata.prefill_swa_lens))
        checked = 0
        for part, rows, lens in parts:
            checked += rows.shape[0]
            self._check.runs(
                WINDOW_GROUP,
                rows[:, 0],
                lens,
                self._histories.keys,
                first[part],
                count[part],
                changes=self._histories.changes,
            )
        if checked != step.num_tokens:
            self.verdict.wrong(1, f"{WINDOW_GROUP}: {checked} rows for {step.num_tokens} tokens")

    def _check_compressed(self, layer: LayerType, step: Step, metadata: DeepseekSparseSWAMetadata) -> None:
        name, ratio, group = layer.value, layer.ratio, metadata.compressed[layer.value]
        entries = self._page_entries[name]
        local = step.positions // ratio
        page = step.tables[name][step.request, local // entries].astype(np.int64)
        completes = (step.positions + 1) % ratio == 0
        right = np.where(completes, page * entries + local % entries, -1)
        self._check.equal(name, "the compressed slot", _host(group.compressed_slot_mapping), right)
        tokens = np.flatnonzero(completes)
        keys = self._histories.entry_keys[ratio]
        self._check.wrote(name, right[tokens], keys[entry_index(self._histories, step, ratio, tokens)])
        if layer.indexed:
            return
        if group.rows is None or group.lens is None:
            self.verdict.wrong(step.num_tokens, f"{name}: the build made no rows")
            return
        count = (step.positions + 1) // ratio
        first = self._histories.entry_base[ratio][step.request_ids]
        changes = self._histories.changes
        self._check.runs(name, group.rows, group.lens, keys, first, count, padded=False, changes=changes)


class StepOracle:
    """Compares outputs of chosen tokens with the oracle.

    Args:
        oracle: knows the right outputs.
        histories: content keys.
        window: tokens that a token sees, itself included.
        verify: which tokens.
        expected_tokens: tokens of the whole replay, for the rate of the sample.
        seed: of the sample.
    """

    def __init__(
        self, oracle: Oracle, histories: Histories, window: int, verify: Verify, expected_tokens: int, seed: int
    ) -> None:
        self._oracle = oracle
        self._histories = histories
        self._window = window
        self._verify = verify
        self._rate = min(SAMPLED_TOKENS / max(expected_tokens, 1), 1.0)
        self._salt = salt(seed, "sample")
        self.verdict = Verdict()

    def choose(self, step: Step) -> np.ndarray:
        """Tokens of the step to compare, ascending.

        A sample holds the first and the last token of each piece of prompt (they sit at chunk borders and behind
        prefix hits), all of a request's first decode step, and others at random.
        """
        if self._verify is Verify.NONE:
            return np.empty(0, dtype=np.int64)
        if self._verify is Verify.ALL:
            return np.arange(step.num_tokens)
        draws = mix(mix(step.keys ^ self._salt) + step.positions.astype(np.uint64)) / 2.0**64
        chosen = draws < self._rate
        at = 0
        for work in step.work:
            if work.kind is not Kind.DECODE:
                chosen[[at, at + work.count - 1]] = True
            elif work.state.generated == 1:
                chosen[at : at + work.count] = True
            at += work.count
        return np.flatnonzero(chosen)

    def compare(
        self, step: Step, tokens: np.ndarray, layer: LayerType, out: torch.Tensor, picks: torch.Tensor | None
    ) -> None:
        """Compare one layer's output.

        Args:
            step: the batch.
            tokens: [n] tokens to compare.
            layer: the layer's type.
            out: [T, heads, 512] output.
            picks: [T, K] request-local entries that an indexed layer picked.
        """
        if not len(tokens):
            return
        index = torch.from_numpy(tokens)
        found = out.index_select(0, index.to(out.device)).double().cpu().numpy()
        picked = None if picks is None else picks.index_select(0, index.to(picks.device)).cpu().numpy()
        histories, windows, entries = self._histories, [], []
        for row, token in enumerate(tokens.tolist()):
            position, at, request = (int(a[token]) for a in (step.positions, step.token, step.request_ids))
            windows.append(histories.keys[at - min(position, self._window - 1) : at + 1])
            seen = np.empty(0, dtype=np.int64)
            if layer.compressed:
                complete = np.arange((position + 1) // layer.ratio)
                seen = complete if picked is None else picked[row][picked[row] >= 0]
                seen = histories.entry_base[layer.ratio][request] + seen
            entries.append(histories.entry_keys[layer.ratio][seen] if layer.compressed else _NO_KEYS)
        right = self._oracle.attend(step.keys[tokens], layer, windows, entries)
        for row, token in enumerate(tokens.tolist()):
            where = f"request {step.request_ids[token]}, position {step.positions[token]}"
            compare(found[row], right[row], f"{layer} layer, {where}", self.verdict)


def _host(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.cpu().numpy()
    return array
