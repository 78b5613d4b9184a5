"""What the library makes of one step, as plain data: split, requests, rows, pages, chunk plans, plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from swa_backend.backend import Backend
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.cache_layout import HEAD_DIM, get_layout
from swa_backend.chunk_plan import BF16_BYTES, has_compressed_cache, workspace_bytes, workspace_rows
from swa_backend.errors import ValidationError
from swa_backend.groups import CompressedGroup
from swa_backend.inspect.seen import Key, SeenEntries, SeenTokens, seen_entries, seen_tokens, window_keys
from swa_backend.inspect.step_input import StepInput
from swa_backend.layer_types import LayerType
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.pages import element_dtype
from swa_backend.platform import CacheRole


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request of a step; positions are absolute, ends inclusive."""

    request: int
    part: str
    tokens: int
    context: int
    first_position: int
    last_position: int
    first_key: int
    last_key: int
    replay_start: int
    gathered: int | None
    images: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token; ``keys`` counts what it sees by kind, ``entries`` by layer type."""

    token: int
    request: int
    position: int
    part: str
    len: int
    first_key: int | None
    last_key: int | None
    first_slot: int | None
    last_slot: int | None
    keys: Mapping[str, int]
    entries: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PagesView:
    """Pages of one request in one cache group that this step reads or writes: ``pages[i]`` is column ``first + i``."""

    group: str
    request: int
    page_tokens: int
    entries_per_page: int
    first_column: int
    pages: tuple[int, ...]
    without_page: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkView:
    """One chunk of prefill requests (numbers in the batch) and the workspace rows that it takes of the budget."""

    layer_type: str
    requests: tuple[int, int]
    tokens: int
    compressed: int
    width: int
    rows: int
    budget: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer type of the model: how many layers, what a token sees of the compressed cache, the tile plan."""

    layer_type: str
    layers: int
    ratio: int
    sees: str
    plan: str


@dataclass(frozen=True)
class StepReport:
    """Everything that `swa-backend inspect` prints; ``seen`` and ``entries`` are what it draws."""

    step: StepInput
    facts: Mapping[str, Any]
    requests: tuple[RequestView, ...]
    tokens: tuple[TokenView, ...]
    pages: tuple[PagesView, ...]
    chunks: tuple[ChunkView, ...]
    layers: tuple[LayerView, ...]
    validation: str | None
    problems: tuple[str, ...]
    seen: SeenTokens
    entries: Mapping[LayerType, SeenEntries]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it, with the slots of every row."""
        tokens = [
            {**asdict(token), "slots": self.seen.slots[token.token, : token.len].tolist()} for token in self.tokens
        ]
        return {
            **self.facts,
            "validation": self.validation,
            "problems": list(self.problems),
            "requests": [asdict(one) for one in self.requests],
            "tokens": tokens,
            "pages": [asdict(one) for one in self.pages],
            "chunk_plans": [asdict(one) for one in self.chunks],
            "layers": [asdict(one) for one in self.layers],
        }


def inspect_step(step: StepInput, backend: Backend) -> StepReport:
    """Build a step and look at the result.

    Raises:
        BatchError: the batch breaks a rule that is always checked.
        ConfigError: the configuration does.
        ProviderError: no attention provider of the platform serves the layers.
    """
    validation = _validate(step, backend)
    builder, metadata = _build(step, backend)
    seen = seen_tokens(step, metadata)
    entries = {kind: seen_entries(kind, group, step, metadata, seen) for kind, group in step.compressed.items()}
    kinds = step.config.model.present_layer_types
    tokens = tuple(_token(step, metadata, seen, entries, token) for token in range(len(seen.request)))
    return StepReport(
        step,
        _facts(step, builder, metadata),
        tuple(_request(step, metadata, seen, request) for request in range(step.batch.num_reqs)),
        tokens,
        tuple(_pages(step, seen, entries)),
        tuple(_chunks(step, metadata)),
        tuple(_layer(kind, step, builder, metadata, entries, seen.valid) for kind in kinds),
        validation,
        seen.problems,
        seen,
        entries,
    )


def _build(step: StepInput, backend: Backend) -> tuple[DeepseekSparseSWAMetadataBuilder, DeepseekSparseSWAMetadata]:
    config = step.config
    device = torch.device(backend.platform.device_type)
    layout = get_layout(config.cache_layout, backend.cache_dialect(CacheRole.SWA))
    cache = DeepseekV4SWACache(
        HEAD_DIM, config.model.window_size, element_dtype(layout), "inspect", None, backend, config.page_tokens, layout
    )
    groups = [
        CompressedGroup(kind.value, kind.ratio, group.page_tokens, group.num_pages)
        for kind, group in step.compressed.items()
    ]
    builder = backend.get_builder_cls()(
        cache.get_kv_cache_spec(config), ["inspect"], config, device, step.num_pages, compressed_groups=groups
    )
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "replay_start")
    given = {name: getattr(step.batch, name) for name in names}
    batch = replace(step.batch, **{name: one.to(device) for name, one in given.items() if one is not None})
    inputs = {kind.value: (one.table.to(device), one.slots.to(device)) for kind, one in step.compressed.items()}
    return builder, builder.build(0, batch, groups=inputs)


def _validate(step: StepInput, backend: Backend) -> str | None:
    """What validation mode says against the step, None if nothing."""
    try:
        _build(replace(step, config=replace(step.config, validate=True)), backend)
    except ValidationError as error:
        return str(error)
    return None


def _facts(
    step: StepInput, builder: DeepseekSparseSWAMetadataBuilder, metadata: DeepseekSparseSWAMetadata
) -> dict[str, Any]:
    config = step.config
    return {
        "source": step.source,
        "model": config.model.name,
        "platform": builder.backend.name,
        "provider": builder.provider.name,
        "causal": step.batch.causal,
        "split": {
            "decodes": metadata.num_decodes,
            "prefills": metadata.num_prefills,
            "decode_tokens": metadata.num_decode_tokens,
            "prefill_tokens": metadata.num_prefill_tokens,
            "padding": int((~metadata.is_valid_token).sum()),
            "decode_threshold": config.decode_threshold,
            "max_decode_query_len": metadata.max_decode_query_len,
        },
        "window": config.model.window_size,
        "decode_width": metadata.decode_swa_width,
        "prefill_width": config.prefill_width,
        "page_tokens": config.page_tokens,
        "num_pages": step.num_pages,
        "workspace_bytes": workspace_bytes(config),
    }


def _request(step: StepInput, metadata: DeepseekSparseSWAMetadata, seen: SeenTokens, request: int) -> RequestView:
    batch = step.batch
    first, end = batch.query_start_loc_cpu[request : request + 2].tolist()
    context = int(batch.seq_lens[request])
    own = np.flatnonzero((seen.request == request) & (seen.lens > 0))
    prefill = request - metadata.num_decodes
    gathered = metadata.prefill_gather_lens
    return RequestView(
        request,
        "prefill" if prefill >= 0 else "decode",
        end - first,
        context,
        context - (end - first),
        context - 1,
        int(seen.first[own].min()) if own.size else -1,
        int(seen.end[own].max()) - 1 if own.size else -1,
        0 if batch.replay_start is None else int(batch.replay_start[request]),
        int(gathered[prefill]) if prefill >= 0 and gathered is not None else None,
        tuple((first, last) for first, last in (batch.mm_req_doc_ranges or {}).get(request, ())),
    )


def _token(
    step: StepInput,
    metadata: DeepseekSparseSWAMetadata,
    seen: SeenTokens,
    entries: Mapping[LayerType, SeenEntries],
    token: int,
) -> TokenView:
    count = int(seen.lens[token])
    keys = window_keys(step, seen, token)
    part = "decode" if token < metadata.num_decode_tokens else "prefill"
    row = seen.slots[token]
    return TokenView(
        token,
        int(seen.request[token]),
        int(seen.position[token]),
        part if seen.valid[token] else "padding",
        count,
        int(seen.first[token]) if count else None,
        int(seen.end[token]) - 1 if count else None,
        int(row[0]) if count else None,
        int(row[count - 1]) if count else None,
        {key.name.lower(): n for key in Key if (n := int((keys == key).sum()))},
        {kind.value: _sees(one, token, step.config.model.index_topk) for kind, one in entries.items()},
    )


def _sees(entries: SeenEntries, token: int, topk: int) -> int:
    """Entries that a token sees: exactly, or at most where the picks are not known."""
    found = len(entries.entries[token]) - len(entries.missing[token])
    return found if entries.known[token] else min(found, topk)


def _pages(step: StepInput, seen: SeenTokens, entries: Mapping[LayerType, SeenEntries]) -> list[PagesView]:
    found = []
    batch = step.batch
    for request in range(batch.num_reqs):
        own = np.flatnonzero((seen.request == request) & (seen.lens > 0))
        if own.size:
            keys = (int(seen.first[own].min()), int(seen.end[own].max()) - 1)
            found.append(
                _columns("window", request, batch.block_table_tensor, step.num_pages, keys, step.config.page_tokens, 1)
            )
    for kind, group in step.compressed.items():
        for request in range(batch.num_reqs):
            own = np.flatnonzero(seen.request == request)
            used = [entries[kind].entries[token] for token in own if len(entries[kind].entries[token])]
            if used:
                span = (min(int(one[0]) for one in used), max(int(one[-1]) for one in used))
                found.append(
                    _columns(kind.value, request, group.table, group.num_pages, span, group.page_tokens, kind.ratio)
                )
    return found


def _columns(
    name: str, request: int, table: torch.Tensor, num_pages: int | None, span: tuple[int, int], tokens: int, ratio: int
) -> PagesView:
    """Columns that hold entries ``span[0] .. span[1]``."""
    per_page = tokens // ratio
    first, last = (place // per_page for place in span)
    row = table[request].tolist()
    pages = tuple(row[column] if column < len(row) else -1 for column in range(first, last + 1))
    legal = range(num_pages if num_pages is not None else 2**31)
    without = tuple(first + i for i, page in enumerate(pages) if page not in legal)
    return PagesView(name, request, tokens, per_page, first, pages, without)


def _chunks(step: StepInput, metadata: DeepseekSparseSWAMetadata) -> list[ChunkView]:
    config, scheduler = step.config, step.config.scheduler
    found = []
    for kind in config.model.present_layer_types:
        compressed = has_compressed_cache(config.model.version, kind.ratio)
        budget = workspace_rows(
            kind.ratio,
            config.prefill_chunk_size,
            has_compressed=compressed,
            window=config.model.window_size,
            max_model_len=scheduler.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        for chunk in metadata.get_prefill_chunk_plan(kind.ratio, config.prefill_chunk_size, compressed):
            first, end = metadata.num_decodes + chunk.first, metadata.num_decodes + chunk.end
            starts = step.batch.query_start_loc_cpu
            rows = (chunk.end - chunk.first) * chunk.width
            found.append(
                ChunkView(
                    kind.value, (first, end - 1), int(starts[end] - starts[first]), chunk.compressed, chunk.width, rows,
                    budget, rows * HEAD_DIM * BF16_BYTES,
                )
            )  # fmt: skip
    return found


def _layer(
    kind: LayerType,
    step: StepInput,
    builder: DeepseekSparseSWAMetadataBuilder,
    metadata: DeepseekSparseSWAMetadata,
    entries: Mapping[LayerType, SeenEntries],
    valid: np.ndarray,
) -> LayerView:
    model = step.config.model
    plan = metadata.plans[kind]
    if plan is not None:
        text = f"{type(plan).__name__}, which the first decode of the type fills"
    elif not builder.provider.takes_plans:
        text = f"none: {builder.provider.name} takes no plan"
    else:
        text = "none: no decode tokens"
    return LayerView(kind.value, model.layer_types.count(kind), kind.ratio, _describe(kind, step, entries, valid), text)


def _describe(kind: LayerType, step: StepInput, entries: Mapping[LayerType, SeenEntries], valid: np.ndarray) -> str:
    if kind not in entries:
        return "the window"
    own = entries[kind]
    counts = {_sees(own, token, step.config.model.index_topk) for token in range(len(valid)) if valid[token]} or {0}
    span = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    if own.known.all():
        return f"the window and {span} entries"
    return f"the window and {span} of up to {own.complete.max()} complete entries, as the indexer picks"
