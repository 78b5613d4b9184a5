"""Written bytes and read values of whole pages, against the independent codec and the recorded pages."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.cache import DeepseekV4SWACache
from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.errors import CacheError
from swa_backend.reference import codec
from swa_backend.registry import get_backend
from swa_backend.write import gather_kv, write_kv
from tests.cache_twin import (
    DIALECTS,
    FILL,
    READABLE_FORMS,
    WRITABLE_FORMS,
    assert_same_floats,
    make_cache,
    memory_of,
    to_bits,
    to_torch,
)
from tests.independent_codec import (
    E4M3,
    E4M3_NAN,
    FORMS,
    UE8M0,
    WRITABLE,
    Array,
    bf16_bits,
    bf16_values,
    decode,
    encode,
)

GOLDEN = Path(__file__).parent / "golden" / "kv"


# Recorded pages


def test_no_recorded_case_is_left_out() -> None:
    assert len(list(GOLDEN.glob("insert_*.npz"))) == 4
    assert [path.stem for path in GOLDEN.glob("*.npz") if not path.stem.startswith("insert_")] == ["gather_bs64"]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("insert_*.npz")), ids=lambda path: path.stem)
def test_golden_insert_is_byte_exact(path: Path) -> None:
    with np.load(path) as file:
        bits, slots, recorded = file["k__bf16"], file["slot_mapping"], file["pages"]
    entries = {19_008: 32, 37_440: 64, 149_760: 256}[recorded.shape[1]]
    cache, twin = make_cache("fp8_ds_mla", entries=entries, pages=len(recorded))
    write_kv(to_torch(bits), cache, torch.from_numpy(slots))
    np.testing.assert_array_equal(memory_of(cache).reshape(recorded.shape), recorded)
    twin.write(bits, slots.tolist())
    np.testing.assert_array_equal(twin.memory.reshape(recorded.shape), recorded)  # the oracle is right as well


def test_golden_gather() -> None:
    with np.load(GOLDEN / "gather_bs64.npz") as file:
        case = {key: file[key] for key in file.files}
    cache, _ = make_cache("fp8_ds_mla", entries=64, pages=len(case["pages"]))
    memory_of(cache)[:] = case["pages"].ravel()
    table, seq_lens, gather_lens = (torch.from_numpy(case[key]) for key in ("block_table", "seq_lens", "gather_lens"))
    for name, lens, offset in (("full", None, 0), ("tail", gather_lens, 8)):
        out = torch.zeros(case[f"{name}__bf16"].shape, dtype=torch.bfloat16)
        gather_kv(cache, table, seq_lens, lens, out, offset)
        np.testing.assert_array_equal(to_bits(out), case[f"{name}__bf16"])


# Field cases


def test_c1_a_cache_above_2_gib_is_addressed_with_64_bits() -> None:
    pages, page_bytes = 63_000, 37_440
    # Never filled: the operating system commits only the few pages that are touched.
    memory = torch.empty(pages * page_bytes, dtype=torch.uint8)
    assert memory.numel() > 2.19 * 2**30
    cache = DeepseekV4SWACache(512, 128, torch.uint8, "swa", None, get_backend("cpu"))
    cache.bind_kv_cache(memory.as_strided((pages, 1, 64, 584), (page_bytes, 584, 584, 1)))
    slots = [3_670_911, 3_670_912, 3_670_913, 3_670_976, 3_671_040, pages * 64 - 1]
    bits = to_bits(torch.randn(len(slots), 512, generator=torch.Generator().manual_seed(1)).bfloat16())
    write_kv(to_torch(bits), cache, torch.tensor(slots))
    data, scales = encode(bits, "fp8_ds_mla")
    for token, slot in enumerate(slots):
        page = slot // 64 * page_bytes
        at, scales_at = page + slot % 64 * 576, page + 64 * 576 + slot % 64 * 8
        np.testing.assert_array_equal(memory[at : at + 576].numpy(), data[token])
        np.testing.assert_array_equal(memory[scales_at : scales_at + 8].numpy(), scales[token])
    expected = decode(data, scales, "fp8_ds_mla")
    assert_same_floats(codec.dequantise_slots(cache.pages, torch.tensor(slots)), expected)
    out = torch.empty(1, 65, 512, dtype=torch.bfloat16)
    table = torch.tensor([[57_358, 57_359, 57_360]], dtype=torch.int32)
    gather_kv(cache, table, torch.tensor([65], dtype=torch.int32), None, out)
    np.testing.assert_array_equal(to_bits(out[0, 64]), bf16_bits(expected[3]))
    assert slots[3] // 64 == 57_359


def test_c3_the_page_stride_and_the_storage_offset_are_honoured() -> None:
    page, stride, first, pages = 37_440, 1_435_968, 37_440 * 5 + 64, 3
    cache, twin = make_cache("fp8_ds_mla", entries=64, pages=pages, gap=stride - page, first=first)
    assert cache.pages.page_stride == twin.stride == stride
    bits = np.random.default_rng(3).integers(0, 0x7F00, (3, 512)).astype(np.uint16)
    write_kv(to_torch(bits), cache, torch.tensor([63, 64, 65]))
    twin.write(bits, [63, 64, 65])
    np.testing.assert_array_equal(memory_of(cache), twin.memory)
    assert_same_floats(codec.dequantise_slots(cache.pages, torch.tensor([63, 64, 65])), twin.read([63, 64, 65]))


def test_c4_one_page_of_known_rows() -> None:
    cache, twin = make_cache("fp8_ds_mla", entries=64, pages=1)
    keys = torch.zeros(64, 512)
    keys[1, 0:3] = torch.tensor([448.0, -1.0, 0.3])  # scale 1
    keys[1, 64] = 1.0  # 1 / 448 rounds up to 2^-8: the code of 256
    keys[63, 447] = -900.0  # just above 2 * 448, so the scale is 4, and 225 lies nearest to 224
    keys[63, 448:450] = torch.tensor([1.0, -2.0])
    bits = to_bits(keys.bfloat16())
    write_kv(to_torch(bits), cache, torch.arange(64))
    page = memory_of(cache)
    assert page[576:579].tolist() == [0x7E, 0xB8, 0x2A]
    assert page[576 + 64] == 0x78
    assert page[64 * 576 + 8 : 64 * 576 + 16].tolist() == [127, 119, 105, 105, 105, 105, 105, 0]
    assert page[63 * 576 + 447] == 0xF6
    assert page[63 * 576 + 448 : 63 * 576 + 452].tolist() == [0x80, 0x3F, 0x00, 0xC0]
    assert page[64 * 576 + 63 * 8 : 64 * 576 + 64 * 8].tolist() == [105] * 6 + [129, 0]
    assert page[64 * 584 :].tolist() == [FILL] * (37_440 - 64 * 584)
    twin.write(bits, list(range(64)))
    np.testing.assert_array_equal(page, twin.memory)
    read = codec.dequantise_slots(cache.pages, torch.tensor([1, 63]))
    assert_same_floats(read, twin.read([1, 63]))
    assert read[0, :3].tolist() == [448.0, -1.0, 0.3125]
    assert (read[1, 447], read[1, 448], read[1, 449]) == (-896.0, 1.0, -2.0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_c7_codes_and_scale_bytes_in_a_page(dialect: Dialect) -> None:
    cache, _ = make_cache("fp8_ds_mla", dialect)
    page = memory_of(cache)
    page[:448] = 0x38
    page[64], page[128] = 0x80, 0x7F
    page[32 * 576 : 32 * 576 + 8] = [127, 127, 127, 0, 254, 255, 1, 0]
    row = codec.dequantise_slots(cache.pages, torch.tensor([0]))[0]
    one = 1.0 if dialect is Dialect.OCP else 0.5
    assert row[:64].tolist() == [one] * 64
    assert math.isnan(row[64]) if dialect is Dialect.FNUZ else (row[64] == 0 and bool(torch.signbit(row[64])))
    assert math.isnan(row[128]) if dialect is Dialect.OCP else row[128] == 240
    assert row[192:256].tolist() == [one * 2.0**-127] * 64
    assert row[256:320].tolist() == [one * 2.0**127] * 64
    assert bool(row[320:384].isnan().all())
    assert row[384:448].tolist() == [one * 2.0**-126] * 64


def test_c8_slots_past_the_cache_read_as_zeros_and_store_nothing() -> None:
    cache, twin = make_cache("fp8_ds_mla", pages=2)
    beyond = [64, 64 + 7, -1, -5, 2**31, 2**40, -(2**40)]
    write_kv(torch.ones(7, 512, dtype=torch.bfloat16), cache, torch.tensor(beyond))
    np.testing.assert_array_equal(memory_of(cache), twin.memory)
    memory_of(cache)[:] = 0xFF
    assert not codec.dequantise_slots(cache.pages, torch.tensor(beyond)).any()


# Writing


@st.composite
def keys(draw: st.DrawFn, count: int) -> Array:
    """bf16 bits [count, 512]; each row of a kind of its own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for _ in range(count):
        kind = draw(st.sampled_from(["normal", "tiny", "huge", "zero", "finite", "any", "ties", "lost"]))
        normal = bf16_bits(rng.standard_normal(512).astype(np.float32))
        if kind == "normal":
            row = normal
        elif kind in ("tiny", "huge"):
            octave = rng.uniform(-130, -10, 512) if kind == "tiny" else rng.uniform(100, 127, 512)
            row = bf16_bits((rng.standard_normal(512) * 2.0**octave).clip(-3e38, 3e38).astype(np.float32))
        elif kind == "zero":
            row = rng.integers(0, 2, 512).astype(np.uint16) << 15
        elif kind == "ties":  # odd multiples of 1/32 between 1 and 2: half of them are ties of e4m3 at scale 1 ..
            row = bf16_bits(rng.choice([-1.0, 1.0], 512) * (1 + rng.integers(0, 33, 512) / 32))
            row[::32] = bf16_bits(np.float64(rng.choice([448.0, 240.0])))  # .. which these make it
        else:
            row = rng.integers(0, 2**16, 512).astype(np.uint16)
            if kind == "finite":
                row = np.where(row & 0x7F80 == 0x7F80, row & 0x8000, row)
            if kind == "lost":  # few groups hold NaN or infinity
                row = normal
                row[rng.integers(0, 512, 3)] = rng.choice(np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFFF], np.uint16), 3)
        rows.append(row.astype(np.uint16))
    return np.stack(rows)


@pytest.mark.parametrize(("name", "dialect"), WRITABLE_FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_written_bytes_and_read_values(name: str, dialect: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    bits = data.draw(keys(count + data.draw(st.integers(0, 3))))  # k may be longer than slot_mapping
    entries, pages = data.draw(st.sampled_from([32, 64])), data.draw(st.integers(1, 3))
    real = st.lists(st.integers(0, entries * pages - 1), min_size=count, max_size=count, unique=True)
    slots = data.draw(real)
    for at in data.draw(st.lists(st.integers(0, count - 1), max_size=3)):
        slots[at] = data.draw(st.sampled_from([-1, -(2**31), entries * pages, entries * pages + 7, 2**40]))
    gap, first = data.draw(st.sampled_from([0, 2, 576, 4096])), data.draw(st.sampled_from([0, 2, 640]))
    scale = float(np.float32(data.draw(st.sampled_from([1.0, 0.25, 0.0137, 3.5]))))
    cache, twin = make_cache(name, dialect, entries, pages, gap, first, scale)

    write_kv(to_torch(bits), cache, torch.tensor(slots))

    twin.write(bits, slots)
    np.testing.assert_array_equal(memory_of(cache), twin.memory)  # padding, gaps and other rows included
    assert_same_floats(codec.dequantise_slots(cache.pages, torch.tensor(slots)), twin.read(slots))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_mla_v41"])
def test_the_value_grid_survives_writing_and_reading(name: str, dialect: Dialect) -> None:
    form = FORMS[name]
    finite = np.flatnonzero(~np.isnan(E4M3[dialect]))
    groups = np.resize(finite, (form.quantised // form.group, form.group))  # 448 values: every code at least once
    groups[:, 0] = np.nanargmax(E4M3[dialect])  # so that the scale is the one that is meant
    assert set(groups[:, 1:].ravel()) >= set(finite)
    scale_bytes = np.arange(106, 247)  # those with which fp8_max is above 1e-4 and below the largest bf16 number
    bits = np.zeros((len(scale_bytes), 512), np.uint16)
    values = E4M3[dialect][groups.ravel()] * UE8M0[scale_bytes][:, None]
    bits[:, : form.quantised] = bf16_bits(values)
    data, scales = codec.quantise(to_torch(bits), get_layout(name, dialect))
    np.testing.assert_array_equal(data[:, : form.quantised].numpy(), np.tile(groups.ravel(), (len(scale_bytes), 1)))
    for group in range(len(groups)):
        np.testing.assert_array_equal(scales[:, group].numpy(), scale_bytes)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_mla_v41"])
def test_a_key_of_zeros_has_the_smallest_scale(name: str, dialect: Dialect) -> None:
    key = torch.zeros(2, 512, dtype=torch.bfloat16)
    key[1] = -key[1]
    data, scales = codec.quantise(key, get_layout(name, dialect))
    groups = {"fp8_ds_mla": 7, "fp8_ds_mla_v41": 16}[name]
    assert scales[:, :groups].unique().tolist() == [105 if dialect is Dialect.OCP else 106]
    assert scales[:, groups:].unique().tolist() in ([], [0])
    quantised = FORMS[name].quantised
    assert data[0, :quantised].unique().tolist() == [0x00]
    assert data[1, :quantised].unique().tolist() == [0x80 if dialect is Dialect.OCP else 0x00]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_maxima_below_1e_4_share_its_scale(dialect: Dialect) -> None:
    key = torch.zeros(1, 512)
    key[0, 0], key[0, 64], key[0, 128] = 9.9e-5, 1e-30, 2e-4
    _, scales = codec.quantise(key.bfloat16(), get_layout("fp8_ds_mla", dialect))
    low = 105 if dialect is Dialect.OCP else 106
    assert scales[0].tolist() == [low, low, low + 1 if dialect is Dialect.OCP else 107, low, low, low, low, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("name", "group", "count"), [("fp8_ds_mla", 64, 7), ("fp8_ds_mla_v41", 32, 16)])
def test_a_group_that_is_not_finite_is_lost_alone(
    name: str, group: int, count: int, dialect: Dialect, bad: float
) -> None:
    key = torch.ones(1, 512, dtype=torch.bfloat16)
    key[0, group + 3] = bad
    data, scales = codec.quantise(key, get_layout(name, dialect))
    assert (data[0, group : 2 * group] == E4M3_NAN[dialect]).all()
    scale = 119 if dialect is Dialect.OCP else 120  # 1 / 448 and 1 / 240 rounded up to 2^-8 and 2^-7
    assert scales[0, :count].tolist() == [scale, 255] + [scale] * (count - 2)
    others = torch.cat((data[0, :group], data[0, 2 * group : group * count]))
    assert others.unique().tolist() == [0x78]  # 1 = 256 * 2^-8 in OCP, 128 * 2^-7 in FNUZ: the same byte


def test_rope_values_are_copied_whatever_they_are() -> None:
    bits = np.zeros((1, 512), np.uint16)
    bits[0, 448:] = np.arange(64) * 1040 + 7
    bits[0, 448:451] = [0x7F80, 0xFFC1, 0x8000]
    data, scales = codec.quantise(to_torch(bits), get_layout("fp8_ds_mla"))
    assert np.array_equal(data[0, 448:].numpy().view(np.uint16), bits[0, 448:])
    assert scales[0].tolist() == [105] * 7 + [0]


@pytest.mark.parametrize("name", WRITABLE)
def test_of_equal_slots_one_token_wins_whole(name: str) -> None:
    cache, twin = make_cache(name)
    bits = to_bits(torch.randn(40, 512, generator=torch.Generator().manual_seed(2)).mul(10).bfloat16())
    slots = [5, 6] * 20
    write_kv(to_torch(bits), cache, torch.tensor(slots))
    data, scales = encode(bits, name)
    for slot in (5, 6):
        data_place, scale_place = twin.places(slot)
        memory = memory_of(cache)
        candidates = [t for t in range(40) if slots[t] == slot]
        assert any(
            np.array_equal(memory[data_place], data[t]) and np.array_equal(memory[scale_place], scales[t])
            for t in candidates
        )


def test_no_slot_is_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores to one place may be split among threads: what wins data must win scales."""
    cache, _ = make_cache("fp8_ds_mla")
    stored: list[int] = []
    monkeypatch.setattr(codec, "_store", lambda view, slots, data, scales: stored.extend(slots.tolist()))
    write_kv(torch.ones(6, 512, dtype=torch.bfloat16), cache, torch.tensor([5, 9, 5, -1, 9, 5]))
    assert sorted(stored) == [5, 9]


def test_every_token_of_a_long_write_arrives() -> None:
    count, pages = 5000, 80  # more tokens than are written at a time
    cache, twin = make_cache("bf16", entries=64, pages=pages)
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**16, (count, 512)).astype(np.uint16)
    slots = rng.permutation(pages * 64)[:count]
    write_kv(to_torch(bits), cache, torch.from_numpy(slots))
    twin.write(bits, slots.tolist())
    np.testing.assert_array_equal(memory_of(cache), twin.memory)


def test_rows_of_k_may_lie_apart() -> None:
    wide = torch.randn(4, 1024, generator=torch.Generator().manual_seed(3)).bfloat16()
    cache, twin = make_cache("fp8_ds_mla")
    write_kv(wide[:, 256:768], cache, torch.arange(4))
    twin.write(to_bits(wide[:, 256:768]), [0, 1, 2, 3])
    np.testing.assert_array_equal(memory_of(cache), twin.memory)


# Reading


@pytest.mark.parametrize(("name", "dialect"), READABLE_FORMS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), entries=st.sampled_from([1, 2, 16, 64]), gap=st.sampled_from([0, 6, 1024]))
def test_any_bytes_are_read_right(name: str, dialect: str, seed: int, entries: int, gap: int) -> None:
    cache, twin = make_cache(name, dialect, entries, pages=3, gap=gap, first=2)
    memory_of(cache)[:] = twin.memory[:] = np.random.default_rng(seed).integers(0, 256, twin.memory.size)
    slots = [*range(min(3 * entries, 20)), 3 * entries - 1, 3 * entries, -1]
    assert_same_floats(codec.dequantise_slots(cache.pages, torch.tensor(slots)), twin.read(slots))


def test_the_288_byte_row_by_hand() -> None:
    cache, _ = make_cache("fp4_ds_mla_v41", entries=2, pages=1)
    page = memory_of(cache)
    page[288 : 288 + 256] = 0
    page[288] = 0xF2  # low nibble 2 = 1.0 is value 0, high nibble F = -6.0 is value 1
    page[288 + 8] = 0x07  # the second group of 16 begins at byte 8
    page[288 + 256 : 288 + 288] = 0x38  # e4m3 1.0
    page[288 + 257] = 0x40  # 2.0
    row = codec.dequantise_slots(cache.pages, torch.tensor([1]))[0]
    assert row[:3].tolist() == [1.0, -6.0, 0.0]
    assert row[16:18].tolist() == [12.0, 0.0]
    assert row[18:].abs().sum() == 0


def test_slots_of_any_shape_are_read() -> None:
    cache, _ = make_cache("bf16")
    memory_of(cache)[:] = 0
    assert codec.dequantise_slots(cache.pages, torch.zeros(2, 3, 4, dtype=torch.int32)).shape == (2, 3, 4, 512)
    assert codec.dequantise_slots(cache.pages, torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, 512)


@pytest.mark.parametrize(("name", "dialect"), READABLE_FORMS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_gather(name: str, dialect: str, data: st.DataObject) -> None:
    entries, pages = data.draw(st.sampled_from([2, 32])), 4
    cache, twin = make_cache(name, dialect, entries, pages, gap=data.draw(st.sampled_from([0, 512])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    memory_of(cache)[:] = twin.memory[:] = rng.integers(0, 256, twin.memory.size)
    requests, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    page = st.sampled_from([0, 1, 2, 3, -1, pages, pages + 7, 2**31 - 1, -(2**31)])
    table = np.array(data.draw(st.lists(page, min_size=requests * columns, max_size=requests * columns)), np.int32)
    table = table.reshape(requests, columns)
    # A request may be longer than its table, its gather longer than the workspace.
    seq_lens = [data.draw(st.integers(0, columns * entries + 3)) for _ in range(requests)]
    everything = data.draw(st.booleans())
    lens = seq_lens if everything else [data.draw(st.integers(0, seq)) for seq in seq_lens]
    height = data.draw(st.integers(0, max(lens, default=0) + 4))
    offset = data.draw(st.integers(0, height))
    expected = np.full((requests, height, 512), 0x1234, np.uint16)
    out = to_torch(np.full((requests, height + 1, 512), 0x1234, np.uint16))[:, :height]
    wide = torch.full((requests, columns + 2), 1, dtype=torch.int32)
    wide[:, :columns] = torch.from_numpy(table)

    gather_kv(
        cache,
        wide[:, :columns],
        torch.tensor(seq_lens, dtype=torch.int32),
        None if everything else torch.tensor(lens, dtype=torch.int32),
        out,
        offset,
    )

    twin.gather(table, seq_lens, lens, expected, offset)
    found, both_nan = to_bits(out), np.isnan(bf16_values(expected))
    assert np.array_equal(np.isnan(bf16_values(found)), both_nan)
    np.testing.assert_array_equal(np.where(both_nan, 0, found), np.where(both_nan, 0, expected))


def test_gather_longer_than_a_piece() -> None:
    cache, _ = make_cache("fp8_ds_mla_v41", entries=32, pages=2)
    memory_of(cache)[:] = 0
    memory_of(cache)[0], memory_of(cache)[512] = 0x38, 127
    length = 70_000  # more than is gathered at a time
    table = torch.zeros(1, length // 32 + 1, dtype=torch.int32)
    out = torch.full((1, length, 512), 7.0, dtype=torch.bfloat16)
    gather_kv(cache, table, torch.tensor([length], dtype=torch.int32), None, out)
    assert out[0, ::32, 0].eq(1).all()
    assert out.sum(dtype=torch.float64) == -(-length // 32)


def test_a_read_only_layout_is_not_quantised() -> None:
    with pytest.raises(CacheError, match="writable"):
        codec.quantise(torch.zeros(1, 512), get_layout("fp4_ds_mla_v41"))
