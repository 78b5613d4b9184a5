"""The cache and index kernels on a GPU: captured graphs, allocations, synchronisation, binaries compiled elsewhere.

What they compute is tested in ``tests/kernels``, which runs here as well with ``--kernels device``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from swa_backend.chunk_plan import PrefillChunk
from swa_backend.combine import CombineStep, CompressedRows
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig
from swa_backend.kernels.combine import combine_rows
from swa_backend.kernels.jit import STRICT_VARIABLE, mark_warm, stats
from swa_backend.registry import get_backend
from tests.kernels.pools import Twin, bf16, make_twin, wild_keys

pytestmark = pytest.mark.gpu
TOKENS, REQUESTS, PAGES = 200, 3, 12


class Scene:
    """One of each operation on fixed buffers; `change` gives every input other values in place."""

    def __init__(self, layout: str = "fp8_ds_mla") -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.backend = get_backend("rocm" if torch.version.hip else "cuda")
        self.twin: Twin = make_twin(self.device, layout, entries=64, pages=PAGES)
        self.k = bf16(wild_keys(TOKENS, 0), self.device)
        self.slots = torch.arange(TOKENS, device=self.device)
        self.table = self._ints(REQUESTS, PAGES)
        self.seq_lens, self.gather_lens = self._ints(REQUESTS), self._ints(REQUESTS)
        self.workspace = torch.zeros(REQUESTS, 300, 512, dtype=torch.bfloat16, device=self.device)
        self.topk = self._ints(TOKENS, 512)
        self.requests, self.positions = self._ints(TOKENS), self._ints(TOKENS)
        self.valid = torch.ones(TOKENS, dtype=torch.bool, device=self.device)
        self.mapped, self.mapped_lens = self._ints(TOKENS, 512), self._ints(TOKENS)
        self.rows, self.row_lens = self._ints(TOKENS, 640), self._ints(TOKENS)
        self.starts = torch.tensor([0, 50, 120, TOKENS], dtype=torch.int32, device=self.device)
        self.window_rows, self.window_lens = self._ints(TOKENS, 128), self._ints(TOKENS)
        self.step = CombineStep(
            PrefillChunk(0, REQUESTS, 192, 600), 0, 0, self.window_rows, self.window_lens, self.requests, self.valid,
            self.starts, self.seq_lens, self.gather_lens, None, CompressedRows(self.topk, self.table, 16, PAGES, 4),
            self.rows, self.row_lens,
        )  # fmt: skip
        self.change(0)

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def change(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.k.copy_(torch.randn(TOKENS, 512))
        self.slots.copy_(torch.randint(-5, PAGES * 64 + 5, (TOKENS,)))
        self.table.copy_(torch.randint(-1, PAGES + 1, (REQUESTS, PAGES)))
        self.seq_lens.copy_(torch.randint(200, PAGES * 64, (REQUESTS,)))
        self.gather_lens.copy_(torch.randint(0, 200, (REQUESTS,)))
        self.topk.copy_(torch.randint(-20, 220, (TOKENS, 512)))
        self.requests.copy_(torch.arange(REQUESTS).repeat_interleave(torch.tensor([50, 70, 80])))
        self.positions.copy_(torch.randint(0, 800, (TOKENS,)))
        self.valid.copy_(torch.rand(TOKENS) > 0.1)
        self.window_rows.copy_(torch.randint(-1, 700, (TOKENS, 128)))
        self.window_lens.copy_(torch.randint(0, 129, (TOKENS,)))

    def run(self) -> None:
        operations = self.backend.operations
        operations.write_kv(self.k, self.twin.view, self.slots)
        operations.gather_kv(self.twin.view, self.table, self.seq_lens, self.gather_lens, self.workspace, 7)
        operations.map_topk(
            self.topk, self.requests, self.positions, self.table, 16, self.valid, 4, PAGES, self.mapped,
            self.mapped_lens,
        )  # fmt: skip
        combine_rows(self.step)

    def results(self) -> list[torch.Tensor]:
        found = (self.twin.memory, self.workspace, self.mapped, self.mapped_lens, self.rows, self.row_lens)
        return [tensor.clone() for tensor in found]

    def poison(self) -> None:
        """The same bytes everywhere before a run, so that nothing is left of the last one."""
        self.twin.memory.fill_(0x38)
        for tensor in (self.workspace, self.mapped, self.mapped_lens, self.rows, self.row_lens):
            tensor.fill_(77)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_ds_mla_v41", "bf16", "fp8_per_tensor"])
def test_h3_nothing_is_allocated_and_nothing_read_back(layout: str) -> None:
    scene = Scene(layout)
    scene.run()
    torch.cuda.synchronize()
    before = allocations()
    with no_synchronisation():
        for _ in range(3):
            scene.run()
    assert allocations() == before


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_ds_mla_v41", "bf16", "fp8_per_tensor"])
def test_g5_a_captured_graph_replays_like_eager(layout: str) -> None:
    scene = Scene(layout)
    scene.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scene.run()
    for seed in range(1, 50):
        scene.change(seed)
        scene.poison()
        graph.replay()
        replayed = scene.results()
        scene.poison()
        scene.run()
        for found, expected in zip(replayed, scene.results(), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_h1_no_compilation_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.backend.warmup(BackendConfig(ModelConfig.packaged("V4-Flash"), SchedulerConfig(65536, 1024, 8192)))
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    before = stats().compilations
    operations = scene.backend.operations
    try:
        for requests in (1, 2, 15, 16, 17, 64, 257):
            for columns in (1, 15, 16, 17, 4096):
                table = scene._ints(requests, columns)
                slots = torch.arange(requests, device=scene.device) % 64
                operations.write_kv(torch.zeros(requests, 512, device=scene.device).bfloat16(), scene.twin.view, slots)
                out = torch.zeros(requests, 3, 512, dtype=torch.bfloat16, device=scene.device)
                lens = scene._ints(requests) + 1
                operations.gather_kv(scene.twin.view, table, lens, lens, out, 1)
                local, valid = scene._ints(requests, columns), lens > 0
                operations.map_topk(
                    local, lens - 1, lens + 8, table, 16, valid, 4, None, torch.empty_like(local),
                    torch.empty_like(lens),
                )  # fmt: skip
        scene.run()
        assert stats().compilations == before
    finally:
        mark_warm(False)


_RUN = """
import sys
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig
from swa_backend.registry import get_backend
target = sys.argv[2] if len(sys.argv) > 2 else None
backend = get_backend(sys.argv[1], target)
names = backend.warmup(BackendConfig(ModelConfig.packaged("V4-Flash"), SchedulerConfig(65536, 64, 4096)))
if target is None:
    from tests.gpu.test_cache import Scene
    Scene().run()
print(len(names))
"""


def _in_process(cache: Path, *arguments: str) -> int:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _kernels(cache: Path) -> set[str]:
    """Names of the compiled kernels; Triton keeps its launcher stubs beside them."""
    return {str(path.relative_to(cache)) for kind in ("cubin", "hsaco") for path in cache.glob(f"*/*.{kind}")}


def test_the_gpu_finds_what_was_compiled_without_it(tmp_path: Path) -> None:
    if torch.version.hip:
        platform, target = "rocm", f"hip:{torch.cuda.get_device_properties(0).gcnArchName.split(':')[0]}"
    else:
        major, minor = torch.cuda.get_device_capability()
        platform, target = "cuda", f"cuda:{major}{minor}"
    count = _in_process(tmp_path, platform, target)
    compiled = _kernels(tmp_path)
    assert len(compiled) == count > 10
    assert _in_process(tmp_path, platform) == count
    assert _kernels(tmp_path) == compiled


def test_launches_go_to_the_current_stream() -> None:
    scene = Scene()
    scene.run()
    expected = scene.results()
    scene.poison()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        scene.run()
        done = stream.record_event()
    assert not done.query()
    torch.cuda.current_stream().wait_stream(stream)
    for found, before in zip(scene.results()[2:], expected[2:], strict=True):  # what no earlier bytes show through
        assert torch.equal(found, before)
