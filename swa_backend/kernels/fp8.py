"""The number formats of the caches inside kernels, exact for every code; twins of `swa_backend.reference.fp8`.

Integer arithmetic throughout, so that every chip, the interpreter and the reference agree bit for bit. ``HW_FP8``
takes the chip's own OCP conversions where they are known to agree: a tile of the kernels' tuning, no caller's choice.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton.language as tl

from swa_backend.kernels.jit import device_function

MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # float32 without its sign
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4
OCP_NAN = tl.constexpr(0x7F)
FNUZ_NAN = tl.constexpr(0x80)


@device_function
def bits_of(values):
    """float32 as int32 bits."""
    return values.to(tl.int32, bitcast=True)


@device_function
def float_of(bits):
    """int32 bits as float32."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@device_function
def scale_code(amax_bits, FNUZ: tl.constexpr):
    """UE8M0 code of a group's scale: the least e with 2^e * fp8_max >= max(amax, 1e-4), plus 127.

    fp8_max is 1.75 * 2^8 (OCP) or 1.875 * 2^7 (FNUZ): e follows from amax's exponent and from whether its mantissa is
    larger. ``amax_bits`` are those of a finite float32 that is not negative.
    """
    bits = tl.maximum(amax_bits, AMAX_FLOOR_BITS)
    mantissa = bits & 0x7FFFFF
    if FNUZ:
        code = (bits >> 23) - 7 + (mantissa > 0x700000).to(tl.int32)
    else:
        code = (bits >> 23) - 8 + (mantissa > 0x600000).to(tl.int32)
    return code


@device_function
def encode_e4m3(values, FNUZ: tl.constexpr, HW_FP8: tl.constexpr):
    """float32 within the dialect's range to e4m3 codes (uint8), to nearest even.

    What rounds to zero keeps its sign in OCP and is 0x00 in FNUZ.
    """
    if HW_FP8 and not FNUZ:
        code = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = bits_of(values)
        magnitude = bits & MAGNITUDE
        # Normal codes: round to three mantissa bits, move the exponent's bias. Subnormal ones: float32's own rounding
        # at the number whose last place is the smallest subnormal.
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        if FNUZ:
            normal -= 119 << 3
            subnormal = bits_of(float_of(magnitude) + 8192.0) - 0x46000000
            number = tl.where(magnitude < 0x3C000000, subnormal, normal)
            sign = tl.where(number == 0, 0, (bits >> 24) & 0x80)
        else:
            normal -= 120 << 3
            subnormal = bits_of(float_of(magnitude) + 16384.0) - 0x46800000
            number = tl.where(magnitude < 0x3C800000, subnormal, normal)
            sign = (bits >> 24) & 0x80
        code = (number | sign).to(tl.uint8)
    return code


@device_function
def decode_e4m3(codes, FNUZ: tl.constexpr, HW_FP8: tl.constexpr):
    """e4m3 codes (uint8) to float32.

    OCP: bias 7, 0x7F and 0xFF are NaN. FNUZ: bias 8, 0x80 is NaN and there is no negative zero.
    """
    if HW_FP8 and not FNUZ:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int32)
        # In float16 the fields keep their number and read too small by the difference of the biases.
        fields = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        half = fields.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        if FNUZ:
            values = tl.where(wide == FNUZ_NAN, float("nan"), half * 128.0)
        else:
            values = tl.where((wide & 0x7F) == OCP_NAN, float("nan"), half * 256.0)
    return values


@device_function
def decode_e2m1(nibbles):
    """e2m1 codes (int32, four bits) to float32."""
    # As above: in float16 the fields read too small by 2^14.
    fields = ((nibbles & 7) << 9) | ((nibbles & 8) << 12)
    return fields.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@device_function
def decode_ue8m0(codes):
    """UE8M0 codes (uint8) to float32: 2^(code - 127), a subnormal number for 0 and NaN for 255."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return float_of(tl.where(wide == 255, NAN_BITS, bits))
