/* Buffer operations: an address is a resource (base, size) and an offset; outside, loads give 0 and stores do nothing. */
#include "machine.h"

enum { MAX_RESOURCES = 256 };
static struct resource { char *base; u64 bytes; } resources[MAX_RESOURCES];
static int count;

void forget_buffers(void) { count = 0; }

/* One record for each different resource: a workgroup makes few, and every work-item of it makes the same. */
INTRINSIC(make_buffer_rsrc) { /* base, stride, bytes, flags */
    char *base = *(char **)a[0];
    u64 bytes = *(u64 *)a[2] & 0xFFFFFFFF;
    int i = 0;
    while (i < count && (resources[i].base != base || resources[i].bytes != bytes)) i++;
    if (i == MAX_RESOURCES) {
        fail("more than %d different buffer resources", MAX_RESOURCES);
        i = 0;
    } else if (i == count)
        resources[count++] = (struct resource){base, bytes};
    *(struct resource **)r = &resources[i];
}

static char *place(void *resource, void *offset, void *scalar_offset, u32 bytes) {
    struct resource *to = *(struct resource **)resource;
    u64 at = (u64) * (u32 *)offset + *(u32 *)scalar_offset;
    return at + bytes <= to->bytes ? to->base + at : 0;
}
void buffer_load(void *r, void **a, u32 bytes) {
    char *from = place(a[0], a[1], a[2], bytes);
    if (from) memcpy(r, from, bytes);
    else memset(r, 0, bytes);
}
void buffer_store(void **a, u32 bytes) {
    char *to = place(a[1], a[2], a[3], bytes);
    if (to) memcpy(to, a[0], bytes);
}
INTRINSIC(raw_ptr_buffer_atomic_add_i32) { /* one work-item runs at a time: nothing to do for atomicity */
    u32 *to = (u32 *)place(a[1], a[2], a[3], 4);
    *(u32 *)r = to ? *to : 0;
    if (to) *to += *(u32 *)a[0];
}
