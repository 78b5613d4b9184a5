/* A compute unit of an AMD chip, as far as Triton's code can tell: work-items are fibers, waves run in lockstep. */
#ifndef MACHINE_H
#define MACHINE_H
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
typedef int32_t i32;

enum { MAX_ITEMS = 1024, MAX_WAVES = 32, LDS_BYTES = 1 << 18 };

/* What a wave does together: `base` is the number of its first work-item, bit i of `active` its work-item base + i. */
typedef void (*wave_op)(int base, u64 active);

struct item {
    void *stack_pointer;
    int state;
    int site;     /* where in the kernel it waits: numbers grow along the program */
    wave_op op;   /* what it waits to do; null: a barrier */
    void *result; /* where an operation's result goes */
    void **args;  /* addresses of an operation's operands */
};

extern struct item items[MAX_ITEMS];
extern int current; /* work-item that runs */
extern int wave_size;
extern int is_gfx950;
extern u32 workgroup[3];
extern char global_smem[LDS_BYTES];
extern unsigned barrier_epoch; /* grows with every barrier and workgroup, never 0 */

/* Wait until the active work-items of the wave have come to `site`; then the wave does `op`. */
void meet(int site, wave_op op, void *result, void **args);
/* End the simulation with a message. */
void fail(const char *format, ...);

/* An intrinsic: `r` is the address of its result, `a[i]` that of operand i. */
#define INTRINSIC(name) void amd_##name(int site, void *r, void **a)
#define WAVE_INTRINSIC(name)                       \
    static void wave_##name(int base, u64 active); \
    INTRINSIC(name) { meet(site, wave_##name, r, a); } \
    static void wave_##name(int base, u64 active)
#define ACTIVE(i) ((active >> ((i) - base)) & 1)
#define EACH(i) for (int i = base; i < base + wave_size; i++) if (ACTIVE(i))
#define OPERAND(i, k, type) (*(type *)items[i].args[k])
#define RESULT(i, type) (*(type *)items[i].result)

float from_bf16(u16 bits);
float from_half(u16 bits);
float from_fp8(u8 code); /* e4m3 in the chip's dialect */
float from_bf8(u8 code); /* e5m2 in the chip's dialect */
u16 to_bf16(float value);
#endif
