"""Histories of an engine through the kernels: plain ones of this device's platform, and AMD's with its builder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from swa_backend.backend import Backend
from swa_backend.fuzz import Mode, Profile, random_case, run_case, run_fuzz
from swa_backend.kernels.jit import stats
from swa_backend.registry import get_backend
from tests.kernels.on_device import kernel_backend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, at overflow


def amd_backend(target: str) -> Backend:
    """The AMD platform, its tensors on the CPU: builder with ragged rows, dialect and kernels are its own."""
    own = get_backend("rocm", target=target)
    return Backend(replace(own.platform, device_type="cpu"), own.target)


@pytest.fixture(autouse=True)
def _reference_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "reference")


def check(backend: Backend, device: torch.device, **options: Any) -> None:
    launches = stats().launches
    report = run_fuzz(backend, device, profile=Profile.CHIP, **options)
    assert not report.failures, report.failures[0].text
    assert stats().launches > launches + report.steps


def test_histories_through_the_kernels(device: torch.device, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--kernels") == "interpret":  # costs a second a step
        for seed in (40_000, 40_016):  # images and captured shapes; draft blocks; all complete entries
            assert run_case(random_case(seed, Profile.CHIP, steps=9), kernel_backend(device), device).steps >= 8
        return
    mode = Mode.CAPTURED if device.type == "cuda" else Mode.EAGER
    check(kernel_backend(device), device, seed=40_000, steps=1000 if device.type == "cuda" else 100, mode=mode)


@pytest.mark.simulate
def test_histories_on_the_amd_platform(device: torch.device, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--kernels") != "simulate":
        pytest.skip("runs under --kernels simulate; on an AMD GPU the test above does this")
    check(amd_backend(request.config.getoption("--target")), device, seed=50_000, steps=100)
