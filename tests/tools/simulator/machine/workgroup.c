/* Runs a grid: one workgroup after another, its waves one after another from barrier to barrier, as far as each can go.
 *
 * The work-items of a wave run one by one up to the next thing that a wave does together (lane exchange, matrix product,
 * access to shared memory, barrier). Of those that wait, the ones at the earliest site go first: the code of a branch
 * that only some take is finished before the wave goes on together, as on the chip. */
#include "machine.h"
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { RUNNING, WAITING, DONE };
enum { STACK_BYTES = 1 << 18 };

struct item items[MAX_ITEMS];
int current, wave_size, is_gfx950;
u32 workgroup[3];
char global_smem[LDS_BYTES] __attribute__((aligned(1024)));
unsigned barrier_epoch;

static void *scheduler_stack;
static char *stacks;
static void **kernel_args;
static char message[1024];
extern void kernel_entry(void **args);
extern void forget_buffers(void);

/* Save the callee-saved registers and the stack pointer here, go on there. */
void switch_stack(void **from, void *to);
__asm__(".text\n.globl switch_stack\n.hidden switch_stack\n.type switch_stack,@function\nswitch_stack:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
        ".size switch_stack, .-switch_stack\n");

void fail(const char *format, ...) {
    if (message[0]) return; /* the first failure says most */
    va_list rest;
    va_start(rest, format);
    vsnprintf(message, sizeof message, format, rest);
    va_end(rest);
}

static void stop(int state) {
    items[current].state = state;
    switch_stack(&items[current].stack_pointer, scheduler_stack);
}

void meet(int site, wave_op op, void *result, void **args) {
    struct item *item = &items[current];
    item->site = site, item->op = op, item->result = result, item->args = args;
    stop(WAITING);
}

INTRINSIC(s_barrier) { meet(site, 0, r, a); }

/* What the runtime passes behind a kernel's own arguments: the grid; what else is there nobody may read. */
static u32 hidden_arguments[64];
INTRINSIC(implicitarg_ptr) { *(u32 **)r = hidden_arguments; }

static void run_item(void) {
    kernel_entry(kernel_args);
    stop(DONE);
}

static void make_items(int count) {
    for (int i = 0; i < count; i++) {
        /* As if it had been stopped on entry of run_item: a return address, six registers; aligned as after a call. */
        void **top = (void **)(stacks + (size_t)(i + 1) * STACK_BYTES) - 2;
        *top = (void *)run_item;
        memset(top - 6, 0, 6 * sizeof *top);
        items[i].stack_pointer = top - 6;
        items[i].state = RUNNING;
    }
}

/* Run a wave until all of it is at a barrier (true) or done (false). */
static int run_wave(int base) {
    for (;;) {
        for (current = base; current < base + wave_size; current++)
            if (items[current].state == RUNNING) switch_stack(&scheduler_stack, items[current].stack_pointer);
        if (message[0]) return 0;
        u64 live = 0, active = 0;
        int first = 0;
        for (int i = base; i < base + wave_size; i++) {
            if (items[i].state == DONE) continue;
            if (!live || items[i].site < first) first = items[i].site;
            live |= 1ull << (i - base);
        }
        if (!live) return 0;
        wave_op op = 0;
        for (int i = base; i < base + wave_size; i++)
            if (items[i].state == WAITING && items[i].site == first) active |= 1ull << (i - base), op = items[i].op;
        if (!op) {
            if (active == live) return 1;
            fail("barrier in a branch that only a part of wave %d takes", base / wave_size);
            return 0;
        }
        op(base, active);
        EACH(i) items[i].state = RUNNING;
    }
}

static void run_workgroup(int count, int backwards) {
    int waves = count / wave_size;
    make_items(count);
    memset(global_smem, 0xAB, sizeof global_smem); /* what nobody has written must not look like zeros */
    barrier_epoch++;
    for (;;) {
        int waiting = 0;
        for (int n = 0; n < waves && !message[0]; n++) waiting += run_wave((backwards ? waves - 1 - n : n) * wave_size);
        if (!waiting || message[0]) return;
        for (int i = 0; i < count; i++)
            if (items[i].state == WAITING) items[i].state = RUNNING;
        barrier_epoch++;
    }
}

/* Run a grid. Returns null, or what went wrong. `args`: addresses of the kernel's arguments. */
const char *run_grid(void **args, int count, int lanes, int gfx950, int backwards, u32 x, u32 y, u32 z) {
    if (!stacks) stacks = mmap(0, (size_t)MAX_ITEMS * STACK_BYTES, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return stacks = 0, "no memory for the stacks";
    kernel_args = args, wave_size = lanes, is_gfx950 = gfx950, message[0] = 0;
    memset(hidden_arguments, 0xAB, sizeof hidden_arguments);
    hidden_arguments[0] = x, hidden_arguments[1] = y, hidden_arguments[2] = z;
    for (workgroup[2] = 0; workgroup[2] < z; workgroup[2]++)
        for (workgroup[1] = 0; workgroup[1] < y; workgroup[1]++)
            for (workgroup[0] = 0; workgroup[0] < x; workgroup[0]++) {
                forget_buffers();
                run_workgroup(count, backwards);
                if (message[0]) return message;
            }
    return 0;
}
