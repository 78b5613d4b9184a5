"""Counter-based randomness: every value of a replay is a function of a key, whatever the order of use."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values one to one (the SplitMix64 finaliser); any shape."""
    x = values + _GOLDEN
    x ^= x >> _S30
    x *= _C1
    x ^= x >> _S27
    x *= _C2
    x ^= x >> _S31
    return x


def mix_int(*parts: int) -> int:
    """One 64-bit number from several integers; differs with their order."""
    x = 0
    for part in parts:
        x = (x ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return x


def salt(*parts: int | str) -> np.uint64:
    """A uint64 constant to tell one use of a key from another."""
    numbers = [part if isinstance(part, int) else int.from_bytes(part.encode(), "little") & _MASK for part in parts]
    return np.uint64(mix_int(*numbers))
