"""The two caches of a layer: construction, what an engine is told, binding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.backend import Backend
from swa_backend.cache import CacheConfig, CompressedCache, DeepseekV4SWACache
from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.errors import CacheError
from swa_backend.platform import CacheRole
from swa_backend.registry import get_backend
from tests.fakes import fake_platform

U8, BF16, FP8 = torch.uint8, torch.bfloat16, torch.float8_e4m3fn


def swa(
    dtype: torch.dtype = U8, prefix: str = "layers.0.attn", context: Any = None, **options: Any
) -> DeepseekV4SWACache:
    options.setdefault("backend_cls", get_backend("cpu"))
    return DeepseekV4SWACache(512, 128, dtype, prefix, context, **options)


def compressed(ratio: int = 4, layout: Any = "fp8_ds_mla", page_tokens: int = 256, **options: Any) -> CompressedCache:
    options.setdefault("backend_cls", get_backend("cpu"))
    return CompressedCache(ratio, layout, page_tokens, options.pop("prefix", "layers.0.c4a"), **options)


def refused(make: Any, *arguments: Any, **options: Any) -> CacheError:
    with pytest.raises(CacheError) as error:
        make(*arguments, **options)
    return error.value


# Construction


def test_defaults_come_from_the_dtype() -> None:
    names = {dtype: swa(dtype).layout.name for dtype in (U8, BF16, FP8)}
    assert names == {U8: "fp8_ds_mla", BF16: "bf16", FP8: "fp8_per_tensor"}
    cache = swa()
    assert (cache.prefix, cache.window_size, cache.block_size, cache.entries_per_page) == ("layers.0.attn", 128, 64, 64)
    assert (cache.role, cache.layout.dialect, cache.dtype, cache.scale) == (CacheRole.SWA, Dialect.OCP, U8, None)


def test_arguments_in_the_order_engines_pass_them() -> None:
    cache = DeepseekV4SWACache(512, 64, U8, "p", None, get_backend("cpu"), 256, "fp8_ds_mla_v41")
    assert (cache.window_size, cache.block_size, cache.layout) == (64, 256, get_layout("fp8_ds_mla_v41"))


def test_the_backend_defaults_to_the_chosen_one() -> None:
    assert DeepseekV4SWACache(512, 128, U8, "p", None).backend == get_backend()


def test_a_backend_is_a_descriptor() -> None:
    error = refused(DeepseekV4SWACache, 512, 128, U8, "p", None, "cpu")
    assert (error.field, error.found) == ("backend_cls", "'cpu'")
    assert refused(CompressedCache, 4, "bf16", 256, "p", None, "cpu").field == "backend_cls"


def test_the_platform_decides_the_dialect_of_each_role() -> None:
    roles: list[CacheRole] = []

    def dialect(role: CacheRole, target: object) -> Dialect:
        roles.append(role)
        return Dialect.FNUZ if role is CacheRole.SWA else Dialect.OCP

    backend = Backend(fake_platform("chip", cache_dialect=dialect))
    assert swa(backend_cls=backend).layout.dialect is Dialect.FNUZ
    assert swa(FP8, backend_cls=backend).layout == get_layout("fp8_per_tensor", Dialect.FNUZ)
    assert swa(layout="fp8_ds_mla_v41", backend_cls=backend).layout.dialect is Dialect.FNUZ
    assert swa(BF16, backend_cls=backend).layout.dialect is None
    assert compressed(backend_cls=backend).layout.dialect is Dialect.OCP
    # A layout object says its dialect itself.
    assert swa(layout=get_layout("fp8_ds_mla"), backend_cls=backend).layout.dialect is Dialect.OCP
    assert set(roles) == set(CacheRole)


@pytest.mark.parametrize("size", [256, 0, 576, "512"])
def test_other_heads_are_refused(size: Any) -> None:
    error = refused(DeepseekV4SWACache, size, 128, U8, "p", None, get_backend("cpu"))
    assert (error.field, error.found, error.legal) == ("head_dim", size, 512)


@pytest.mark.parametrize("window", [0, -1, 128.0, True, None])
def test_a_window_is_a_positive_int(window: Any) -> None:
    error = refused(DeepseekV4SWACache, 512, window, U8, "p", None, get_backend("cpu"))
    assert error.field == "window_size"


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.int8, torch.float8_e4m3fnuz, torch.float8_e5m2, "uint8", None, []]
)
def test_other_dtypes_are_refused(dtype: Any) -> None:
    error = refused(swa, dtype)
    assert (error.field, error.found) == ("dtype", dtype)
    assert error.legal == "torch.uint8, torch.bfloat16 or torch.float8_e4m3fn"


@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
def test_c6_page_sizes_that_are_multiples_of_32(size: int) -> None:
    assert swa(block_size=size).get_kv_cache_spec().block_size == size


@pytest.mark.parametrize("size", [16, 48, 100, 0, -32, 33, 64.0, "64", None, True])
def test_c6_other_page_sizes(size: Any) -> None:
    error = refused(swa, block_size=size)
    assert (error.field, error.found) == ("block_size", repr(size))
    assert "a multiple of 32: 32, 64, 96, 128, 256" in str(error)
    assert "kernels read a window page 32 tokens at a time" in str(error)  # the reason


@pytest.mark.parametrize("prefix", ["", None, 3, ["a"]])
def test_a_prefix_is_a_name(prefix: Any) -> None:
    assert refused(swa, prefix=prefix).field == "prefix"


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(U8, "bf16"), (U8, "fp8_per_tensor"), (BF16, "fp8_ds_mla"), (BF16, "fp8_per_tensor"), (FP8, "fp8_ds_mla")],
)
def test_dtype_and_layout_must_agree(dtype: torch.dtype, layout: str) -> None:
    error = refused(swa, dtype, layout=layout)
    assert (error.field, error.found) == ("dtype", dtype)
    assert layout in str(error)


def test_c5_an_old_layout_version_or_an_unknown_layout() -> None:
    old = replace(get_layout("fp8_ds_mla"), version=0)
    for make in (swa, compressed):
        assert "fp8_ds_mla version 0" in str(refused(make, layout=old))
        assert "fp8_ds_mla_v41" in str(refused(make, layout="fp8_ds_mla_v0"))
        assert refused(make, layout="").field == "layout"
        assert refused(make, layout=584).field == "layout"


def test_the_window_cannot_be_read_only() -> None:
    assert "fp4_ds_mla_v41 is read only" in str(refused(swa, layout="fp4_ds_mla_v41"))
    assert compressed(layout="fp4_ds_mla_v41").layout.bytes_per_token == 288


def test_scales() -> None:
    scale = torch.tensor([0.5])
    assert swa(FP8, scale=scale).scale is scale
    assert compressed(layout="fp8_per_tensor", scale=scale).scale is scale
    assert refused(swa, scale=scale).field == "scale"
    assert refused(swa, FP8, scale=torch.ones(2)).field == "scale"


@pytest.mark.parametrize("ratio", [0, -4, 4.0, True])
def test_a_ratio_is_a_positive_int(ratio: Any) -> None:
    assert refused(compressed, ratio).field == "ratio"


def test_a_compressed_page_holds_whole_entries() -> None:
    assert [compressed(r, page_tokens=t).entries_per_page for r, t in ((4, 256), (4, 64), (128, 256), (1, 7))] == [
        64,
        16,
        2,
        7,
    ]
    error = refused(compressed, 128, page_tokens=64)
    assert (error.field, error.found) == ("page_tokens", 64)
    assert "a multiple of the ratio 128" in str(error)


# Contexts


def test_a_prefix_is_taken_once_in_a_context() -> None:
    context = CacheConfig()
    first = swa(prefix="layers.0", context=context)
    other = compressed(prefix="layers.0.c4a", cache_config=context)
    assert context.layers == {"layers.0": first, "layers.0.c4a": other}
    for make in (
        lambda: swa(prefix="layers.0", context=context),
        lambda: compressed(prefix="layers.0", cache_config=context),
    ):
        error = refused(make)
        assert error.field == "prefix"
        assert "'layers.0'" in str(error)
    assert context.layers["layers.0"] is first
    swa(prefix="layers.0", context=CacheConfig())
    swa(prefix="layers.0")
    swa(prefix="layers.0")


def test_a_refused_cache_leaves_its_prefix_free() -> None:
    context = CacheConfig()
    refused(swa, prefix="layers.0", context=context, block_size=16)
    refused(swa, prefix="layers.0", context=context, scale=torch.ones(1))
    swa(prefix="layers.0", context=context)


def test_an_engines_own_configuration_is_a_context_too() -> None:
    for context in (SimpleNamespace(block_size=64, cache_dtype="fp8_ds_mla"), SimpleNamespace(layers={})):
        cache = swa(prefix="layers.0", context=context)
        assert context.layers == {"layers.0": cache}
        assert refused(swa, prefix="layers.0", context=context).field == "prefix"


@dataclass(frozen=True)
class Sealed:
    block_size: int = 64


@pytest.mark.parametrize("context", [Sealed(), 7, {}, SimpleNamespace(layers=[])])
def test_a_context_that_can_keep_no_caches(context: object) -> None:
    error = refused(swa, context=context)
    assert error.field == "cache_config"
    assert type(context).__name__ in str(error)


# What an engine's memory manager is told


@pytest.mark.parametrize(("size", "page"), [(32, 19_008), (64, 37_440), (128, 74_880), (256, 149_760)])
def test_the_spec_of_a_window_cache(size: int, page: int) -> None:
    spec = swa(block_size=size).get_kv_cache_spec("whatever the engine passes")
    assert (spec.role, spec.block_size, spec.num_kv_heads, spec.head_size) == (CacheRole.SWA, size, 1, 512)
    assert (spec.dtype, spec.sliding_window, spec.compress_ratio, spec.entries_per_page) == (U8, 128, 1, size)
    assert (spec.state_content_bytes, spec.alignment, spec.page_size_bytes) == (584, 576, page)
    assert spec.layout == get_layout("fp8_ds_mla")


@pytest.mark.parametrize(
    ("dtype", "layout", "page"),
    [(U8, "fp8_ds_mla_v41", 33_792), (BF16, None, 65_536), (FP8, None, 32_768)],
)
def test_the_spec_of_other_layouts(dtype: torch.dtype, layout: str | None, page: int) -> None:
    spec = swa(dtype, layout=layout).get_kv_cache_spec()
    assert (spec.dtype, spec.state_content_bytes, spec.alignment, spec.page_size_bytes) == (dtype, None, 512, page)


@pytest.mark.parametrize(
    ("ratio", "layout", "entries", "page", "content"),
    [
        (4, "fp8_ds_mla", 64, 37_440, 584),
        (128, "fp8_ds_mla", 2, 1_728, 584),
        (2, "fp8_ds_mla_v41", 128, 67_584, None),
        (1, "fp4_ds_mla_v41", 256, 73_728, None),
    ],
)
def test_the_spec_of_a_compressed_cache(ratio: int, layout: str, entries: int, page: int, content: int | None) -> None:
    spec = compressed(ratio, layout, 256).get_kv_cache_spec()
    assert (spec.role, spec.dtype, spec.sliding_window) == (CacheRole.COMPRESSED, U8, None)
    assert (spec.block_size, spec.compress_ratio, spec.entries_per_page) == (256, ratio, entries)
    assert (spec.page_size_bytes, spec.state_content_bytes) == (page, content)


# Binding


def test_reading_before_binding() -> None:
    for name in ("pages", "kv_cache"):
        error = refused(getattr, swa(), name)
        assert "layers.0.attn" in error.field
        assert "bind_kv_cache" in str(error)


def test_bind_takes_the_engines_view_and_drops_the_head_dimension() -> None:
    cache = swa()
    tensor = torch.zeros(4 * 40_000, dtype=U8).as_strided((4, 1, 64, 584), (40_000, 584, 584, 1))
    cache.bind_kv_cache(tensor)
    assert cache.kv_cache.shape == (4, 64, 584)
    assert cache.kv_cache.stride(0) == cache.pages.page_stride == 40_000
    assert cache.kv_cache.data_ptr() == cache.pages.data.data_ptr() == tensor.data_ptr()
    assert cache.pages.num_slots == 256
    again = tensor[:2, 0]
    cache.bind_kv_cache(again)
    assert (cache.pages.num_pages, cache.kv_cache.shape) == (2, (2, 64, 584))


def test_c5_a_cache_of_528_bytes_is_not_bound_as_one_of_584() -> None:
    other = swa(layout="fp8_ds_mla_v41")
    cache = swa()
    cache.bind_kv_cache(cache.allocate(2, "cpu"))
    before = cache.pages
    error = refused(cache.bind_kv_cache, other.allocate(3, "cpu"))
    assert "uint8 [pages, 1, 64, 584]" in str(error)
    assert cache.pages is before
    assert "uint8 [pages, 1, 64, 528]" in str(refused(other.bind_kv_cache, cache.allocate(3, "cpu")))


def test_c2_too_many_slots_are_not_bound() -> None:
    huge = torch.empty_strided((2**25, 1, 64, 584), (37_440, 584, 584, 1), dtype=U8, device="meta")
    assert "2^31" in str(refused(swa().bind_kv_cache, huge))
    assert "2^31" in str(refused(swa().allocate, 2**25, "meta"))


def test_a_per_tensor_scale_defaults_to_one() -> None:
    cache = swa(FP8)
    cache.bind_kv_cache(cache.allocate(2, "cpu"))
    assert cache.scale is not None
    assert cache.pages.scale is cache.scale
    assert cache.scale.tolist() == [1.0]
    assert cache.scale.dtype == torch.float32


@pytest.mark.parametrize("thing", [None, [1], "memory"])
@pytest.mark.parametrize("dtype", [U8, FP8])
def test_binding_what_is_no_tensor(dtype: torch.dtype, thing: object) -> None:
    assert type(thing).__name__ in str(refused(swa(dtype).bind_kv_cache, thing))


@pytest.mark.parametrize(
    ("dtype", "layout", "page"),
    [(U8, None, 37_440), (U8, "fp8_ds_mla_v41", 33_792), (BF16, None, 65_536), (FP8, None, 32_768)],
)
def test_allocate_makes_what_bind_takes(dtype: torch.dtype, layout: str | None, page: int) -> None:
    cache = swa(dtype, layout=layout)
    tensor = cache.allocate(3, "cpu")
    assert tensor.dtype == dtype
    assert tensor.untyped_storage().nbytes() == 3 * page
    assert not tensor.view(U8).any()
    cache.bind_kv_cache(tensor)
    assert (cache.pages.num_pages, cache.pages.page_stride) == (3, page)


@pytest.mark.parametrize("pages", [0, -1, 1.5, True])
def test_allocate_needs_a_page(pages: Any) -> None:
    assert refused(swa().allocate, pages, "cpu").field == "num_pages"
