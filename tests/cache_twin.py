"""A cache beside its independent twin: the same bytes in a `PageView` of the library and in a numpy pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swa_backend.cache import CompressedCache, DeepseekV4SWACache, PagedCache
from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.registry import get_backend
from tests.independent_codec import FORMS, WRITABLE, Array, Pool

DIALECTS = [Dialect.OCP, Dialect.FNUZ]
FILL = 0xAB
WRITABLE_FORMS = [
    pytest.param(name, dialect, id=f"{name}-{dialect}")
    for name in WRITABLE
    for dialect in (DIALECTS if name != "bf16" else DIALECTS[:1])
]
READABLE_FORMS = [*WRITABLE_FORMS, pytest.param("fp4_ds_mla_v41", Dialect.OCP, id="fp4_ds_mla_v41")]


def to_torch(bits: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def to_bits(tensor: torch.Tensor) -> Array:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def make_cache(
    name: str, dialect: str = "ocp", entries: int = 32, pages: int = 3, gap: int = 0, first: int = 0, scale: float = 1.0
) -> tuple[PagedCache, Pool]:
    """A cache over memory filled with 0xAB, pages ``gap`` bytes further apart than they are long, and its twin."""
    layout, form = get_layout(name, Dialect(dialect)), FORMS[name]
    stride = form.page(entries) + gap
    memory = torch.full((first + pages * stride,), FILL, dtype=torch.uint8)
    own = torch.tensor([scale]) if name == "fp8_per_tensor" else None
    backend = get_backend("cpu")
    cache: PagedCache
    if layout.writable and entries % 32 == 0:
        dtype = {"bf16": torch.bfloat16, "fp8_per_tensor": torch.float8_e4m3fn}.get(name, torch.uint8)
        cache = DeepseekV4SWACache(512, 128, dtype, "swa", None, backend, entries, layout, own)
    else:
        cache = CompressedCache(4, layout, entries * 4, "compressed", None, backend, own)
    cache.bind_kv_cache(memory.as_strided((pages, 1, entries, form.token), (stride, form.token, form.token, 1), first))
    return cache, Pool(memory.numpy().copy(), name, entries, pages, stride, first, str(dialect), scale)


def memory_of(cache: PagedCache) -> Array:
    """All bytes of the storage, gaps included."""
    storage = cache.pages.data.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload]


def assert_same_floats(found: torch.Tensor, expected: Array) -> None:
    """Equal as float32 bit for bit, signs of zero included; NaN equals NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        want = expected.astype(np.float32)
    have = found.numpy()
    np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(np.signbit(have) & ~np.isnan(have), np.signbit(want) & ~np.isnan(want))
