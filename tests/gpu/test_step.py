"""A whole V4-Flash decode step on a GPU: captured once, replayed with other batches, equal to eager steps bit for bit.

Written once for every attention provider of the platform.
"""

from __future__ import annotations

import pytest
import torch

from swa_backend.bench.decode_step import DecodeStep
from swa_backend.registry import get_backend
from tests.gpu import captured_step
from tests.gpu.captured_step import capture

pytestmark = pytest.mark.gpu

REQUESTS, CONTEXT = 8, 8192
PROVIDERS = ("flashmla",)

LENGTHS = {**captured_step.LENGTHS, "one request": [2049]}


@pytest.fixture(params=PROVIDERS)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DecodeStep:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", request.param)
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    made = DecodeStep(get_backend("cuda"), torch.device("cuda:0"), REQUESTS, CONTEXT)
    assert made.builder.provider.name == request.param
    assert len(made.layers) == 43
    made.change([100] * REQUESTS, 0)
    return made


def test_g5_g6_g7_t3_a_captured_step_of_43_layers_equals_an_eager_one(step: DecodeStep) -> None:
    graph = capture(step.run)[0]
    for seed, (name, seqs) in enumerate(LENGTHS.items(), 1):
        step.change(seqs, seed)
        step.out.fill_(torch.nan)
        graph.replay()
        replayed = step.out.clone()
        step.out.fill_(torch.nan)
        step.run()
        torch.cuda.synchronize()
        for number, layer in enumerate(step.layers):
            assert torch.equal(replayed[number], step.out[number]), f"{name}: layer {number}, {layer.kind}"
        assert torch.isfinite(replayed).all(), name
        assert not replayed[:, len(seqs) :].any(), name
        assert (replayed[:, : len(seqs)] != 0).any(dim=-1).all(), name


def test_two_captures_and_eager_steps_between_their_replays(step: DecodeStep) -> None:
    """Each graph plans for itself, whatever the other one or an eager step has left."""
    first = capture(step.run)[0]
    step.change([5000, 30], 1)
    second = capture(step.run)[0]
    for seed, seqs in enumerate(([7000] * 8, [129, 1, 640], [64] * 5), 2):
        results = []
        for one in (first, step, second, step, first):
            step.change(seqs, seed)
            step.out.fill_(torch.nan)
            one.replay() if isinstance(one, torch.cuda.CUDAGraph) else one.run()
            results.append(step.out.clone())
            step.change([8000] * 8, seed)
            step.run()
        torch.cuda.synchronize()
        for other in results[1:]:
            assert torch.equal(results[0], other)


def test_metadata_captured_twice_without_a_build_between(step: DecodeStep) -> None:
    """Two graphs over one metadata object each make their own plan."""
    metadata = step.build()
    layers = [number for number, layer in enumerate(step.layers) if number < 4]

    def attend_first() -> None:
        for number in layers:
            step.attend(number, metadata)

    graphs = []
    attend_first()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend_first()
        graphs.append(graph)
    torch.cuda.synchronize()
    attend_first()
    eager = step.out[layers].clone()
    del graphs[0]
    step.out.fill_(torch.nan)
    graphs[0].replay()
    assert torch.equal(step.out[layers], eager)
