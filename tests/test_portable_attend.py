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

# One layout, and one pair of two that are read in loops of their own: an interpreted step of a hundred tokens takes
# seconds. tests/kernels/test_sparse_mla.py has every layout, tests/gpu/test_portable.py the suite over all of them.
PAIRS = (("fp8_ds_mla", "fp8_ds_mla"), ("bf16", "fp8_ds_mla"))


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "triton")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    changes: dict[str, Any] = {"load_providers": lambda target: (TritonAttention(units=4),)}
    backend = Backend(replace(get_backend("cpu").platform, **changes))
    return ProviderUnderTest("triton", backend, "cpu", ("fp8_ds_mla",), PAIRS)
