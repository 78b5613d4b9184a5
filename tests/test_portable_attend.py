"""The semantic attention suite over the portable Triton kernels, interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")
for helper in ("attention_scene", "attention_suite", "portable_golden"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.backend import Backend  # noqa: E402
from swa_backend.portable.provider import TritonAttention  # noqa: E402
from swa_backend.registry import get_backend  # noqa: E402
from tests.attention_scene import ProviderUnderTest  # noqa: E402
from tests.attention_suite import *  # noqa: E402, F403
from tests.portable_golden import *  # noqa: E402, F403

# Interpreted, a step of a hundred tokens takes seconds: here the tests of a few tokens, and few of the others.
# tests/kernels/test_sparse_mla.py has every layout, tests/gpu/test_portable.py the whole suite over all of them.
PAIRS = (("bf16", "fp8_ds_mla"),)  # read in loops of their own
LEFT_TO_A_GPU = (
    "test_g2_page_0_never_reaches_a_row",
    "test_g4_padded_tokens_are_zero",
    "test_g7_all_lens_zero",
    "test_n5_a_row_alone_equals_the_row_in_a_batch",
    "test_nan_in_a_key_stays_in_the_rows_that_refer_to_it",
    "test_nan_in_a_query_stays_in_its_row",
    "test_p3_nan_in_fresh_memory_never_reaches_the_output",
    "test_r7_image_rows_look_ahead",
    "test_rows_past_the_step_are_zero",
    "test_s5_decode_rows_around_64",
    "test_scale_and_lse_are_options",
    "test_strided_tensors_are_taken_as_they_are",
)


@pytest.fixture
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    if request.node.originalname in LEFT_TO_A_GPU:
        pytest.skip("too long for the interpreter")
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "triton")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    changes: dict[str, Any] = {"load_providers": lambda target: (TritonAttention(units=4),)}
    backend = Backend(replace(get_backend("cpu").platform, **changes))
    return ProviderUnderTest("triton", backend, "cpu", ("fp8_ds_mla",), PAIRS)
