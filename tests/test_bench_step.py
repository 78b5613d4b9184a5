"""The bench of a whole decode step: what it runs, small and on the CPU, over fake kernels and the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.flashmla_fake")

from swa_backend.backend import Backend  # noqa: E402
from swa_backend.bench import step as bench  # noqa: E402
from swa_backend.bench.decode_step import DecodeStep  # noqa: E402
from swa_backend.bench.step import PeerStep  # noqa: E402
from swa_backend.bench.timing import Timing  # noqa: E402
from swa_backend.config import ModelConfig  # noqa: E402
from swa_backend.layer_types import LayerType  # noqa: E402
from swa_backend.registry import get_backend  # noqa: E402
from tests.flashmla_fake import FakeKernels, fake_backend  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def kernels() -> FakeKernels:
    return FakeKernels()


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: FakeKernels) -> Iterator[Backend]:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    with fake_backend(tmp_path, kernels) as made:
        yield made


def test_the_layers_are_those_of_v4_flash(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.setattr(DecodeStep, "_fill", lambda self, cache, pages: cache.bind_kv_cache(cache.allocate(pages, CPU)))
    step = DecodeStep(backend, CPU, 1, 256)
    kinds = Counter(layer.kind for layer in step.layers)
    assert kinds == {LayerType.SWAONLY: 2, LayerType.C4A: 21, LayerType.C128A: 20}
    assert [layer.kind for layer in step.layers[:4]] == [*[LayerType.SWAONLY] * 2, LayerType.C4A, LayerType.C128A]
    assert step.q.shape == (1, ModelConfig.packaged("V4-Flash").num_heads, 512)


def test_t1_a_step_is_planned_once_for_each_type_and_equals_the_reference(
    backend: Backend, kernels: FakeKernels
) -> None:
    found = []
    for one in (backend, get_backend("cpu")):
        step = DecodeStep(one, CPU, 3, 512, layers=5)
        step.change([300, 40], 1)
        found.append(step.run().float())
    assert kernels.planned == 3
    assert len(kernels.decodes) == 5
    # Rows that map_topk made go to the kernel as they are.
    extra = [call["extra"].data_ptr() for call in kernels.decodes if call["extra"] is not None]
    assert len(set(extra)) == 2
    for number in range(5):
        difference = (found[0][number] - found[1][number]).norm() / found[1][number].norm()
        assert difference < 3e-3, f"layer {number}"
    assert not found[0][:, 2].any(), "a padded token"


def peer_of(step: DecodeStep, kernels: FakeKernels, spoil: float = 1.0) -> SimpleNamespace:
    """The peer's builder and calls by their names, over ours and the fake kernels."""

    def build(prefix: int, common: Any) -> Any:
        metadata = step.build()
        names = ("decode_swa_indices", "decode_swa_lens", "token_to_req_indices", "is_valid_token")
        return SimpleNamespace(
            **{name: getattr(metadata, name) for name in names},
            **{f"tile_sched_{kind.value}": object() for kind in LayerType},
        )

    def write(k: Any, pages: Any, slots: Any, page_tokens: int) -> None:
        assert (k.shape, page_tokens) == ((step.requests, 512), 64)
        assert pages.shape[1] == 37440

    def mapped(picks: Any, requests: Any, table: Any, entries: int, valid: Any) -> Any:
        assert entries == 64
        known = picks >= 0
        page = torch.gather(table, 1, (picks // entries).clamp(min=0).long())
        return (page * entries + picks % entries).where(known, -1), known.sum(1).int()[:, None]

    def decode(q: Any, cache: Any, table: Any, lens: Any, dim: int, plan: Any, **options: Any) -> Any:
        kernels.decode(
            q, cache, options["indices"], options["topk_length"], options["attn_sink"], None, None,
            options.get("extra_k_cache"), options.get("extra_indices_in_kvcache"), options.get("extra_topk_length"),
            dim, options["softmax_scale"], options["out"],
        )  # fmt: skip
        options["out"].mul_(spoil)

    return SimpleNamespace(
        make_builder=lambda *args, **options: SimpleNamespace(build=build),
        common_metadata=lambda *args: SimpleNamespace(),
        quantize_and_insert_k_cache=write, compute_global_topk_indices_and_lens=mapped, flash_mla_with_kvcache=decode,
    )  # fmt: skip


def test_the_peers_step_is_the_same_work(backend: Backend, kernels: FakeKernels) -> None:
    step = DecodeStep(backend, CPU, 2, 512, layers=4)
    ours = step.run().clone()
    bench._require_same(ours, PeerStep(step, peer_of(step, FakeKernels())).run())
    with pytest.raises(RuntimeError, match="layer 0 differs from the peer's"):
        bench._require_same(ours, PeerStep(step, peer_of(step, FakeKernels(), spoil=1.1)).run())


def test_the_report(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    small = lambda backend, device, requests: DecodeStep(backend, device, requests, 256, layers=3)  # noqa: E731
    monkeypatch.setattr(bench, "DecodeStep", small)
    monkeypatch.setattr(bench, "BATCHES", (1, 2))
    monkeypatch.setattr(bench, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(bench, "compare_steps", lambda steps: {"ours": Timing(10.0, 11.0, 20.0, 3.0)})
    report = bench.run(backend, CPU, None)
    assert report["what"] == "step"
    assert [row["case"] for row in report["cases"]] == ["3 layers, batch 1, flashmla", "3 layers, batch 2, flashmla"]
    assert report["cases"][0]["ours"]["gpu"] == 20.0
