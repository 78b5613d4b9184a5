"""A step as a JSON file: written by an engine that wants to know what it handed over, or by hand.

::

    {
      "config": {                          every key may be left out, and so may "config"
        "model": "V4-Flash",                 a packaged model, the path of a config.json, or what such a file holds
        "max_model_len": 8192,               default: 8192, or the longest request
        "max_num_seqs": 64,                  default: 64, or the requests of the batch
        "max_num_batched_tokens": 2048,      default: 2048, or the tokens of the batch
        "page_tokens": 64,                   and cache_layout, compressed_layout, tensor_parallel_size,
                                             prefill_chunk_size, batch_invariant: as in BackendConfig
        "speculative": {"num_speculative_tokens": 5, "parallel_drafting": false, "dspark": true}
      },
      "batch": {                           names and shapes of CommonAttentionMetadata; R requests, T tokens
        "query_start_loc": [0, 1, 71],       [R + 1]
        "seq_lens": [130, 70],               [R]
        "block_table_tensor": [[7, 3, 9], [4, 5, -1]],   default: pages numbered through
        "slot_mapping": [577, ..],           [T], -1 = padding; default: as the table says, -1 past the last request
        "num_actual_tokens": 71,             default: the length of slot_mapping, or the end of query_start_loc
        "max_query_len": 70, "max_seq_len": 130,         default: the largest
        "seq_lens_cpu_upper_bound": [130, 70],           default: seq_lens
        "causal": true,
        "replay_start": [0, 0],
        "mm_req_doc_ranges": {"1": [[10, 40]]}           request -> inclusive spans of image tokens
      },
      "num_pages": 16,                     default: not known, or as many as were numbered through
      "groups": {                          compressed caches by layer type; default: pages numbered through
        "c4a": {"page_tokens": 256, "num_pages": 16, "block_table": [[5], [6]], "slot_mapping": [..],
                "topk": [[3, 0, -1], ..]}    [T, K] entries that the indexer picked; default: not known
      }
    }
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from swa_backend._checks import is_int, show
from swa_backend._math import cdiv
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, packaged_models
from swa_backend.errors import BatchError, ConfigError
from swa_backend.inspect.json_checks import read_int, read_ints, read_matrix, read_object, refuse
from swa_backend.inspect.step_input import COMPRESSED_PAGE_TOKENS, CompressedInput, StepInput
from swa_backend.layer_types import LayerType, ModelVersion

EXAMPLES = Path(__file__).parent / "examples"

_SCHEDULER = tuple(field.name for field in fields(SchedulerConfig))
_SETTINGS = (
    "page_tokens", "cache_layout", "compressed_layout", "tensor_parallel_size", "prefill_chunk_size", "batch_invariant",
)  # fmt: skip
_BATCH = (
    "query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "num_actual_tokens", "max_query_len",
    "max_seq_len", "seq_lens_cpu_upper_bound", "causal", "replay_start", "mm_req_doc_ranges",
)  # fmt: skip
_GROUP = ("page_tokens", "num_pages", "block_table", "slot_mapping", "topk")
_INT64_MAX = 2**63 - 1


def example_names() -> tuple[str, ...]:
    """Batches that come with the library."""
    return tuple(sorted(path.stem for path in EXAMPLES.glob("*.json")))


def read_batch(source: str | Path | Mapping[str, Any]) -> StepInput:
    """A step from a file, from an example that comes with the library, or from parsed JSON.

    Args:
        source: path, name of an example (`example_names`), or the parsed file.

    Raises:
        BatchError: it cannot be read, or a key of the batch is unknown, missing or of another form; names the key.
        ConfigError: the same for the configuration.
    """
    if isinstance(source, Mapping):
        return _read(source, "the given dict")
    path = Path(source)
    if str(source) in example_names() and not path.exists():
        path = EXAMPLES / f"{source}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BatchError(
            str(path),
            found=error.strerror or str(error),
            legal=f"a readable JSON file, or one of the examples {', '.join(example_names())}",
            fix="Correct the path.",
        ) from None
    except (ValueError, RecursionError) as error:
        raise BatchError(
            str(path), found=f"no JSON ({error})", legal="a JSON object in UTF-8", fix="Correct the file."
        ) from None
    try:
        return _read(data, str(path))
    except (BatchError, ConfigError) as error:
        raise type(error)(f"{path}: {error.field}", found=error.found, legal=error.legal, fix=error.fix) from None


def save_batch(
    path: str | Path,
    batch: Any,
    config: BackendConfig,
    num_pages: int | None = None,
    groups: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    page_tokens: int = COMPRESSED_PAGE_TOKENS,
) -> None:
    """Write what an engine passes to ``build`` to a file that `read_batch` and ``swa-backend inspect`` take.

    Reads the device, so it is for looking into a step, not for every step.

    Args:
        path: file to write.
        batch, groups: as passed to ``builder.build``; groups that are not named after a layer type are left out.
        config: the builder's configuration.
        num_pages: pages of the window cache.
        page_tokens: tokens that a page of the compressed groups stands for.

    Raises:
        BatchError: ``batch`` lacks an attribute.
    """
    batch = CommonAttentionMetadata.of(batch)
    given = {name: _plain(getattr(batch, name)) for name in _BATCH}
    data = {
        "config": {
            "model": _model(config.model),
            **{name: getattr(config.scheduler, name) for name in _SCHEDULER},
            **{name: getattr(config, name) for name in _SETTINGS},
            **({} if config.speculative is None else {"speculative": asdict(config.speculative)}),
        },
        "batch": {name: value for name, value in given.items() if value is not None},
        **({} if num_pages is None else {"num_pages": num_pages}),
        "groups": {
            name: {"page_tokens": page_tokens, "block_table": table.tolist(), "slot_mapping": slots.tolist()}
            for name, (table, slots) in (groups or {}).items()
            if name in list(LayerType)
        },
    }
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(request): [list(span) for span in spans] for request, spans in value.items()}
    return value


def _model(model: ModelConfig) -> Any:
    """The name of a packaged model; of another one, a config that reads back as the same attention."""
    if model.name in packaged_models() and ModelConfig.packaged(model.name) == model:
        return model.name
    return {
        "_name_or_path": model.name,
        "model_type": "deepseek_v41" if model.version is ModelVersion.V4_1 else "deepseek_v4",
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_heads,
        "head_dim": model.head_dim,
        "qk_rope_head_dim": model.rope_dim,
        "sliding_window": model.window_size,
        "index_topk": model.index_topk,
        "max_position_embeddings": model.max_position_embeddings,
        "compress_ratios": list(model.compress_ratios),
        "kv_source_layer_ids": list(model.kv_source_layer_ids),
        **({"vision_n_layers": 1, "vision_max_n_token": model.max_image_tokens} if model.max_image_tokens else {}),
    }


def _read(data: Any, source: str) -> StepInput:
    top = read_object("batch file", data, ("config", "batch", "num_pages", "groups"))
    given = read_object("batch", top.get("batch"), _BATCH)
    starts = read_ints("batch.query_start_loc", given.get("query_start_loc"))
    if not starts or starts[0] != 0 or any(after < before for before, after in pairwise(starts)):
        raise refuse("batch.query_start_loc", show(starts), "R + 1 numbers that begin with 0 and never fall")
    count = len(starts) - 1
    seq_lens = read_ints("batch.seq_lens", given.get("seq_lens"), count)
    for request, (seq_len, query_len) in enumerate(zip(seq_lens, _lengths(starts), strict=True)):
        if seq_len < query_len:
            raise refuse(
                f"batch.seq_lens[{request}]", seq_len, f"at least the request's {query_len} tokens of this step"
            )
    slots = given.get("slot_mapping")
    slots = None if slots is None else read_ints("batch.slot_mapping", slots, minimum=-(2**63), maximum=_INT64_MAX)
    tokens = read_int(given, "num_actual_tokens", starts[-1] if slots is None else len(slots))
    if slots is not None and len(slots) != tokens:
        raise refuse("batch.slot_mapping", f"{len(slots)} numbers", f"num_actual_tokens = {tokens} numbers")
    if tokens < starts[-1]:
        raise refuse("batch.num_actual_tokens", tokens, f"at least {starts[-1]}, the end of query_start_loc")
    config = _config(read_object("config", top.get("config", {}), ("model", *_SCHEDULER, *_SETTINGS, "speculative")),
                     max(seq_lens, default=1), count, tokens)  # fmt: skip

    steps = (starts, seq_lens, tokens)
    table, num_pages = _table("batch.block_table_tensor", given.get("block_table_tensor"), seq_lens, config.page_tokens)
    num_pages = read_int(top, "num_pages", num_pages, "num_pages", minimum=1)
    batch = CommonAttentionMetadata(
        query_start_loc=_int32(starts),
        query_start_loc_cpu=_int32(starts),
        seq_lens=_int32(seq_lens),
        num_reqs=count,
        num_actual_tokens=tokens,
        max_query_len=read_int(given, "max_query_len", max(_lengths(starts), default=0)),
        max_seq_len=read_int(given, "max_seq_len", max(seq_lens, default=0)),
        block_table_tensor=table,
        slot_mapping=_slots(slots, table, config.page_tokens, *steps),
        seq_lens_cpu_upper_bound=_int32(
            read_ints("batch.seq_lens_cpu_upper_bound", given.get("seq_lens_cpu_upper_bound", seq_lens), count)
        ),
        causal=_causal(given.get("causal", True)),
        mm_req_doc_ranges=_spans(given.get("mm_req_doc_ranges")),
    )
    if given.get("replay_start") is not None:
        batch.replay_start = _int32(read_ints("batch.replay_start", given["replay_start"], count))
        batch.replay_start_cpu = batch.replay_start.clone()
    kinds = [kind for kind in config.model.present_layer_types if kind.compressed]
    groups = read_object("groups", top.get("groups", {}), kinds)
    compressed = {
        kind: _group(kind, read_object(f"groups.{kind}", groups.get(kind, {}), _GROUP), *steps) for kind in kinds
    }
    return StepInput(source, config, batch, num_pages, compressed)


def _config(given: Mapping[str, Any], longest: int, requests: int, tokens: int) -> BackendConfig:
    model = given.get("model", "V4-Flash")
    named = isinstance(model, str) and model.casefold() in (name.casefold() for name in packaged_models())
    read = ModelConfig.packaged(model) if named else ModelConfig.from_hf_config(model)
    speculative = given.get("speculative")
    if speculative is not None:
        names = [field.name for field in fields(SpeculativeConfig)]
        speculative = read_object("config.speculative", speculative, names)
        if names[0] not in speculative:
            raise refuse(f"config.speculative.{names[0]}", "nothing", "the draft tokens of a request and step")
    defaults = {
        "max_model_len": min(max(8192, longest), read.max_position_embeddings),
        "max_num_seqs": max(64, requests),
        "max_num_batched_tokens": max(2048, tokens),
    }
    return BackendConfig(
        read,
        SchedulerConfig(**{name: given.get(name, default) for name, default in defaults.items()}),
        speculative=None if speculative is None else SpeculativeConfig(**speculative),
        **{name: given[name] for name in _SETTINGS if name in given},
    )


def _group(
    kind: LayerType, given: Mapping[str, Any], starts: list[int], seq_lens: list[int], tokens: int
) -> CompressedInput:
    where = f"groups.{kind}"
    page_tokens = read_int(given, "page_tokens", COMPRESSED_PAGE_TOKENS, where, minimum=1) or COMPRESSED_PAGE_TOKENS
    if page_tokens % kind.ratio:
        raise refuse(f"{where}.page_tokens", page_tokens, f"a multiple of the ratio {kind.ratio}")
    table, num_pages = _table(f"{where}.block_table", given.get("block_table"), seq_lens, page_tokens)
    slots = given.get("slot_mapping")
    if slots is not None:
        slots = read_ints(f"{where}.slot_mapping", slots, tokens, minimum=-(2**63), maximum=_INT64_MAX)
    picks = given.get("topk")
    if picks is not None:
        if not kind.indexed:
            raise refuse(f"{where}.topk", "picks", f"none: every complete entry of a {kind} layer is seen")
        picks = read_matrix(f"{where}.topk", picks, tokens)
    return CompressedInput(
        page_tokens,
        read_int(given, "num_pages", num_pages, where, minimum=1),
        table,
        _slots(slots, table, page_tokens, starts, seq_lens, tokens),
        picks,
    )


def _table(field: str, given: Any, seq_lens: list[int], page_tokens: int) -> tuple[torch.Tensor, int | None]:
    """The table, and the number of pages where it is known."""
    if given is not None:
        return read_matrix(field, given, len(seq_lens)), None
    counts = [cdiv(seq_len, page_tokens) for seq_len in seq_lens]
    table = torch.full((len(counts), max(counts, default=0)), -1, dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count] = sum(counts[:request]) + torch.arange(count, dtype=torch.int32)
    return table, max(sum(counts), 1)


def _slots(
    given: list[int] | None, table: torch.Tensor, page_tokens: int, starts: list[int], seq_lens: list[int], tokens: int
) -> torch.Tensor:
    if given is not None:
        return torch.tensor(given, dtype=torch.int64)
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    for request, (first, end, seq_len) in enumerate(zip(starts[:-1], starts[1:], seq_lens, strict=True)):
        position = torch.arange(seq_len - (end - first), seq_len)
        column = position // page_tokens
        inside = column < table.shape[1]
        page = table[request, column.clamp(max=max(table.shape[1] - 1, 0))] if table.shape[1] else column
        slot = page.long() * page_tokens + position % page_tokens
        slots[first:end] = slot.where(inside & (page >= 0), -1)
    return slots


def _lengths(starts: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(starts)]


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _causal(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise refuse("batch.causal", show(value), "true or false")


def _spans(given: Any) -> dict[int, list[tuple[int, int]]] | None:
    if given is None:
        return None
    legal = 'an object {"request number": [[first, last], ..]}'
    if not isinstance(given, dict):
        raise refuse("batch.mm_req_doc_ranges", show(given), legal)
    spans = {}
    for request, own in given.items():
        pairs = isinstance(own, list) and all(isinstance(one, list) and len(one) == 2 for one in own)
        if not request.isdecimal() or not pairs or not all(is_int(edge) for one in own for edge in one):
            raise refuse(f"batch.mm_req_doc_ranges[{show(request)}]", show(own), legal)
        spans[int(request)] = [(first, last) for first, last in own]
    return spans
