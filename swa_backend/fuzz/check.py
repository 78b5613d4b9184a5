"""A step's metadata beside what it has to be; the first difference is raised in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from swa_backend._math import cdiv
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.fuzz.case import Knobs
from swa_backend.fuzz.pages import MAIN, group_of
from swa_backend.fuzz.rows import Right, slots_of
from swa_backend.fuzz.step import Step
from swa_backend.metadata import CompressedGroupMetadata, DeepseekSparseSWAMetadata

CHUNK_REQUESTS = 4


class MismatchError(Exception):
    """The library's result is not the right one."""


def check_metadata(
    metadata: DeepseekSparseSWAMetadata,
    step: Step,
    right: Right,
    knobs: Knobs,
    builder: DeepseekSparseSWAMetadataBuilder,
) -> int:
    """Compare everything that a build made.

    Returns:
        Index rows compared.

    Raises:
        MismatchError: the first difference.
    """
    rows = 0
    _check_numbers(metadata, step, right, knobs)
    for number, (name, one) in enumerate([(MAIN, metadata), *metadata.groups.items()]):
        page_tokens = knobs.page_tokens if name == MAIN else knobs.second_page_tokens
        rows += _check_window(one, name, number, page_tokens, step, right, knobs, builder)
    for ratio in knobs.ratios:
        rows += _check_compressed(metadata.compressed[group_of(ratio)], ratio, step, knobs)
    return rows


def _check_numbers(metadata: DeepseekSparseSWAMetadata, step: Step, right: Right, knobs: Knobs) -> None:
    prefills = len(step.parts) - right.decodes
    threshold = knobs.threshold
    longest = threshold if step.captured else min(step.max_query_len, threshold)
    for field, want in {
        "num_decodes": right.decodes,
        "num_prefills": prefills,
        "num_decode_tokens": right.decode_tokens,
        "num_prefill_tokens": step.num_tokens - right.decode_tokens,
        "max_decode_query_len": longest,
        "prefill_window_size": knobs.window if prefills else 0,
        "prefill_max_model_len": knobs.max_len if prefills else 0,
        "prefill_max_num_batched_tokens": knobs.max_tokens if prefills else 0,
        "window_size": knobs.window,
        "causal": step.causal,
    }.items():
        _same(field, getattr(metadata, field), want)
    _equal("token_to_req_indices", metadata.token_to_req_indices, right.request)
    replay = step.replay if step.replay is not None else np.zeros(len(step.parts))
    _equal("replay_start", metadata.replay_start, replay)
    if not prefills:
        for field in ("prefill_seq_lens", "prefill_gather_lens", "prefill_swa_indices", "prefill_left_visible"):
            _same(field, getattr(metadata, field), None)
        return
    _equal("prefill_seq_lens", metadata.prefill_seq_lens, step.seqs[right.decodes :])
    _equal("prefill_seq_lens_cpu", metadata.prefill_seq_lens_cpu, step.seqs[right.decodes :])
    _equal("prefill_query_lens_cpu", metadata.prefill_query_lens_cpu, step.queries[right.decodes :])
    _equal("prefill_gather_lens", metadata.prefill_gather_lens, right.gather)
    if right.left is None or right.right is None:
        _same("prefill_left_visible", metadata.prefill_left_visible, None)
        _same("prefill_right_visible", metadata.prefill_right_visible, None)
    else:
        part = slice(right.decode_tokens, step.num_tokens)
        for field, visible in (("prefill_left_visible", right.left), ("prefill_right_visible", right.right)):
            found = getattr(metadata, field)
            if found is None:
                raise MismatchError(f"{field} is None although a prefill has an image")
            _equal(field, found[part], visible[part])
    for ratio in (0, *knobs.ratios):
        plan = [tuple(chunk) for chunk in metadata.get_prefill_chunk_plan(ratio, CHUNK_REQUESTS, ratio > 0)]
        _same(f"prefill chunks of ratio {ratio}", plan, _chunks(step, right, knobs, ratio))


def _chunks(step: Step, right: Right, knobs: Knobs, ratio: int) -> list[tuple[int, int, int, int]]:
    """The chunk plan, grown request by request from the rule's words."""
    budget = CHUNK_REQUESTS * ((cdiv(knobs.max_len, ratio) if ratio else 0) + knobs.window + knobs.max_tokens)
    chunks: list[tuple[int, int, int, int]] = []
    queries = step.queries[right.decodes :].tolist()
    entries = [int(seq) // ratio if ratio else 0 for seq in step.seqs[right.decodes :]]
    first = 0
    while first < len(queries):
        if not queries[first]:
            first += 1
            continue
        end = first + 1
        while end < len(queries) and queries[end]:
            most = max(entries[first : end + 1]) + int(right.gather[first : end + 1].max())
            if (end + 1 - first) * most > budget:
                break
            end += 1
        compressed = max(entries[first:end])
        chunks.append((first, end, compressed, compressed + int(right.gather[first:end].max())))
        first = end
    return chunks


def _check_window(
    one: DeepseekSparseSWAMetadata,
    name: str,
    number: int,
    page_tokens: int,
    step: Step,
    right: Right,
    knobs: Knobs,
    builder: DeepseekSparseSWAMetadataBuilder,
) -> int:
    _same(f"{name} block_size", one.block_size, page_tokens)
    _equal(f"{name} is_valid_token", one.is_valid_token, right.valid[name])
    width = knobs.window if step.causal else -(-(knobs.window + knobs.drafts) // 64) * 64
    _same(f"{name} decode_swa_width", one.decode_swa_width, width)
    border = right.decode_tokens
    wide = knobs.window + knobs.image_tokens
    parts: list[tuple[str, int, int, int]] = [("decode", 0, border, width)]
    if len(step.parts) > right.decodes:
        parts.append(("prefill", border, step.num_tokens, wide))
    for part, begin, end, columns in parts:
        rows, lens = _row_block(name, page_tokens, step, right, knobs, begin, end, columns)
        _equal(f"{name} {part}_swa_lens", getattr(one, f"{part}_swa_lens"), lens, begin)
        found = getattr(one, f"{part}_swa_indices")
        _same(f"{name} {part}_swa_indices shape", tuple(found.shape), (end - begin, 1, columns))
        _equal(f"{name} {part}_swa_indices", found[:, 0], rows, begin)
        _check_ragged(one, f"{name} {part}", part, rows, lens)
    if border:
        tail = builder._buffers.decode_lens[number, border:]
        if bool(tail.any()):
            raise MismatchError(f"{name} decode_swa_lens has a length past the {border} decode tokens")
    return step.num_tokens


def _row_block(
    name: str, page_tokens: int, step: Step, right: Right, knobs: Knobs, begin: int, end: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.full((end - begin, columns), -1, dtype=np.int64)
    lens = np.zeros(end - begin, dtype=np.int64)
    table, valid = step.tables[name], right.valid[name]
    for token in range(begin, min(end, len(step.row))):
        if not valid[token]:
            continue
        sees = right.sees[token]
        lens[token - begin] = len(sees)
        rows[token - begin, : len(sees)] = slots_of(table, int(step.row[token]), sees, page_tokens, knobs.pages)
    return rows, lens


def _check_ragged(one: DeepseekSparseSWAMetadata, what: str, part: str, rows: np.ndarray, lens: np.ndarray) -> None:
    indptr = getattr(one, f"{part}_swa_ragged_indptr")
    indices = getattr(one, f"{part}_swa_ragged_indices")
    if indptr is None or indices is None:
        return
    live = (np.arange(rows.shape[1]) < lens[:, None]) & (rows >= 0)
    bounds = np.concatenate([[0], np.cumsum(live.sum(axis=1))])
    _equal(f"{what}_swa_ragged_indptr", indptr, bounds)
    _equal(f"{what}_swa_ragged_indices", indices[: int(bounds[-1])], rows[live])
    _same(f"{what}_swa_ragged_indices length", indices.shape[0], rows.size)


def _check_compressed(group: CompressedGroupMetadata, ratio: int, step: Step, knobs: Knobs) -> int:
    name = group_of(ratio)
    entries = knobs.compressed_page_tokens // ratio
    table = step.tables[name]
    slots = np.full(step.num_tokens, -1, dtype=np.int64)
    lens = np.zeros(step.num_tokens, dtype=np.int64)
    full: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * step.num_tokens
    for token, (row, position) in enumerate(zip(step.row.tolist(), step.position.tolist(), strict=True)):
        if step.slots[MAIN][token] < 0:
            continue
        if (position + 1) % ratio == 0:
            slots[token] = slots_of(table, row, np.array([position // ratio]), entries, knobs.pages)[0]
        lens[token] = (position + 1) // ratio
        full[token] = slots_of(table, row, np.arange(lens[token]), entries, knobs.pages)
    _equal(f"{name} compressed_slot_mapping", group.compressed_slot_mapping, slots)
    if ratio != 128:
        _same(f"{name} rows", group.rows, None)
        return 0
    if group.rows is None or group.lens is None:
        raise MismatchError(f"{name} rows: the build made none")
    _equal(f"{name} lens", group.lens, lens)
    found = _host(group.rows)
    for token, row in enumerate(full):
        _equal(f"{name} rows of token {token}", found[token, : len(row)], row)
    return step.num_tokens


def _host(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.cpu().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
    return array


def _same(what: str, found: object, want: object) -> None:
    if found != want if not isinstance(found, torch.Tensor) else want is None:
        text = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise MismatchError(f"{what} is {text}, must be {want!r}")


def _equal(what: str, found: Any, want: np.ndarray, base: int = 0) -> None:
    """Compare arrays; ``base`` is the token that their first row belongs to."""
    if found is None:
        raise MismatchError(f"{what} is None")
    have = _host(found)
    if have.shape != want.shape:
        raise MismatchError(f"{what} has shape {have.shape}, must be {want.shape}")
    wrong = have != want
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        place = ", ".join(map(str, (at[0] + base, *at[1:])))
        raise MismatchError(f"{what}[{place}] is {int(have[at])}, must be {int(want[at])} ({int(wrong.sum())} differ)")
