"""Content: the same key gives the same values, other keys other ones, and exact values pass through every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.cache_layout import LAYOUT_NAMES, Dialect, get_layout
from swa_backend.layer_types import LayerType
from swa_backend.pages import PageView, element_dtype
from swa_backend.reference.codec import dequantise_slots, write_kv
from swa_backend.replay.content import Content, DataMode, TopkChooser, chunk_table
from swa_backend.replay.hashing import mix, mix_int, salt
from swa_backend.replay.history import Histories
from swa_backend.replay.traces import Request

CPU = torch.device("cpu")
WRITABLE = [
    get_layout(name, dialect)
    for name in LAYOUT_NAMES
    for dialect in Dialect
    if get_layout(name).writable and (get_layout(name).dialect or dialect is Dialect.OCP)
]


def request(number: int, prompt: int, output: int, blocks: tuple[int, ...] | None) -> Request:
    return Request(number, number + 1, 0.0, prompt, output, blocks)


SHARED = [
    request(0, 1100, 40, (5, 6, 7)),
    request(1, 1300, 20, (5, 6, 8)),
    request(2, 600, 10, None),
    request(3, 600, 10, None),
]


def histories(seed: int = 0) -> Histories:
    return Histories(SHARED, seed, {4, 128})


def through_cache(k: torch.Tensor, layout) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Keys [n, 512] written to a cache of one page and read again."""
    entries = -(-len(k) // 32) * 32
    page = layout.page_bytes(entries)
    width = layout.bytes_per_token // element_dtype(layout).itemsize
    pool = torch.zeros(page, dtype=torch.uint8).view(element_dtype(layout))
    tensor = pool.as_strided((1, entries, width), (pool.numel(), width, 1))
    scale = torch.ones(1) if layout.scale_format == "tensor" else None
    view = PageView.of(tensor, layout, entries, scale)
    write_kv(k, view, torch.arange(len(k)))
    return dequantise_slots(view, torch.arange(len(k)))


class TestHashing:
    def test_mix_is_one_to_one_on_a_sample_and_spreads_bits(self):
        values = mix(np.arange(100_000, dtype=np.uint64))
        assert len(np.unique(values)) == 100_000
        ones = np.unpackbits(values.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 0.01

    def test_mix_leaves_its_argument_alone(self):
        values = np.arange(5, dtype=np.uint64)
        mix(values)
        assert values.tolist() == [0, 1, 2, 3, 4]

    def test_order_and_parts_matter(self):
        assert len({mix_int(1, 2), mix_int(2, 1), mix_int(1), mix_int(1, 2, 0), mix_int(0, 1, 2)}) == 5
        assert len({int(salt("a", 1)), int(salt("a", 2)), int(salt("b", 1))}) == 3


class TestHistories:
    def test_shared_blocks_have_the_same_keys(self):
        first, second = histories().of(0), histories().of(1)
        assert len(first) == 1140
        assert np.array_equal(first[:1024], second[:1024])
        assert not np.isin(first[1024:], second).any()
        assert len(np.unique(first)) == len(first)

    def test_nothing_else_is_shared(self):
        third, fourth = histories().of(2), histories().of(3)
        assert not np.isin(third, fourth).any()
        assert not np.isin(histories(1).of(0), histories(0).of(0)).any()

    def test_the_same_block_at_another_place_is_other_content(self):
        moved = Histories([request(0, 1024, 1, (5, 6)), request(1, 1024, 1, (6, 5))], 0, ())
        assert not np.isin(moved.of(0), moved.of(1)).any()

    def test_chain_agrees_exactly_as_long_as_everything_before_does(self):
        one = histories()
        same = one.chain(0)[:1140] == one.chain(1)[:1140]
        assert same[:1024].all()
        assert not same[1024:].any()

    @pytest.mark.parametrize("ratio", [4, 128])
    def test_entries_stand_for_the_content_of_their_tokens(self, ratio):
        one = histories()
        base = one.entry_base[ratio]
        first, second = (one.entry_keys[ratio][base[r] : base[r] + 1024 // ratio + 1] for r in (0, 1))
        assert np.array_equal(first[:-1], second[:-1])  # complete inside the shared part
        assert first[-1] != second[-1]
        assert len(one.entry_keys[ratio]) == sum(r.total_length // ratio for r in SHARED)

    def test_reject_changes_the_drafts_and_their_entries_until_restored(self):
        one = histories()
        keys, entries = one.keys.copy(), {ratio: own.copy() for ratio, own in one.entry_keys.items()}
        one.reject(1, 1298, 5)  # positions 1298..1302
        one.reject(0, 1101, 2)
        changed = np.flatnonzero(one.keys != keys) - one.base[1]
        assert changed[changed >= 0].tolist() == [1298, 1299, 1300, 1301, 1302]
        assert (one.of(0) != keys[:1140]).nonzero()[0].tolist() == [1101, 1102]
        changed = np.flatnonzero(one.entry_keys[4] != entries[4]) - one.entry_base[4][1]
        assert changed[changed >= 0].tolist() == [1298 // 4, 1302 // 4]
        assert np.array_equal(one.entry_keys[128], entries[128])  # those entries never become complete
        one.reject(1, 1270, 2)
        assert (np.flatnonzero(one.entry_keys[128] != entries[128]) - one.entry_base[128][1]).tolist() == [9]
        one.restore()
        assert np.array_equal(one.keys, keys)
        assert all(np.array_equal(one.entry_keys[ratio], entries[ratio]) for ratio in entries)


class TestTensors:
    @pytest.mark.parametrize("mode", list(DataMode))
    def test_a_function_of_seed_key_and_layer(self, mode):
        keys = histories().of(0)[:50]
        one, again = (Content(mode, 3, 4, CPU) for _ in range(2))
        shuffled = np.random.default_rng(0).permutation(50)
        for make in ("rows", "queries"):
            values = getattr(one, make)(keys, LayerType.C4A)
            assert torch.equal(getattr(again, make)(keys[shuffled], LayerType.C4A), values[shuffled])
            for other in (
                getattr(one, make)(keys, LayerType.SWAONLY),
                getattr(Content(mode, 4, 4, CPU), make)(keys, LayerType.C4A),
            ):
                assert not (other == values).flatten(1).all(dim=1).any()
        assert not torch.equal(one.rows(keys, LayerType.C4A), one.rows(keys, LayerType.C4A, entry=True))

    def test_shapes_types_and_different_rows(self):
        content = Content(DataMode.ARBITRARY, 0, 4, CPU)
        keys = histories().of(0)
        rows, queries = content.rows(keys, LayerType.C128A), content.queries(keys[:20], LayerType.C128A)
        assert (rows.shape, rows.dtype) == ((1140, 512), torch.bfloat16)
        assert (queries.shape, queries.dtype) == ((20, 4, 512), torch.bfloat16)
        assert len(torch.unique(rows.float(), dim=0)) == 1140
        assert len(torch.unique(queries.float().flatten(0, 1), dim=0)) == 80
        sink = content.attn_sink(LayerType.C4A)
        assert (sink.shape, sink.dtype) == ((4,), torch.float32)
        assert sink.abs().max() <= 2
        assert not torch.equal(sink, content.attn_sink(LayerType.C2A))

    @pytest.mark.parametrize("layout", WRITABLE, ids=lambda layout: f"{layout.name}-{layout.dialect}")
    def test_exact_values_are_exact_in_every_layout(self, layout):
        rows = chunk_table(DataMode.EXACT, 7)[:512].repeat(1, 8)
        assert torch.equal(through_cache(rows, layout), rows.float())

    @pytest.mark.parametrize("layout", WRITABLE, ids=lambda layout: f"{layout.name}-{layout.dialect}")
    def test_arbitrary_values_are_not_exact(self, layout):
        rows = chunk_table(DataMode.ARBITRARY, 7)[:64].repeat(1, 8)
        assert torch.equal(through_cache(rows, layout), rows.float()) == (layout.name == "bf16")


class TestTopk:
    @settings(max_examples=40)
    @given(st.lists(st.integers(0, 5000), min_size=1, max_size=8), st.sampled_from([8, 64, 512]), st.integers(0, 3))
    def test_distinct_complete_entries_as_many_as_there_are(self, complete, topk, seed):
        chooser = TopkChooser(LayerType.C4A, topk, seed, CPU)
        keys = mix(np.arange(len(complete), dtype=np.uint64))
        picks = chooser.choose(keys, np.array(complete))
        assert (picks.shape, picks.dtype) == ((len(complete), topk), torch.int32)
        for row, limit in zip(picks.tolist(), complete, strict=True):
            chosen = [pick for pick in row if pick >= 0]
            assert len(chosen) == len(set(chosen)) == min(limit, topk)
            assert all(pick < limit for pick in chosen)
            assert all(pick == -1 for pick in row if pick < 0)

    def test_a_token_picks_the_same_wherever_it_stands(self):
        chooser = TopkChooser(LayerType.C4A, 64, 0, CPU)
        keys = mix(np.arange(9, dtype=np.uint64))
        complete = np.array([3, 70, 900, 64, 5000, 128, 0, 63, 65])
        picks = chooser.choose(keys, complete)
        for i in range(9):
            assert torch.equal(chooser.choose(keys[i : i + 1], complete[i : i + 1])[0], picks[i])

    def test_picks_are_in_no_order_and_reach_the_whole_context(self):
        picks = TopkChooser(LayerType.C4A, 64, 0, CPU).choose(mix(np.arange(200, dtype=np.uint64)), np.full(200, 5000))
        assert not (picks.sort(dim=1).values == picks).all(dim=1).any()
        assert len(torch.unique(picks)) > 3000
        assert picks.max() > 4900
