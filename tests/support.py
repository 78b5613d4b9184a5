"""Shared by the tests: configurations, batches written as lists, golden cases."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swa_backend.backend import Backend
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.config import BackendConfig, ImageMode, ModelConfig, SchedulerConfig, SpeculativeConfig
from swa_backend.layer_types import ModelVersion
from swa_backend.registry import get_backend

GOLDEN = Path(__file__).parent / "golden"


def make_config(
    *,
    window: int = 128,
    page_tokens: int = 64,
    k: int = 0,
    parallel_drafting: bool = False,
    dspark: bool = False,
    max_image_tokens: int = 0,
    compress_ratios: Sequence[int] = (1, 4, 128),
    version: ModelVersion = ModelVersion.V4,
    max_model_len: int = 8192,
    max_num_batched_tokens: int = 1024,
    max_num_seqs: int = 64,
    num_heads: int = 64,
    **options: Any,
) -> BackendConfig:
    """A small model's configuration; every knob of a golden case by name."""
    model = ModelConfig(
        name="test",
        version=version,
        num_hidden_layers=len(compress_ratios),
        num_heads=num_heads,
        head_dim=512,
        rope_dim=64,
        window_size=window,
        index_topk=512,
        max_position_embeddings=max(max_model_len, 1048576),
        compress_ratios=tuple(compress_ratios),
        image_mode=ImageMode.BIDIRECTIONAL if max_image_tokens else ImageMode.NONE,
        max_image_tokens=max_image_tokens,
    )
    speculative = SpeculativeConfig(k, parallel_drafting=parallel_drafting, dspark=dspark) if k else None
    return BackendConfig(
        model,
        SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        speculative=speculative,
        page_tokens=page_tokens,
        **options,
    )


def make_builder(
    config: BackendConfig,
    *,
    backend: Backend | None = None,
    ragged: bool = False,
    device: str | None = None,
    **options: Any,
) -> DeepseekSparseSWAMetadataBuilder:
    """A builder of ``backend`` (the CPU platform by default), with ragged rows if asked for."""
    backend = backend or get_backend("cpu")
    cache = DeepseekV4SWACache(
        512, config.model.window_size, torch.uint8, "layers.0", None, backend_cls=backend, block_size=config.page_tokens
    )
    builder_cls = backend.get_builder_cls()
    if ragged:
        builder_cls = type("RaggedBuilder", (builder_cls,), {"wants_ragged_rows": True})
    return builder_cls(
        cache.get_kv_cache_spec(config), ["layers.0"], config, device or backend.platform.device_type, **options
    )


@dataclass
class Batch:
    """A batch as lists: ``queries`` and ``seqs`` per request; tables and slots follow unless given."""

    queries: Sequence[int]
    seqs: Sequence[int]
    page_tokens: int = 64
    table: Sequence[Sequence[int]] | None = None
    slots: Sequence[int] | None = None
    causal: bool = True
    spans: Mapping[int, Sequence[tuple[int, int]]] | None = None
    replay: Sequence[int] | None = None
    padding: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def block_table(self) -> torch.Tensor:
        if self.table is not None:
            return torch.tensor(self.table, dtype=torch.int32).reshape(len(self.queries), -1)
        columns = max([-(-seq // self.page_tokens) for seq in self.seqs] or [0]) + 1
        pages = torch.arange(len(self.seqs) * columns, dtype=torch.int32).flip(0) + 1
        return pages.reshape(len(self.seqs), columns)

    def slot_mapping(self) -> torch.Tensor:
        if self.slots is not None:
            return torch.tensor(self.slots, dtype=torch.int64)
        table = self.block_table().tolist()
        slots = []
        for request, (query, seq) in enumerate(zip(self.queries, self.seqs, strict=True)):
            for position in range(seq - query, seq):
                page = table[request][position // self.page_tokens]
                slots.append(page * self.page_tokens + position % self.page_tokens if page >= 0 else -1)
        return torch.tensor(slots + [-1] * self.padding, dtype=torch.int64)

    def metadata(self, device: str = "cpu") -> CommonAttentionMetadata:
        starts = torch.tensor([0, *np.cumsum(self.queries)], dtype=torch.int32)
        seq_lens = torch.tensor(self.seqs, dtype=torch.int32)
        slots = self.slot_mapping()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts.clone(),  # on the CPU too, host copies are tensors of their own
            seq_lens=seq_lens.to(device),
            num_reqs=len(self.queries),
            num_actual_tokens=len(slots),
            max_query_len=max(self.queries, default=0),
            max_seq_len=max(self.seqs, default=0),
            block_table_tensor=self.block_table().to(device),
            slot_mapping=slots.to(device),
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            causal=self.causal,
            mm_req_doc_ranges=self.spans,
            replay_start=None if self.replay is None else torch.tensor(self.replay, dtype=torch.int32).to(device),
            **self.extra,
        )


class GoldenFileError(Exception):
    """A recorded file is missing or damaged."""


@dataclass
class GoldenCase:
    """A recorded case: scalars and arrays by path, absent ones None."""

    name: str
    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def tensor(self, key: str) -> torch.Tensor:
        if f"{key}__bf16" in self.values:
            return torch.from_numpy(self.values[f"{key}__bf16"].view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(self.values[key])

    def config(self, **options: Any) -> BackendConfig:
        return make_config(
            window=self["inputs/window_size"],
            page_tokens=self["inputs/block_size"],
            k=self["inputs/num_speculative_tokens"],
            parallel_drafting=self["inputs/parallel_drafting"],
            dspark=self["inputs/dspark"],
            max_image_tokens=self["inputs/max_image_tokens"],
            compress_ratios=self["inputs/compress_ratios"],
            max_model_len=self["inputs/max_model_len"],
            max_num_batched_tokens=self["inputs/max_num_batched_tokens"],
            max_num_seqs=self["inputs/max_num_seqs"],
            **options,
        )

    def batch(self, device: str = "cpu") -> CommonAttentionMetadata:
        starts, seq_lens = self.tensor("inputs/query_start_loc"), self.tensor("inputs/seq_lens")
        spans = {int(request): [tuple(span) for span in own] for request, own in self["inputs/image_spans"].items()}
        queries = (starts[1:] - starts[:-1]).tolist()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts.clone(),
            seq_lens=seq_lens.to(device),
            num_reqs=len(queries),
            num_actual_tokens=self["inputs/num_actual_tokens"],
            max_query_len=max(queries),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.tensor("inputs/block_table").to(device),
            slot_mapping=self.tensor("inputs/slot_mapping").to(device),
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            causal=self["inputs/causal"],
            mm_req_doc_ranges=spans,
        )


def load_golden(path: Path) -> GoldenCase:
    """A recorded case.

    Raises:
        GoldenFileError: the file is not what was recorded.
    """
    try:
        with np.load(path) as file:
            values = {key: file[key] for key in file.files if key != "meta_json"}
            values.update(json.loads(str(file["meta_json"])))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise GoldenFileError(f"{path}: {error}. Restore the recorded file: git checkout -- {path}") from error
    return GoldenCase(path.stem, values)


def golden_cases(folder: str, pattern: str = "*.npz") -> list[Path]:
    cases = sorted((GOLDEN / folder).glob(pattern))
    if not cases:
        raise FileNotFoundError(f"no golden case matches {GOLDEN / folder / pattern}")
    return cases
