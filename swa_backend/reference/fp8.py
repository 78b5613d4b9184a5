"""The small number formats of the caches, exact for every code: e4m3 in both dialects, e2m1 and UE8M0.

Decoding widens a code's fields into float16, which holds every e4m3 and e2m1 number times a power of two: on a CPU
that is several times faster than a table or PyTorch's own conversion from float8.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from swa_backend.cache_layout import Dialect

AMAX_FLOOR = 1e-4
"""Smallest maximum that a group is scaled for, so that a group of zeros has a scale too."""
UE8M0_BIAS = 127
UE8M0_NAN = 255

_BIT_14 = 0x4000
_NOT_BIT_14 = ~_BIT_14
# Fields moved to float16 keep their exponent number, so they read too small by the difference of the two biases.
_E4M3_REBIAS = {Dialect.OCP: 2.0 ** (15 - 7), Dialect.FNUZ: 2.0 ** (15 - 8)}
_E2M1_REBIAS = 2.0 ** (15 - 1)
# An e2m1 byte, copied to two 16-bit lanes: nibble bits 0-2 go to float16 bits 9-11, nibble bit 3 to its sign.
_E2M1_MAGNITUDE = (2**9 + 2**21, 0x0E000E00)
_E2M1_SIGN = (2**12 + 2**24, 0x80008000 - 2**32)


def decode_e4m3(codes: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """e4m3 codes, uint8 of any shape, to float32.

    OCP: bias 7, 0x7F and 0xFF are NaN. FNUZ: bias 8, 0x80 is NaN, there is no negative zero.
    """
    wide = codes.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
    # Exponent and mantissa go to float16 bits 13..10 and 9..7, the sign to bit 15; bit 14 still repeats the sign.
    fields = wide.mul_(128).bitwise_and(_NOT_BIT_14)
    if dialect is Dialect.OCP:
        # All ones in the magnitude, and only they, carry into bit 14: exponent 31, a float16 NaN.
        fields.bitwise_or_(fields.add(0x80).bitwise_and_(_BIT_14))
    values = fields.view(torch.float16).to(torch.float32).mul_(_E4M3_REBIAS[dialect])
    if dialect is Dialect.FNUZ and codes.numel() and int(codes.view(torch.int8).min()) == -0x80:
        values.masked_fill_(codes == 0x80, math.nan)
    return values


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes, uint8 [..., n] with the even-numbered value in the low nibble, to float32 [..., 2 n]."""
    wide = codes.to(torch.int32, memory_format=torch.contiguous_format)
    (spread, magnitude), (spread_sign, sign) = _E2M1_MAGNITUDE, _E2M1_SIGN
    fields = (wide * spread).bitwise_and_(magnitude).bitwise_or_((wide * spread_sign).bitwise_and_(sign))
    return fields.view(torch.float16).to(torch.float32).mul_(_E2M1_REBIAS)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """UE8M0 codes, uint8 of any shape, to float32: 2^(code - 127), and NaN for 255. Code 0 is a subnormal float32."""
    return _ue8m0_table(codes.device)[codes.int()]


@cache
def _ue8m0_table(device: torch.device) -> torch.Tensor:
    numbers = [math.ldexp(1.0, code - UE8M0_BIAS) for code in range(UE8M0_NAN)]
    return torch.tensor([*numbers, math.nan], dtype=torch.float32, device=device)


def encode_e4m3(values: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """float32 of any shape to e4m3 codes, uint8: clamped to the dialect's maximum, rounded to nearest even.

    What rounds to zero keeps its sign in OCP and is 0x00 in FNUZ. NaN becomes a NaN code.
    """
    dtype = torch.float8_e4m3fn if dialect is Dialect.OCP else torch.float8_e4m3fnuz
    return values.clamp(-dialect.fp8_max, dialect.fp8_max).to(dtype).view(torch.uint8)


def scale_exponents(amax: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """Exponent e of each group's scale 2^e, int32: the least with ``2^e * fp8_max >= max(amax, 1e-4)``.

    That is ``ceil(log2(max(amax, 1e-4) / fp8_max))``, taken from the numbers' own exponents, so that no logarithm or
    division can round across a power of two. Where that formula is evaluated in float32 on bf16 input it agrees: a
    bf16 maximum is either exactly a power of two times fp8_max, or more than 0.4 % away from one.

    Args:
        amax: float32 of any shape, finite and not negative. The result lies in [-22, 121].
    """
    mantissa, exponent = torch.frexp(amax.clamp(min=AMAX_FLOOR))
    max_mantissa, max_exponent = math.frexp(dialect.fp8_max)
    return exponent - max_exponent + (mantissa > max_mantissa)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponents as float32, exact, for int32 exponents of normal numbers."""
    return (exponents + 127).bitwise_left_shift(23).view(torch.float32)
