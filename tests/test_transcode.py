"""Caches moved between fp8 dialects: every byte with every scale byte, in float64, against independent tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import swa_backend
from swa_backend.cache import PagedCache
from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.errors import CacheError
from swa_backend.pages import PageView
from swa_backend.transcode import transcode_pages
from tests.cache_twin import FILL, make_cache, memory_of
from tests.independent_codec import E4M3, E4M3_NAN, FORMS, UE8M0, Array, Pool, round_e4m3

OTHER = {"ocp": "fnuz", "fnuz": "ocp"}
GROUPED = ["fp8_ds_mla", "fp8_ds_mla_v41"]


def from_bytes(name: str, dialect: str, codes: Array, scales: Array, entries: int = 32) -> tuple[PagedCache, Pool]:
    """A cache whose entries have these quantised codes [n, values] and scale bytes [n, groups]; n fills whole pages."""
    cache, pool = make_cache(name, dialect, entries, len(codes) // entries)
    rng = np.random.default_rng(0)
    form = FORMS[name]
    for slot in range(len(codes)):
        data, scale = pool.places(slot)
        tail = rng.integers(0, 256, form.data - form.quantised, dtype=np.uint8)
        pool.memory[data] = np.concatenate([codes[slot], tail])
        pool.memory[scale] = np.concatenate([scales[slot], np.zeros(form.scales - scales.shape[1], np.uint8)])
    memory_of(cache)[:] = pool.memory
    return cache, pool


def moved(cache: PagedCache, name: str, dialect: str, entries: int = 32) -> tuple[PagedCache, Pool]:
    """The cache in the other dialect, and a twin of its bytes."""
    destination, twin = make_cache(name, OTHER[dialect], entries, cache.pages.num_pages)
    transcode_pages(cache, destination)
    twin.memory[:] = memory_of(destination)
    return destination, twin


def every_pair(name: str) -> tuple[Array, Array]:
    """(codes [n, values], scale bytes [n, groups]): each group holds one code alone, each pair of bytes once."""
    form = FORMS[name]
    groups = form.quantised // form.group
    pairs = np.arange(2**16)
    pairs = np.append(pairs, np.zeros(-len(pairs) % (groups * 32), pairs.dtype)).reshape(-1, groups)
    return np.repeat(pairs % 256, form.group, axis=1).astype(np.uint8), (pairs // 256).astype(np.uint8)


def assert_values(found: Array, expected: Array) -> None:
    """Equal in float64; NaN where NaN is expected."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.nan_to_num(found), np.nan_to_num(expected))


@pytest.mark.parametrize("name", GROUPED)
def test_ocp_to_fnuz_every_byte_with_every_scale(name: str) -> None:
    codes, scales = every_pair(name)
    cache, pool = from_bytes(name, "ocp", codes, scales)
    _, twin = moved(cache, name, "ocp")
    slots = list(range(len(codes)))
    before, after = pool.read(slots), twin.read(slots)
    quantised = FORMS[name].quantised
    most = np.repeat(np.where(scales == 254, 240 * 2.0**127, np.inf), FORMS[name].group, axis=1)
    expected = before.copy()
    expected[:, :quantised] = np.clip(before[:, :quantised], -most, most)
    assert_values(after, expected)
    inexact = (expected != before) & ~np.isnan(before)
    assert {abs(v) for v in before[inexact]} == {v * 2.0**127 for v in (256, 288, 320, 352, 384, 416, 448)}


@pytest.mark.parametrize("name", GROUPED)
def test_fnuz_to_ocp_every_byte_with_every_scale(name: str) -> None:
    codes, scales = every_pair(name)
    cache, pool = from_bytes(name, "fnuz", codes, scales)
    _, twin = moved(cache, name, "fnuz")
    slots = list(range(len(codes)))
    before, after = pool.read(slots), twin.read(slots)
    form = FORMS[name]
    again = np.repeat((scales == 0) | np.isin(codes[:, :: form.group], (0x7F, 0xFF)), form.group, axis=1)
    values = E4M3["fnuz"][codes]
    with np.errstate(invalid="ignore"):
        rounded = E4M3["ocp"][round_e4m3(np.nan_to_num(values), "ocp")]
    rounded[np.isnan(values)] = np.nan
    expected = before.copy()
    each = np.repeat(UE8M0[scales], form.group, axis=1)
    expected[:, : form.quantised] = np.where(again, rounded * each, before[:, : form.quantised])
    assert_values(after, expected)
    inexact = (expected != before)[:, : form.quantised] & ~np.isnan(values) & ~np.isnan(each)
    assert set(codes[inexact]) == {code | sign for code in range(1, 16, 2) for sign in (0, 0x80)}
    assert set(scales[:, :][inexact[:, :: form.group]]) == {0}, "240 is held exactly"


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_nan_and_zero_are_written_as_the_writer_writes_them(dialect: str) -> None:
    form = FORMS["fp8_ds_mla"]
    codes = np.zeros((32, form.quantised), np.uint8)
    codes[0, 0] = E4M3_NAN[dialect]
    codes[0, 1] = 0x80 if dialect == "ocp" else 0
    scales = np.full((32, 7), 120, np.uint8)
    scales[1, 3] = 255
    cache, _ = from_bytes("fp8_ds_mla", dialect, codes, scales)
    _, twin = moved(cache, "fp8_ds_mla", dialect)
    rows = [np.concatenate([twin.memory[part] for part in twin.places(slot)]) for slot in range(32)]
    other = OTHER[dialect]
    step = 1 if other == "fnuz" else -1
    assert rows[0][:3].tolist() == [E4M3_NAN[other], 0, 0]
    assert set(rows[1][192:256]) == {E4M3_NAN[other]}
    assert rows[1][-8:].tolist() == [120 + step] * 3 + [255] + [120 + step] * 3 + [0]
    assert not rows[2][:448].any()


def test_one_240_makes_its_group_be_coded_again_and_no_other() -> None:
    """Groups of many codes: what decides is the group, and what cannot be held is rounded to nearest even."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (64, 448)).astype(np.uint8)
    codes[codes == 0x80] = 0
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    codes[::2, 64 * 3 + 17] = 0xFF
    scales = rng.integers(1, 255, (64, 7)).astype(np.uint8)
    cache, pool = from_bytes("fp8_ds_mla", "fnuz", codes, scales)
    _, twin = moved(cache, "fp8_ds_mla", "fnuz")
    before, after = pool.read(list(range(64))), twin.read(list(range(64)))
    exact = np.ones((64, 512), bool)
    exact[::2, 192:256] = False
    np.testing.assert_array_equal(after[exact], before[exact])
    group, value = after[::2, 192:256] / UE8M0[scales[::2, 3]][:, None], E4M3["fnuz"][codes[::2, 192:256]]
    assert (np.abs(group - value) <= 2.0**-10).all()
    assert (group[:, 17] == -240).all()
    large = np.abs(value) >= 2.0**-6
    np.testing.assert_array_equal(group[large], value[large])


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_what_the_writer_wrote_comes_over_and_back(dialect: str) -> None:
    cache, pool = make_cache("fp8_ds_mla", dialect, 64, 2)
    keys = torch.randn(128, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    bits = keys.view(torch.int16).numpy().view(np.uint16)
    pool.write(bits, list(range(128)))
    memory_of(cache)[:] = pool.memory
    other, twin = moved(cache, "fp8_ds_mla", dialect, 64)
    before, after = pool.read(list(range(128))), twin.read(list(range(128)))
    again, back = moved(other, "fp8_ds_mla", OTHER[dialect], 64)
    if dialect == "ocp":
        np.testing.assert_array_equal(after, before)
        np.testing.assert_array_equal(back.read(list(range(128))), before)
    else:
        scale = np.abs(before[:, :448]).reshape(128, 7, 64).max(axis=2).repeat(64, axis=1)
        assert (np.abs(after - before)[:, :448] <= scale * 2.0**-17).all(), "half of OCP's smallest step, of 240"
        np.testing.assert_array_equal(after[:, 448:], before[:, 448:])
    assert again.layout == cache.layout


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-140])
def test_one_scale_for_the_whole_cache(dialect: str, scale: float) -> None:
    scale = float(np.float32(scale))
    cache, pool = make_cache("fp8_per_tensor", dialect, scale=scale)
    memory_of(cache)[:] = np.tile(np.arange(256, dtype=np.uint8), len(pool.memory) // 256)
    pool.memory[:] = memory_of(cache)
    destination, twin = make_cache("fp8_per_tensor", OTHER[dialect])
    transcode_pages(cache, destination)
    twin.memory[:] = memory_of(destination)
    assert destination.scale is not None
    twin.tensor_scale = float(destination.scale)
    assert twin.tensor_scale == (2 * scale if dialect == "ocp" else scale)
    before, after = pool.read([0, 95]), twin.read([0, 95])
    if dialect == "ocp":
        assert_values(after, before)
    else:
        values = E4M3["fnuz"]
        rounded = E4M3["ocp"][round_e4m3(np.nan_to_num(values), "ocp")]
        rounded[0x80] = np.nan
        assert_values(after, np.tile(rounded * scale, (2, 2)))


@pytest.mark.parametrize(("name", "dialect"), [("bf16", "ocp"), ("fp4_ds_mla_v41", "ocp"), ("fp8_ds_mla", "fnuz")])
def test_without_a_change_of_dialect_bytes_are_copied(name: str, dialect: str) -> None:
    entries = 8 if name == "fp4_ds_mla_v41" else 32
    cache, pool = make_cache(name, dialect, entries)
    pool.memory[:] = np.random.default_rng(2).integers(0, 256, len(pool.memory))
    memory_of(cache)[:] = pool.memory
    destination, twin = make_cache(name, dialect, entries)
    transcode_pages(cache, destination)
    twin.memory[:] = memory_of(destination)
    for slot in range(pool.pages * entries):
        for ours, theirs in zip(twin.places(slot), pool.places(slot), strict=True):
            np.testing.assert_array_equal(twin.memory[ours], pool.memory[theirs])


@pytest.mark.parametrize("name", GROUPED)
def test_padding_gaps_and_tails_are_not_changed(name: str) -> None:
    """Pages further apart than they are long, other distances on the two sides, a first byte inside an allocation."""
    source, pool = make_cache(name, "ocp", 32, 3, gap=576 * 3, first=1024)
    pool.memory[:] = np.random.default_rng(3).integers(0, 256, len(pool.memory))
    memory_of(source)[:] = pool.memory
    destination, twin = make_cache(name, "fnuz", 32, 3, gap=576, first=2048)
    transcode_pages(source, destination)
    np.testing.assert_array_equal(memory_of(source), pool.memory)
    touched = np.zeros(len(twin.memory), bool)
    form = FORMS[name]
    for slot in range(96):
        for place in twin.places(slot):
            touched[place] = True
        data, scales = twin.places(slot)
        ours, theirs = pool.places(slot)
        tail = slice(data.start + form.quantised, data.stop)
        np.testing.assert_array_equal(
            memory_of(destination)[tail], pool.memory[ours.start + form.quantised : ours.stop]
        )
        unused = form.scales - form.quantised // form.group
        if unused:
            np.testing.assert_array_equal(
                memory_of(destination)[scales.stop - unused : scales.stop],
                pool.memory[theirs.stop - unused : theirs.stop],
            )
    assert (memory_of(destination)[~touched] == FILL).all()


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_pages_may_be_changed_in_place(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swa_backend.transcode._VALUES", 448 * 40)  # one page at a time
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (96, 448)).astype(np.uint8)
    scales = rng.integers(0, 256, (96, 7)).astype(np.uint8)
    cache, _ = from_bytes("fp8_ds_mla", dialect, codes, scales)
    _, twin = moved(cache, "fp8_ds_mla", dialect)
    view = cache.pages
    other = PageView(get_layout("fp8_ds_mla", Dialect(OTHER[dialect])), view.entries, view.num_pages, view.data)
    transcode_pages(cache, other)
    for slot in range(96):
        for place in twin.places(slot):
            np.testing.assert_array_equal(memory_of(cache)[place], twin.memory[place])


def test_it_is_a_public_name() -> None:
    assert swa_backend.transcode_pages is transcode_pages


def test_what_does_not_fit_is_refused_before_a_byte_is_written() -> None:
    source, _ = make_cache("fp8_ds_mla", "ocp")
    untouched = memory_of(source).copy()
    unbound = swa_backend.DeepseekV4SWACache(512, 128, torch.uint8, "x", None, swa_backend.get_backend("cpu"))
    layouts = {name: make_cache(name, "fnuz")[0] for name in ("fp8_ds_mla_v41", "fp8_per_tensor")}
    cases = [
        (layouts["fp8_ds_mla_v41"], "destination layout", "fp8_ds_mla_v41"),
        (layouts["fp8_per_tensor"], "destination layout", "fp8_per_tensor"),
        (make_cache("fp8_ds_mla", "fnuz", entries=64)[0], "destination entries", "64"),
        (make_cache("fp8_ds_mla", "fnuz", pages=2)[0], "destination num_pages", "2"),
        (unbound, "cache 'x'", "no memory bound"),
        (source.kv_cache, "destination", "Tensor"),
        (None, "destination", "NoneType"),
    ]
    for destination, field, found in cases:
        with pytest.raises(CacheError) as error:
            transcode_pages(source, destination)  # type: ignore[arg-type]
        assert error.value.field == field
        assert found in str(error.value.found)
    with pytest.raises(CacheError, match="source"):
        transcode_pages(torch.zeros(3), source)  # type: ignore[arg-type]
    view = source.pages
    shifted = view.data[1:]
    part = PageView(get_layout("fp8_ds_mla", Dialect.FNUZ), view.entries, 2, shifted)
    first = PageView(view.layout, view.entries, 2, view.data[:2])
    with pytest.raises(CacheError, match="at another place"):
        transcode_pages(first, part)
    meta = PageView(get_layout("fp8_ds_mla", Dialect.FNUZ), view.entries, view.num_pages, view.data.to("meta"))
    with pytest.raises(CacheError, match="destination device"):
        transcode_pages(source, meta)
    np.testing.assert_array_equal(memory_of(source), untouched)


# The dialects themselves, byte by byte.


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_c7_every_byte_of_both_dialects(dialect: str) -> None:
    """Written from the bit fields: sign, four bits of exponent, three of mantissa."""
    from swa_backend.reference.fp8 import decode_e4m3

    values = decode_e4m3(torch.arange(256, dtype=torch.uint8), Dialect(dialect)).tolist()
    bias = 7 if dialect == "ocp" else 8
    for code, value in enumerate(values):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if code in ((0x7F, 0xFF) if dialect == "ocp" else (0x80,)):
            assert math.isnan(value), hex(code)
            continue
        magnitude = mantissa * 2.0 ** (-2 - bias) if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - bias - 3)
        assert value == (-magnitude if sign else magnitude), hex(code)
        assert math.copysign(1, value) == (-1 if sign else 1), hex(code)


def test_c7_every_scale_byte() -> None:
    from swa_backend.reference.fp8 import decode_ue8m0

    values = decode_ue8m0(torch.arange(256, dtype=torch.uint8)).double().tolist()
    assert values[:255] == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert math.isnan(values[255])
