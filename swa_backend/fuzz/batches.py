"""A step's host arrays as the tensors that an engine passes: fresh ones each step, or those of a captured graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from swa_backend.batch import CommonAttentionMetadata
from swa_backend.fuzz.pages import MAIN
from swa_backend.fuzz.step import Step

Groups = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch for the library, and its further groups."""

    metadata: CommonAttentionMetadata
    groups: Groups | None

    @classmethod
    def of(cls, step: Step, device: torch.device) -> Batch:
        """Tensors of a step; tables are views of wider ones, whose other columns must never be read."""
        queries, seqs = torch.from_numpy(step.starts), torch.from_numpy(step.seqs)
        tables = {name: _wide(table, device) for name, table in step.tables.items()}
        slots = {name: torch.from_numpy(own).to(device) for name, own in step.slots.items()}
        replay = None if step.replay is None else torch.from_numpy(step.replay)
        groups = {name: (table, slots.get(name, slots[MAIN])) for name, table in tables.items() if name != MAIN}
        upper = seqs.clone()
        for row, part in enumerate(step.parts):  # known too large for decodes, as under asynchronous scheduling
            if row + 1 < len(step.parts) and step.parts[row + 1].count <= 1 and part.count == 1 and step.number % 2:
                upper[row] += 3
        metadata = CommonAttentionMetadata(
            query_start_loc=queries.to(device),
            query_start_loc_cpu=queries.clone(),
            seq_lens=seqs.to(device),
            num_reqs=len(step.parts),
            num_actual_tokens=step.num_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            block_table_tensor=tables[MAIN],
            slot_mapping=slots[MAIN],
            seq_lens_cpu_upper_bound=upper if _all_decode(step) else seqs.clone(),
            causal=step.causal,
            mm_req_doc_ranges=step.spans,
            replay_start=None if replay is None else replay.to(device),
            replay_start_cpu=replay,
        )
        return cls(metadata, groups or None)

    def take(self, step: Step) -> None:
        """Put another step of the same shape into the same device tensors."""
        batch = self.metadata
        batch.query_start_loc.copy_(torch.from_numpy(step.starts))
        batch.seq_lens.copy_(torch.from_numpy(step.seqs))
        if batch.replay_start is not None and step.replay is not None:
            batch.replay_start.copy_(torch.from_numpy(step.replay))
        groups = {} if self.groups is None else self.groups
        for name, table in step.tables.items():
            own, slots = (batch.block_table_tensor, batch.slot_mapping) if name == MAIN else groups[name]
            own.copy_(torch.from_numpy(table))
            slots.copy_(torch.from_numpy(step.slots.get(name, step.slots[MAIN])))


def _all_decode(step: Step) -> bool:
    return bool((step.queries <= 1).all())


def _wide(table: np.ndarray, device: torch.device) -> torch.Tensor:
    rows, columns = table.shape
    wide = torch.zeros(rows, columns + 3, dtype=torch.int32)  # page 0 belongs to someone
    wide[:, :columns] = torch.from_numpy(table)
    return wide.to(device)[:, :columns]
