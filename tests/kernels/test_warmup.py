"""Warm-up: every key that a configuration can need is compiled, and nothing after it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from swa_backend.backend import Backend
from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.chunk_plan import PrefillChunk
from swa_backend.cli import main
from swa_backend.combine import CombineStep, CompressedRows
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig, packaged_models
from swa_backend.errors import ProviderError
from swa_backend.kernels import combine, jit
from swa_backend.kernels.jit import STRICT_VARIABLE, Tuning, kernel, mark_warm, stats
from swa_backend.kernels.offline import compile_only
from swa_backend.kernels.operations import TritonOperations
from swa_backend.kernels.warmup import _compile_all, keys_of, warmup
from swa_backend.platform import CacheRole
from swa_backend.registry import registry
from tests.kernels.pools import bf16, make_twin, wild_keys

BOTH = {CacheRole.SWA: Dialect.OCP, CacheRole.COMPRESSED: Dialect.OCP}


def config_of(model: str = "V4-Flash", **options: str) -> BackendConfig:
    return BackendConfig(ModelConfig.packaged(model), SchedulerConfig(65536, 64, 4096), **options)  # type: ignore[arg-type]


def here() -> Backend:
    return Backend(registry().require("cuda"))


@pytest.fixture(autouse=True)
def _forget_keys() -> Iterator[None]:
    """Nothing is compiled before a test, and no other test finds itself after a warm-up."""
    for one in jit.all_kernels():
        one._launchers.clear()
    mark_warm(False)
    yield
    mark_warm(False)


def use_everything(device: torch.device, layout: str, compressed_layout: str) -> None:
    """Every operation on shapes, strides, widths and alignments of all kinds."""
    operations = TritonOperations()

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    for name in {layout, compressed_layout}:
        for gap, entries in ((0, 32), (6, 2)):
            twin = make_twin(device, name, entries=entries, gap=gap, pages=2)
            if get_layout(name).writable:
                for tokens in (1, 9):
                    slots = torch.arange(tokens, device=device)
                    operations.write_kv(bf16(wild_keys(tokens, 0), device), twin.view, slots)
            for requests, columns in ((1, 1), (2, 17)):
                out = torch.zeros(requests, 5, 512, dtype=torch.bfloat16, device=device)
                lens = ints(requests) + 3
                operations.gather_kv(twin.view, ints(requests, columns), lens, None, out, 0)
                operations.gather_kv(twin.view, ints(requests, columns), lens, lens, out, 1)
    for tokens, width in ((1, 1), (3, 512), (2, 700)):
        local, valid = ints(tokens, width), torch.ones(tokens, dtype=torch.bool, device=device)
        for positions in (ints(tokens) + 9, ints(tokens).long() + 9):
            operations.map_topk(
                local, ints(tokens), positions, ints(1, 4), 16, valid, 4, None, ints(tokens, width), ints(tokens)
            )
        for rows in (
            None,
            CompressedRows(local, ints(1, 4), 16, 9, 4),
            CompressedRows(None, ints(1, 3), 2, 9, 128),
        ):
            starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
            combine.combine_rows(
                CombineStep(
                    PrefillChunk(0, 1, 4, 200), 0, 0, ints(tokens, 128), ints(tokens) + 1, ints(tokens), valid, starts,
                    ints(1) + 20, ints(1) + 5, None, rows, ints(tokens, 900), ints(tokens),
                )
            )  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("V4-Flash", ("fp8_ds_mla", "fp8_ds_mla")),
        ("V4-Flash", ("bf16", "fp4_ds_mla_v41")),
        ("V4-Pro", ("fp8_per_tensor", "fp8_ds_mla_v41")),
    ],
)
def test_h1_nothing_is_compiled_after_warm_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, model: str, layouts: tuple[str, str]
) -> None:
    config = config_of(model, cache_layout=layouts[0], compressed_layout=layouts[1])
    names = warmup(here(), config, device=device)
    assert len(set(names)) == len(names) > 10
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    before = stats().compilations
    use_everything(device, *layouts)
    assert stats().compilations == before
    other = make_twin(device, next(name for name in ("fp8_per_tensor", "bf16") if name not in layouts))
    with pytest.raises(ProviderError, match="kernel write_pages: found a compilation after warm-up"):
        TritonOperations().write_kv(bf16(wild_keys(1, 0), device), other.view, torch.zeros(1, device=device).long())


def test_progress_counts_to_the_end(device: torch.device) -> None:
    seen: list[tuple[int, int, str]] = []
    names = warmup(here(), config_of(), device=device, progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(len(names) + 1))
    assert {total for _, total, _ in seen} == {len(names)}
    assert {text for _, _, text in seen[1:]} == set(names)
    assert warmup(here(), config_of(), device=device) == names  # a second time it finds them all


def test_a_second_configuration_is_warmed_up_in_strict_mode(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    first = warmup(here(), config_of(), device=device)
    second = warmup(here(), config_of(cache_layout="bf16"), device=device)
    assert set(second) - set(first)


@pytest.mark.parametrize("model", packaged_models())
def test_keys_are_few_and_hold_no_count(model: str) -> None:
    config = config_of(model)
    wider = BackendConfig(ModelConfig.packaged(model), SchedulerConfig(131072, 999, 8192))
    keys = [(one.name, tuple(key.items())) for one, key in keys_of(config, BOTH)]
    assert len(set(keys)) == len(keys) < 50
    assert keys == [(one.name, tuple(key.items())) for one, key in keys_of(wider, BOTH)]
    topk = [key for name, key in keys if name == "map_rows"]
    assert len(topk) == 2


def test_fnuz_and_ocp_are_keys_of_their_own() -> None:
    mixed = {CacheRole.SWA: Dialect.FNUZ, CacheRole.COMPRESSED: Dialect.OCP}
    written = [key["FNUZ"] for one, key in keys_of(config_of(), mixed) if one.name == "write_pages"]
    assert set(map(bool, written)) == {False, True}
    assert sum(written) * 2 == len(written)


# Through the compiler, for chips that are not here


@pytest.mark.compiled
def test_the_command_fills_one_cache_for_a_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["warmup", "--target", "cuda:90", "--target", "hip:gfx942", "--cache", str(tmp_path), "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    targets = {one["target"]: one["kernels"] for one in report["targets"]}
    assert set(targets) == {"cuda:90", "hip:gfx942"}
    assert any("FNUZ=True" in name for name in targets["hip:gfx942"])
    assert not any("FNUZ=True" in name for name in targets["cuda:90"])
    binaries = {path.suffix: 0 for path in tmp_path.glob("*/*")}
    for path in tmp_path.glob("*/*"):
        binaries[path.suffix] += 1
    assert binaries[".cubin"] == len(targets["cuda:90"])
    assert binaries[".hsaco"] == len(targets["hip:gfx942"])
    files = sorted(tmp_path.rglob("*"))
    written = {path: path.stat().st_mtime_ns for path in files if path.suffix in (".cubin", ".hsaco")}
    assert main(arguments) == 0  # the same process again: everything is found
    assert sorted(tmp_path.rglob("*")) == files
    again = [sys.executable, "-m", "swa_backend", *arguments]
    done = subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {one["target"]: one["kernels"] for one in json.loads(done.stdout)["targets"]} == targets
    assert sorted(tmp_path.rglob("*")) == files, "another process finds everything too"
    assert {path: path.stat().st_mtime_ns for path in written} == written


@kernel(types={"out": "*i32"}, tuning={"": Tuning(1, 1)}, keys=lambda config, dialects: ())
def may_not_compile_for_test(out, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.static_assert(VALUE >= 0)
    tl.store(out, VALUE)


@pytest.mark.compiled
def test_a_kernel_that_does_not_compile_ends_one_warm_up_and_not_the_next(tmp_path: Path) -> None:
    with compile_only("cuda:90", cache=tmp_path):
        launchers = [may_not_compile_for_test.on(torch.device("cpu"), VALUE=value) for value in (1, -1, 2)]
        with pytest.raises(Exception, match="static_assert"):
            _compile_all(launchers, None, 2)
        good = [launchers[0], launchers[2]]
        assert _compile_all(good, None, 2, again=True) == tuple(map(str, good))
        may_not_compile_for_test.on(torch.device("cpu"), VALUE=3).compile()  # nor does a later key wait for a pool


@pytest.mark.compiled
def test_threads_that_compile_parse_one_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CPython cannot parse in two threads at once: now and then it fails."""
    parse, now, most = ast.parse, [0], [0]

    def watched(*args: Any, **options: Any) -> Any:
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.01)  # the others' turn
        tree = parse(*args, **options)
        now[0] -= 1
        return tree

    monkeypatch.setattr(ast, "parse", watched)
    with compile_only("cuda:90", cache=tmp_path):
        launchers = [may_not_compile_for_test.on(torch.device("cpu"), VALUE=value) for value in range(10, 22)]
        _compile_all(launchers, None, 6)
    assert most == [1]


def test_the_command_refuses_a_chip_that_nobody_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--target", "tpu:5"]) == 2
    assert "target: found 'tpu:5', which no platform serves" in capsys.readouterr().err


def test_the_command_refuses_a_cache_without_a_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["warmup", "--cache", str(tmp_path)]) == 2
    assert "legal: --cache and --mounted-at together with --target" in capsys.readouterr().err


def test_the_command_compiles_nothing_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--platform", "cpu", "--model", "V4-Pro", "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)["targets"]
    assert report["kernels"] == []
