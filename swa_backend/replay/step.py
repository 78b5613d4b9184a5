"""One step's batch as an engine hands it to the library: lengths, block tables, slots, all from the engine's books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swa_backend.batch import CommonAttentionMetadata
from swa_backend.replay.blocks import BlockManager
from swa_backend.replay.history import Histories
from swa_backend.replay.scheduler import Kind, Work

WINDOW_GROUP = "window"


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of R requests and T tokens.

    Attributes:
        work: what each request does.
        request: [T] number in the batch of each token's request.
        request_ids: [T] number in the trace of each token's request.
        positions: [T] int64 absolute positions.
        token: [T] where each token's content key lies in ``Histories.keys``.
        keys: [T] uint64 content keys.
        tables: [R, columns] int32 page numbers of each cache group, host.
        slots: [T] int64 slot of each token in each cache group, counted in tokens, host.
        batch: the library's view of the window group.
        groups: the library's view of the other cache groups.
    """

    work: Sequence[Work]
    request: np.ndarray
    request_ids: np.ndarray
    positions: np.ndarray
    token: np.ndarray
    keys: np.ndarray
    tables: dict[str, np.ndarray]
    slots: dict[str, np.ndarray]
    batch: CommonAttentionMetadata
    groups: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_decodes(self) -> int:
        """Requests that belong to the decode part of the batch."""
        return sum(one.kind is not Kind.PREFILL for one in self.work)


def make_step(work: Sequence[Work], manager: BlockManager, histories: Histories, device: torch.device) -> Step:
    """The batch of ``work``, whose requests have pages for all their tokens."""
    ids = np.array([one.request for one in work], dtype=np.int64)
    counts = np.array([one.count for one in work], dtype=np.int64)
    ends = np.array([one.end for one in work], dtype=np.int64)
    query_start = np.concatenate([[0], np.cumsum(counts)])
    request = np.repeat(np.arange(len(work)), counts)
    positions = np.arange(query_start[-1]) - query_start[request] + (ends - counts)[request]
    token = histories.base[ids][request] + positions

    tables: dict[str, np.ndarray] = {}
    slots: dict[str, np.ndarray] = {}
    for name, group in manager.groups.items():
        table = tables[name] = manager.tables(name, ids.tolist())
        page = table[request, positions // group.page_tokens].astype(np.int64)
        slots[name] = page * group.page_tokens + positions % group.page_tokens

    query_start_cpu = torch.from_numpy(query_start.astype(np.int32))
    seq_lens = torch.from_numpy(ends.astype(np.int32))
    on_device = {name: (_to(tables[name], device), _to(slots[name], device)) for name in tables}
    window_table, window_slots = on_device.pop(WINDOW_GROUP)
    batch = CommonAttentionMetadata(
        query_start_loc=query_start_cpu.to(device),
        query_start_loc_cpu=query_start_cpu,
        seq_lens=seq_lens.to(device),
        num_reqs=len(work),
        num_actual_tokens=len(positions),
        max_query_len=int(counts.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=window_table,
        slot_mapping=window_slots,
        seq_lens_cpu_upper_bound=seq_lens,
    )
    return Step(
        work, request, ids[request], positions, token, histories.keys[token], tables, slots, batch, on_device
    )


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
