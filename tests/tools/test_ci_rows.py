"""The platform matrix: its rows say what they ran and what they could not, and nothing that did not run has passed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci import environment, matrix, results, rows
from ci.matrix import ROWS, RUNS, Row
from ci.results import FAILED, NOT_RUN, PASSED, Counts, RowResult, StepResult

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(rows, "RESULTS", tmp_path)
        monkeypatch.setattr(sys, "argv", ["ci/run_row", "--out", str(tmp_path), *arguments])
        code = rows.main()
        return code, capsys.readouterr().out

    return call


class TestMatrix:
    def test_every_kind_of_run_and_machine_has_a_row(self) -> None:
        kinds = {name for row in ROWS.values() for name in row.runs}
        assert {"unit", "interpret", "compile", "simulate", "device"} <= kinds == set(RUNS)
        machines = {row.gpu: (row.platform, row.arch) for row in ROWS.values() if row.gpu}
        assert machines == {
            "H100": ("cuda", ("cuda:90",)),
            "H200": ("cuda", ("cuda:90",)),
            "B200": ("cuda", ("cuda:100",)),
            "MI300X": ("rocm", ("hip:gfx942",)),
            "MI355X": ("rocm", ("hip:gfx950",)),
        }

    def test_targets_are_known(self) -> None:
        pytest.importorskip("triton")
        from swa_backend.kernels.offline import CHIPS
        from tests.tools.simulator.driver import SIMULATED

        for row in ROWS.values():
            known = SIMULATED if RUNS[row.runs[0]].needs == "simulator" else CHIPS.keys()
            assert set(row.targets) <= set(known)

    def test_files_that_runs_name_exist(self) -> None:
        for run in RUNS.values():
            for argument in (*run.pytest, *run.command):
                path = argument.removeprefix("--ignore=")
                if path.startswith("tests"):
                    assert (ROOT / path).exists(), argument

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({"name": "a", "runs": ["unit"], "platform": "tpu"}, "no platform 'tpu'"),
            ({"name": "a", "runs": ["units"], "platform": "cpu"}, "no run 'units'"),
            ({"name": "a", "runs": ["unit"], "platform": "cpu", "pyton": "3.11"}, "row 'a': .*pyton"),
        ],
    )
    def test_a_mistake_in_the_matrix_is_named(self, row: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            matrix.read({"run": {"unit": {"about": ""}}, "row": [row]})
        fine = {"name": "a", "runs": [], "platform": "cpu"}
        with pytest.raises(ValueError, match="row 'a' twice"):
            matrix.read({"run": {}, "row": [fine, fine]})

    def test_list(self, call: Call) -> None:
        code, text = call("--list")
        assert code == 0
        assert [line.split()[0] for line in text.splitlines() if line[0] != " "] == list(ROWS)
        assert "on rocm MI300X hip:gfx942; python 3.12, torch 2.11.0, triton 3.6.0" in text

    def test_listing_needs_nothing_but_python(self) -> None:
        """The workflows list the rows before anything is installed."""
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(ROOT / "ci" / "run_row"), "--list", "--json", "--platform", "cpu"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        names = [row["name"] for row in json.loads(done.stdout)]
        assert names == [name for name, row in ROWS.items() if row.platform == "cpu"]

    def test_workflows_have_a_job_for_every_row_with_a_runner(self, call: Call) -> None:
        listed = []
        for workflow in WORKFLOWS:
            (command,) = re.findall(r"ci/run_row (--list [^)]*)\)", workflow.read_text())
            listed += [row["name"] for row in json.loads(call(*command.split())[1])]
        assert sorted(listed) == sorted(name for name, row in ROWS.items() if row.runner)
        assert all(row.runner or row.platform == "any" for row in ROWS.values())

    @pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
    def test_workflows_only_call_the_script(self, workflow: Path) -> None:
        text = workflow.read_text()
        runs = re.findall(r"\brun: (.*)", text)
        assert len(runs) == 2
        assert all("ci/run_row" in command for command in runs)
        for words in (
            "include: ${{ fromJSON(needs.rows.outputs.rows) }}",
            "runs-on: ${{ matrix.runner }}",
            "path: ~/.cache/pip",
            "TRITON_CACHE_DIR: ${{ github.workspace }}/.ci/triton-cache",
        ):
            assert words in text
        used = set(re.findall(r"matrix\.(\w+)", text.replace("ci/matrix.toml", "")))
        assert used <= set(Row.__dataclass_fields__)


def step(status: str = PASSED, tests: Counts | None = None, title: str = "step", output: str = "") -> StepResult:
    return StepResult(title, ("python", "-m", "x"), status, "" if status == PASSED else "why", 0, 2.0, tests, output)


class TestRun:
    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[rows.Step]:
        """The steps that a row asks for, instead of running them; the second one fails."""
        steps: list[rows.Step] = []

        def run(one: rows.Step) -> StepResult:
            steps.append(one)
            return step(FAILED if len(steps) == 2 else PASSED, title=one.title)

        monkeypatch.setattr(rows, "run", run)
        monkeypatch.setattr(rows, "why_not", lambda row: [])
        monkeypatch.setattr(rows.os, "cpu_count", lambda: 1)
        return steps

    def test_one_failed_step_fails_the_row(self, call: Call, ran: list[rows.Step], tmp_path: Path) -> None:
        code, text = call("simulate", "--short", "--here", "--", "-x")
        assert code == 1
        assert text.splitlines()[-1] == "row simulate: FAILED: 1 of 2 steps passed, 4 s"
        assert [one.arguments[2:] for one in ran] == [
            ("tests", "--kernels=simulate", f"--target={target}", "-m", "simulate", "-x")
            for target in ROWS["simulate"].targets
        ]
        saved = json.loads((tmp_path / "simulate.json").read_text())
        assert (saved["status"], saved["short"], len(saved["steps"])) == (FAILED, True, 2)
        assert "## Row simulate (the short part): FAILED" in (tmp_path / "simulate.md").read_text()

    def test_one_target_alone(self, call: Call, ran: list[rows.Step]) -> None:
        call("compile", "--target", "cuda:90", "--here")
        assert [one.title for one in ran] == ["compile", "resources cuda:90"]
        assert ran[1].arguments == ("-m", "ci.resource_table", "cuda:90")
        ran.clear()
        call("compile", "--here", "--short")
        assert [one.arguments[-1] for one in ran[1:]] == ["--short"] * 7

    def test_no_target_at_all_has_not_passed(self, call: Call, ran: list[rows.Step]) -> None:
        assert call("simulate", "--here", "--target", "hip:gfx1201")[0] == 3
        assert ran == []

    def test_other_versions(self, call: Call, ran: list[rows.Step], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rows, "installed", lambda: {"python": "3.10", "torch": "2.13.0+cpu", "triton": "none"})
        code, text = call("cpu")
        assert code == 3
        assert ran == []
        assert "row cpu: NOT RUN: python is 3.10, the row is for 3.11; --venv FOLDER makes" in text
        assert "row cpu: NOT RUN: triton is none, the row is for 3.6.0" in text
        assert "torch is" not in text
        code, text = call("cpu", "--here")
        assert code == 0
        assert "row cpu: not as the matrix says: python is 3.10, the row is for 3.11" in text
        assert [one.title for one in ran] == ["unit"]

    def test_an_environment_that_cannot_be_made(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def make(*arguments: Any) -> Path:
            raise environment.NoEnvironmentError("no python3.13 on this machine that runs")

        monkeypatch.setattr(rows, "make_environment", make)
        assert call("cpu-python-3.13", "--venv", str(tmp_path / "venv")) == (
            3, "row cpu-python-3.13: NOT RUN: no python3.13 on this machine that runs\n"
        )  # fmt: skip
        assert json.loads((tmp_path / "cpu-python-3.13.json").read_text())["status"] == NOT_RUN

    def test_an_environment_of_its_own(self, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        made: list[Any] = []
        monkeypatch.setattr(rows, "make_environment", lambda *given: made.append(given) or Path("/venv/bin/python"))
        monkeypatch.setattr(
            rows.subprocess, "run", lambda command, check: made.append(command) or SimpleNamespace(returncode=3)
        )
        assert call("cpu", "--venv", "v", "--index=", "--short", "--", "-x")[0] == 3
        assert made[0] == (ROWS["cpu"], Path("v"), "")
        assert made[1] == [
            Path("/venv/bin/python"), ROOT / "ci" / "run_row", "--out", str(tmp_path), "cpu", "--short", "--", "-x"
        ]  # fmt: skip

    def test_a_step_reports_what_it_ran(self) -> None:
        result = rows.run(rows.Step("three", ("-c", "print(7); exit(3)")))
        assert (result.status, result.why, result.exit_code, result.output) == (FAILED, "exit code 3", 3, "7\n")
        assert rows.run(rows.Step("one", ("-c", "print(7)"))).status == PASSED

    @pytest.mark.parametrize(
        ("text", "status", "tests"),
        [
            ("def test_a(): pass\nimport pytest\n@pytest.mark.skip\ndef test_b(): pass", PASSED, Counts(1, 0, 1)),
            ("def test_a(): assert False\ndef test_b(): pass", FAILED, Counts(1, 1, 0)),
            ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", NOT_RUN, Counts(0, 0, 1)),
            ("", FAILED, Counts(0, 0, 0)),
        ],
        ids=["some skipped", "one fails", "all skipped", "none"],
    )
    def test_a_step_whose_tests_were_all_skipped_has_not_passed(
        self, tmp_path: Path, text: str, status: str, tests: Counts
    ) -> None:
        (tmp_path / "test_it.py").write_text(text + "\n")
        result = rows.run(rows.Step("x", ("-m", "pytest", "-c", "/dev/null", "--noconftest", str(tmp_path))))
        assert (result.status, result.tests) == (status, tests)


class TestWhyNot:
    def test_no_gpu(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(rows, "run", lambda step: pytest.fail("ran"))
        assert call("device") == (3, "row device: NOT RUN: no GPU that torch can use\n")
        assert "row h200: NOT RUN: no GPU that torch can use; the row is for H200" in call("h200", "--here")[1]

    @pytest.mark.parametrize(
        ("row", "gpu", "fine"),
        [
            ("h200", ("NVIDIA H200", "cuda:90"), True),
            ("h100", ("NVIDIA H200", "cuda:90"), False),
            ("b200", ("NVIDIA B200", "cuda:100"), True),
            ("mi300x", ("AMD Instinct MI300X", "hip:gfx942"), True),
            ("mi355x", ("AMD Instinct MI300X", "hip:gfx942"), False),
            ("device", ("NVIDIA L4", "cuda:89"), True),
        ],
    )
    def test_another_gpu(self, monkeypatch: pytest.MonkeyPatch, row: str, gpu: tuple[str, str], fine: bool) -> None:
        monkeypatch.setattr(environment, "describe_gpu", lambda: gpu)
        reasons = environment.why_not(ROWS[row])
        assert (reasons == []) is fine
        assert fine or f"this machine's GPU is {gpu[0]} ({gpu[1]}), the row is for {ROWS[row].gpu}" in reasons[0]

    def test_what_torch_says_of_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        amd = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: amd)
        monkeypatch.setattr(torch.version, "hip", "7.2")
        assert environment.describe_gpu() == ("AMD Instinct MI300X", "hip:gfx942")
        nvidia = SimpleNamespace(name="NVIDIA B200", major=10, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: nvidia)
        monkeypatch.setattr(torch.version, "hip", None)
        assert environment.describe_gpu() == ("NVIDIA B200", "cuda:100")

    def test_another_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
        assert environment.why_not(ROWS["cpu"]) == ["this machine is aarch64, the row is for x86_64"]
        assert environment.why_not(ROWS["cpu-arm"]) == []


class TestEnvironment:
    def made(self, row: Row, index: str | None = None) -> list[str]:
        commands: list[str] = []
        environment.make_environment(row, Path("/v"), index, lambda command: commands.append(" ".join(command)))
        return commands

    def test_versions_of_the_row(self) -> None:
        row = Row("x", ("unit",), "cpu", python=environment.installed()["python"], torch="2.9.0", triton="3.9.0")
        pip = "/v/bin/python -m pip install --quiet"
        assert self.made(row) == [
            f"{sys.executable} -m venv /v",
            f"{pip} --extra-index-url=https://download.pytorch.org/whl/cpu torch==2.9.0 -e .[test]",
            f"{pip} --no-deps triton==3.9.0",
        ]
        assert self.made(row, "")[1] == f"{pip} torch==2.9.0 -e .[test]"

    def test_without_triton(self) -> None:
        row = Row("x", ("unit",), "rocm", triton="none")
        install, uninstall = self.made(row)[1:]
        assert install.endswith("--extra-index-url=https://download.pytorch.org/whl/rocm7.2 -e .[test]")
        assert uninstall == "/v/bin/python -m pip uninstall --quiet --yes triton"

    def test_a_run_that_makes_its_own_gets_a_bare_one(self) -> None:
        assert self.made(Row("x", ("newcomer",), "cpu")) == [f"{sys.executable} -m venv /v"]

    def test_no_such_python(self) -> None:
        with pytest.raises(environment.NoEnvironmentError, match=r"no python3\.99 on this machine"):
            self.made(Row("x", ("unit",), "cpu", python="3.99"))

    def test_a_command_that_fails_is_told(self) -> None:
        command = (sys.executable, "-c", "print('no such package'); exit(1)")
        with pytest.raises(environment.NoEnvironmentError, match="failed with exit code 1: no such package"):
            environment._run(command)

    def test_differences(self) -> None:
        row = Row("x", (), "cpu", python="3.11", torch="2.13.0", triton="none")
        assert environment.differences(row, {"python": "3.11", "torch": "2.13.0+cpu", "triton": "none"}) == []
        assert environment.differences(row, {"python": "3.11", "torch": "2.11.0+cu130", "triton": "3.6.0"}) == [
            "torch is 2.11.0+cu130, the row is for 2.13.0", "triton is 3.6.0, the row is for none"
        ]  # fmt: skip


class TestResults:
    @pytest.mark.parametrize(
        ("statuses", "expected"),
        [
            ([PASSED, PASSED], PASSED),
            ([PASSED, FAILED, NOT_RUN], FAILED),
            ([PASSED, NOT_RUN], NOT_RUN),
            ([], NOT_RUN),
        ],
    )
    def test_verdict(self, statuses: list[str], expected: str) -> None:
        assert results.verdict(map(step, statuses)) == expected

    def result(self, *steps: StepResult, **options: Any) -> RowResult:
        status = results.verdict(steps)
        found, date = {"python": "3.11"}, "2026-12-01T10:00:00Z"
        whole = RowResult("cpu", status, (), False, (), found, "abc", date, steps)
        return replace(whole, **options)

    def test_summary_shows_the_end_of_what_failed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page"))
        output = "\n".join(f"line {i}" for i in range(100))
        self.result(step(tests=Counts(5, 0, 1)), step(FAILED, output=output)).write(tmp_path / "new" / "folder")
        text = (tmp_path / "new" / "folder" / "cpu.md").read_text()
        assert text == (tmp_path / "page").read_text()
        assert "| step | passed | 5 passed, 0 failed, 1 skipped | 2 |" in text
        assert "line 99" in text
        assert "line 60" in text
        assert "line 59" not in text

    def test_report_of_all_rows(self, tmp_path: Path, call: Call) -> None:
        self.result(step(tests=Counts(5, 0, 1)), step(tests=Counts(7, 0, 2)), differs=("torch is 2.14",)).write(
            tmp_path
        )
        self.result(row="h200", why=("no GPU",), short=True).write(tmp_path)
        code, text = call("--report")
        assert code == 0
        lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
        assert set(ROWS) <= set(lines)
        assert lines["cpu"] == (
            "| cpu | unit | cpu x86_64 | 3.11, 2.13.0, 3.6.0 "
            "| passed: 12 passed, 0 failed, 3 skipped, although torch is 2.14, 2026-12-01 |"
        )
        assert lines["h200"] == (
            "| h200 | device | cuda H200 cuda:90 | 3.12, 2.11.0, 3.6.0 | NOT RUN (short part): no GPU, 2026-12-01 |"
        )
        assert lines["b200"] == "| b200 | device | cuda B200 cuda:100 | 3.12, 2.11.0, 3.6.0 | none |"
