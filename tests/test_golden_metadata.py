"""Every recorded metadata case, field by field. Where the right behaviour differs from the recorded one, it says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


WITH_CHUNK_PLANS = [path for path in CASES if load_golden(path).get("expected/chunk_plans")]


@pytest.mark.parametrize("path", WITH_CHUNK_PLANS, ids=lambda path: path.stem)
def test_chunk_plans_equal_the_recording(path: Path) -> None:
    """Cases with an empty chunk were dropped from the recording: no chunk is ever empty here."""
    case = load_golden(path)
    metadata = make_builder(case.config()).build(0, case.batch())
    for key, expected in case["expected/chunk_plans"].items():
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
    for step in steps:
        batch.seq_lens.copy_(case.tensor(f"expected/draft_steps/{step}/seq_lens"))
        builder.update_draft_decode_metadata(metadata)
        for field in ("decode_swa_indices", "decode_swa_lens"):
            expected = case[f"expected/draft_steps/{step}/{field}"]
            assert getattr(metadata, field).tolist() == expected.tolist(), (step, field)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_plans_exist_for_the_recorded_layer_types(path: Path) -> None:
    """The recording names the types that had a FlashMLA plan: those present, in a step with decode tokens."""
    case = load_golden(path)
    config = case.config()
    metadata = make_builder(config).build(0, case.batch())
    present = [str(t) for t in config.model.present_layer_types] if metadata.num_decode_tokens else []
    assert sorted(present) == sorted(case["expected/tile_sched_present"])
    assert set(metadata.plans) >= set(config.model.present_layer_types)
