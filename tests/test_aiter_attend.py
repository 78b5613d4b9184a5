"""The semantic attention suite over aiter's provider, with a fake kernel on the CPU.

The kernel gives no lse: every output of the suite is taken from a call without one, through aiter, and the lse from a
second call, which goes to the provider behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for helper in ("attention_scene", "attention_suite"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.attention import AttentionResult  # noqa: E402
from tests import aiter_fake  # noqa: E402
from tests.aiter_fake import PRESENT, fake_backend  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene  # noqa: E402
from tests.attention_suite import *  # noqa: E402, F403

EDITS_ROWS = (
    "test_n1_no_entry_inside_a_row",
    "test_c8_entries_outside_the_cache_are_skipped",
    "test_n3_partial_results_merge_into_one_pass",
)
"""Tests that change the dense rows of a step by hand, where a build writes both forms."""


def pack_again(scene: Scene) -> None:
    """Bring the ragged rows to what a build that knows the number of pages makes of such dense rows."""
    metadata, slots = scene.metadata, scene.num_pages * scene.settings.page_tokens
    for kind in ("decode", "prefill"):
        dense, lens = getattr(metadata, f"{kind}_swa_indices"), getattr(metadata, f"{kind}_swa_lens")
        if dense is None:
            continue
        indices, indptr = (getattr(metadata, f"{kind}_swa_ragged_{part}") for part in ("indices", "indptr"))
        at = 0
        for row, length in enumerate(lens.tolist()):
            kept = [slot for slot in dense[row, 0, :length].tolist() if 0 <= slot < slots]
            indices[at : at + len(kept)] = indices.new_tensor(kept)
            at += len(kept)
            indptr[row + 1] = at


@pytest.fixture
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ProviderUnderTest]:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "aiter")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    plain_run = Scene.run

    def run(scene: Scene, **options: Any) -> AttentionResult:
        if request.node.originalname in EDITS_ROWS:
            pack_again(scene)
        if "return_lse" in options:
            return plain_run(scene, **options)
        out = plain_run(scene, return_lse=False, **options).out
        lse = plain_run(scene, **{**options, "out": None}).lse
        return AttentionResult(out, lse)

    monkeypatch.setattr(Scene, "run", run)
    aiter_fake.calls.clear()
    with aiter_fake.installed(tmp_path, PRESENT):
        yield ProviderUnderTest("aiter", fake_backend(), "cpu", batch_invariant=False)
