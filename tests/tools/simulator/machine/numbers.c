/* Number formats and the arithmetic instructions that LLVM does not know. */
#include "machine.h"
#include <math.h>

static u32 bits_of(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
float from_bf16(u16 bits) { u32 wide = (u32)bits << 16; float value; memcpy(&value, &wide, 4); return value; }
float from_half(u16 bits) { _Float16 value; memcpy(&value, &bits, 2); return (float)value; }
u16 to_bf16(float value) {
    u32 bits = bits_of(value);
    return value != value ? 0x7FC0 : (u16)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* An 8-bit float with `mantissa` bits of mantissa. OCP on gfx950; before, FNUZ: bias one more, 0x80 is the only NaN. */
static float from_byte(u8 code, int mantissa) {
    int bias = (mantissa == 3 ? 7 : 15) + !is_gfx950, magnitude = code & 0x7F;
    int exponent = magnitude >> mantissa, fraction = magnitude & ((1 << mantissa) - 1);
    float value = exponent ? ldexpf((float)(fraction + (1 << mantissa)), exponent - bias - mantissa)
                           : ldexpf((float)fraction, 1 - bias - mantissa);
    if (!is_gfx950 && code == 0x80) return NAN;
    if (is_gfx950 && mantissa == 3 && magnitude == 0x7F) return NAN;
    if (is_gfx950 && mantissa == 2 && magnitude >= 0x7C) value = magnitude == 0x7C ? INFINITY : NAN;
    return code & 0x80 ? -value : value;
}
float from_fp8(u8 code) { return from_byte(code, 3); }
float from_bf8(u8 code) { return from_byte(code, 2); }

/* To nearest even; beyond the largest number the largest number (Triton sets FP16_OVFL, which asks for that). */
static u8 to_byte(float value, int mantissa) {
    u8 sign = signbit(value) ? 0x80 : 0, largest = (u8)(is_gfx950 ? (mantissa == 3 ? 0x7E : 0x7B) : 0x7F), best = 0;
    if (value != value) return is_gfx950 ? sign | 0x7F : 0x80;
    double magnitude = fabs((double)value), least = INFINITY;
    for (int code = 0; code <= largest; code++) { /* codes ascend: among two as near, take the even one */
        double error = fabs((double)from_byte((u8)code, mantissa) - magnitude);
        if (error < least || (error == least && !(code & 1))) least = error, best = (u8)code;
    }
    if (isinf(magnitude)) best = largest;
    return !is_gfx950 && !best ? 0 : sign | best;
}

static void pack(void *r, void *old, u8 low, u8 high, int word) {
    u16 halves[2];
    memcpy(halves, old, 4);
    halves[word] = (u16)(low | high << 8);
    memcpy(r, halves, 4);
}
INTRINSIC(cvt_pk_fp8_f32) { pack(r, a[2], to_byte(*(float *)a[0], 3), to_byte(*(float *)a[1], 3), *(u8 *)a[3] & 1); }
INTRINSIC(cvt_pk_bf8_f32) { pack(r, a[2], to_byte(*(float *)a[0], 2), to_byte(*(float *)a[1], 2), *(u8 *)a[3] & 1); }
INTRINSIC(cvt_scalef32_pk_fp8_f32) {
    float scale = *(float *)a[3];
    pack(r, a[0], to_byte(*(float *)a[1] / scale, 3), to_byte(*(float *)a[2] / scale, 3), *(u8 *)a[4] & 1);
}
INTRINSIC(cvt_f32_fp8) { *(float *)r = from_fp8((u8)(*(u32 *)a[0] >> 8 * *(u32 *)a[1])); }
INTRINSIC(cvt_pk_f32_fp8) {
    u32 word = *(u32 *)a[0] >> (*(u8 *)a[1] & 1 ? 16 : 0);
    for (int i = 0; i < 2; i++) ((float *)r)[i] = from_fp8((u8)(word >> 8 * i));
}
INTRINSIC(cvt_scalef32_pk_f32_fp8) {
    u32 word = *(u32 *)a[0] >> (*(u8 *)a[2] & 1 ? 16 : 0);
    for (int i = 0; i < 2; i++) ((float *)r)[i] = from_fp8((u8)(word >> 8 * i)) * *(float *)a[1];
}
INTRINSIC(cvt_scalef32_pk_bf16_fp8) {
    u32 word = *(u32 *)a[0] >> (*(u8 *)a[2] & 1 ? 16 : 0);
    for (int i = 0; i < 2; i++) ((u16 *)r)[i] = to_bf16(from_fp8((u8)(word >> 8 * i)) * *(float *)a[1]);
}

INTRINSIC(exp2_f32) { *(float *)r = exp2f(*(float *)a[0]); }
INTRINSIC(log_f32) { *(float *)r = log2f(*(float *)a[0]); } /* v_log_f32 is to base 2 */
INTRINSIC(rcp_f32) { *(float *)r = 1.0f / *(float *)a[0]; }
INTRINSIC(sqrt_f32) { *(float *)r = sqrtf(*(float *)a[0]); }
INTRINSIC(rsq_f32) { *(float *)r = 1.0f / sqrtf(*(float *)a[0]); }
INTRINSIC(fmed3_f32) {
    float x = *(float *)a[0], y = *(float *)a[1], z = *(float *)a[2];
    *(float *)r = fmaxf(fminf(x, y), fminf(fmaxf(x, y), z));
}
INTRINSIC(perm) { /* four bytes out of eight */
    u64 bytes = (u64) * (u32 *)a[0] << 32 | *(u32 *)a[1];
    u32 selector = *(u32 *)a[2], out = 0;
    for (int i = 0; i < 4; i++) {
        u32 code = selector >> 8 * i & 255, byte = 0;
        if (code < 8) byte = bytes >> 8 * code & 255;
        else if (code < 12) byte = bytes >> (16 * (code - 8) + 15) & 1 ? 255 : 0; /* a sign, spread */
        else if (code > 12) byte = 255;
        out |= byte << 8 * i;
    }
    *(u32 *)r = out;
}

/* Waiting for memory, priorities and scheduling hints mean nothing here: memory is coherent and in order. */
INTRINSIC(nothing) {}
INTRINSIC(s_setreg) {
    if (*(u32 *)a[0] != 1473) fail("s_setreg %u is not simulated", *(u32 *)a[0]); /* FP16_OVFL alone */
}

/* What LLVM calls to convert float to bfloat; it expects the bits in the low half of the first vector register. It also
 * moves bfloats through float, so that a NaN has to come back as it was. */
float __truncsfbf2(float value) {
    u32 bits = bits_of(value), narrow = to_bf16(value);
    if (value != value) narrow = bits >> 16 | (bits >> 16 & 0x7F ? 0 : 0x40);
    float r;
    memcpy(&r, &narrow, 4);
    return r;
}
