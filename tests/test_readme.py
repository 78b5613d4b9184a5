"""What the README shows is run here as it stands, or compared with what it speaks of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ci.matrix import ROWS
from swa_backend.commands.bench_command import BENCHES
from tests import newcomer

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
CONSOLE = [command for command in newcomer.commands(TEXT) if not command.startswith("python3 -m venv")]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    if "triton" in EXAMPLES[number]:
        pytest.importorskip("triton")
    path = tmp_path / "example.py"  # Triton reads the source of a kernel
    path.write_text(EXAMPLES[number])
    environment = {**os.environ, "SWA_BACKEND_PLATFORM": "cpu", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_from_batch_to_attention_in_thirty_lines() -> None:
    assert len(EXAMPLES[0].splitlines()) <= 30
    assert all(word in EXAMPLES[0] for word in ("builder.build", "write_kv", "attend"))


@pytest.mark.parametrize("command", CONSOLE)
def test_command_works(command: str, tmp_path: Path) -> None:
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    if "simulate" in command:
        pytest.skip("a row of its own")
    (tmp_path / "ci").symlink_to(ROOT / "ci")
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_commands_that_ci_runs() -> None:
    """.ci/run takes the first two; a newcomer follows all."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert newcomer.commands(TEXT) == [*(block.strip() for block in blocks), *CONSOLE]
    assert CONSOLE


def names_of_table(heading: str) -> set[str]:
    """What stands in the first column of the table under a heading, without its marks."""
    section = TEXT[TEXT.index(f"\n## {heading}\n") :].split("\n## ")[1]
    return {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]*)`", line.split("|")[1])
    }


def test_every_environment_variable_is_in_the_table() -> None:
    sources = [path for folder in ("swa_backend", "platforms") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(SWA_BACKEND_[A-Z_]*[A-Z])"', path.read_text())}
    assert names_of_table("Environment variables") == read


def test_every_command_is_in_the_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swa_backend", "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    listed = set(re.findall(r"^\u2502 ([a-z-]+) +[A-Z]", done.stdout, re.MULTILINE))
    shown = {name.split()[1] for name in names_of_table("Command line") if name.startswith("swa-backend ")}
    assert {"replay", "inspect", "bench"} <= listed == shown
    assert {"metadata", "cache", "attention"} <= set(BENCHES)


def test_rows_that_it_speaks_of_exist() -> None:
    named = re.findall(r"ci/run_row ([a-z][a-z0-9.-]*)", TEXT)
    assert set(named) <= set(ROWS)
    for row in ROWS.values():
        assert f"| {row.name} |" in TEXT, f"no result of the row {row.name}"
        assert not row.gpu or row.name in TEXT


class TestNewcomer:
    """The script that follows the README: it stops at the first command that fails, and takes nothing along."""

    def test_commands_in_order(self) -> None:
        text = "```sh\na && b\n```\ntext\n```console\n$ c --d\noutput\n$ e\n```\n```python\n$ f\n```\n"
        assert newcomer.commands(text) == ["a && b", "c --d", "e"]

    @pytest.mark.parametrize(("todo", "status"), [(["true", "true | true"], 0), (["false", "touch it"], 1),
                                                  (["false | true", "touch it"], 1)])  # fmt: skip
    def test_the_first_failure_ends_it(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], todo: list[str], status: int
    ) -> None:
        assert newcomer.follow(todo, tmp_path) == status
        assert not (tmp_path / "it").exists()
        assert ("command 1 FAILED with exit code 1" in capfd.readouterr().out) is bool(status)

    def test_environment_is_new(self, tmp_path: Path) -> None:
        given = {"PATH": "/own/bin:/usr/bin", "VIRTUAL_ENV": "/own", "PYTHONPATH": "/x", "SWA_BACKEND_PLATFORM": "cpu",
                 "HOME": "/root", "PIP_INDEX_URL": "u", "https_proxy": "p"}  # fmt: skip
        assert newcomer.environment(tmp_path, given) == {
            "PATH": f"{tmp_path}/.venv/bin:/usr/bin", "HOME": "/root", "PIP_INDEX_URL": "u", "https_proxy": "p"
        }  # fmt: skip

    def test_sources_are_copied_without_what_git_ignores(self, tmp_path: Path) -> None:
        if not (ROOT / ".git").exists():
            pytest.skip("the sources are no git checkout, as those that a newcomer's tests run in")
        newcomer.copy_sources(tmp_path)
        assert (tmp_path / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()
        assert (tmp_path / "swa_backend" / "__init__.py").exists()
        assert not list(tmp_path.rglob("__pycache__"))
