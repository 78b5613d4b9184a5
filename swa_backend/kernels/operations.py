"""The shared Triton kernels as a platform's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swa_backend.kernels import cache_gather, cache_write, topk
from swa_backend.kernels.metadata_launch import MetadataLauncher

if TYPE_CHECKING:
    from swa_backend.buffers import IndexBuffers
    from swa_backend.step import BuildStep


class TritonOperations:
    """`swa_backend.operations.Operations` for tensors on a GPU (or, interpreted, on the CPU)."""

    def prepare_build(self, buffers: IndexBuffers) -> Callable[[BuildStep], None]:
        return MetadataLauncher(buffers)

    write_kv = staticmethod(cache_write.write_kv)
    gather_kv = staticmethod(cache_gather.gather_kv)
    map_topk = staticmethod(topk.map_topk)
