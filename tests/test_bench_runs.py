"""Saved bench runs: read, shown, compared and drawn without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swa_backend.bench import timing
from swa_backend.bench.compare_runs import compare_runs
from swa_backend.bench.plot_ratios import bars_of_comparison, bars_of_reports
from swa_backend.bench.report import read_reports
from swa_backend.cli import main
from swa_backend.commands import bench_command
from swa_backend.errors import ConfigError


def times(gpu: float, host: float, cold: float | None = None) -> dict[str, float | None]:
    return {"host": host, "host_p90": host + 1, "gpu": gpu, "launches": 1.0, "gpu_p90": gpu, "gpu_cold": cold}


def report(what: str, *cases: dict[str, Any], gpu: str = "NVIDIA H200") -> dict[str, Any]:
    return {"what": what, "gpu": gpu, "torch": "2.11.0", "triton": "3.6.0", "date": "2026-12-01", "cases": list(cases)}


def case(name: str, ours: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"case": name, "ours": ours, **others}


BEFORE = {
    "reports": [
        report(
            "metadata",
            case("decode 64", times(2.0, 20.0, 4.0), peer=times(6.0, 100.0, 8.0)),
            case("gone", times(1, 1)),
        ),
        report("cache", case("write 64", times(4.0, 30.0))),
    ]
}
AFTER = {
    "reports": [
        report("metadata", case("decode 64", times(3.0, 10.0, 4.0), peer=times(6.0, 120.0, 8.0))),
        report("cache", case("write 64", times(4.1, 30.0)), case("new", times(1, 1))),
    ]
}  # fmt: skip


def write(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, str]:
    return str(write(tmp_path / "a.json", BEFORE)), str(write(tmp_path / "b.json", AFTER))


def test_cases_are_matched_by_bench_and_name() -> None:
    found = compare_runs(BEFORE["reports"], AFTER["reports"])
    assert (found.only_before, found.only_after) == (("metadata: gone",), ("cache: new",))
    changes = {(one.what, one.case, one.who, one.metric): one for one in found.changes}
    gpu = changes["metadata", "decode 64", "ours", "gpu"]
    assert (gpu.factor, gpu.peer_before, gpu.peer_after) == (1.5, 3.0, 2.0)
    host = changes["metadata", "decode 64", "ours", "host"]
    assert (host.factor, host.peer_before, host.peer_after) == (0.5, 5.0, 12.0)
    assert changes["metadata", "decode 64", "peer", "host"].factor == 1.2
    assert changes["metadata", "decode 64", "peer", "host"].peer_before is None
    assert ("cache", "write 64", "ours", "gpu_cold") not in changes  # not measured
    assert {one.metric for one in found.slower(1.1)} == {"gpu"}
    assert found.slower(1.6) == ()
    assert found.differences == ()


def test_another_machine_is_told() -> None:
    found = compare_runs([report("cache")], [report("cache", gpu="NVIDIA B200")])
    assert found.differences == ("gpu: NVIDIA H200 -> NVIDIA B200",)


def test_bars_are_ratios_of_which_more_is_better() -> None:
    (bar,) = bars_of_reports(BEFORE["reports"])
    assert (bar.group, bar.label) == ("metadata", "decode 64")
    assert bar.ratios == {"gpu": 3.0, "gpu_cold": 2.0, "host": 5.0}
    bars = {bar.label: bar.ratios for bar in bars_of_comparison(compare_runs(BEFORE["reports"], AFTER["reports"]))}
    assert bars["decode 64"] == {"gpu": pytest.approx(2 / 3), "gpu_cold": 1.0, "host": 2.0}


def test_further_contenders_have_bars_of_their_own() -> None:
    row = case("decode 1", times(4.0, 1.0), portable=times(8.0, 1.0), peer=times(4.0, 2.0))
    bars = {bar.label: bar.ratios["gpu"] for bar in bars_of_reports([report("providers", row)])}
    assert bars == {"decode 1": 1.0, "decode 1 (portable)": 0.5}


def test_show_prints_what_was_saved(saved: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "show", saved[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == BEFORE
    assert main(["bench", "show", saved[0]]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("H200", "peer", "5.00", "3.00"))


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--fail-above", "1.6"], 0), (["--fail-above", "1.4"], 1)])
def test_compare(
    saved: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    status: int,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "compare", *saved, *options]) == status
    text = " ".join(capsys.readouterr().out.split())
    assert "Only in" in text
    assert ("Slower than allowed: metadata: decode 64, gpu x 1.50" in text) is bool(status)
    assert main(["bench", "compare", *saved, *options, "--json"]) == status
    assert json.loads(capsys.readouterr().out)["slower"] == status


def test_pictures(saved: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for arguments in (["show", saved[0]], ["compare", *saved]):
        picture = tmp_path / f"{arguments[0]}.png"
        assert main(["bench", *arguments, "--plot", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "said"), [("a.bmp", "ends in .png, .svg, .pdf"), ("no/folder/a.png", "a folder that exists")]
)
def test_picture_that_cannot_be_written(
    saved: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "show", saved[0], "--plot", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_missing_extra_is_named(
    saved: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "show", saved[0], "--plot", "a.png"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Run: pip install 'swa-backend[plot]'" in err


def test_a_run_without_a_peer_has_no_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "a.json", report("cache", case("write 64", times(1, 1))))
    assert main(["bench", "show", str(path), "--plot", str(tmp_path / "a.png")]) == 2
    assert "plot: found no case with two times to compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "no JSON"),
        (json.dumps(BEFORE)[:200], "no JSON"),
        ("[]", "a JSON list without reports"),
        ("{}", "a report without 'what'"),
        ('{"reports": 3}', "without reports"),
        ('{"what": "cache"}', "the report 'cache' without a list 'cases'"),
        ('{"what": "cache", "gpu": 7, "cases": []}', "a gpu that is no text"),
        ('{"what": "cache", "cases": [{"case": "x"}]}', "case 0 of the report 'cache' ('x') without times of 'ours'"),
        ('{"what": "cache", "cases": [{"case": "x", "ours": {"gpu": "2"}}]}', "ours has gpu = '2'"),
        ('{"what": "cache", "cases": [{"case": "x", "ours": {"gpu": -1}}]}', "ours has gpu = -1"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_file_that_is_no_run(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="--output FILE") as error:
        read_reports(path)
    assert said in error.value.found
    assert error.value.field == str(path)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for what in (*bench_command.BENCHES, "all"):
        assert main(["bench", what, "--platform", "cpu"]) == 2
        assert "legal: a platform with a GPU. Run this on a machine with" in capsys.readouterr().err


class TestRun:
    """The command around the benches, which are replaced."""

    @pytest.fixture
    def modules(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        made = {name: SimpleNamespace(run=lambda *_, name=name: report(name)) for name in bench_command.BENCHES}
        platform = SimpleNamespace(platform=SimpleNamespace(device_type="cuda"))
        monkeypatch.setattr(bench_command, "get_backend", lambda name: platform)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr(bench_command, "import_module", lambda name: made[name.rpartition(".")[2]])
        return made

    def test_all_writes_after_each(self, modules: dict[str, Any], tmp_path: Path) -> None:
        def broken(*_: Any) -> None:
            raise RuntimeError("differs from the peer's")

        modules["attention"].run = broken
        with pytest.raises(RuntimeError):
            main(["bench", "all", "--output", str(tmp_path / "run.json")])
        assert [one["what"] for one in read_reports(tmp_path / "run.json")] == ["metadata", "cache"]

    def test_one(self, modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "cache", "--json", "--output", str(tmp_path / "run.json")]) == 0
        assert json.loads(capsys.readouterr().out) == report("cache")
        assert json.loads((tmp_path / "run.json").read_text()) == report("cache")

    @pytest.mark.parametrize(
        ("options", "said"),
        [(["--output", "no/folder/run.json"], "output: found"), (["--plot", "a.png"], "plot: found no peer")],
    )
    def test_refused_before_anything_is_timed(
        self, modules: dict[str, Any], capsys: pytest.CaptureFixture[str], options: list[str], said: str
    ) -> None:
        pytest.importorskip("matplotlib")
        modules["cache"].run = lambda *_: pytest.fail("ran")
        assert main(["bench", "cache", *options]) == 2
        assert said in capsys.readouterr().err


def event(name: str, start: float, microseconds: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start), device_time=microseconds)


def test_calls_are_told_apart_in_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [event("k", i, float(i)) for i in range(6)]
    monkeypatch.setattr(timing, "_events", lambda call, calls: events)
    assert timing._calls_on_gpu(lambda: None, 3) == ([1.0, 5.0, 9.0], 2.0)
    assert timing._calls_on_gpu(lambda: None, 4) == ([15 / 4], 1.5)


def test_cold_calls_leave_out_what_clears_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (("bitwise_not_kernel", 90.0), ("a", 2.0), ("b", 3.0), ("bitwise_not_kernel", 90.0))
    events = [event(name, start, microseconds) for start, (name, microseconds) in enumerate(names)]
    monkeypatch.setattr(timing, "_events", lambda call, calls: events)
    monkeypatch.setattr("torch.empty", lambda *_, **__: None)
    assert timing.cold_on_gpu(lambda: None, 2) == [5.0, 0.0]
    with pytest.raises(RuntimeError, match="2 of 3 cold calls"):
        timing.cold_on_gpu(lambda: None, 3)


@pytest.mark.parametrize("time", ["NaN", "Infinity", "1" + "0" * 400])
def test_a_time_that_is_no_number_of_microseconds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], time: str
) -> None:
    text = json.dumps(report("cache", case("write 64", times(77.5, 1)))).replace("77.5", time)
    path = str(write(tmp_path / "a.json", text))
    for command in (["show", path], ["compare", path, path]):
        assert main(["bench", *command]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "where ours has gpu" in err


def test_runs_without_a_common_case_are_no_comparison(saved: tuple[str, str], tmp_path: Path, capsys: Any) -> None:
    other = str(write(tmp_path / "c.json", report("cache", case("another", times(1, 1)))))
    assert main(["bench", "compare", saved[0], other, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no case in common" in err
