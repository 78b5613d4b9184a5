"""A cache on the device under test beside its independent twin, for the tests of the cache kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.pages import PageView
from tests.independent_codec import FORMS, Array, Pool

FILL = 0xAB


@dataclass
class Twin:
    """The same bytes twice: ``memory`` with the library's view of it, and a numpy ``pool``."""

    memory: torch.Tensor
    view: PageView
    pool: Pool

    def randomise(self, seed: int) -> None:
        """Random bytes in both, gaps included."""
        self.pool.memory[:] = np.random.default_rng(seed).integers(0, 256, self.pool.memory.size)
        self.memory.copy_(torch.from_numpy(self.pool.memory))

    def assert_same_bytes(self) -> None:
        np.testing.assert_array_equal(self.memory.cpu().numpy(), self.pool.memory)


def make_twin(
    device: torch.device, name: str, dialect: str = "ocp", entries: int = 32, pages: int = 3, gap: int = 0,
    first: int = 0, scale: float = 1.0,
) -> Twin:  # fmt: skip
    """Memory filled with 0xAB, pages ``gap`` bytes further apart than they are long, from byte ``first`` on."""
    form = FORMS[name]
    stride = form.page(entries) + gap
    memory = torch.full((first + pages * stride,), FILL, dtype=torch.uint8, device=device)
    own = torch.tensor([scale], device=device) if name == "fp8_per_tensor" else None
    rows = memory.as_strided((pages, entries, form.token), (stride, form.token, 1), first)
    view = PageView.of(rows, get_layout(name, Dialect(dialect)), entries, own)
    return Twin(memory, view, Pool(memory.cpu().numpy().copy(), name, entries, pages, stride, first, dialect, scale))


def bf16(bits: Array, device: torch.device) -> torch.Tensor:
    """uint16 bits as a bf16 tensor."""
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16).to(device)


def bits_of(tensor: torch.Tensor) -> Array:
    found: Array = tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return found


def wild_keys(count: int, seed: int) -> Array:
    """bf16 bits [count, 512]: ordinary, tiny and huge keys, some with zeros, some with values that are not finite."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, 512)) * 2.0 ** rng.integers(-40, 40, (count, 1))
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[rng.random((count, 512)) < 0.05] = 0x8000
    bits[::5] = rng.integers(0, 2**16, bits[::5].shape)  # any bits: denormals, NaN, infinity
    bits[1::7] = 0
    for bad, row in ((0x7F80, 2), (0x7FC1, 3), (0xFF80, 4)):
        if row < count:
            bits[row, rng.integers(0, 512)] = bad
    return bits
