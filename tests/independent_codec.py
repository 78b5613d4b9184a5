"""The caches' bytes, written a second time from their description alone: numpy, float64, no code of the library.

Formats are tables computed from their bit fields; rounding searches the table for the nearest entry. It is slow and
meant to be read: where it and the library differ, one of them misreads the description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of sign, exponent and mantissa fields, without any special code."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def _e4m3_table(bias: int, nans: tuple[int, ...]) -> Array:
    return np.array([math.nan if code in nans else minifloat(code, 4, 3, bias) for code in range(256)])


E4M3 = {"ocp": _e4m3_table(7, (0x7F, 0xFF)), "fnuz": _e4m3_table(8, (0x80,))}
E4M3_MAX = {"ocp": 448.0, "fnuz": 240.0}
E4M3_NAN = {"ocp": 0x7F, "fnuz": 0x80}
E2M1 = np.array([minifloat(code, 2, 1, 1) for code in range(16)])
UE8M0 = np.array([math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan])


@dataclass(frozen=True)
class Form:
    """One page layout: sizes in bytes, counts in values."""

    data: int
    scales: int
    planar: bool
    align: int
    quantised: int  # leading values that are quantised; the others are bf16
    group: int = 0  # values of a scale in the page; 0: none there
    values: str = "e4m3"
    scale: str = "ue8m0"

    @property
    def token(self) -> int:
        return self.data + self.scales

    def data_at(self, entries: int, j: int) -> int:
        return j * (self.data if self.planar else self.token)

    def scales_at(self, entries: int, j: int) -> int:
        return entries * self.data + j * self.scales if self.planar else j * self.token + self.data

    def page(self, entries: int) -> int:
        size = entries * self.token
        while size % self.align:
            size += 1
        return size


FORMS = {
    "fp8_ds_mla": Form(576, 8, True, 576, 448, group=64),
    "fp8_ds_mla_v41": Form(512, 16, False, 512, 512, group=32),
    "fp4_ds_mla_v41": Form(256, 32, False, 512, 512, group=16, values="e2m1", scale="e4m3"),
    "bf16": Form(1024, 0, False, 512, 0),
    "fp8_per_tensor": Form(512, 0, False, 512, 512),
}
WRITABLE = tuple(name for name in FORMS if name != "fp4_ds_mla_v41")


def bf16_values(bits: Array) -> Array:
    """uint16 bits of bf16 numbers to float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16_bits(values: Array) -> Array:
    """float64 numbers to bf16 bits, rounded to nearest even; NaN becomes 0x7FC0. float32 holds them exactly."""
    with np.errstate(over="ignore", invalid="ignore"):
        word = np.asarray(values, np.float64).astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def scale_exponents(amax: Array, dialect: str) -> Array:
    """The least e with 2^e * fp8_max >= max(amax, 1e-4), by looking it up among all of them."""
    ladder = np.array([math.ldexp(E4M3_MAX[dialect], e) for e in range(-200, 200)])
    return np.searchsorted(ladder, np.maximum(amax, 1e-4), side="left") - 200


def round_e4m3(values: Array, dialect: str) -> Array:
    """Codes of the nearest e4m3 numbers, ties to the even code, clamped; NaN gives the NaN code."""
    grid = E4M3[dialect][: 0x7F if dialect == "ocp" else 0x80]
    flat = np.asarray(values, np.float64).ravel()
    parts = [_nearest(part, grid, dialect) for part in np.array_split(flat, flat.size // 4096 + 1)]
    return np.concatenate(parts).reshape(np.shape(values))


def _nearest(x: Array, grid: Array, dialect: str) -> Array:
    distance = np.abs(np.minimum(np.abs(x), grid[-1])[:, None] - grid)
    low = distance.argmin(axis=1)
    high = len(grid) - 1 - distance[:, ::-1].argmin(axis=1)
    code = np.where(low % 2 == 0, low, high)  # the two differ only on a tie
    negative = np.signbit(x) & ((code > 0) | (dialect == "ocp"))
    return np.where(np.isnan(x), E4M3_NAN[dialect], code + 128 * negative).astype(np.uint8)


def encode(bits: Array, name: str, dialect: str = "ocp", tensor_scale: float = 1.0) -> tuple[Array, Array]:
    """Data rows and scale rows (uint8) of keys given as bf16 bits [n, 512]."""
    form, n = FORMS[name], len(bits)
    tail = np.ascontiguousarray(bits[:, form.quantised :]).view(np.uint8).reshape(n, -1)
    scale_rows = np.zeros((n, form.scales), np.uint8)
    if not form.quantised:
        return tail, scale_rows
    values = bf16_values(bits[:, : form.quantised])
    if not form.group:
        with np.errstate(over="ignore"):
            quotient = values.astype(np.float32) / np.float32(tensor_scale)
        return round_e4m3(np.where(np.isfinite(values), quotient, np.nan), dialect), scale_rows
    groups = values.reshape(n, -1, form.group)
    good = np.isfinite(groups).all(axis=2)
    exponents = scale_exponents(np.where(good, np.abs(groups).max(axis=2), 0.0), dialect)
    with np.errstate(invalid="ignore"):
        codes = round_e4m3(groups / np.exp2(exponents)[..., None], dialect)
    codes[~good] = E4M3_NAN[dialect]
    scale_rows[:, : groups.shape[1]] = np.where(good, np.clip(exponents + 127, 0, 255), 255)
    return np.concatenate([codes.reshape(n, -1), tail], axis=1), scale_rows


def decode(data: Array, scales: Array, name: str, dialect: str = "ocp", tensor_scale: float = 1.0) -> Array:
    """Values float64 [n, 512] of data rows and scale rows."""
    form, n = FORMS[name], len(data)
    tail = bf16_values(np.ascontiguousarray(data[:, -2 * (512 - form.quantised) :]).view(np.uint16))
    if not form.quantised:
        return tail
    if form.values == "e2m1":
        head = np.stack([E2M1[data & 15], E2M1[data >> 4]], axis=2).reshape(n, 512)
    else:
        head = E4M3[dialect][data[:, : form.quantised]]
    if form.group:
        table = UE8M0 if form.scale == "ue8m0" else E4M3["ocp"]
        each = table[scales[:, : form.quantised // form.group]]
        head = (head.reshape(n, -1, form.group) * each[..., None]).reshape(n, -1)
    else:
        head = head * tensor_scale
    return head if form.quantised == 512 else np.concatenate([head, tail], axis=1)


@dataclass
class Pool:
    """The bytes of a cache as one flat array: page p begins at ``first + p * stride``."""

    memory: Array
    name: str
    entries: int
    pages: int
    stride: int
    first: int = 0
    dialect: str = "ocp"
    tensor_scale: float = 1.0

    def places(self, slot: int) -> tuple[slice, slice]:
        """Bytes of a slot's data row and of its scale row."""
        form = FORMS[self.name]
        page = self.first + slot // self.entries * self.stride
        data = page + form.data_at(self.entries, slot % self.entries)
        scales = page + form.scales_at(self.entries, slot % self.entries)
        return slice(data, data + form.data), slice(scales, scales + form.scales)

    def write(self, bits: Array, slots: list[int]) -> None:
        """Store key t at slots[t]; slots outside the pool store nothing."""
        data, scales = encode(bits[: len(slots)], self.name, self.dialect, self.tensor_scale)
        for token, slot in enumerate(slots):
            if 0 <= slot < self.pages * self.entries:
                data_place, scale_place = self.places(slot)
                self.memory[data_place], self.memory[scale_place] = data[token], scales[token]

    def read(self, slots: list[int]) -> Array:
        """Values float64 [n, 512]; zeros for a slot outside the pool."""
        form, out = FORMS[self.name], np.zeros((len(slots), 512))
        real = [(i, *self.places(slot)) for i, slot in enumerate(slots) if 0 <= slot < self.pages * self.entries]
        if real:
            data = np.stack([self.memory[place] for _, place, _ in real])
            scales = np.stack([self.memory[place] for _, _, place in real]).reshape(len(real), form.scales)
            out[[i for i, _, _ in real]] = decode(data, scales, self.name, self.dialect, self.tensor_scale)
        return out

    def gather(self, table: Array, seq_lens: list[int], gather_lens: list[int], out: Array, offset: int) -> None:
        """Store positions seq - L .. seq - 1 of each request in ``out`` (bf16 bits [R, M, 512]) from row offset on."""
        for request, (seq, length) in enumerate(zip(seq_lens, gather_lens, strict=True)):
            for j in range(min(length, out.shape[1] - offset)):
                position = seq - length + j
                column = position // self.entries
                page = int(table[request, column]) if 0 <= column < table.shape[1] else -1
                slot = page * self.entries + position % self.entries if page >= 0 else -1
                out[request, offset + j] = bf16_bits(self.read([slot])[0])
