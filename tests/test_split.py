"""The decode/prefill split: field case S1, every option, and a slow independent rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swa_backend.errors import BatchError
from swa_backend.split import Split, split_decodes_and_prefills
from tests.support import Batch, make_builder, make_config


def split(queries: list[int], threshold: int, padding: int = 0, **options: Any) -> Split:
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    return split_decodes_and_prefills(starts, int(starts[-1]) + padding, max(queries, default=0), threshold, **options)


@pytest.mark.parametrize(
    ("queries", "threshold", "expected"),
    [
        ([1], 6, (1, 0, 1, 0)),
        ([6], 6, (1, 0, 6, 0)),
        ([7], 6, (0, 1, 0, 7)),
        ([11], 6, (0, 1, 0, 11)),
        ([12], 6, (0, 1, 0, 12)),
        ([1], 11, (1, 0, 1, 0)),
        ([6], 11, (1, 0, 6, 0)),
        ([7], 11, (1, 0, 7, 0)),
        ([11], 11, (1, 0, 11, 0)),
        ([12], 11, (0, 1, 0, 12)),
        ([1, 6, 7, 11, 12], 6, (2, 3, 7, 30)),
        ([1, 6, 7, 11, 12], 11, (4, 1, 25, 12)),
        ([1, 6, 7, 1], 6, (2, 2, 7, 8)),
        ([7, 1, 1], 6, (0, 3, 0, 9)),
    ],
)
def test_s1_thresholds_with_and_without_parallel_drafting(
    queries: list[int], threshold: int, expected: tuple[int, ...]
) -> None:
    assert split(queries, threshold) == expected
    config = make_config(k=5, parallel_drafting=threshold == 11)
    assert config.decode_threshold == threshold
    metadata = make_builder(config).build(0, Batch(queries, [q + 20 for q in queries]).metadata())
    found = (
        metadata.num_decodes,
        metadata.num_prefills,
        metadata.num_decode_tokens,
        metadata.num_prefill_tokens,
    )
    assert found == expected
    # Whatever reads the metadata sees that border: rows, lengths of the prefills, and the chunks made of them.
    assert metadata.decode_swa_indices.shape[0] == metadata.decode_swa_lens.shape[0] == expected[2]
    assert metadata.max_decode_query_len == min(max(queries), threshold)
    if not expected[1]:
        assert metadata.prefill_swa_indices is metadata.prefill_seq_lens is None
        return
    assert metadata.prefill_swa_indices.shape[0] == metadata.prefill_swa_lens.shape[0] == expected[3]
    assert metadata.prefill_query_lens_cpu.tolist() == queries[expected[0] :]
    assert metadata.prefill_seq_lens.tolist() == [q + 20 for q in queries[expected[0] :]]
    plan = metadata.get_prefill_chunk_plan(4, 4)
    assert [r for chunk in plan for r in range(chunk.first, chunk.end)] == list(range(expected[1]))


def test_padding_counts_with_the_last_side() -> None:
    assert split([1, 1], 1, padding=3) == (2, 0, 5, 0)
    assert split([1, 9], 1, padding=3) == (1, 1, 1, 12)


def test_uniform_decodes() -> None:
    uniform = {"require_uniform": True}
    assert split([2, 2, 2], 3, **uniform) == (3, 0, 6, 0)
    assert split([2, 2, 0], 3, **uniform) == (3, 0, 4, 0)
    assert split([2, 2, 3], 3, **uniform) == (2, 1, 4, 3)
    assert split([2, 1, 2], 3, **uniform) == (1, 2, 2, 3)
    assert split([1, 1], 1, **uniform) == (2, 0, 2, 0)
    assert split([4, 2], 3, **uniform) == (0, 2, 0, 6)


def test_short_extends_apart() -> None:
    prefilling = torch.tensor([False, False, True, True])
    options = {"treat_short_extends_as_decodes": False, "is_prefilling": prefilling}
    assert split([1, 2, 2, 9], 3, **options) == (2, 2, 3, 11)
    assert split([1, 2, 2, 2], 3, **options) == (2, 2, 3, 4)
    assert split([2, 2, 2, 2], 3, require_uniform=True, **options) == (2, 2, 4, 4)
    nothing = {"treat_short_extends_as_decodes": False, "is_prefilling": torch.zeros(2, dtype=torch.bool)}
    assert split([1, 2], 3, **nothing) == (2, 0, 3, 0)


@pytest.mark.parametrize("prefilling", [None, torch.zeros(3, dtype=torch.bool), torch.zeros(2, dtype=torch.int32)])
def test_short_extends_apart_need_is_prefilling(prefilling: torch.Tensor | None) -> None:
    with pytest.raises(BatchError, match="is_prefilling"):
        split([1, 2], 3, treat_short_extends_as_decodes=False, is_prefilling=prefilling)


def test_empty_batch() -> None:
    assert split([], 1) == (0, 0, 0, 0)
    assert split([], 1, treat_short_extends_as_decodes=False) == (0, 0, 0, 0)


def slow_split(
    queries: list[int], tokens: int, longest: int, threshold: int, uniform: bool, short: bool, pre: list[bool]
) -> Any:
    """The rule read aloud, request by request."""
    count = len(queries)
    if longest <= threshold and short and (not uniform or threshold <= 1):
        return (count, 0, tokens, 0)
    if not count:
        return (0, 0, 0, 0)
    if queries[0] > threshold:
        return (0, count, 0, tokens)
    for at, query in enumerate(queries):
        begins = query not in (queries[0], 0) if uniform else query > threshold
        if begins or (not short and pre[at]):
            return (at, count - at, sum(queries[:at]), tokens - sum(queries[:at]))
    return (count, 0, tokens, 0)


@given(
    queries=st.lists(st.integers(0, 9), max_size=8),
    threshold=st.integers(1, 8),
    padding=st.integers(0, 3),
    slack=st.integers(0, 4),
    uniform=st.booleans(),
    short=st.booleans(),
    data=st.data(),
)
def test_split_equals_the_slow_rule(
    queries: list[int], threshold: int, padding: int, slack: int, uniform: bool, short: bool, data: Any
) -> None:
    """``max_query_len`` may be padded too: ``slack`` longer than the longest query."""
    pre = data.draw(st.lists(st.booleans(), min_size=len(queries), max_size=len(queries)))
    tokens, longest = sum(queries) + padding, max(queries, default=0) + slack
    found = split_decodes_and_prefills(
        torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
        tokens,
        longest,
        threshold,
        require_uniform=uniform,
        treat_short_extends_as_decodes=short,
        is_prefilling=torch.tensor(pre, dtype=torch.bool),
    )
    assert found == slow_split(queries, tokens, longest, threshold, uniform, short, pre)
    assert found.num_decodes + found.num_prefills == len(queries)


@pytest.mark.parametrize("count", [127, 128, 129, 700])
@pytest.mark.parametrize("first_prefill", [0, 1, 100, None])
def test_border_among_many_requests(count: int, first_prefill: int | None) -> None:
    """Few requests are looked at as a list, many as a tensor: the border is the same."""
    queries = [1 + i % 2 for i in range(count)]
    if first_prefill is None:
        assert split(queries, 2) == (count, 0, sum(queries), 0)
        assert split(queries, 2, treat_short_extends_as_decodes=False, is_prefilling=torch.zeros(count).bool()) == (
            count, 0, sum(queries), 0,
        )  # fmt: skip
        return
    queries[first_prefill] = 3
    expected = (
        first_prefill,
        count - first_prefill,
        sum(queries[:first_prefill]),
        sum(queries[first_prefill:]),
    )
    assert split(queries, 2) == expected


@pytest.mark.parametrize(
    "flags", [None, [False], torch.zeros(1), torch.zeros(2).bool(), torch.zeros(1, device="meta").bool()]
)
def test_prefilling_flags_of_another_form_are_refused(flags: Any) -> None:
    with pytest.raises(BatchError, match=r"^is_prefilling: "):
        split([1], 1, treat_short_extends_as_decodes=False, is_prefilling=flags)
