"""What a cache gives back for a row of keys, computed apart from the library's codec: numpy, float64, tables.

Nothing here is shared with the reference codec, so that a mistake in one of them shows.
"""

from __future__ import annotations

import numpy as np

from swa_backend.cache_layout import PageLayout

_AMAX_FLOOR = 1e-4


def e4m3_magnitudes(dialect: str) -> np.ndarray:
    """Finite magnitudes of the codes 0, 1, 2, ...: 127 of them in ``ocp``, 128 in ``fnuz``."""
    bias, codes = (7, 127) if dialect == "ocp" else (8, 128)
    code = np.arange(codes)
    exponent, mantissa = code >> 3, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - bias - 3)
    return np.where(exponent > 0, normal, mantissa * 2.0 ** (1 - bias - 3))


def round_to_e4m3(values: np.ndarray, dialect: str) -> np.ndarray:
    """The nearest e4m3 value of each, ties to the even code, larger ones cut to the largest that is written."""
    grid = e4m3_magnitudes(dialect)
    middles = (grid[1:] + grid[:-1]) / 2
    size = np.minimum(np.abs(values), grid[-1])
    low, high = np.searchsorted(middles, size, side="left"), np.searchsorted(middles, size, side="right")
    code = np.where(low % 2 == 0, low, high)  # they differ only on a tie
    rounded: np.ndarray = np.copysign(grid[code], values)
    return rounded


def scale_exponent(amax: np.ndarray, dialect: str) -> np.ndarray:
    """Smallest e for which ``2^e`` times the largest written value is at least amax (at least 1e-4)."""
    fraction, exponent = np.frexp(np.maximum(amax, _AMAX_FLOOR) / e4m3_magnitudes(dialect)[-1])
    clipped: np.ndarray = np.clip(exponent - (fraction == 0.5), -127, 128)
    return clipped


_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_GROUP = 16


def unpacked_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values [n, 2 c] float64 of e2m1 codes [n, c] uint8, low nibble first, with an e4m3 scale for each 16 of them."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)
    values = np.where(nibbles >= 8, -1.0, 1.0) * _E2M1[nibbles & 7]
    rows: np.ndarray = values * np.repeat(e4m3_magnitudes("ocp")[scales], _E2M1_GROUP, axis=1)
    return rows


def stored_rows(rows: np.ndarray, layout: PageLayout) -> np.ndarray:
    """Rows [n, 512] as a writable cache of this layout returns them, float64. A per-tensor scale is taken to be 1."""
    rows = rows.astype(np.float64)
    if layout.value_format == "bf16":
        return rows
    dialect = str(layout.dialect)
    head, tail = rows[:, : layout.quantised_dims], rows[:, layout.quantised_dims :]
    if layout.scale_format == "tensor":
        return np.concatenate([round_to_e4m3(head, dialect), tail], axis=1)
    groups = head.reshape(len(rows), -1, layout.group)
    scale = 2.0 ** scale_exponent(np.abs(groups).max(axis=2), dialect)[:, :, None]
    head = (round_to_e4m3(groups / scale, dialect) * scale).reshape(len(rows), -1)
    return np.concatenate([head, tail], axis=1)
