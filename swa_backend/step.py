"""What changes from step to step of a metadata build; what stays is `swa_backend.buffers.IndexBuffers`.

The builder fills in a `BuildStep` on the host and hands it once to what the platform's operations prepared. The plain
PyTorch operations and the Triton launch take the same object, so that one can stand for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

next_number: Callable[[], int] = count(1).__next__
"""Numbers builds, updates and mapped rows of this process in the order in which they are made."""


@dataclass(slots=True)  # not frozen: that would cost a step more than all of its checks
class BuildStep:
    """Inputs of one build. R requests, T tokens; no tensor is read on the host."""

    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    replay_start: torch.Tensor | None  # [R] int32, None = zeros
    spans: torch.Tensor | None  # [num_spans, 3] int32 (request, first, last position), by request and position
    groups: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (block table [R, C] int32, slots [T] int64) of each group
    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    max_query_len: int
    causal: bool

    @property
    def num_prefills(self) -> int:
        return self.num_reqs - self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens
