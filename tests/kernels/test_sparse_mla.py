"""The portable attention kernel over every layout, dialect and kind of row, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swa_backend.cache_layout import get_layout
from swa_backend.pages import PageView
from swa_backend.portable.provider import TritonAttention
from tests.independent_codec import decode, encode
from tests.kernels.attention_calls import Case, keyed_twin, make_case
from tests.kernels.pools import bits_of

OCP = "ocp"
FP8, V41, FP4, BF16, TENSOR = "fp8_ds_mla", "fp8_ds_mla_v41", "fp4_ds_mla_v41", "bf16", "fp8_per_tensor"


@pytest.fixture
def provider() -> TritonAttention:
    """Planned for one compute unit: rows are not shared among programs."""
    return TritonAttention(units=1)


@pytest.mark.parametrize(
    "window", [(FP8, OCP), (FP8, "fnuz"), (V41, OCP), (V41, "fnuz"), (BF16, OCP), (TENSOR, OCP), (TENSOR, "fnuz")]
)
def test_one_cache(device: torch.device, provider: TritonAttention, window: tuple[str, str]) -> None:
    make_case(device, window).check(provider)


@pytest.mark.parametrize(
    ("window", "second"),
    [
        ((FP8, OCP), (FP8, OCP)),  # alike: one loop takes the tiles of both
        ((FP8, "fnuz"), (FP8, OCP)),
        ((V41, OCP), (FP4, OCP)),
        ((BF16, OCP), (TENSOR, OCP)),
        ((TENSOR, OCP), (TENSOR, "fnuz")),
    ],
)
def test_two_caches(
    device: torch.device, provider: TritonAttention, window: tuple[str, str], second: tuple[str, str]
) -> None:
    make_case(device, window, second, tokens=3, seed=3).check(provider)


@pytest.mark.simulate
@pytest.mark.parametrize("dialect", [OCP, "fnuz"])
def test_64_heads_over_two_caches(device: torch.device, provider: TritonAttention, dialect: str) -> None:
    make_case(device, (FP8, dialect), (FP8, OCP), tokens=2, width=20, second_width=18, heads=64).check(provider)


@pytest.mark.parametrize("heads", [1, 16, 17, 70, 128])
def test_n4_any_number_of_heads(device: torch.device, provider: TritonAttention, heads: int) -> None:
    make_case(device, (FP8, OCP), tokens=2, width=10, heads=heads).check(provider)


@pytest.mark.parametrize(("gap", "first"), [(8, 0), (0, 3), (1_435_968 - 19_008, 576)])
def test_c3_pages_lie_anywhere(device: torch.device, provider: TritonAttention, gap: int, first: int) -> None:
    twin = keyed_twin(device, FP8, entries=32, pages=3, gap=gap, first=first)
    rows = np.array([[95, 31, 32, 0, 64, 63]], np.int32)
    Case(device, twin, rows, np.array([6], np.int32)).check(provider)


@pytest.mark.parametrize("entries", [2, 48, 100])
def test_c6_page_sizes(device: torch.device, provider: TritonAttention, entries: int) -> None:
    make_case(device, (FP8, OCP), (V41, OCP), tokens=2, entries=entries, second_entries=entries).check(provider)


def test_c1_a_cache_above_2_gib(device: torch.device, provider: TritonAttention) -> None:
    pages, page_bytes = 63_000, 37_440
    memory = torch.empty(pages * page_bytes, dtype=torch.uint8, device=device)
    view = PageView.of(memory.as_strided((pages, 64, 584), (page_bytes, 584, 1)), get_layout(FP8), 64)
    slots = [3_670_911, 3_670_912, 3_670_913, 3_670_976, 3_671_040, pages * 64 - 1]
    bits = np.random.default_rng(1).integers(0x3E00, 0x4080, (len(slots), 512)).astype(np.uint16)
    data, scales = encode(bits, FP8)
    for token, slot in enumerate(slots):
        page, entry = slot // 64 * page_bytes, slot % 64
        memory[page + entry * 576 :][:576] = torch.from_numpy(data[token]).to(device)
        memory[page + 64 * 576 + entry * 8 :][:8] = torch.from_numpy(scales[token]).to(device)
    case = Case(device, keyed_twin(device, FP8, entries=2, pages=1), np.zeros((6, 1), np.int32), np.ones(6, np.int32))
    case.sink.fill_(-math.inf)
    call = case.call()
    call.pages = view
    call.metadata.decode_swa_indices = torch.tensor(slots, dtype=torch.int32, device=device)[:, None, None]
    provider.decode(call)
    # One key alone is the result, exactly.
    values = torch.from_numpy(decode(data, scales, FP8)).bfloat16()
    assert torch.equal(call.out.cpu(), values[:, None].expand(-1, 5, -1))


def test_c7_every_code_and_any_scale_byte_is_exact(device: torch.device, provider: TritonAttention) -> None:
    """A key seen alone comes out as it was decoded: subnormal products, both ends of the scales, NaN codes."""
    scales = [0, 1, 7, 126, 127, 134, 135, 200, 245] if device.type == "cpu" else range(246)
    twin = keyed_twin(device, FP8, entries=2, pages=len(scales))
    for number, byte in enumerate(scales):
        for slot in (2 * number, 2 * number + 1):
            data, scale_row = twin.pool.places(slot)
            twin.pool.memory[data] = 0
            codes = np.arange(256) if slot % 2 else np.arange(256)[::-1]
            twin.pool.memory[data][:256] = np.where(codes & 0x7F == 0x7F, 0, codes)
            twin.pool.memory[scale_row] = byte
    twin.memory.copy_(torch.from_numpy(twin.pool.memory))
    rows = np.arange(2 * len(scales), dtype=np.int32)[:, None]
    case = Case(device, twin, rows, np.ones(len(rows), np.int32), heads=1)
    case.q.zero_()
    case.sink.fill_(-math.inf)
    out, _ = case.run(provider)
    right = torch.from_numpy(twin.pool.read(list(range(len(rows)))).astype(np.float32)).bfloat16()
    zero = (right == 0).numpy()  # the sum of products has no sign for zero
    assert np.array_equal(np.where(zero, 0, bits_of(out)[:, 0]), np.where(zero, 0, bits_of(right)))


@pytest.mark.parametrize("byte", [127, 255])
def test_nan_codes_and_the_nan_scale(device: torch.device, provider: TritonAttention, byte: int) -> None:
    case = make_case(device, (FP8, OCP), tokens=3, width=6)
    case.rows[:, :6] = np.arange(6)
    case.lens[:] = 6, 3, 6
    twin = keyed_twin(device, FP8, entries=16, pages=6)
    data, scales = twin.pool.places(4)
    twin.pool.memory[data][70] = 0xFF if byte == 127 else 0
    twin.pool.memory[scales][1] = byte
    twin.memory.copy_(torch.from_numpy(twin.pool.memory))
    case.window = twin
    out, lse = case.run(provider)
    assert out[[0, 2]].isnan().all()
    assert lse[[0, 2]].isnan().all()
    assert torch.isfinite(out[1]).all()


def test_ragged_rows(device: torch.device, provider: TritonAttention) -> None:
    case = make_case(device, (FP8, OCP), (FP8, OCP), tokens=4, seed=5)
    dense = case.run(provider)
    case.ragged = True
    case.rows = np.where(case.rows < 0, -1, np.where(case.rows >= 96, -1, case.rows))
    out, lse = case.check(provider)
    assert torch.allclose(lse, dense[1], atol=1e-5)
    assert torch.allclose(out.float(), dense[0].float(), atol=0.02)


def test_sinks_empty_rows_and_invalid_tokens(device: torch.device, provider: TritonAttention) -> None:
    case = make_case(device, (FP8, OCP), (FP8, OCP), tokens=5, heads=3)
    case.rows[2], case.second_rows[2] = -1, -1  # entries, but none that is any
    case.invalid = [1]
    case.sink = torch.tensor([math.inf, -math.inf, 0.5], device=device)
    case.q[2] = math.nan  # nothing is seen, so nothing comes of it
    out, lse = case.run(provider)
    case.q[2] = 0
    right, right_lse = case.expected()
    assert not out[:, 0].any()
    for token in (1, 2, 4):
        assert not out[token].any()
        assert torch.isneginf(lse[token]).all()
    for token in (0, 3):
        np.testing.assert_allclose(out[token, 1:].cpu().float(), right[token, 1:], atol=0.02)
        np.testing.assert_allclose(lse[token].cpu(), right_lse[token], atol=1e-4)


@pytest.mark.parametrize("factor", [-1.0, 0.0])
def test_any_scale_of_the_logits(device: torch.device, provider: TritonAttention, factor: float) -> None:
    case = make_case(device, (FP8, OCP), tokens=3)
    call = case.call()
    call.scale *= factor
    provider.decode(call)
    case.q = case.q * factor
    right, _ = case.expected()
    np.testing.assert_allclose(call.out.cpu().float(), right, atol=0.02)


def test_lse_is_optional(device: torch.device, provider: TritonAttention) -> None:
    case = make_case(device, (FP8, OCP), tokens=2)
    out, _ = case.run(provider)
    call = case.call()
    call.lse = None
    provider.decode(call)
    assert torch.equal(call.out, out)
