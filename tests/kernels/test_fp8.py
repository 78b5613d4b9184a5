"""The number formats inside kernels, every code of them, against tables computed from their bit fields."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl

from swa_backend.kernels import fp8
from swa_backend.kernels.jit import Tuning, kernel
from tests.independent_codec import E2M1, E4M3, E4M3_MAX, UE8M0, round_e4m3, scale_exponents

BLOCK = 256
TUNING = {"": Tuning(4, 1, tiles={"BLOCK": BLOCK})}


@kernel(types={"codes": "*u8", "values": "*fp32"}, tuning=TUNING, keys=lambda config, dialects: ())
def decode_codes(codes, values, FORMAT: tl.constexpr, HW_FP8: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + at)
    if FORMAT == "e2m1":
        value = fp8.decode_e2m1(code.to(tl.int32))
    elif FORMAT == "ue8m0":
        value = fp8.decode_ue8m0(code)
    else:
        value = fp8.decode_e4m3(code, FORMAT == "fnuz", HW_FP8)
    tl.store(values + at, value)


@kernel(types={"values": "*fp32", "codes": "*u8"}, tuning=TUNING, keys=lambda config, dialects: ())
def encode_values(values, codes, FORMAT: tl.constexpr, HW_FP8: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + at, fp8.encode_e4m3(tl.load(values + at), FORMAT == "fnuz", HW_FP8))


@kernel(types={"amax": "*i32", "codes": "*i32"}, tuning=TUNING, keys=lambda config, dialects: ())
def scales_of(amax, codes, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + at, fp8.scale_code(tl.load(amax + at), FORMAT == "fnuz"))


def _hardware(device: torch.device) -> list[int]:
    """The chip's own conversions as well, where kernels use them there."""
    return [0, 1] if device.type == "cuda" and torch.version.cuda else [0]


def decoded(device: torch.device, form: str, codes: int = 256, hw: int = 0) -> np.ndarray:
    given = torch.arange(BLOCK, dtype=torch.int32).remainder(codes).to(torch.uint8).to(device)
    values = torch.empty(BLOCK, device=device)
    decode_codes.on(device, FORMAT=form, HW_FP8=hw).launch((1, 1, 1), given, values)
    return values.cpu().numpy()[:codes]


@pytest.mark.simulate
@pytest.mark.parametrize("form", ["ocp", "fnuz"])
def test_c7_every_e4m3_code(device: torch.device, form: str) -> None:
    for hw in _hardware(device):
        found = decoded(device, form, hw=hw)
        np.testing.assert_array_equal(found, E4M3[form].astype(np.float32))
        ordinary = ~np.isnan(found)
        np.testing.assert_array_equal(np.signbit(found[ordinary]), np.signbit(E4M3[form][ordinary]))
    assert np.isnan(found[0x7F]) == (form == "ocp")
    assert np.isnan(found[0x80]) == (form == "fnuz")
    assert found[0x38] == (1.0 if form == "ocp" else 0.5)


def test_every_e2m1_code(device: torch.device) -> None:
    np.testing.assert_array_equal(decoded(device, "e2m1", 16), E2M1)
    assert np.signbit(decoded(device, "e2m1", 16)[8])


def test_c7_every_scale_byte(device: torch.device) -> None:
    found = decoded(device, "ue8m0")
    np.testing.assert_array_equal(found, UE8M0.astype(np.float32))
    assert found[0] == 2.0**-127
    assert found[254] == 2.0**127


@pytest.mark.parametrize("form", ["ocp", "fnuz"])
def test_encode_every_tie_and_beside_it(device: torch.device, form: str) -> None:
    grid = E4M3[form][: 0x7F if form == "ocp" else 0x80]
    middles = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    near = [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9)), grid]
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(2000).astype(np.float32) * 2.0 ** rng.integers(-30, 8, 2000)
    values = np.concatenate([*near, np.clip(spread, -E4M3_MAX[form], E4M3_MAX[form]), [1e-40, 2.0**-149]])
    values = np.concatenate([values, -values]).astype(np.float32)
    values = np.pad(values, (0, -len(values) % BLOCK))
    for hw in _hardware(device):
        codes = torch.empty(len(values), dtype=torch.uint8, device=device)
        encode_values.on(device, FORMAT=form, HW_FP8=hw).launch(
            (len(values) // BLOCK, 1, 1), torch.from_numpy(values).to(device), codes
        )
        np.testing.assert_array_equal(codes.cpu().numpy(), round_e4m3(values, form))


@pytest.mark.parametrize("form", ["ocp", "fnuz"])
def test_scale_of_every_bf16_maximum(device: torch.device, form: str) -> None:
    bits = np.arange(0x7F80, dtype=np.int32) << 16
    bits = np.pad(bits, (0, -len(bits) % BLOCK))
    codes = torch.empty(len(bits), dtype=torch.int32, device=device)
    scales_of.on(device, FORMAT=form).launch((len(bits) // BLOCK, 1, 1), torch.from_numpy(bits).to(device), codes)
    expected = scale_exponents(bits.view(np.float32).astype(np.float64), form) + 127
    np.testing.assert_array_equal(codes.cpu().numpy(), expected)
