/* Shared memory (LDS): every access of a wave at once, checked for races between waves.
 *
 * Per byte, which waves wrote and read it since the last barrier. A wave that reads what only others wrote, or changes
 * what others read or wrote, lacks a barrier. Writing what is there already is no race: Triton lets several waves store
 * copies of one value. */
#include "machine.h"

static struct { unsigned written, read; u32 writers, readers; } history[LDS_BYTES];

static u32 offset_of(const void *address, u32 bytes, int site) {
    u64 offset = (u64)((const char *)address - global_smem);
    if (offset + bytes > LDS_BYTES) {
        fail("access to shared memory at offset %lld (site %d)", (long long)offset, site);
        return ~0u;
    }
    return (u32)offset;
}

static void read_lds(int item, const void *address, void *to, u32 bytes, int site) {
    u32 at = offset_of(address, bytes, site), me = 1u << (item / wave_size);
    if (at == ~0u) return;
    for (u32 b = at; b < at + bytes; b++) {
        if (history[b].written == barrier_epoch && !(history[b].writers & me))
            fail("race: wave %d reads byte %u of shared memory that another wave wrote since the last barrier (site %d)",
                 item / wave_size, b, site);
        if (history[b].read != barrier_epoch) history[b].read = barrier_epoch, history[b].readers = 0;
        history[b].readers |= me;
    }
    memcpy(to, address, bytes);
}

static void write_lds(int item, void *address, const void *from, u32 bytes, int site) {
    u32 at = offset_of(address, bytes, site), me = 1u << (item / wave_size);
    if (at == ~0u) return;
    for (u32 k = 0; k < bytes; k++) {
        u32 b = at + k;
        int written = history[b].written == barrier_epoch, read = history[b].read == barrier_epoch;
        if (global_smem[b] != ((const char *)from)[k] &&
            ((written && history[b].writers & ~me) || (read && history[b].readers & ~me)))
            fail("race: wave %d changes byte %u of shared memory that another wave used since the last barrier (site %d)",
                 item / wave_size, b, site);
        if (!written) history[b].written = barrier_epoch, history[b].writers = 0;
        history[b].writers |= me;
    }
    memcpy(address, from, bytes);
}

static void wave_load(int base, u64 active) {
    EACH(i) read_lds(i, items[i].args[0], items[i].result, *(u32 *)items[i].args[1], items[i].site);
}

static void wave_store(int base, u64 active) {
    EACH(i) write_lds(i, items[i].result, items[i].args[0], *(u32 *)items[i].args[1], items[i].site);
}

void lds_load(int site, void *address, void *to, u32 bytes) {
    void *args[2] = {address, &bytes};
    meet(site, wave_load, to, args);
}

void lds_store(int site, void *address, void *from, u32 bytes) {
    void *args[2] = {from, &bytes};
    meet(site, wave_store, address, args);
}

/* Atomic operations order themselves, but not the lanes' other accesses: only the lockstep is kept. */
static void wave_nothing(int base, u64 active) { (void)base, (void)active; }
void lds_atomic(int site) { meet(site, wave_nothing, 0, 0); }

/* Sixteen lanes together read a matrix of sixteen columns, each lane a column; `bytes` is the size of an element. A row
 * is spread over the addresses of 2 * bytes lanes, eight bytes each (gfx950). */
static void read_columns(int base, u64 active, int bytes) {
    int lanes_of_row = 2 * bytes, columns_of_lane = 8 / bytes;
    EACH(i) {
        int group = (i - base) / 16 * 16, column = (i - base) % 16;
        for (int row = 0; row < 8 / bytes; row++) {
            int from = base + group + row * lanes_of_row + column / columns_of_lane;
            if (!ACTIVE(from)) {
                fail("transposed read in a branch that only some lanes take");
                return;
            }
            read_lds(i, OPERAND(from, 0, char *) + column % columns_of_lane * bytes, &RESULT(i, char) + row * bytes,
                     (u32)bytes, items[i].site);
        }
    }
}
WAVE_INTRINSIC(ds_read_tr16_b64) { read_columns(base, active, 2); }
WAVE_INTRINSIC(ds_read_tr8_b64) { read_columns(base, active, 1); }
