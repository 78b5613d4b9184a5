"""Page layouts: sizes and offsets against numbers written by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swa_backend.cache_layout import (
    LAYOUT_NAMES,
    Dialect,
    PageLayout,
    check_layout,
    check_same_layout,
    get_layout,
)
from swa_backend.errors import CacheError
from tests.independent_codec import FORMS

PAGE_BYTES = [
    ("fp8_ds_mla", 32, 19_008),
    ("fp8_ds_mla", 64, 37_440),
    ("fp8_ds_mla", 128, 74_880),
    ("fp8_ds_mla", 256, 149_760),
    ("fp8_ds_mla", 2, 1_728),
    ("fp8_ds_mla", 16, 9_792),
    ("fp8_ds_mla_v41", 64, 33_792),
    ("fp8_ds_mla_v41", 1, 1_024),
    ("fp4_ds_mla_v41", 64, 18_432),
    ("fp4_ds_mla_v41", 2, 1_024),
    ("bf16", 64, 65_536),
    ("fp8_per_tensor", 64, 32_768),
]


@pytest.mark.parametrize(("name", "entries", "size"), PAGE_BYTES)
def test_page_bytes(name: str, entries: int, size: int) -> None:
    assert get_layout(name).page_bytes(entries) == size


# name, entries, entry -> byte of its data row, byte of its scale row
OFFSETS = [
    ("fp8_ds_mla", 64, 0, 0, 36_864),
    ("fp8_ds_mla", 64, 63, 36_288, 37_368),
    ("fp8_ds_mla", 32, 1, 576, 18_440),
    ("fp8_ds_mla", 2, 1, 576, 1_160),
    ("fp8_ds_mla_v41", 64, 0, 0, 512),
    ("fp8_ds_mla_v41", 64, 63, 33_264, 33_776),
    ("fp4_ds_mla_v41", 64, 0, 0, 256),
    ("fp4_ds_mla_v41", 64, 63, 18_144, 18_400),
]


@pytest.mark.parametrize(("name", "entries", "j", "data", "scales"), OFFSETS)
def test_offsets(name: str, entries: int, j: int, data: int, scales: int) -> None:
    layout = get_layout(name)
    assert (layout.data_offset(entries, j), layout.scale_offset(entries, j)) == (data, scales)


@pytest.mark.parametrize(("name", "stride"), [("bf16", 1024), ("fp8_per_tensor", 512)])
def test_plain_rows_follow_each_other(name: str, stride: int) -> None:
    layout = get_layout(name)
    assert [layout.data_offset(64, j) for j in (0, 1, 63)] == [0, stride, 63 * stride]
    assert (layout.scale_bytes, layout.scale_stride, layout.num_groups, layout.packed) == (0, 0, 0, False)


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_every_entry_lies_where_the_independent_arithmetic_puts_it(name: str) -> None:
    layout, form = get_layout(name), FORMS[name]
    for entries in (1, 2, 32, 64, 256):
        assert layout.page_bytes(entries) == form.page(entries)
        for j in range(entries):
            assert layout.data_offset(entries, j) == form.data_at(entries, j)
            assert not form.scales or layout.scale_offset(entries, j) == form.scales_at(entries, j)


def test_groups_and_what_can_be_written() -> None:
    groups = {name: (get_layout(name).group, get_layout(name).num_groups) for name in LAYOUT_NAMES}
    assert groups == {
        "fp8_ds_mla": (64, 7),
        "fp8_ds_mla_v41": (32, 16),
        "fp4_ds_mla_v41": (16, 32),
        "bf16": (0, 0),
        "fp8_per_tensor": (0, 0),
    }
    assert [name for name in LAYOUT_NAMES if not get_layout(name).writable] == ["fp4_ds_mla_v41"]


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_dialect_belongs_to_layouts_with_e4m3_values(name: str) -> None:
    fnuz = get_layout(name, Dialect.FNUZ)
    if FORMS[name].values == "e4m3" and name != "bf16":
        assert (get_layout(name).dialect, fnuz.dialect) == (Dialect.OCP, Dialect.FNUZ)
        assert fnuz.with_dialect(Dialect.OCP) == get_layout(name)
    else:
        assert fnuz is get_layout(name)
        assert fnuz.dialect is None


def test_dialect_constants() -> None:
    assert [(d.fp8_max, d.nan_code) for d in (Dialect.OCP, Dialect.FNUZ)] == [(448.0, 0x7F), (240.0, 0x80)]


def test_a_dialect_may_be_given_by_name() -> None:
    assert get_layout("fp8_ds_mla", "fnuz").dialect is Dialect.FNUZ  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp8", "", "FP8_DS_MLA", None, 584])
def test_unknown_layout_lists_the_legal_names(name: object) -> None:
    with pytest.raises(CacheError, match="fp8_ds_mla_v41") as error:
        get_layout(name)  # type: ignore[arg-type]
    assert repr(name) in str(error.value)


def test_unknown_dialect() -> None:
    with pytest.raises(CacheError, match=r"'e5m2'.*'ocp' or 'fnuz'"):
        get_layout("fp8_ds_mla", "e5m2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("quantised_dims", {"quantised_dims": 512}),
        ("data_bytes", {"data_bytes": 640, "bytes_per_token": 648}),
        ("bytes_per_token", {"bytes_per_token": 583}),
        ("dialect", {"dialect": None}),
        ("group", {"group": 48}),
        ("group", {"group": 32}),
    ],
)
def test_a_layout_that_contradicts_itself_cannot_be_made(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(CacheError) as error:
        replace(get_layout("fp8_ds_mla"), **changes)  # type: ignore[arg-type]
    assert error.value.field.startswith(f"layout fp8_ds_mla: {field}")


def test_a_dialect_without_e4m3_values_cannot_be_made() -> None:
    with pytest.raises(CacheError, match="dialect"):
        replace(get_layout("fp4_ds_mla_v41"), dialect=Dialect.OCP)


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_check_layout_accepts_what_get_layout_returns(name: str) -> None:
    for dialect in Dialect:
        layout = get_layout(name, dialect)
        assert check_layout("layout", layout) is layout


@pytest.mark.parametrize("changes", [{"version": 0}, {"version": 2}, {"alignment": 512}, {"writable": False}])
def test_c5_another_version_of_a_layout_is_refused(changes: dict[str, object]) -> None:
    other = replace(get_layout("fp8_ds_mla"), **changes)  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="fp8_ds_mla version 1"):
        check_layout("layout", other)


@pytest.mark.parametrize("layout", ["fp8_ds_mla", None, 584])
def test_check_layout_refuses_other_types(layout: object) -> None:
    with pytest.raises(CacheError, match="a PageLayout or one of"):
        check_layout("layout", layout)  # type: ignore[arg-type]


def test_check_layout_refuses_a_layout_of_its_own_name() -> None:
    with pytest.raises(CacheError, match="'mine'"):
        check_layout("layout", replace(get_layout("bf16"), name="mine"))


def test_c5_a_cache_of_another_layout_is_never_read_as_this_one() -> None:
    reader = get_layout("fp8_ds_mla")
    check_same_layout("layout", get_layout("fp8_ds_mla"), reader)
    for other in (get_layout("fp8_ds_mla_v41"), get_layout("fp8_ds_mla", Dialect.FNUZ), replace(reader, version=0)):
        with pytest.raises(CacheError, match=r"fp8_ds_mla version 1 \(584 bytes a token, ocp\)") as error:
            check_same_layout("layout", other, reader)
        assert f"version {other.version} ({other.bytes_per_token} bytes" in str(error.value)


def test_layouts_are_values() -> None:
    assert get_layout("bf16") == get_layout("bf16")
    assert len({get_layout(name, dialect) for name in LAYOUT_NAMES for dialect in Dialect}) == 8
    with pytest.raises(AttributeError):
        get_layout("bf16").alignment = 1  # type: ignore[misc]
    assert isinstance(get_layout("bf16"), PageLayout)
