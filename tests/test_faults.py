"""What goes wrong outside the library: state stays consistent, nothing is half-written, messages say what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend import cli
from swa_backend.backend import Backend
from swa_backend.cache import CacheConfig, DeepseekV4SWACache
from swa_backend.errors import BatchError, CacheError, ConfigError, TraceError
from swa_backend.fuzz import random_case, run_case
from swa_backend.provider import AttentionCall
from swa_backend.reference.provider import ReferenceAttention
from swa_backend.registry import get_backend
from swa_backend.replay import ReplayOptions, run_replay
from swa_backend.replay.blocks import BlockManager, GroupSpec
from swa_backend.replay.pool import PagePool
from swa_backend.replay.traces import packaged_trace, read_trace
from tests.attention_scene import ProviderUnderTest, mixed
from tests.support import Batch, GoldenFileError, golden_cases, load_golden, make_builder, make_config

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "swa-backend")


def child(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with the tests importable."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


class Flaky(ReferenceAttention):
    """The reference, until it is told to fail in the middle of a forward."""

    def __init__(self) -> None:
        self.fails_in: str | None = None

    def decode(self, call: AttentionCall) -> None:
        super().decode(call)
        self._fail("decode")

    def prefill(self, call: AttentionCall) -> None:
        self._fail("prefill")
        super().prefill(call)

    def _fail(self, part: str) -> None:
        if self.fails_in == part:
            raise RuntimeError(f"CUDA error in {part}")


def flaky_backend() -> tuple[Flaky, Backend]:
    provider = Flaky()
    platform = replace(get_backend("cpu").platform, load_providers=lambda target: (provider,))
    return provider, Backend(platform)


class TestForward:
    @pytest.mark.parametrize("part", ["decode", "prefill"])
    def test_a_provider_that_raises_leaves_the_step_usable(self, part: str) -> None:
        provider, backend = flaky_backend()
        scene = mixed(ProviderUnderTest("reference", backend, "cpu"), second=(128, "fp8_ds_mla", 256))
        group = scene.metadata.compressed["second"]
        compressed = (scene.second_cache, group.rows, group.lens)
        right = scene.run(compressed=compressed)
        pages = scene.cache.pages.data.clone()
        rows = scene.metadata.decode_swa_indices.clone()
        provider.fails_in = part
        with pytest.raises(RuntimeError, match=f"^CUDA error in {part}$"):  # not hidden behind another
            scene.run(compressed=compressed)
        provider.fails_in = None
        assert torch.equal(scene.cache.pages.data, pages)
        assert torch.equal(scene.metadata.decode_swa_indices, rows)
        again = scene.run(compressed=compressed)
        assert torch.equal(again.out, right.out)
        scene.metadata = scene.build()
        assert torch.equal(scene.run(compressed=compressed).out, right.out)

    def test_gradients_are_as_before_after_a_failure(self) -> None:
        provider, backend = flaky_backend()
        scene = mixed(ProviderUnderTest("reference", backend, "cpu"))
        provider.fails_in = "decode"
        with torch.enable_grad():
            with pytest.raises(RuntimeError):
                scene.run()
            assert torch.is_grad_enabled()

    def test_a_launch_that_fails_leaves_no_step_that_looks_whole(self) -> None:
        """What the buffers held before may be half gone: that metadata is refused, the next build is right."""
        builder = make_builder(make_config())
        batch = Batch([1, 200], [130, 300]).metadata()
        before = builder.build(0, batch)
        launch = builder._build_indices

        def failing(step: Any) -> None:
            launch(replace_step(step))
            raise RuntimeError("out of resources")

        def replace_step(step: Any) -> Any:
            return replace(step, seq_lens=step.seq_lens - 1)

        builder._build_indices = failing
        with pytest.raises(RuntimeError, match="out of resources"):
            builder.build(0, batch)
        assert before.is_overwritten
        builder._build_indices = launch
        again = builder.build(0, batch)
        fresh = make_builder(make_config()).build(0, batch)
        assert torch.equal(again.decode_swa_indices, fresh.decode_swa_indices)
        assert torch.equal(again.prefill_swa_indices, fresh.prefill_swa_indices)

    def test_a_refused_batch_leaves_the_step_before_it(self) -> None:
        builder = make_builder(make_config())
        batch = Batch([1, 200], [130, 300]).metadata()
        metadata = builder.build(0, batch)
        rows = metadata.prefill_swa_indices.clone()
        with pytest.raises(BatchError):
            builder.build(0, Batch([1, 2000], [130, 3000]).metadata())
        assert not metadata.is_overwritten
        assert torch.equal(metadata.prefill_swa_indices, rows)


def out_of_memory(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class TestMemory:
    @pytest.mark.parametrize("name", ["zeros", "full"])
    def test_a_builder_for_which_memory_is_missing(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        config = make_config()
        with monkeypatch.context() as patched:
            patched.setattr(torch, name, out_of_memory)
            with pytest.raises(ConfigError) as error:
                make_builder(config)
        assert error.value.field == "max_num_batched_tokens"
        assert "1024 tokens a step" in str(error.value)
        assert error.value.fix.startswith("Lower max_num_batched_tokens")
        assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
        make_builder(config).build(0, Batch([1], [9]).metadata())  # nothing is left of the attempt

    def test_a_provider_that_cannot_reserve(self) -> None:
        provider, backend = flaky_backend()
        provider.reserve = out_of_memory  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="memory is missing"):
            make_builder(make_config(), backend=backend)

    def test_other_errors_of_a_construction_pass(self) -> None:
        provider, backend = flaky_backend()

        def reserve(config: Any, device: Any) -> None:
            raise RuntimeError("no kernel image is available")

        provider.reserve = reserve  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no kernel image"):
            make_builder(make_config(), backend=backend)

    @pytest.mark.parametrize("failure", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
    def test_pages_for_which_memory_is_missing(self, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
        context = CacheConfig()
        cache = DeepseekV4SWACache(512, 128, torch.uint8, "layers.0", context, get_backend("cpu"))

        def zeros(*args: Any, **options: Any) -> Any:
            raise failure

        with monkeypatch.context() as patched:
            patched.setattr(torch, "zeros", zeros)
            with pytest.raises(CacheError) as error:
                cache.allocate(1000, "cpu")
        assert error.value.field == "num_pages"
        assert "1000 pages, 37440000 bytes on cpu" in str(error.value)
        with pytest.raises(CacheError, match="no memory bound"):
            _ = cache.pages
        cache.bind_kv_cache(cache.allocate(2, "cpu"))
        assert list(context.layers) == ["layers.0"]

    def test_memory_that_really_runs_out(self) -> None:
        """A process that may take 300 MB more asks for a cache of 1 GiB, then for buffers of as much."""
        code = """
import resource, torch
from pathlib import Path
from swa_backend.errors import SwaBackendError
from swa_backend.cache import DeepseekV4SWACache
from swa_backend.registry import get_backend
from tests.support import make_builder, make_config
cache = DeepseekV4SWACache(512, 128, torch.uint8, "layers.0", None, get_backend("cpu"))
make_builder(make_config())
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
config = make_config(max_num_batched_tokens=2**21)
for ask in (lambda: cache.allocate(2**30 // 37440, "cpu"), lambda: make_builder(config)):
    try:
        ask()
    except SwaBackendError as error:
        print(type(error).__name__, error.field, "memory is missing" in str(error))
"""
        done = child(code)
        assert done.stdout == "CacheError num_pages True\nConfigError max_num_batched_tokens True\n", done.stderr


def interrupted(code: list[str], ready: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command, press Ctrl-C once it has printed a line, wait."""
    # Ignored in what a shell has started in the background, and inherited.
    reset = "import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    running = subprocess.Popen(
        [sys.executable, "-c", reset + code[0], *code[1:]],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == ready
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    return subprocess.CompletedProcess(code, running.returncode, out, err)


class TestInterrupt:
    def test_a_replay(self) -> None:
        code = """
import sys
sys.argv = ["swa-backend", "replay", "--platform", "cpu", "--attention", "none", "--json"]
from swa_backend import cli
from swa_backend.replay import runner
original = runner._Replay._run_step
def step(self, work):
    original(self, work)
    if len(self.counts.build) == 1:
        print("ready", flush=True)
runner._Replay._run_step = step
sys.exit(cli.main())
"""
        done = interrupted([code], "ready\n")
        assert done.returncode == 130
        assert done.stdout == ""  # no half of a report
        assert "Traceback" not in done.stderr
        assert done.stderr.endswith("swa-backend: interrupted\n")

    def test_while_torch_is_loaded(self, tmp_path: Path) -> None:
        """The script imports the package before any of its own code could catch an exception."""
        slow = "import time\nprint('loading', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException as error:\n"
        (tmp_path / "torch.py").write_text(slow + "    raise ImportError('torch is broken') from error\n")
        code = "sys.argv[0] = 'swa-backend'; from swa_backend.cli import main; sys.exit(main())"
        done = interrupted([code, "doctor"], "loading\n", PYTHONPATH=str(tmp_path), SWA_BACKEND_PLATFORM="auto")
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "swa-backend: interrupted\n")

    @pytest.mark.parametrize(
        ("program", "before", "same"),
        [
            ("serve", "default_int_handler", True),
            ("swa-backend", "SIG_IGN", True),
            ("swa-backend", "default_int_handler", False),
        ],
    )
    def test_only_our_own_command_handles_them(self, program: str, before: str, same: bool) -> None:
        """Not in an engine's process, and not where they are ignored."""
        code = (
            f"import signal, sys; signal.signal(signal.SIGINT, signal.{before}); sys.argv[0] = {program!r}; "
            f"import swa_backend; print(signal.getsignal(signal.SIGINT) is signal.{before})"
        )
        assert child(code, SWA_BACKEND_PLATFORM="cpu").stdout == f"{same}\n"


class TestPipes:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["replay", "--max-requests", "1", "--max-model-len", "600", "--attention", "none", "--skip-bad-rows"],
            ["fuzz", "--steps", "1", "--no-attention"],
        ],
    )
    def test_a_reader_of_json_that_goes_away(self, arguments: list[str]) -> None:
        running = subprocess.Popen(
            [SCRIPT, *arguments, "--platform", "cpu", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        err = running.stderr.read()
        assert running.wait(60) == 141
        assert "Traceback" not in err
        assert "Exception" not in err
        assert "BrokenPipe" not in err


class TestTraces:
    def test_a_trace_cut_anywhere_is_read_or_refused(self, tmp_path: Path) -> None:
        """Cut at every byte of the third row: what is left is two or three whole requests, or an error with a line."""
        for name, lines in (("mooncake", 2), ("azure", 3)):  # the header is one more
            rows = packaged_trace(name).read_bytes().split(b"\n")
            if name == "mooncake":  # few ids, so that there are few places to cut
                short = {"input_length": 700, "hash_ids": [1, 2]}
                rows = [json.dumps({**json.loads(row), **short}).encode() for row in rows[:3]]
            kept = b"\n".join(rows[:lines]) + b"\n"
            path = tmp_path / name
            seen = set()
            for end in range(len(rows[lines]) + 1):
                path.write_bytes(kept + rows[lines][:end])
                whole = read_trace(path, skip_bad_rows=True)
                seen.add((len(whole.requests), whole.bad_rows))
                if whole.bad_rows:
                    with pytest.raises(TraceError, match=f"^{path}:{lines + 1}.*--skip-bad-rows"):
                        read_trace(path)
            assert seen == {(2, 0), (2, 1), (3, 0)}

    def test_a_trace_that_ends_in_the_middle_of_a_replay_starts_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(packaged_trace("mooncake").read_bytes()[:1500])
        assert cli.main(["replay", "--platform", "cpu", "--trace", str(path), "--json"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{path}:" in err


class TestGoldenFiles:
    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "gone"])
    def test_a_damaged_file_is_named_with_the_way_to_restore_it(self, tmp_path: Path, damage: str) -> None:
        source = golden_cases("metadata", "decode_single.npz")[0]
        data = bytearray(source.read_bytes())
        path = tmp_path / source.name
        if damage == "cut":
            data = data[: len(data) // 2]
        elif damage == "flipped":
            for at in range(60, len(data) - 200, 7):
                data[at] ^= 0xFF
        elif damage == "empty":
            data = bytearray()
        elif damage == "text":
            data = bytearray(b"version https://git-lfs.github.com/spec/v1\n")
        if damage != "gone":
            path.write_bytes(data)
        with pytest.raises(GoldenFileError) as error:
            load_golden(path)
        assert str(error.value).startswith(str(path))
        assert f"git checkout -- {path}" in str(error.value)


class TestPages:
    def test_a_pool_that_runs_out_changes_nothing(self) -> None:
        pool = PagePool(3)
        held = [pool.take() for _ in range(3)]
        pool.publish(held[0], 77)
        for _ in range(2):
            with pytest.raises(CacheError) as error:
                pool.take()
            assert (error.value.field, error.value.found) == ("pages", "all 3 pages held")
            assert "preempt" in error.value.fix
        assert pool.check(dict.fromkeys(held, 1)) == []
        pool.release(held[0])
        assert pool.take() == held[0]

    def test_tables_that_cannot_grow_stay_as_they_are(self) -> None:
        manager = BlockManager([GroupSpec("a", 64, 4), GroupSpec("b", 32, 3)], 1024)
        keys = {"a": list(range(16)), "b": list(range(32))}
        manager.begin(0, keys, 0)
        assert manager.extend(0, 64)
        before = {name: manager.tables(name, [0]).copy() for name in ("a", "b")}
        assert not manager.extend(0, 128)  # group a has the pages, group b has not
        assert all((manager.tables(name, [0]) == before[name]).all() for name in ("a", "b"))
        assert manager.check() == []

    def test_a_replay_with_too_few_pages_says_how_many(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:44:50.08,2000,3\n")
        with pytest.raises(ConfigError) as error:
            run_replay(ReplayOptions(trace=path, platform="cpu", pages=2, attention="none"))
        assert error.value.field.startswith("pages of the cache group")
        assert "--pages" in error.value.fix

    def test_a_replay_with_just_enough_pages_preempts_and_ends(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        rows = "".join(f"2023-11-16 18:44:5{i}.08,400,120\n" for i in range(4))
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
        options = ReplayOptions(
            trace=path, platform="cpu", pages=6, attention="none", layers=("c4a",), max_batched_tokens=128
        )
        report = run_replay(options)
        assert report.requests == 4
        assert report.preemptions > 0
        assert report.mismatches == 0


FORKED = """
import os, sys
import swa_backend
child = os.fork()
if not child:
    from tests.attention_scene import ProviderUnderTest, check, mixed
    from swa_backend.registry import get_backend
    scene = mixed(ProviderUnderTest("reference", get_backend("cpu"), "cpu"))
    check(scene.run(), scene.expected())
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


class TestProcesses:
    def test_a_fork_after_the_import_attends(self) -> None:
        done = child(FORKED, SWA_BACKEND_PLATFORM="auto")
        assert done.returncode == 0, done.stderr

    def test_builders_of_two_threads_do_not_disturb_each_other(self) -> None:
        raised: list[BaseException] = []

        def run(seed: int) -> None:
            try:
                run_case(random_case(seed, steps=25), get_backend("cpu"), torch.device("cpu"))
            except BaseException as error:
                raised.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in (31, 32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert raised == []
