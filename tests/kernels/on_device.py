"""Builders that run the kernels on the device under test, graphs that replay them, memory that ends where it ends."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from swa_backend.backend import Backend
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.config import BackendConfig
from swa_backend.kernels.operations import TritonOperations
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.registry import get_backend
from tests.support import make_builder

COMPUTED = (
    "is_valid_token",
    "token_to_req_indices",
    "decode_swa_indices",
    "decode_swa_lens",
    "decode_swa_ragged_indices",
    "decode_swa_ragged_indptr",
    "prefill_swa_indices",
    "prefill_swa_lens",
)
Groups = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def kernel_backend(device: torch.device) -> Backend:
    """The device's platform; without a GPU the CPU's with the kernels in place of plain PyTorch."""
    if device.type == "cuda":
        return get_backend("rocm" if torch.version.hip else "cuda")
    return Backend(replace(get_backend("cpu").platform, load_operations=TritonOperations))


def kernel_builder(config: BackendConfig, device: torch.device, **options: Any) -> Any:
    """A `DeepseekSparseSWAMetadataBuilder`; typed as Any, so that tests index its optional fields."""
    return make_builder(config, backend=kernel_backend(device), device=str(device), **options)


class CapturedBuild:
    """A build of fixed shape in a graph; `replay` runs it on what the batch's tensors hold by then.

    Without a GPU a replay is the one launch once more, with the arguments that a graph would keep.
    """

    def __init__(
        self, builder: DeepseekSparseSWAMetadataBuilder, batch: CommonAttentionMetadata, groups: Groups | None = None
    ) -> None:
        shape = batch.num_reqs, batch.num_actual_tokens
        if builder.device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                builder.capture_build(*shape, batch, groups=groups)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.metadata: Any = builder.capture_build(*shape, batch, groups=groups)
            self.replay: Callable[[], None] = graph.replay
            self.replay()
        else:
            self.metadata = builder.capture_build(*shape, batch, groups=groups)
            step = self.metadata.step
            assert step is not None
            self.replay = lambda: builder._build_indices(step)


def tensors_of(metadata: DeepseekSparseSWAMetadata) -> dict[str, torch.Tensor]:
    """What a build computed, compressed groups included, by name."""
    found = {name: getattr(metadata, name) for name in COMPUTED}
    for name, group in metadata.compressed.items():
        parts = {"slots": group.compressed_slot_mapping, "rows": group.rows, "lens": group.lens}
        found |= {f"{name}.{part}": value for part, value in parts.items()}
    return {name: value for name, value in found.items() if value is not None}


def assert_same(found: DeepseekSparseSWAMetadata, right: DeepseekSparseSWAMetadata) -> None:
    """Everything that means something is equal: of ragged rows and full rows the part that is in use."""
    have, want = tensors_of(found), tensors_of(right)
    assert have.keys() == want.keys()
    for name, expected in want.items():
        tensor, expected = have[name].cpu(), expected.cpu()
        assert tensor.shape == expected.shape, name
        if name.endswith("ragged_indices"):
            live = int(want["decode_swa_ragged_indptr"][-1])
            tensor, expected = tensor[:live], expected[:live]
        elif name.endswith(".rows"):
            used = torch.arange(expected.shape[1]) < want[name.replace(".rows", ".lens")].cpu()[:, None]
            tensor, expected = tensor[used], expected[used]
        assert torch.equal(tensor, expected), name


_kept: list[object] = []  # guarded memory lives as long as the process: tensors do not own it


def at_the_end(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` whose last element is the last of its allocation; on a CPU the next byte is a fault."""
    values = values.contiguous()
    if device.type == "cuda":
        size = 12 * 2**20  # large enough for torch to ask the driver for a block of its own
        block = torch.empty(size, dtype=torch.uint8, device=device)
        return block[size - values.nbytes :].view(values.dtype).view(values.shape).copy_(values)
    page = mmap.PAGESIZE
    size = -(-max(values.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    _kept.append(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    return whole[size - values.nbytes :].view(values.dtype).view(values.shape).copy_(values)
