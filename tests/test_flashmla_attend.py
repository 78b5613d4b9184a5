"""The semantic attention suite over FlashMLA's provider, with fake kernels on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

for helper in ("attention_scene", "attention_suite", "flashmla_fake", "flashmla_golden"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from tests.attention_scene import ProviderUnderTest  # noqa: E402
from tests.attention_suite import *  # noqa: E402, F403
from tests.flashmla_fake import FakeKernels, fake_backend  # noqa: E402
from tests.flashmla_golden import *  # noqa: E402, F403


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProviderUnderTest]:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "flashmla")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    with fake_backend(tmp_path, FakeKernels()) as backend:
        yield ProviderUnderTest("flashmla", backend, "cpu", batch_invariant=False)
