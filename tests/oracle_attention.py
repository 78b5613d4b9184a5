"""Attention in float64 with plain loops over tokens and entries: what every provider is measured against.

It shares no code with the library. Keys come in already dequantised, by a codec that the library does not contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Keys:
    """What each token may see in one cache: keys [slots, 512] float64, rows [T][w], lens [T]."""

    keys: Floats
    rows: Sequence[Sequence[int]]
    lens: Sequence[int]


def attention(q: Floats, caches: Sequence[Keys], sinks: Sequence[float], scale: float) -> tuple[Floats, Floats]:
    """(out [T, h, 512], lse [T, h]) of q [T, h, 512]; lse is natural and without the sink."""
    tokens, heads, dim = q.shape
    out = np.zeros((tokens, heads, dim))
    lse = np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        seen = []
        for cache in caches:
            for i, slot in enumerate(cache.rows[t]):
                if i < cache.lens[t] and 0 <= slot < len(cache.keys):
                    seen.append(cache.keys[slot])
        if not seen:
            continue
        keys = np.array(seen, dtype=np.float64)
        for h in range(heads):
            out[t, h], lse[t, h] = _one_head(q[t, h], keys, sinks[h], scale)
    return out, lse


def _one_head(q: Floats, keys: Floats, sink: float, scale: float) -> tuple[Floats, float]:
    with np.errstate(all="ignore"):  # infinities and NaN are part of what is tested
        logits = scale * (keys @ q)
        peak = logits.max()
        lse = float(peak + np.log(np.exp(logits - peak).sum()))
        weights = np.exp(logits - lse)
        share = 1.0 / (1.0 + np.exp(sink - lse))  # of the denominator that is not the sink's
        return share * (weights @ keys), lse


def relative_error(found: Floats, expected: Floats) -> float:
    """Frobenius norm of the difference over that of the expected value."""
    norm = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(np.asarray(found, dtype=np.float64) - expected))
    return error / norm if norm else error


def worst_row_error(found: Floats, expected: Floats) -> float:
    """Largest relative error of a row along the first axis; a row that should be 0 has to be exactly 0."""
    worst = 0.0
    for one, right in zip(found, expected, strict=True):
        error = relative_error(one, right)
        worst = max(worst, error if right.any() or error == 0 else np.inf)
    return worst
