"""The reference as a platform's operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from swa_backend.buffers import IndexBuffers
from swa_backend.reference import codec, rows, topk
from swa_backend.step import BuildStep


class ReferenceOperations:
    """`swa_backend.operations.Operations` in plain PyTorch, on any device."""

    def prepare_build(self, buffers: IndexBuffers) -> Callable[[BuildStep], None]:
        return partial(rows.build, buffers)

    write_kv = staticmethod(codec.write_kv)
    gather_kv = staticmethod(codec.gather_kv)
    map_topk = staticmethod(topk.map_topk)
