"""Every recorded metadata case, field by field. Where the right behaviour differs from the recorded one, it says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes import planning_backend
from tests.support import GoldenCase, golden_cases, load_golden, make_builder

SAME = [
    "is_valid_token",
    "token_to_req_indices",
    "decode_swa_indices",
    "decode_swa_lens",
    "prefill_swa_indices",
    "prefill_swa_lens",
    "prefill_seq_lens",
    "prefill_seq_lens_cpu",
    "prefill_gather_lens",
    "prefill_query_lens_cpu",
]
SCALARS = [
    "decode_swa_width",
    "num_decodes",
    "num_prefills",
    "num_decode_tokens",
    "num_prefill_tokens",
    "max_decode_query_len",
    "block_size",
]
CASES = golden_cases("metadata")


def _check(case: GoldenCase, metadata: object, field: str) -> None:
    expected, found = case.get(f"expected/{field}"), getattr(metadata, field)
    if expected is None:
        assert found is None, field
    else:
        assert isinstance(found, torch.Tensor), field
        torch.testing.assert_close(found.cpu(), torch.from_numpy(expected), rtol=0, atol=0, msg=field)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_build_equals_the_recording(path: Path) -> None:
    case = load_golden(path)
    builder = make_builder(case.config(), ragged=True)
    metadata = builder.build(0, case.batch())
    for field in SAME:
        _check(case, metadata, field)
    for field in SCALARS:
        assert getattr(metadata, field) == case[f"expected/{field}"], field
    assert builder.decode_threshold == case["expected/decode_threshold"]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_visibility_equals_the_recording(path: Path) -> None:
    """The recording holds the prefill tokens' part of what is a whole-batch tensor here."""
    case = load_golden(path)
    metadata = make_builder(case.config()).build(0, case.batch())
    for field in ("prefill_left_visible", "prefill_right_visible"):
        expected, found = case.get(f"expected/{field}"), getattr(metadata, field)
        if expected is None:
            assert found is None
        else:
            assert found.shape == (metadata.num_tokens,)
            assert found[metadata.num_decode_tokens :].tolist() == expected.tolist()


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_ragged_rows_equal_the_recording(path: Path) -> None:
    case = load_golden(path)
    metadata = make_builder(case.config(), ragged=True).build(0, case.batch())
    seen = 0
    for part, rows in (("decode", metadata.num_decode_tokens), ("prefill", metadata.num_prefill_tokens)):
        expected = case.get(f"expected/{part}_ragged_indptr")
        if expected is None:
            assert rows == 0
            continue
        indptr = getattr(metadata, f"{part}_swa_ragged_indptr")
        indices = getattr(metadata, f"{part}_swa_ragged_indices")
        assert indptr.tolist() == expected.tolist()
        assert indices[: indptr[-1]].tolist() == case[f"expected/{part}_ragged_indices"].tolist()
        seen += 1
    assert seen


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_chunk_plans_equal_the_recording(path: Path) -> None:
    """Plans with an empty chunk were dropped from the recording; those are cases with a zero-token prefill."""
    case = load_golden(path)
    metadata = make_builder(case.config()).build(0, case.batch())
    plans = case.get("expected/chunk_plans")
    if plans is None:
        queries = case.tensor("inputs/query_start_loc").diff().tolist()[metadata.num_decodes :]
        assert not queries or "expected/chunk_plans_note" in case.values
        covered = [r for chunk in metadata.get_prefill_chunk_plan(4, 4) for r in range(chunk.first, chunk.end)]
        assert covered == [request for request, query in enumerate(queries) if query]
        return
    assert plans
    for key, expected in plans.items():
        ratio, chunk_size, has_compressed = key.split("/")
        flag = {"None": None, "True": True, "False": False}[has_compressed]
        plan = metadata.get_prefill_chunk_plan(int(ratio), int(chunk_size), flag)
        assert [list(chunk) for chunk in plan] == expected, key


WITH_DRAFT_STEPS = golden_cases("metadata", "draft_update_*.npz")


@pytest.mark.parametrize("path", WITH_DRAFT_STEPS, ids=lambda path: path.stem)
def test_draft_updates_equal_the_recording(path: Path) -> None:
    case = load_golden(path)
    batch = case.batch()
    builder = make_builder(case.config())
    metadata = builder.build(0, batch)
    steps = sorted({key.split("/")[2] for key in case.values if key.startswith("expected/draft_steps/")}, key=int)
    assert steps
    live = batch.query_start_loc.diff() > 0
    for step in steps:
        batch.seq_lens.add_(live)  # as recorded: one more token for each live request
        assert batch.seq_lens.tolist() == case[f"expected/draft_steps/{step}/seq_lens"].tolist()
        builder.update_draft_decode_metadata(metadata)
        for field in ("decode_swa_indices", "decode_swa_lens"):
            expected = case[f"expected/draft_steps/{step}/{field}"]
            assert getattr(metadata, field).tolist() == expected.tolist(), (step, field)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_plans_exist_for_the_recorded_layer_types(path: Path) -> None:
    """By the names of the recorded implementation; none where, as on a CPU, no kernel takes a plan."""
    case = load_golden(path)
    for backend, expected in ((planning_backend(), set(case["expected/tile_sched_present"])), (None, set())):
        metadata = make_builder(case.config(), backend=backend).build(0, case.batch())
        kinds = ("swaonly", "c1a", "c2a", "c4a", "c128a")
        assert {kind for kind in kinds if getattr(metadata, f"tile_sched_{kind}") is not None} == expected


COMPARED = {
    *SAME,
    *SCALARS,
    "decode_threshold",
    "prefill_left_visible",
    "prefill_right_visible",
    "decode_ragged_indices",
    "decode_ragged_indptr",
    "prefill_ragged_indices",
    "prefill_ragged_indptr",
    "chunk_plans",
    "chunk_plans_note",
    "tile_sched_present",
}
DRAFT_FIELDS = {"seq_lens", "decode_swa_indices", "decode_swa_lens"}


def test_nothing_recorded_is_left_out() -> None:
    """All 53 files, and every entry of each is one that a test above compares."""
    assert len(CASES) == 53
    drafts = 0
    for path in CASES:
        expected = [key.removeprefix("expected/") for key in load_golden(path).values if key.startswith("expected/")]
        steps = [key.split("/") for key in expected if key.startswith("draft_steps/")]
        assert {field for _, _, field in steps} <= DRAFT_FIELDS
        assert {key for key in expected if not key.startswith("draft_steps/")} <= COMPARED, path.stem
        assert set(SAME + SCALARS) <= set(expected), path.stem
        drafts += bool(steps)
    assert drafts == len(WITH_DRAFT_STEPS) == 2
