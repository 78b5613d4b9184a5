"""Warm-up compiles exactly the keys that a configuration's calls ask for: none is missing, none is for nothing.

Every call is made as an engine could make it, and nothing is launched: what is looked at is `Kernel.on`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.backend import Backend
from swa_backend.cache_layout import LAYOUT_NAMES, Dialect, get_layout
from swa_backend.chunk_plan import PrefillChunk
from swa_backend.combine import CombineStep, CompressedRows
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, packaged_models
from swa_backend.groups import CompressedGroup
from swa_backend.kernels import jit
from swa_backend.kernels.cache_write import MOST_FEW
from swa_backend.kernels.combine import combine_rows
from swa_backend.kernels.jit import STRICT_VARIABLE, Kernel, mark_warm, stats
from swa_backend.kernels.operations import TritonOperations
from swa_backend.kernels.warmup import keys_of, warmup
from swa_backend.platform import CacheRole, Target
from swa_backend.registry import registry
from tests.kernels.attention_calls import ask_for_attention
from tests.kernels.on_device import kernel_builder
from tests.kernels.pools import make_twin
from tests.support import Batch, make_config

Key = tuple[str, frozenset[tuple[str, object]]]
CPU = torch.device("cpu")
WRITABLE = [name for name in LAYOUT_NAMES if get_layout(name).writable]
SPECULATIVE = {
    "plain": None,
    "k2": SpeculativeConfig(2),
    "parallel": SpeculativeConfig(3, parallel_drafting=True),
    "dspark": SpeculativeConfig(5, dspark=True),
    "dspark65": SpeculativeConfig(65, dspark=True),
}


def config_of(model: str, speculative: str = "plain", **options: Any) -> BackendConfig:
    return BackendConfig(
        ModelConfig.packaged(model), SchedulerConfig(4096, 8, 640), speculative=SPECULATIVE[speculative], **options
    )


class Asked:
    """In place of `Kernel.on`: notes the key and hands out a launcher that launches nothing."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.keys: set[Key] = set()

    def __call__(self, kernel: Kernel, device: torch.device, **key: object) -> Any:
        self.keys.add((kernel.name, frozenset(key.items())))
        launcher = SimpleNamespace(tiles=kernel.tuning_for(self.target).tiles, launch=lambda grid, *args: None)
        launcher.bind = lambda *fixed: SimpleNamespace(launcher=launcher, launch=launcher.launch)
        return launcher


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    one = Asked(Target.parse("cuda:90"))
    monkeypatch.setattr(Kernel, "on", lambda kernel, device, **key: one(kernel, device, **key))
    return one


def warm_keys(config: BackendConfig, dialects: dict[CacheRole, Dialect]) -> set[Key]:
    found = [
        (one.name, frozenset(key.items()))
        for one, key in keys_of(config, dialects)
        if one.fn.fn.__module__.startswith("swa_backend.")  # other tests declare kernels too
        and "window" not in one.fn.fn.__module__  # of window-only prefill: see test_sparse_mla_window.py
    ]
    assert len(set(found)) == len(found)
    return set(found)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def build_everything(config: BackendConfig) -> None:
    """Every kind of step: decodes, prefills, both, drafts, with and without replay and images, of any width."""
    groups = [CompressedGroup("c4a", 4, 256), CompressedGroup("c128a", 128, 256)]
    longest = config.decode_threshold
    for ragged in (False, True):
        for compressed in ((), groups):
            builder = kernel_builder(config, CPU, ragged=ragged, compressed_groups=compressed)
            cases = [
                Batch([1], [1]),
                Batch([longest] * 4, [300] * 4, padding=2),
                Batch([1, longest, longest + 60], [5, 200, 500]),
                Batch([longest + 200], [longest + 200]),
            ]
            cases += [Batch(c.queries, c.seqs, replay=[0] * len(c.seqs)) for c in cases]
            if config.max_image_tokens:
                image = {0: [(3, 9), (20, 19 + config.max_image_tokens)]}
                cases += [Batch([300], [500], spans=image), Batch([300], [500], spans=image, replay=[10])]
                cases += [Batch([1, 300], [500, 300], spans=image)]  # of a decode: no span that counts
            if config.dspark:
                k = config.k
                cases += [Batch([k, k], [k, 300], causal=False), Batch([k], [300], causal=False, replay=[100])]
            for case in cases:
                batch = case.metadata()
                table, slots = batch.block_table_tensor, batch.slot_mapping
                metadata = builder.build(0, batch, groups={g.name: (table, slots) for g in compressed})
                if not metadata.num_prefills:
                    builder.update_draft_decode_metadata(metadata)
            batch = Batch([longest] * 4, [300] * 4).metadata()
            further = {g.name: (batch.block_table_tensor, batch.slot_mapping) for g in compressed}
            builder.capture_build(4, 4 * longest, batch, groups=further)


def use_caches(layout: str, dialect: Dialect) -> None:
    """Any alignment of pages and keys, any number of tokens."""
    operations = TritonOperations()
    for gap, first in ((0, 0), (8, 0), (0, 8), (1024, 16)):
        for entries in (2, 64):
            for tokens in (1, 7, MOST_FEW, MOST_FEW + 1):
                view = make_twin(CPU, layout, dialect, entries, gap=gap, first=first).view
                keys = torch.zeros((tokens + 1) * 512 + 3, dtype=torch.bfloat16)
                where = torch.zeros(tokens, dtype=torch.int64)
                for odd in (0, 3):
                    k = keys[odd : odd + tokens * 512].view(tokens, 512)
                    if get_layout(layout).writable:
                        operations.write_kv(k, view, where)
                    for lens in (None, ints(1)):
                        operations.gather_kv(view, ints(1, 17), ints(1), lens, k[None], 0)
                        operations.gather_kv(view, ints(1, 1), ints(1), lens, k[None], tokens)


def use_topk(config: BackendConfig) -> None:
    """What the model's layers need of top-k rows and of combined rows."""
    valid, layers = torch.ones(3, dtype=torch.bool), config.model.present_layer_types
    rows: list[CompressedRows | None] = [None]
    if any(layer.indexed for layer in layers):
        for width in (1, 512, 700):
            for positions in (ints(3), ints(3).long()):
                TritonOperations().map_topk(
                    ints(3, width), ints(3), positions, ints(1, width), 16, valid, 4, None, ints(3, width), ints(3)
                )
            rows.append(CompressedRows(ints(3, width), ints(1, 4), 16, 9, 4))
    if any(layer.compressed and not layer.indexed for layer in layers):
        rows.append(CompressedRows(None, ints(1, 3), 2, 9, 128))
    for compressed in rows:
        for right in (None, ints(3)) if config.max_image_tokens else (None,):
            combine_rows(
                CombineStep(
                    PrefillChunk(0, 1, 4, 200), 0, 0, ints(3, 128), ints(3), ints(3), valid, ints(2), ints(1), ints(1),
                    right, compressed, ints(3, 900), ints(3),
                )
            )  # fmt: skip


def use_everything(config: BackendConfig, dialects: dict[CacheRole, Dialect]) -> None:
    build_everything(replace(config, cache_layout="fp8_ds_mla"))  # rows are the same over any cache
    use_topk(config)
    ask_for_attention(config, dialects)
    use_caches(config.cache_layout, dialects[CacheRole.SWA])
    if any(layer.compressed for layer in config.model.present_layer_types):
        use_caches(config.compressed_layout, dialects[CacheRole.COMPRESSED])


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("speculative", SPECULATIVE)
@pytest.mark.parametrize("model", packaged_models())
def test_h1_every_key_of_a_model(asked: Asked, model: str, speculative: str, fnuz: bool) -> None:
    config = config_of(model, speculative)
    dialects = {CacheRole.SWA: Dialect.FNUZ if fnuz else Dialect.OCP, CacheRole.COMPRESSED: Dialect.OCP}
    use_everything(config, dialects)
    assert asked.keys == warm_keys(config, dialects)


@pytest.mark.parametrize("compressed", LAYOUT_NAMES)
@pytest.mark.parametrize("layout", WRITABLE)
def test_h1_every_key_of_every_pair_of_cache_layouts(asked: Asked, layout: str, compressed: str) -> None:
    config = config_of("V4-Flash", cache_layout=layout, compressed_layout=compressed)
    for swa in Dialect:
        asked.keys.clear()
        dialects = {CacheRole.SWA: swa, CacheRole.COMPRESSED: Dialect.OCP}
        use_everything(config, dialects)
        assert asked.keys == warm_keys(config, dialects)


@pytest.fixture
def forget_keys() -> Iterator[None]:
    for one in jit.all_kernels():
        one._launchers.clear()
    mark_warm(False)
    yield
    mark_warm(False)


@pytest.mark.usefixtures("forget_keys")
@pytest.mark.parametrize("ragged", [False, True])
def test_h1_builds_after_warm_up_compile_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, ragged: bool
) -> None:
    """Warm up, then batches of 1 to 257 requests, tables of 1 to 4096 columns, varying accepted lengths."""
    config = make_config(
        k=2, dspark=True, max_image_tokens=24, max_num_seqs=257, max_num_batched_tokens=1100, max_model_len=300_000
    )
    warmup(Backend(registry().require("cuda")), config, device=device)
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    before = stats().compilations
    builder = kernel_builder(config, device, ragged=ragged)
    counts = (1, 2, 15, 16, 17, 257)
    for at, count in enumerate(counts):
        columns = (1, 15, 16, 17, 4096)[at % 5]
        accepted = [1 + (request * 7 + at) % 3 for request in range(count)]
        table = [[request % 9] * columns for request in range(count)]
        seqs = [q + 20 for q in accepted]
        builder.build(0, Batch(accepted, seqs, table=table, slots=[1] * sum(accepted)).metadata(str(device)))
    for case in (
        Batch([2, 2], [50, 9], causal=False),
        Batch([2, 2], [50, 9], causal=False, replay=[3, 0]),
        Batch([1, 30], [9, 80], replay=[0, 40]),
        Batch([1, 30], [9, 80], spans={1: [(60, 70)]}),
        Batch([1, 30], [9, 80], spans={1: [(60, 70)]}, replay=[0, 40]),
    ):
        builder.build(0, case.metadata(str(device)))
    assert stats().compilations == before
