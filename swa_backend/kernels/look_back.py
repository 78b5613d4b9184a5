"""Where a tile's entries begin among those of all tiles, within one launch: a decoupled look-back.

Each tile publishes one 64-bit word: ``launch number << 33 | whether tiles before it are counted in << 32 | entries``.
The launch number makes words of earlier launches void, so that nothing is cleared in between and a captured graph can
be replayed. It comes back after 2^30 launches; a tile's word is then 2^30 launches old only if no launch in all that
time had that tile but exactly the first and the last.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl

from swa_backend.kernels.jit import device_function

LOOK_BACK = tl.constexpr(64)  # earlier tiles looked at together
LAUNCH_SHIFT = tl.constexpr(33)
WHOLE = tl.constexpr(1 << 32)
LAUNCH_MASK = tl.constexpr((1 << 30) - 1)


@device_function
def entries_before(scan, tile, count, launch):
    """Publish a tile's number of entries; returns how many the tiles before it have. A tile calls it once.

    Tiles start in the order of their numbers, so a tile that is waited for is running or done.
    """
    tag = launch << LAUNCH_SHIFT
    before = count * 0
    if tile > 0:
        tl.atomic_xchg(scan + tile, tag | count.to(tl.int64))
        nearest = tile - 1
        distance = tl.arange(0, LOOK_BACK)
        while nearest >= 0:
            at = nearest - distance
            real = at >= 0
            # Atomic reads: a plain load may be served by a cache that does not see other compute units' writes.
            word = tl.atomic_add(scan + tl.maximum(at, 0), tl.zeros([LOOK_BACK], tl.int64), mask=real)
            known = ~real | ((word >> LAUNCH_SHIFT) == launch)
            whole = real & known & ((word & WHOLE) != 0)
            end = tl.min(tl.where(whole, distance, LOOK_BACK), 0)
            missing = tl.sum((~known & (distance < end)).to(tl.int32), 0)
            if missing == 0:
                before += tl.sum(tl.where(real & (distance <= end), word.to(tl.int32), 0), 0)
                nearest = tl.where(end < LOOK_BACK, -1, nearest - LOOK_BACK)
    tl.atomic_xchg(scan + tile, tag | WHOLE | (before + count).to(tl.int64))
    return before


@device_function
def launch_number(words):
    """Number of this launch, to be read by every program before `finish_launch`."""
    return tl.load(words)


@device_function
def finish_launch(words, launch, num_programs):
    """Count a program as finished; the last one of the launch gives the next launch its number."""
    finished = tl.atomic_add(words + 1, 1)
    if finished == num_programs - 1:
        tl.store(words + 1, 0)
        tl.store(words, (launch + 1) & LAUNCH_MASK)
