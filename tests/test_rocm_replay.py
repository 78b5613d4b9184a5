"""A few steps of a request trace through the whole ROCm platform, as code for its chips, every token and row checked.

Builder, cache writer, top-k mapping and attention are those that the platform picks for the chip; nothing is replaced
but the type of the device. `ci/run_row rocm` runs it as gfx942 and as gfx950 code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from swa_backend.backend import Backend
from swa_backend.kernels.jit import stats
from swa_backend.replay import ReplayOptions, run_replay, runner
from tests.rocm_support import GFX942, rocm_backend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, at overflow and NaN


@pytest.fixture
def platform(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The platform for the chip that is simulated, else for gfx942, whose window cache is fnuz."""
    simulated = request.config.getoption("--kernels") == "simulate"
    backend = rocm_backend(device, request.config.getoption("--target") if simulated else GFX942)
    monkeypatch.setattr(runner, "get_backend", lambda name: backend)
    for variable in ("SWA_BACKEND_ATTENTION", "SWA_BACKEND_VALIDATE"):
        monkeypatch.delenv(variable, raising=False)
    return backend


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A V4 with one layer of each type and two heads."""
    path = tmp_path / "config.json"
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 512,
        "qk_rope_head_dim": 64, "sliding_window": 128, "index_topk": 24, "max_position_embeddings": 8192,
        "compress_ratios": [0, 4, 128],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return path


def write_trace(folder: Path, requests: list[tuple[int, int]]) -> Path:
    """Requests of (prompt, output) tokens, all there from the start."""
    rows = [
        {
            "timestamp": 0,
            "input_length": n,
            "output_length": m,
            "hash_ids": list(range(100 * i, 100 * i + -(-n // 512))),
        }
        for i, (n, m) in enumerate(requests)
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_replay_on_the_whole_platform_finds_nothing_wrong(platform: Backend, tmp_path: Path, model: Path) -> None:
    trace = write_trace(tmp_path, [(140, 3), (20, 6)])
    before = stats().launches
    options = ReplayOptions(
        trace=trace, model=model, verify="all", drafts=2, max_batched_tokens=80, max_seqs=4, pages=8
    )
    report = run_replay(options)
    assert report.mismatches == 0, report.examples
    assert (report.platform, report.requests) == ("rocm", 2)
    assert report.provider == platform.providers[1].name, "the first behind aiter, which is for gfx950 devices alone"
    assert report.steps >= 4
    assert report.tokens_verified >= 165
    assert report.rows_checked >= report.tokens_verified
    assert stats().launches >= before + report.steps * 5, "a build, three writes and a mapping at least"
