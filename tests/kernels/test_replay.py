"""A request trace from scheduler to attention with the kernels doing everything but attention itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swa_backend.kernels.jit import stats
from swa_backend.replay import ReplayOptions, run_replay, runner
from tests.kernels.on_device import kernel_backend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, at overflow and NaN


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 512,
        "qk_rope_head_dim": 64, "sliding_window": 128, "index_topk": 40, "max_position_embeddings": 8192,
        "compress_ratios": [0, 4, 128],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return path


def test_a_replay_finds_nothing_wrong(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    backend = kernel_backend(device)
    monkeypatch.setattr(runner, "get_backend", lambda platform: backend)
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": n, "output_length": m, "hash_ids": [n]} for n, m in [(200, 5), (40, 9)]]
    trace.write_text("\n".join(map(json.dumps, rows)))
    before = stats().launches
    options = ReplayOptions(trace=trace, model=model, verify="all", drafts=2, max_batched_tokens=96, pages=16)
    report = run_replay(options)
    assert report.mismatches == 0, report.examples
    assert report.requests == 2
    assert report.tokens_verified > 240
    assert stats().launches > before + 10
