"""How an engine's tensor becomes pages: strides and offsets that are honoured, forms that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swa_backend.cache_layout import LAYOUT_NAMES, Dialect, get_layout
from swa_backend.errors import CacheError
from swa_backend.pages import PageView, check_num_slots, check_scale, element_dtype

PAGE = 37_440
V4 = get_layout("fp8_ds_mla")


def pool(pages: int = 3, stride: int = PAGE, first: int = 0, missing: int = 0) -> torch.Tensor:
    """[pages, 1, 64, 584] of zeros; ``missing`` bytes short of what the last page needs without its padding."""
    memory = torch.zeros(first + (pages - 1) * stride + 64 * 584, dtype=torch.uint8)
    tensor = memory.as_strided((pages, 1, 64, 584), (stride, 584, 584, 1), first)
    if missing:
        memory.untyped_storage().resize_(memory.numel() - missing)
    return tensor


def refused(tensor: Any, layout: str = "fp8_ds_mla", entries: int = 64, **options: Any) -> CacheError:
    with pytest.raises(CacheError) as error:
        PageView.of(tensor, get_layout(layout), entries, **options)
    return error.value


def test_a_view_of_the_same_memory() -> None:
    tensor = pool(stride=PAGE + 96, first=48)
    view = PageView.of(tensor, V4, 64)
    assert (view.num_pages, view.entries, view.num_slots, view.page_stride) == (3, 64, 192, PAGE + 96)
    assert view.device == torch.device("cpu")
    assert view.data.dtype == torch.uint8
    assert view.data.shape == (3, 64 * 584)
    assert view.data.data_ptr() == tensor.data_ptr()
    view.data[2, 5] = 9
    assert tensor[2, 0, 0, 5] == 9
    assert tensor.sum() == 9


def test_the_head_dimension_may_be_left_out() -> None:
    tensor = pool()
    view = PageView.of(tensor[:, 0], V4, 64)
    assert view.data.data_ptr() == tensor.data_ptr()
    assert view.page_stride == PAGE


def test_one_page_needs_no_stride() -> None:
    view = PageView.of(torch.zeros(1, 1, 64, 584, dtype=torch.uint8), V4, 64)
    assert (view.num_pages, view.page_stride) == (1, PAGE)


def test_the_last_page_needs_no_padding() -> None:
    assert PageView.of(pool(), V4, 64).num_pages == 3
    error = refused(pool(missing=1))
    assert error.field == "tensor"
    assert "a storage of 112255 bytes" in str(error)
    assert "112256 bytes: 3 pages 37440 bytes apart from byte 0 on" in str(error)


def test_a_storage_offset_counts_against_the_storage() -> None:
    assert "from byte 640 on" in str(refused(pool(first=640, missing=1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_bf16_pages_in_either_dtype(dtype: torch.dtype) -> None:
    memory = torch.zeros(2, 1, 32, 512, dtype=torch.bfloat16)
    tensor = memory if dtype == torch.bfloat16 else memory.view(torch.uint8)
    view = PageView.of(tensor, get_layout("bf16"), 32)
    assert (view.page_stride, view.data.shape) == (32 * 1024, (2, 32 * 1024))
    part = torch.zeros(5, 1, 32, 512, dtype=dtype)[1::2] if dtype == torch.bfloat16 else None
    if part is not None:  # offsets and strides of a bf16 tensor are elements
        view = PageView.of(part, get_layout("bf16"), 32)
        assert (view.num_pages, view.page_stride, view.data.storage_offset()) == (2, 2 * 32 * 1024, 32 * 1024)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_per_tensor_pages_in_either_dtype_whatever_the_dialect(dialect: Dialect, dtype: torch.dtype) -> None:
    scale = torch.tensor([0.5])
    tensor = torch.zeros(2, 1, 32, 512, dtype=torch.uint8).view(dtype)
    view = PageView.of(tensor, get_layout("fp8_per_tensor", dialect), 32, scale)
    assert view.scale is scale
    assert view.layout.dialect is dialect
    assert view.page_stride == 32 * 512


def test_element_dtypes() -> None:
    assert {name: element_dtype(get_layout(name)) for name in LAYOUT_NAMES} == {
        "fp8_ds_mla": torch.uint8,
        "fp8_ds_mla_v41": torch.uint8,
        "fp4_ds_mla_v41": torch.uint8,
        "bf16": torch.bfloat16,
        "fp8_per_tensor": torch.float8_e4m3fn,
    }
    assert element_dtype(get_layout("fp8_per_tensor", Dialect.FNUZ)) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(1, 1, 64, 584, dtype=torch.int8), id="int8"),
        pytest.param(torch.zeros(1, 1, 64, 584, dtype=torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.zeros(1, 1, 64, 292, dtype=torch.bfloat16), id="bf16"),
        pytest.param(torch.zeros(1, 1, 64, 528, dtype=torch.uint8), id="528-bytes"),
        pytest.param(torch.zeros(1, 1, 64, 576, dtype=torch.uint8), id="576-bytes"),
        pytest.param(torch.zeros(1, 1, 32, 584, dtype=torch.uint8), id="32-entries"),
        pytest.param(torch.zeros(1, 2, 64, 584, dtype=torch.uint8), id="two-heads"),
        pytest.param(torch.zeros(1, 64, 1, 584, dtype=torch.uint8), id="head-last"),
        pytest.param(torch.zeros(64, 584, dtype=torch.uint8), id="two-dimensions"),
        pytest.param(torch.zeros(1, PAGE, dtype=torch.uint8), id="page-bytes"),
        pytest.param(torch.zeros(1, 1, 1, 64, 584, dtype=torch.uint8), id="five-dimensions"),
        pytest.param(torch.tensor(0, dtype=torch.uint8), id="scalar"),
    ],
)
def test_other_dtypes_and_shapes(tensor: torch.Tensor) -> None:
    error = refused(tensor)
    assert error.field == "tensor"
    assert str(tensor.dtype) in str(error)
    assert "torch.uint8 [pages, 1, 64, 584]" in str(error)


def test_another_fp8_dtype_than_the_legal_one() -> None:
    error = refused(torch.zeros(1, 1, 32, 512).to(torch.float8_e5m2), "fp8_per_tensor", 32, scale=torch.ones(1))
    assert "torch.uint8 [pages, 1, 32, 512] or torch.float8_e4m3fn [pages, 1, 32, 512]" in str(error)


@pytest.mark.parametrize("thing", [None, [1, 2], "pages"])
def test_what_is_no_tensor(thing: object) -> None:
    assert type(thing).__name__ in str(refused(thing))


@pytest.mark.parametrize("strides", [(PAGE, 584, 584, 2), (PAGE, 584, 592, 1), (PAGE, 584, 0, 1), (PAGE, 584, 584, 0)])
def test_rows_that_do_not_follow_each_other(strides: tuple[int, ...]) -> None:
    tensor = torch.zeros(4 * PAGE, dtype=torch.uint8).as_strided((2, 1, 64, 584), strides)
    assert f"found strides {strides}" in str(refused(tensor))


@pytest.mark.parametrize("stride", [64 * 584, PAGE - 1, 0])
def test_pages_that_overlap_or_lack_their_padding(stride: int) -> None:
    tensor = torch.zeros(3 * PAGE, dtype=torch.uint8).as_strided((2, 1, 64, 584), (stride, 584, 584, 1))
    error = refused(tensor)
    assert f"pages {stride} bytes apart" in str(error)
    assert ">= 37440: 64 x 584 bytes, rounded up to 576" in str(error)


def test_no_page_at_all() -> None:
    assert refused(torch.zeros(0, 1, 64, 584, dtype=torch.uint8)).field == "num_pages"


def test_c2_slots_from_2_to_the_31_on_are_refused() -> None:
    most = (2**31 - 1) // 64
    assert check_num_slots(most, 64) == most * 64
    for pages, entries in ((most + 1, 64), (2**31, 1), (2**26, 32), (1, 2**31)):
        with pytest.raises(CacheError, match=r"fewer than 2\^31 slots") as error:
            check_num_slots(pages, entries)
        assert f"{pages} pages of {entries} entries = {pages * entries} slots" in str(error.value)
    assert check_num_slots(2**31 - 1, 1) == 2**31 - 1
    # Strides and shapes alone, without the 1.25 TB of memory.
    huge = torch.empty_strided((2**25, 1, 64, 584), (PAGE, 584, 584, 1), dtype=torch.uint8, device="meta")
    assert "at most 33554431 pages" in str(refused(huge))


def test_a_scale_only_where_the_layout_has_one() -> None:
    check_scale(None, V4)
    check_scale(torch.ones(1), get_layout("fp8_per_tensor"), torch.device("cpu"))
    assert "None for fp8_ds_mla" in str(refused(pool(), scale=torch.ones(1)))


@pytest.mark.parametrize(
    "scale",
    [
        None,
        0.5,
        torch.ones(()),
        torch.ones(2),
        torch.ones(1, 1),
        torch.ones(1, dtype=torch.bfloat16),
        torch.ones(1, device="meta"),
    ],
)
def test_a_scale_of_another_form(scale: object) -> None:
    tensor = torch.zeros(1, 1, 32, 512, dtype=torch.uint8)
    error = refused(tensor, "fp8_per_tensor", 32, scale=scale)
    assert error.field == "scale"
    assert "a float32 tensor of shape (1,)" in str(error)
