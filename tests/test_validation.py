"""Validation mode: every value rule of a batch has a batch that breaks it and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swa_backend.errors import ValidationError
from swa_backend.groups import CompressedGroup, SwaGroup
from tests.support import Batch, make_builder, make_config

TABLE = [[7, 3, 9, 1], [4, 5, 2, 6], [8, 10, 11, 0]]
NUM_PAGES = 12


def sound(**changes: Any) -> Batch:
    """Two decodes and a resumed prefill; window of 128, so positions from 3 on (request 0) and 73 on (request 2)."""
    return Batch([1, 1, 40], [131, 5, 240], **{"table": TABLE, "padding": 2, **changes})


def build(batch: Any, *, validate: bool = True, null_page: int | None = None, **config: Any) -> Any:
    builder = make_builder(make_config(validate=validate, **config), num_pages=NUM_PAGES, null_page=null_page)
    return builder.build(0, batch)


def refused(batch: Any, **options: Any) -> ValidationError:
    with pytest.raises(ValidationError) as error:
        build(batch, **options)
    build(batch, **{**options, "validate": False})  # without validation the same batch is built
    return error.value


def test_a_sound_batch_passes() -> None:
    for batch in (sound(), sound(replay=[0, 4, 100]), Batch([], []), Batch([0, 0], [0, 9])):
        build(batch.metadata())


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = sound().metadata()
    batch.seq_lens[1] = 0
    batch.seq_lens_cpu_upper_bound[1] = 0
    monkeypatch.setenv("SWA_BACKEND_VALIDATE", "1")
    with pytest.raises(ValidationError):
        build(batch, validate=False)


def test_query_starts_begin_at_0_and_never_fall() -> None:
    batch = sound().metadata()
    batch.query_start_loc[0] = batch.query_start_loc_cpu[0] = 1
    assert refused(batch).field == "query_start_loc[0]"
    batch = sound().metadata()
    batch.query_start_loc[2] = batch.query_start_loc_cpu[2] = 0
    error = refused(batch)
    assert (error.field, error.found) == ("query_start_loc, request 1", 0)


def test_both_copies_of_query_starts_agree() -> None:
    batch = sound().metadata()
    batch.query_start_loc[1] = 0
    assert refused(batch).field == "query_start_loc_cpu, request 1"


def test_the_maximum_query_is_one() -> None:
    batch = sound().metadata()
    batch.max_query_len = 39
    error = refused(batch)
    assert (error.field, error.found, error.legal) == ("max_query_len", 39, ">= 40")


def test_a_context_holds_its_query() -> None:
    batch = sound().metadata()
    for lens in (batch.seq_lens, batch.seq_lens_cpu_upper_bound):
        lens[2] = 39
    assert refused(batch).field == "seq_lens, request 2"


def test_the_longest_context_is_max_seq_len() -> None:
    batch = sound().metadata()
    batch.max_seq_len = 239
    error = refused(batch)
    assert (error.field, error.found) == ("seq_lens, request 2", 240)


def test_the_upper_bound_is_one_and_exact_for_prefills() -> None:
    batch = sound().metadata()
    batch.seq_lens_cpu_upper_bound[0] = 130
    assert refused(batch).field == "seq_lens_cpu_upper_bound, request 0"
    batch.seq_lens_cpu_upper_bound[0] = 140  # too large is right for a decode ..
    build(batch)
    batch.seq_lens_cpu_upper_bound[2] = 241  # .. and wrong for a prefill
    error = refused(batch)
    assert (error.field, error.found) == ("seq_lens_cpu_upper_bound, request 2", 241)


@pytest.mark.parametrize("start", [-1, 201])
def test_a_replay_begins_in_the_prefix(start: int) -> None:
    error = refused(sound(replay=[0, 0, start]).metadata())
    assert (error.field, error.found) == ("replay_start, request 2", start)
    build(sound(replay=[0, 0, 200]).metadata())


def test_both_copies_of_replay_starts_agree() -> None:
    batch = sound(replay=[0, 4, 100]).metadata()
    batch.replay_start_cpu = torch.tensor([0, 4, 99], dtype=torch.int32)
    error = refused(batch)
    assert (error.field, error.found) == ("replay_start_cpu, request 2", 99)
    batch.replay_start_cpu[2] = 100
    build(batch)
    batch.replay_start = None
    assert refused(batch).field == "replay_start_cpu, request 1"


def test_slots_lie_in_the_cache() -> None:
    batch = sound().metadata()
    batch.slot_mapping[1] = NUM_PAGES * 64
    error = refused(batch)
    assert (error.field, error.found) == ("slot_mapping of main, token 1", NUM_PAGES * 64)


def test_padding_has_no_slot() -> None:
    batch = sound().metadata()
    batch.slot_mapping[43] = 0
    error = refused(batch)
    assert (error.field, error.found) == ("slot_mapping of main, token 43", 0)


@pytest.mark.parametrize("page", [-1, NUM_PAGES, 2**31 - 1])
@pytest.mark.parametrize(
    ("request_number", "column", "live"),
    [(0, 0, True), (0, 2, True), (0, 3, False), (1, 0, True), (1, 1, False), (2, 0, False), (2, 1, True), (2, 3, True)],
)
def test_pages_under_the_window_exist(page: int, request_number: int, column: int, live: bool) -> None:
    """Request 0 sees positions 3 to 130, request 1 0 to 4, request 2 73 to 239; pages of 64."""
    slots = sound().slot_mapping().tolist()
    table = [list(row) for row in TABLE]
    table[request_number][column] = page
    batch = sound(table=table, slots=slots).metadata()
    if not live:
        build(batch)
        return
    error = refused(batch)
    assert (error.field, error.found) == (f"block table of main, request {request_number}, column {column}", page)


def test_replayed_requests_need_no_page_before_their_replay() -> None:
    table = [list(row) for row in TABLE]
    table[2][1] = -1
    slots = sound().slot_mapping().tolist()
    build(sound(table=table, slots=slots, replay=[0, 0, 128]).metadata())
    assert refused(sound(table=table, slots=slots, replay=[0, 0, 127]).metadata()).field.endswith("column 1")


def test_a_draft_block_sees_the_window_before_it_whatever_replays() -> None:
    """Prefix 200, so positions from 72 on: page 1 is needed although the replay begins behind it."""
    table = [[7, -1, 9, 1]]
    batch = Batch([5], [205], table=table, causal=False, replay=[150]).metadata()
    error = refused(batch, k=5, dspark=True)
    assert error.field == "block table of main, request 0, column 1"
    build(Batch([5], [205], table=[[-1, 7, 9, 1]], causal=False).metadata(), k=5, dspark=True)


def test_a_draft_block_sees_one_position_more_than_a_causal_token() -> None:
    """Prefix 191: positions from 63, the last of page 0, against 64, the first of page 1."""
    slots, table = [9 * 64 + 63, *[64 + i for i in range(4)]], [[-1, 7, 9, 1]]
    options: dict[str, Any] = {"k": 5, "dspark": True}
    build(Batch([5], [196], table=table, slots=slots).metadata(), **options)
    error = refused(Batch([5], [196], table=table, slots=slots, causal=False).metadata(), **options)
    assert error.field == "block table of main, request 0, column 0"


def test_a_request_without_real_tokens_needs_no_page() -> None:
    table = [[-1] * 4, *TABLE[1:]]
    build(sound(table=table).metadata())


def test_a_table_is_as_wide_as_its_contexts() -> None:
    slots = sound().slot_mapping().tolist()
    error = refused(sound(table=[row[:3] for row in TABLE], slots=slots).metadata())
    assert (error.field, error.found) == ("block table of main, request 2", "3 columns")
    assert error.legal == "at least 4"


@pytest.mark.parametrize("null_page", [0, 9])
def test_a_null_page_in_the_window_is_reported_and_stays_a_page(null_page: int) -> None:
    """Page 0 ends request 2's row, page 9 holds request 0's newest tokens."""
    batch = sound().metadata()
    if null_page == 0:
        build(Batch([1, 1, 40], [131, 5, 190], table=TABLE).metadata(), null_page=0)  # it is not in the window
    error = refused(batch, null_page=null_page)
    assert error.field.startswith("block table of main")
    assert error.found == null_page
    rows = build(batch, validate=False, null_page=null_page)
    plain = build(batch, validate=False)
    assert torch.equal(rows.decode_swa_indices, plain.decode_swa_indices)
    assert torch.equal(rows.prefill_swa_indices, plain.prefill_swa_indices)


class TestFurtherGroups:
    QUERIES, SEQS = (1, 40), (131, 240)

    def build(self, *, table: Any = None, slots: Any = None, other: Any = None, validate: bool = True) -> Any:
        """Window pages of 32 and entries of 4 tokens, 16 a page: 131 tokens have 32 entries, 240 have 60."""
        main = Batch(self.QUERIES, self.SEQS)
        narrow = Batch(self.QUERIES, self.SEQS, page_tokens=32)
        builder = make_builder(
            make_config(validate=validate),
            num_pages=20,
            compressed_groups=(CompressedGroup("c4a", 4, 64, num_pages=10),),
            swa_groups=(SwaGroup("other", page_tokens=32, num_pages=40),),
        )
        own = main.slot_mapping() if slots is None else torch.tensor(slots)
        pages = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]] if table is None else table, dtype=torch.int32)
        further = narrow.slot_mapping() if other is None else torch.tensor(other)
        groups = {"c4a": (pages, own), "other": (narrow.block_table(), further)}
        return builder.build(0, main.metadata(), groups=groups)

    def test_a_sound_step(self) -> None:
        self.build()
        self.build(table=[[0, 1, -1, -1], [4, 5, 6, 7]])
        self.build(slots=[10**9] * 41)  # a compressed group's slots say only which tokens are real

    @pytest.mark.parametrize(
        ("table", "field"),
        [
            ([[0, -1, 2, 3], [4, 5, 6, 7]], "block table of c4a, request 0, column 1"),
            ([[0, 1, 2, 3], [4, 5, 6, 10]], "block table of c4a, request 1, column 3"),
            ([[0, 1, 2], [4, 5, 6]], "block table of c4a, request 1"),
        ],
    )
    def test_every_complete_entry_has_a_page(self, table: Any, field: str) -> None:
        with pytest.raises(ValidationError) as error:
            self.build(table=table)
        assert error.value.field == field

    def test_slots_of_another_window_cache(self) -> None:
        with pytest.raises(ValidationError) as error:
            self.build(other=[5, *[40 * 32] * 40])
        assert error.value.field == "slot_mapping of other, token 1"
