"""The replay's oracle against loops over entries, its codec against the library's, and its verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swa_backend.cache import CompressedCache
from swa_backend.cache_layout import get_layout
from swa_backend.layer_types import LayerType
from swa_backend.reference.codec import dequantise_slots
from swa_backend.registry import get_backend
from swa_backend.replay.content import Content, DataMode, chunk_numbers, chunk_table
from swa_backend.replay.hashing import mix
from swa_backend.replay.oracle import Oracle, Verdict, compare
from swa_backend.replay.oracle_codec import e4m3_magnitudes, round_to_e4m3, scale_exponent, stored_rows, unpacked_rows
from swa_backend.replay.packed_entries import PackedEntries, packed_table
from tests.oracle_attention import Keys, attention
from tests.test_replay_content import WRITABLE, through_cache

CPU = torch.device("cpu")
HEADS = 4
KEYS = mix(np.arange(400, dtype=np.uint64))


def make(mode: DataMode, layer: LayerType) -> tuple[Oracle, Content]:
    content = Content(mode, 11, HEADS, CPU)
    layouts = get_layout("fp8_ds_mla"), get_layout("fp8_ds_mla_v41")
    return Oracle(mode, 11, *layouts, HEADS, {layer: content.attn_sink(layer)}), content


class TestAttention:
    @pytest.mark.parametrize("mode", list(DataMode))
    @pytest.mark.parametrize(("seen", "entries"), [(1, 0), (128, 0), (128, 200), (5, 1)])
    def test_against_loops(self, mode, seen, entries):
        layer = LayerType.C4A
        oracle, content = make(mode, layer)
        window, picked = KEYS[:seen], KEYS[seen : seen + entries]
        # Beside a token that sees other keys, and other numbers of them.
        both = oracle.attend(KEYS[[7, 399]], layer, [KEYS[:3], window], [KEYS[200:206], picked])
        found = both[1]

        keys = through_cache(content.rows(window, layer), get_layout("fp8_ds_mla"))
        if entries:
            second = through_cache(content.rows(picked, layer, entry=True), get_layout("fp8_ds_mla_v41"))
            keys = torch.cat([keys, second])
        q = content.queries(KEYS[399:], layer).double().numpy()
        every = Keys(keys.double().numpy(), [list(range(len(keys)))], [len(keys)])
        right, _ = attention(q, [every], content.attn_sink(layer).tolist(), 512**-0.5)
        assert found.shape == (HEADS, 512)
        np.testing.assert_allclose(found, right[0], rtol=1e-12, atol=1e-14)

    def test_one_entry_by_hand(self):
        """A single key k gets the weight exp(s) / (exp(s) + exp(sink))."""
        layer = LayerType.SWAONLY
        oracle, content = make(DataMode.EXACT, layer)
        out = oracle.attend(KEYS[:1], layer, [KEYS[:1]], [KEYS[:0]])[0]
        k = content.rows(KEYS[:1], layer)[0].tolist()
        for head in range(HEADS):
            q = content.queries(KEYS[:1], layer)[0, head].tolist()
            score = sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(512)
            weight = 1 / (1 + math.exp(float(content.attn_sink(layer)[head]) - score))
            np.testing.assert_allclose(out[head], weight * np.array(k), rtol=1e-12)


class TestCodec:
    @pytest.mark.parametrize("layout", WRITABLE, ids=lambda layout: f"{layout.name}-{layout.dialect}")
    def test_agrees_with_the_library_on_every_chunk(self, layout):
        rows = chunk_table(DataMode.ARBITRARY, 3).repeat(1, 8)
        found = stored_rows(rows.double().numpy(), layout)
        assert np.array_equal(found, through_cache(rows, layout).double().numpy())

    def test_packed_entries_agree_with_the_library_on_every_chunk(self):
        """Every chunk in every place of a 288-byte row, written as the engine does it, read by the library."""
        cache = CompressedCache(1, "fp4_ds_mla_v41", 64, "entries", None, get_backend("cpu"))
        cache.bind_kv_cache(cache.allocate(40, "cpu"))
        slots = torch.randperm(2560, generator=torch.Generator().manual_seed(0))
        keys = mix(np.arange(2560, dtype=np.uint64))
        slots[7] = -1
        PackedEntries(9, CPU).write(keys, LayerType.C1A, cache, slots)
        found = dequantise_slots(cache.pages, slots).double().numpy()
        values = unpacked_rows(*(table.numpy() for table in packed_table(9)))
        right = values[chunk_numbers(keys, LayerType.C1A, entry=True)].reshape(2560, 512)
        right[7] = 0
        assert np.array_equal(found, right)
        assert len(np.unique(right, axis=0)) == 2560

    def test_packed_values_by_hand(self):
        row = unpacked_rows(np.array([[0x21, 0xF8, *[0x77] * 6]], dtype=np.uint8), np.array([[0x40]], dtype=np.uint8))
        assert row.tolist() == [[1.0, 2.0, 0.0, -12.0, *[12.0] * 12]]

    def test_magnitudes(self):
        ocp, fnuz = e4m3_magnitudes("ocp"), e4m3_magnitudes("fnuz")
        assert (ocp[0x38], ocp[1], ocp[8], ocp[-1]) == (1.0, 2.0**-9, 2.0**-6, 448.0)
        assert (fnuz[0x40], fnuz[1], fnuz[8], fnuz[-1]) == (1.0, 2.0**-10, 2.0**-7, 240.0)

    @pytest.mark.parametrize(
        ("value", "right"),
        [(1.0625, 1.0), (1.1875, 1.25), (1.07, 1.125), (-1.07, -1.125), (460.0, 448.0), (1e9, 448.0), (2.0**-10, 0.0)],
    )
    def test_rounds_to_the_even_neighbour(self, value, right):
        assert round_to_e4m3(np.array([value]), "ocp")[0] == right

    @pytest.mark.parametrize(("amax", "e"), [(448.0, 0), (448.1, 1), (896.0, 1), (0.0, -22), (1e-4, -22), (3.5, -7)])
    def test_scale_exponent(self, amax, e):
        assert scale_exponent(np.array([amax]), "ocp")[0] == e


class TestCompare:
    right = np.ones((3, 512))

    def verdict(self, out: np.ndarray, right: np.ndarray | None = None) -> Verdict:
        verdict = Verdict()
        compare(out, self.right if right is None else right, "layer x", verdict)
        return verdict

    @pytest.mark.parametrize(("error", "mismatches"), [(0.0, 0), (3.99e-3, 0), (4.01e-3, 1)])
    def test_bound_holds_for_each_row(self, error, mismatches):
        out = self.right.copy()
        out[1] *= 1 + error
        verdict = self.verdict(out)
        assert (verdict.mismatches, verdict.rows) == (mismatches, 3)
        assert verdict.worst_error == pytest.approx(error)
        assert len(verdict.examples) == mismatches

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_not_a_number(self, value):
        out = self.right.copy()
        out[2, 5] = value
        verdict = self.verdict(out)
        assert verdict.mismatches == 1
        assert verdict.worst_error == np.inf

    def test_zero_where_something_belongs_and_the_reverse(self):
        out = self.right.copy()
        out[0] = 0
        assert self.verdict(out).mismatches == 1
        right = self.right.copy()
        right[0] = 0
        assert self.verdict(self.right, right).mismatches == 1
        assert self.verdict(out, right).mismatches == 0

    def test_tiny_row_counts_relative_to_itself(self):
        right = self.right.copy()
        right[0] *= 1e-9
        out = right.copy()
        out[0, :5] *= 2
        assert self.verdict(out, right).mismatches == 1

    def test_few_examples_are_kept(self):
        verdict = Verdict()
        for number in range(20):
            compare(self.right * 2, self.right, f"token {number}", verdict)
        assert verdict.mismatches == 20
        assert len(verdict.examples) == 5
        assert verdict.examples[0].startswith("token 0: 3 of 3 heads")
