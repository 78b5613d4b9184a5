"""The small number formats of the caches, every code of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swa_backend.cache_layout import Dialect
from swa_backend.reference import fp8
from tests.cache_twin import DIALECTS, assert_same_floats
from tests.independent_codec import E2M1, E4M3, E4M3_MAX, UE8M0, bf16_values, round_e4m3, scale_exponents


def test_the_tables_are_the_published_ones() -> None:
    assert sorted({abs(v) for v in E2M1}) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [E4M3["ocp"][c] for c in (0x01, 0x08, 0x38, 0x7E)] == [2.0**-9, 2.0**-6, 1.0, E4M3_MAX["ocp"]]
    assert [E4M3["fnuz"][c] for c in (0x01, 0x08, 0x40, 0x7F)] == [2.0**-10, 2.0**-7, 1.0, E4M3_MAX["fnuz"]]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_e4m3_every_code(dialect: Dialect) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert_same_floats(fp8.decode_e4m3(codes, dialect), E4M3[dialect])
    assert_same_floats(fp8.decode_e4m3(codes.view(16, 16).T, dialect), E4M3[dialect].reshape(16, 16).T)
    assert fp8.decode_e4m3(codes[:0], dialect).shape == (0,)


def test_e2m1_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert [abs(float(v)) for v in fp8.decode_e2m1(codes[:8])[::2]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    low_then_high = np.array([(E2M1[code & 15], E2M1[code >> 4]) for code in range(256)])
    assert_same_floats(fp8.decode_e2m1(codes.view(256, 1)), low_then_high)


def test_ue8m0_every_byte() -> None:
    assert_same_floats(fp8.decode_ue8m0(torch.arange(256, dtype=torch.uint8)), UE8M0)
    assert float(fp8.decode_ue8m0(torch.tensor([0], dtype=torch.uint8))) == 2.0**-127


def test_c7_decode_tables() -> None:
    codes = torch.tensor([0x38, 0x80, 0x7F, 0xFF, 0x00], dtype=torch.uint8)
    ocp, fnuz = (fp8.decode_e4m3(codes, dialect).tolist() for dialect in DIALECTS)
    assert ocp[0] == 1.0
    assert ocp[1] == 0.0
    assert math.copysign(1.0, ocp[1]) == -1.0
    assert math.isnan(ocp[2])
    assert math.isnan(ocp[3])
    assert fnuz[0] == 0.5
    assert math.isnan(fnuz[1])
    assert fnuz[2:4] == [240.0, -240.0]
    assert ocp[4] == fnuz[4] == 0.0
    ordinary = [code for code in range(256) if code & 0x7F not in (0x00, 0x7F)]
    every = torch.tensor(ordinary, dtype=torch.uint8)
    assert torch.equal(fp8.decode_e4m3(every, Dialect.FNUZ), fp8.decode_e4m3(every, Dialect.OCP) / 2)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_rounding_to_nearest_even_at_every_tie_and_beside_it(dialect: Dialect) -> None:
    grid = E4M3[dialect][: 0x7F if dialect is Dialect.OCP else 0x80]
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    beyond = np.array([grid[-1] * 1.01, 1e9, np.inf, 1e-30, 0.0], np.float32)
    values = np.concatenate([grid.astype(np.float32), ties, *near, beyond])
    values = np.concatenate([values, -values, np.array([np.nan], np.float32)])
    codes = fp8.encode_e4m3(torch.from_numpy(values), dialect).numpy()
    np.testing.assert_array_equal(codes[:-1], round_e4m3(values[:-1], dialect))
    assert math.isnan(E4M3[dialect][codes[-1]])


def test_rounding_by_hand() -> None:
    values = torch.tensor([1.0625, 1.1875, -1.0625, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), -0.0, 448.0, 465.0, -1e30])
    ocp = [0x38, 0x3A, 0xB8, 0x00, 0x02, 0x80, 0x80, 0x7E, 0x7E, 0xFE]
    assert fp8.encode_e4m3(values, Dialect.OCP).tolist() == ocp
    values = torch.tensor([1.0625, 1.1875, -1.0625, 2.0**-11, 3 * 2.0**-11, -(2.0**-11), -0.0, 240.0, 250.0, -1e30])
    fnuz = [0x40, 0x42, 0xC0, 0x00, 0x02, 0x00, 0x00, 0x7F, 0x7F, 0xFF]
    assert fp8.encode_e4m3(values, Dialect.FNUZ).tolist() == fnuz


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scale_exponent_of_every_bf16_maximum(dialect: Dialect) -> None:
    amax = bf16_values(np.arange(0x7F80, dtype=np.uint16))  # 0 up to the largest finite number
    found = fp8.scale_exponents(torch.from_numpy(amax).float(), dialect)
    np.testing.assert_array_equal(found.numpy(), scale_exponents(amax, dialect))
    top = {Dialect.OCP: (-22, 120), Dialect.FNUZ: (-21, 121)}[dialect]
    assert (int(found.min()), int(found.max())) == top  # bytes 105..248: no finite key needs the clamp to 0..255
