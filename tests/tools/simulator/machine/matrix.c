/* Matrix products of a wave of 64 lanes: D = A B + C with A [M, K], B [K, M], M 16 or 32.
 *
 * Lane l holds, of A, row l % M and the `per_lane` columns from (l / M) * per_lane on; of B the same with rows and
 * columns exchanged. Of C and D it holds column l % M; its element i lies in row 4 * (l / 16) + i (M 16), or
 * 8 * (i / 4) + 4 * (l / 32) + i % 4 (M 32). */
#include "machine.h"

enum { MAX_ELEMENTS = 32 * 64 }; /* of an operand */

typedef float (*reader)(const void *operand, int index);
static float read_bf16(const void *p, int i) { return from_bf16(((const u16 *)p)[i]); }
static float read_half(const void *p, int i) { return from_half(((const u16 *)p)[i]); }
static float read_float(const void *p, int i) { return ((const float *)p)[i]; }
static float read_fp8(const void *p, int i) { return from_fp8(((const u8 *)p)[i]); }
static float read_bf8(const void *p, int i) { return from_bf8(((const u8 *)p)[i]); }

static void product(int base, u64 active, int m, int per_lane, reader read_a, reader read_b) {
    static float a[MAX_ELEMENTS], b[MAX_ELEMENTS];
    int k = per_lane * (64 / m);
    if (wave_size != 64 || active != ~0ull) {
        fail("matrix product in a branch that only some lanes take");
        return;
    }
    for (int lane = 0; lane < 64; lane++)
        for (int j = 0; j < per_lane; j++) {
            int at = lane % m * k + lane / m * per_lane + j;
            a[at] = read_a(items[base + lane].args[0], j);
            b[at] = read_b(items[base + lane].args[1], j);
        }
    for (int lane = 0; lane < 64; lane++) {
        const float *c = items[base + lane].args[2];
        float *d = items[base + lane].result;
        for (int i = 0; i < m * m / 64; i++) {
            int row = m == 16 ? 4 * (lane / 16) + i : 8 * (i / 4) + 4 * (lane / 32) + i % 4;
            float sum = c[i];
            for (int j = 0; j < k; j++) sum += a[row * k + j] * b[lane % m * k + j];
            d[i] = sum;
        }
    }
}

#define PRODUCT(name, m, per_lane, read_a, read_b) \
    WAVE_INTRINSIC(name) { product(base, active, m, per_lane, read_a, read_b); }
PRODUCT(mfma_f32_16x16x4f32, 16, 1, read_float, read_float)
PRODUCT(mfma_f32_32x32x2f32, 32, 1, read_float, read_float)
PRODUCT(mfma_f32_16x16x16f16, 16, 4, read_half, read_half)
PRODUCT(mfma_f32_32x32x8f16, 32, 4, read_half, read_half)
PRODUCT(mfma_f32_16x16x32_f16, 16, 8, read_half, read_half)
PRODUCT(mfma_f32_32x32x16_f16, 32, 8, read_half, read_half)
PRODUCT(mfma_f32_16x16x16bf16_1k, 16, 4, read_bf16, read_bf16)
PRODUCT(mfma_f32_32x32x8bf16_1k, 32, 4, read_bf16, read_bf16)
PRODUCT(mfma_f32_16x16x32_bf16, 16, 8, read_bf16, read_bf16)
PRODUCT(mfma_f32_32x32x16_bf16, 32, 8, read_bf16, read_bf16)
PRODUCT(mfma_f32_16x16x32_fp8_fp8, 16, 8, read_fp8, read_fp8)
PRODUCT(mfma_f32_32x32x16_fp8_fp8, 32, 8, read_fp8, read_fp8)
PRODUCT(mfma_f32_16x16x32_bf8_bf8, 16, 8, read_bf8, read_bf8)
PRODUCT(mfma_f32_32x32x16_bf8_bf8, 32, 8, read_bf8, read_bf8)

/* The 8-bit product of gfx950 with a format for each operand; without scales (both given as 0), as tl.dot makes it.
 * Which lane holds which columns of A and rows of B differs from the above by one permutation of K in both. */
static void product_f8(int base, u64 active, int m) {
    u32 format_a = OPERAND(base, 3, u32), format_b = OPERAND(base, 4, u32);
    if (format_a > 1 || format_b > 1 || OPERAND(base, 6, u32) || OPERAND(base, 8, u32))
        fail("matrix product of formats %u and %u with scales is not simulated", format_a, format_b);
    else product(base, active, m, 32, format_a ? read_bf8 : read_fp8, format_b ? read_bf8 : read_fp8);
}
WAVE_INTRINSIC(mfma_scale_f32_16x16x128_f8f6f4) { product_f8(base, active, 16); }
WAVE_INTRINSIC(mfma_scale_f32_32x32x64_f8f6f4) { product_f8(base, active, 32); }
