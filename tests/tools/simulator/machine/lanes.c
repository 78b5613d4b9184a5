/* Exchange between the lanes of a wave, and what a lane knows of itself. */
#include "machine.h"

INTRINSIC(workitem_id_x) { *(i32 *)r = current; }
INTRINSIC(workgroup_id_x) { *(u32 *)r = workgroup[0]; }
INTRINSIC(workgroup_id_y) { *(u32 *)r = workgroup[1]; }
INTRINSIC(workgroup_id_z) { *(u32 *)r = workgroup[2]; }

INTRINSIC(mbcnt_lo) { /* lanes of the first half below this one, whose bit is set */
    int lane = current % wave_size;
    u32 below = lane >= 32 ? ~0u : (1u << lane) - 1;
    *(u32 *)r = *(u32 *)a[1] + (u32)__builtin_popcount(*(u32 *)a[0] & below);
}
INTRINSIC(mbcnt_hi) {
    int lane = current % wave_size - 32;
    *(u32 *)r = *(u32 *)a[1] + (lane > 0 ? (u32)__builtin_popcount(*(u32 *)a[0] & ((1u << lane) - 1)) : 0);
}

WAVE_INTRINSIC(ballot_i64) {
    u64 votes = 0;
    EACH(i) votes |= (u64)(OPERAND(i, 0, u8) & 1) << (i - base);
    EACH(i) RESULT(i, u64) = votes;
}
WAVE_INTRINSIC(readfirstlane_i32) {
    int first = base + __builtin_ctzll(active);
    EACH(i) RESULT(i, u32) = OPERAND(first, 0, u32);
}
WAVE_INTRINSIC(readlane_i32) {
    EACH(i) {
        int from = base + (int)(OPERAND(i, 1, u32) % (u32)wave_size);
        if (!ACTIVE(from)) fail("readlane of a lane that is not active");
        else RESULT(i, u32) = OPERAND(from, 0, u32);
    }
}
WAVE_INTRINSIC(ds_bpermute) { /* pull: a lane names whose value it wants */
    EACH(i) {
        int from = base + (int)((OPERAND(i, 0, u32) >> 2) % (u32)wave_size);
        RESULT(i, u32) = ACTIVE(from) ? OPERAND(from, 1, u32) : 0;
    }
}
WAVE_INTRINSIC(ds_permute) { /* push: a lane names who gets its value; the last one wins */
    EACH(i) RESULT(i, u32) = 0;
    EACH(i) {
        int to = base + (int)((OPERAND(i, 0, u32) >> 2) % (u32)wave_size);
        if (ACTIVE(to)) RESULT(to, u32) = OPERAND(i, 1, u32);
    }
}
WAVE_INTRINSIC(ds_swizzle) {
    EACH(i) {
        u32 code = OPERAND(i, 1, u32);
        u32 lane = (u32)(i - base) & 31, from;
        if (code & 0x8000) from = (lane & ~3u) | ((code >> (2 * (lane & 3))) & 3); /* within four */
        else from = ((lane & (code & 31)) | ((code >> 5) & 31)) ^ ((code >> 10) & 31);
        int source = base + ((i - base) & ~31) + (int)from;
        RESULT(i, u32) = ACTIVE(source) ? OPERAND(source, 0, u32) : 0;
    }
}

/* Lane whose value a lane gets under a data-parallel-primitives control word; -1: none. */
static int dpp_source(int lane, int control) {
    int row = lane / 16, column = lane % 16, n = control & 15;
    if (control < 0x100) return (lane & ~3) | ((control >> (2 * (lane & 3))) & 3);             /* quad_perm */
    if (control >= 0x101 && control <= 0x10F) return column + n < 16 ? lane + n : -1;          /* row_shl */
    if (control >= 0x111 && control <= 0x11F) return column >= n ? lane - n : -1;              /* row_shr */
    if (control >= 0x121 && control <= 0x12F) return row * 16 + ((column - n) & 15);           /* row_ror */
    if (control == 0x140) return row * 16 + 15 - column;                                       /* row_mirror */
    if (control == 0x141) return (lane & ~7) | (7 - (lane & 7));                               /* row_half_mirror */
    if (control == 0x142) return row > 0 ? row * 16 - 1 : -1;                                  /* row_bcast:15 */
    if (control == 0x143) return lane >= 32 ? 31 : -1;                                         /* row_bcast:31 */
    if (control >= 0x150 && control <= 0x15F) return row * 16 + n;                             /* row_newbcast */
    fail("data-parallel-primitives control %#x is not simulated", control);
    return -1;
}
WAVE_INTRINSIC(update_dpp_i32) { /* old, source, control, row mask, bank mask, bound control */
    EACH(i) {
        int lane = i - base, from = dpp_source(lane, OPERAND(i, 2, i32));
        int enabled = ((OPERAND(i, 3, i32) >> (lane / 16)) & 1) && ((OPERAND(i, 4, i32) >> (lane % 16 / 4)) & 1);
        u32 old = OPERAND(i, 0, u32);
        if (!enabled) RESULT(i, u32) = old;
        else if (from >= 0 && ACTIVE(base + from)) RESULT(i, u32) = OPERAND(base + from, 1, u32);
        else RESULT(i, u32) = OPERAND(i, 5, u8) & 1 ? 0 : old;
    }
}

/* Rows of `rows` lanes: the odd ones of the first operand change places with the even ones of the second (gfx950). */
static void swap_rows(int base, u64 active, int rows) {
    EACH(i) {
        int odd = (i - base) / rows & 1;
        if (!ACTIVE(odd ? i - rows : i + rows)) {
            fail("permlane swap in a branch that only some lanes take");
            return;
        }
        (&RESULT(i, u32))[0] = odd ? OPERAND(i - rows, 1, u32) : OPERAND(i, 0, u32);
        (&RESULT(i, u32))[1] = odd ? OPERAND(i, 1, u32) : OPERAND(i + rows, 0, u32);
    }
}
WAVE_INTRINSIC(permlane16_swap) { swap_rows(base, active, 16); }
WAVE_INTRINSIC(permlane32_swap) { swap_rows(base, active, 32); }
