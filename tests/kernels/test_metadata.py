"""The one-launch metadata kernel against its plain PyTorch twin, bit for bit, over everything both could have written.

The twin itself is checked against hand-written cases and a slow oracle in ``tests/test_rows.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.buffers import IndexBuffers, RaggedBuffers
from swa_backend.config import BackendConfig
from swa_backend.errors import ConfigError
from swa_backend.groups import CompressedGroup, SwaGroup
from swa_backend.kernels.metadata_launch import MetadataLauncher
from swa_backend.reference import rows
from swa_backend.step import BuildStep
from tests.support import Batch, golden_cases, load_golden, make_builder, make_config

POISON = 77
UNWRITTEN = {"no_replay", "group_table"}


def tensors(buffers: IndexBuffers) -> dict[str, torch.Tensor]:
    """Everything that a build may write."""
    found: dict[str, torch.Tensor] = {}
    for field in fields(buffers):
        value = getattr(buffers, field.name)
        if isinstance(value, RaggedBuffers):
            found |= {f"{field.name}.indices": value.indices, f"{field.name}.indptr": value.indptr}
        elif isinstance(value, torch.Tensor) and field.name not in UNWRITTEN:
            found[field.name] = value
    return found


class Pair:
    """A builder of the CPU platform, and the kernel on buffers of its own with the same groups."""

    def __init__(self, config: BackendConfig, device: torch.device, *, ragged: bool = False, **options: Any) -> None:
        self.builder = make_builder(config, ragged=ragged, **options)
        self.right = self.builder._buffers
        swa = [SwaGroup(g.name, g.page_entries, g.num_pages) for g in self.right.groups if not g.ratio]
        second = [g for g in self.right.groups if g.ratio]
        compressed = [CompressedGroup(g.name, g.ratio, g.page_entries * g.ratio, g.num_pages) for g in second]
        self.found = IndexBuffers.allocate(config, swa, compressed, device, ragged=ragged)
        self.launch = MetadataLauncher(self.found)
        self.device = device

    def check(self, batch: Any, groups: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        step = self.builder.build(0, batch, groups=groups).step
        assert step is not None
        self.check_step(step)

    def check_step(self, step: BuildStep) -> None:
        for tensor in (*tensors(self.right).values(), *tensors(self.found).values()):
            tensor.fill_(1 if tensor.dtype == torch.bool else POISON)
        for buffers in (self.right, self.found):  # entry 0 of an indptr is written once, at construction
            for ragged in (buffers.decode_ragged, buffers.prefill_ragged):
                if ragged is not None:
                    ragged.indptr[:, 0] = 0
        self.launch(moved(step, self.device))
        rows.build(self.right, step)
        for name, right in tensors(self.right).items():
            assert torch.equal(tensors(self.found)[name].cpu(), right), name


def moved(step: BuildStep, device: torch.device) -> BuildStep:
    def to(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device)

    return replace(
        step,
        query_start_loc=to(step.query_start_loc),
        seq_lens=to(step.seq_lens),
        replay_start=to(step.replay_start),
        spans=to(step.spans),
        groups=tuple((to(table), to(slots)) for table, slots in step.groups),
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.simulate if path.stem == "mixed_chunked_prefill" else ())
        for path in golden_cases("metadata")
    ],
)
def test_golden_case(case: Any, device: torch.device) -> None:
    golden = load_golden(case)
    ragged = any("ragged" in key for key in golden.values)
    Pair(golden.config(), device, ragged=ragged).check(golden.batch())


@pytest.mark.parametrize(
    ("queries", "seqs", "options"),
    [
        ([1], [130], {"table": [[7, 3, 9]]}),  # R1
        ([3], [130], {"table": [[7, 3, 9]]}),  # R2
        ([1], [5], {"table": [[5]]}),  # R3
        ([1, 1], [130, 130], {"table": [[2**31 - 1] * 3, [7, 3, 9]], "slots": [-1, 577]}),  # R4
        ([1], [130], {"table": [[7, -1, 9]], "slots": [577]}),  # R9
        ([1], [200], {"table": [[3, 4]], "slots": [5]}),  # H2: the table ends before the context does
        ([2, 2, 0, 2], [4, 300, 0, 129], {"padding": 3}),
    ],
    ids=["R1", "R2", "R3", "R4", "R9", "H2", "padding"],
)
def test_field_case_decodes(queries: list[int], seqs: list[int], options: Any, device: torch.device) -> None:
    Pair(make_config(k=2, max_num_batched_tokens=64), device, ragged=True, num_pages=50).check(
        Batch(queries, seqs, **options).metadata()
    )


@pytest.mark.parametrize("prefix", [200, 40], ids=["R5", "R6"])
@pytest.mark.parametrize("ragged", [False, True])
def test_field_case_draft(prefix: int, ragged: bool, device: torch.device) -> None:
    config = make_config(k=5, dspark=True, max_num_batched_tokens=64)
    batch = Batch([5, 5, 3], [prefix + 5, prefix + 70, 3], causal=False)
    Pair(config, device, ragged=ragged).check(batch.metadata())


@pytest.mark.simulate
def test_r7_image_spans(device: torch.device) -> None:
    config = make_config(max_image_tokens=384, max_num_batched_tokens=512, max_num_seqs=8)
    spans = {1: [(100, 400)], 2: [(3, 5), (6, 6), (9, 20)]}
    batch = Batch([1, 420, 12], [90, 420, 30], spans=spans, table=[list(range(r, r + 8)) for r in (1, 9, 17)])
    Pair(config, device).check(batch.metadata())


@pytest.mark.parametrize("ragged", [False, True])
def test_p5_and_r8_resumed_inside_an_image_and_replayed(ragged: bool, device: torch.device) -> None:
    config = make_config(max_image_tokens=384, max_num_batched_tokens=512, max_num_seqs=8)
    batch = Batch([150, 138], [450, 522], spans={0: [(100, 400)]}, replay=[0, 384])
    Pair(config, device, ragged=ragged).check(batch.metadata())


@pytest.mark.parametrize("ragged", [False, pytest.param(True, marks=pytest.mark.simulate)])
def test_many_groups_in_one_launch(ragged: bool, device: torch.device) -> None:
    queries, seqs = [1, 1, 90], [129, 8, 300]
    batch = Batch(queries, seqs, padding=2)
    narrow = Batch(queries, seqs, page_tokens=32, padding=2)
    slots = batch.slot_mapping()
    table = torch.arange(24, dtype=torch.int32).reshape(3, 8)
    pair = Pair(
        make_config(max_num_batched_tokens=128, max_num_seqs=8),
        device,
        ragged=ragged,
        compressed_groups=(CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256, num_pages=20)),
        swa_groups=(SwaGroup("other", page_tokens=32),),
    )
    groups = {
        "c4a": (table, slots),
        "c128a": (table.flip(1), slots.clone()),
        "other": (narrow.block_table(), narrow.slot_mapping()),
    }
    pair.check(batch.metadata(), groups)


def test_full_rows_of_a_long_context(device: torch.device) -> None:
    """Rows of different lengths in one tile: each is written in whole blocks up to its own length, and no further."""
    seqs = [100, 128 * 64, 128 * 64 + 128, 128 * 200, 1]
    config = make_config(max_model_len=128 * 256, max_num_batched_tokens=16, max_num_seqs=8)
    batch = Batch([1] * 5, seqs)
    pair = Pair(config, device, compressed_groups=(CompressedGroup("c128a", 128, 256),))
    table = torch.randint(0, 900, (5, 100), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    pair.check(batch.metadata(), {"c128a": (table, batch.slot_mapping())})


def test_strided_table_and_last_columns(device: torch.device) -> None:
    """A table that is a view of a wider one: the columns beyond the view are another request's."""
    wide = torch.arange(32, dtype=torch.int32).reshape(2, 16)
    batch = replace(Batch([1, 1], [600, 700], slots=[1, 2]).metadata(), block_table_tensor=wide[:, :8])
    Pair(make_config(max_num_batched_tokens=16), device).check(batch)


@pytest.mark.parametrize("seed", range(12))
def test_random_mix(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    k, window, page = int(rng.integers(0, 4)), int(rng.choice([16, 128])), int(rng.choice([32, 64, 96]))
    dspark, images = bool(seed % 3 == 1 and k), 24 if seed % 3 == 2 else 0
    config = make_config(
        window=window, page_tokens=page, k=k, dspark=dspark, max_image_tokens=images, max_num_batched_tokens=256,
        max_num_seqs=128,
    )  # fmt: skip
    pair = Pair(config, device, ragged=bool(seed % 2), num_pages=60)
    for _ in range(3):
        decodes = [int(q) for q in rng.integers(0, 2 + k, int(rng.integers(0, 20)))]
        prefills = [int(q) for q in rng.integers(2 + k, 40, int(rng.integers(0, 4)))]
        causal = not dspark or bool(rng.integers(2))
        queries = decodes + prefills if causal else [min(q, k) for q in decodes]
        if not sum(queries):
            continue
        seqs = [q + int(rng.choice([0, rng.integers(0, 2 * window), rng.integers(0, 600)])) for q in queries]
        columns = max(-(-seq // page) for seq in seqs)
        table = rng.integers(-2, 70, (len(queries), columns)).tolist()
        slots = rng.choice([5, 5, 5, -1], sum(queries) + int(rng.integers(0, 5))).tolist()
        spans = {r: [(0, 9), (12, 30)] for r in range(len(queries)) if rng.integers(2)} if images else {}
        replay = [int(rng.integers(0, seq - q + 1)) for q, seq in zip(queries, seqs, strict=True)]
        batch = Batch(
            queries, seqs, page, table=table, slots=slots, causal=causal, spans=spans,
            replay=replay if rng.integers(2) else None,
        )  # fmt: skip
        pair.check(batch.metadata())


@pytest.mark.parametrize("uniform", [True, False])
def test_many_requests(uniform: bool, device: torch.device) -> None:
    """More requests than one round of the search looks at, and more tiles than one look back covers."""
    rng = np.random.default_rng(3)
    count = 700
    queries = [2] * count if uniform else rng.integers(0, 3, count).tolist()
    seqs = [int(q + rng.integers(0, 200)) for q in queries]
    config = make_config(k=1, window=16, max_num_batched_tokens=1500, max_num_seqs=count)
    Pair(config, device, ragged=True).check(Batch(queries, seqs).metadata())


def test_draft_update_on_the_same_buffers(device: torch.device) -> None:
    pair = Pair(make_config(k=3, max_num_batched_tokens=64), device, ragged=True)
    batch = Batch([4, 4, 2], [100, 200, 60]).metadata()
    step = pair.builder.build(0, batch).step
    assert step is not None
    for _ in range(3):
        step.seq_lens.add_(1)
        step.groups[0][1][3] *= -1
        pair.check_step(step)


def test_page_counts_learnt_later_reach_the_kernel(device: torch.device) -> None:
    pair = Pair(make_config(max_num_batched_tokens=16), device)
    batch = Batch([1, 1], [300, 400]).metadata()
    pair.check(batch)
    for buffers in (pair.right, pair.found):
        buffers.set_num_pages("main", 3)
    pair.check(batch)
    assert int(pair.right.decode_indices[0, :2].max()) < 3 * 64


def test_too_many_groups_are_refused(device: torch.device) -> None:
    groups = [SwaGroup(f"g{i}", 64) for i in range(9)]
    buffers = IndexBuffers.allocate(make_config(max_num_batched_tokens=8), groups, [], device, ragged=False)
    with pytest.raises(ConfigError, match="groups"):
        MetadataLauncher(buffers)
