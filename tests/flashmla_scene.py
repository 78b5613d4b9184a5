"""FlashMLA's provider over fake kernels: what its test modules share; each imports all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.attention_scene import ProviderUnderTest, Scene
from tests.flashmla_fake import FakeKernels, fake_backend

C4 = (4, "fp8_ds_mla", 256)
C128 = (128, "fp8_ds_mla", 256)


@pytest.fixture
def kernels() -> FakeKernels:
    return FakeKernels()


@pytest.fixture
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: FakeKernels
) -> Iterator[ProviderUnderTest]:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    with fake_backend(tmp_path, kernels, **getattr(request, "param", {})) as backend:
        yield ProviderUnderTest("flashmla", backend, "cpu", batch_invariant=False)


def local_entries(scene: Scene, width: int = 64) -> torch.Tensor:
    return torch.randint(-3, 190, (scene.tokens, width), generator=torch.Generator().manual_seed(7))


def seen_by(scene: Scene, local: torch.Tensor) -> list[torch.Tensor]:
    assert scene.second is not None
    seen = []
    for t in range(scene.tokens):
        request, position = scene.token(t)
        chosen = [entry for entry in local[t].tolist() if 0 <= entry < (position + 1) // scene.second[0]]
        seen.append(torch.cat([scene.window(t), scene.entries[request][chosen]]))
    return seen
