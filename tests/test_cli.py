"""The command line: what it prints where, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from swa_backend import PlatformError, TraceError, cli
from swa_backend._process import is_own_command
from swa_backend.commands import doctor_command as doctor_module

SCRIPT = [str(Path(sysconfig.get_path("scripts")) / "swa-backend")]
MODULE = [sys.executable, "-m", "swa_backend"]


def command(start: list[str], *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*start, *arguments], env={**os.environ, **env}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("start", [SCRIPT, MODULE], ids=["script", "module"])
class TestProcess:
    def test_runs(self, start):
        done = command(start, "doctor", "--json", SWA_BACKEND_PLATFORM="cpu")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        report = json.loads(done.stdout)
        assert (report["chosen"], report["why"]) == ("cpu", "named by SWA_BACKEND_PLATFORM")

    @pytest.mark.parametrize("arguments", [["replay"], ["doctor", "--json"]])
    def test_unknown_platform_in_the_environment(self, start, arguments):
        done = command(start, *arguments, SWA_BACKEND_PLATFORM="nope")
        assert done.returncode == 2
        assert done.stderr.startswith("swa-backend: error: SWA_BACKEND_PLATFORM: found 'nope'")
        assert all(f"\n  {name} (swa-backend " in done.stderr for name in ("cpu", "cuda", "rocm"))
        assert "Traceback" not in done.stderr
        if "doctor" in arguments:
            assert json.loads(done.stdout)["chosen"] is None


@pytest.mark.parametrize(("given", "used"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_sleep_in_our_own_command_alone(monkeypatch, given, used):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = command(MODULE, "doctor", "--json", SWA_BACKEND_PLATFORM="cpu", **given)
    assert json.loads(done.stdout)["environment"]["OMP_WAIT_POLICY"] == used
    code = "import os, swa_backend; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = command([sys.executable, "-c", code], SWA_BACKEND_PLATFORM="cpu", **given)
    assert done.stdout.strip() == given.get("OMP_WAIT_POLICY", "None")


def test_help_and_version_work_whatever_the_environment_says():
    assert command(SCRIPT, "--version", SWA_BACKEND_PLATFORM="nope").stdout.startswith("swa-backend 0.")
    done = command(SCRIPT, "replay", "--help", SWA_BACKEND_PLATFORM="nope")
    assert done.returncode == 0
    assert "--max-requests" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich", "numpy"])
def test_missing_extra_is_named(tmp_path, missing):
    package = tmp_path / missing
    package.mkdir()
    text = f"raise ModuleNotFoundError('No module named {missing}', name='{missing}')\n"
    (package / "__init__.py").write_text(text)
    done = command(MODULE, "replay", PYTHONPATH=str(tmp_path), SWA_BACKEND_PLATFORM="cpu")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"swa-backend: error: the command line needs {missing}, which is not installed. "
        "Run: pip install 'swa-backend[cli]'"
    )
    assert "Traceback" not in done.stderr


def test_reader_of_the_output_goes_away():
    running = subprocess.Popen([*SCRIPT, "doctor", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running.stdout.close()
    assert running.stderr.read() == ""
    assert running.wait() == 141


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["doctor", "--json"], ["doctor"]])
def test_output_that_cannot_be_written(arguments):
    for target, said in ((">&-", "standard output is closed"), (">/dev/full", "No space left on device")):
        done = command(["sh", "-c", f'"$0" "$@" {target}', *SCRIPT], *arguments)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("swa-backend: error: ")
        assert said in line


def test_errors_that_cannot_be_written():
    for target in ("2>&-", "2>/dev/full"):
        done = command(["sh", "-c", f'"$0" "$@" {target}', *SCRIPT], "doctor", "--platform", "nope")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_terminal_of_another_encoding_gets_escapes(tmp_path):
    trace = tmp_path / "trac\xe9"
    done = command(SCRIPT, "replay", "--trace", str(trace), PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert r"trac\xe9: found No such file" in done.stderr
    done = command(SCRIPT, "replay", "--help", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_ends_a_running_command(tmp_path):
    """A real Ctrl-C, while the command is at work."""
    code = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
from swa_backend import cli
from swa_backend.commands import doctor_command
def examine(platform, target):
    print("ready", flush=True)
    time.sleep(60)
doctor_command.examine = examine
sys.exit(cli.main(["doctor"]))
"""
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate()
    assert running.returncode == 130
    assert "Traceback" not in errors


class TestMain:
    def test_library_error(self, monkeypatch, capsys):
        def examine(platform, target):
            raise TraceError("sample.csv, line 7", found="'x'", legal="an integer", fix="Repair the row.")

        monkeypatch.setattr(doctor_module, "examine", examine)
        assert cli.main(["doctor"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err == "swa-backend: error: sample.csv, line 7: found 'x'; legal: an integer. Repair the row.\n"

    def test_interrupt(self, monkeypatch, capsys):
        def examine(platform, target):
            raise KeyboardInterrupt

        monkeypatch.setattr(doctor_module, "examine", examine)
        assert cli.main(["doctor"]) == 130
        assert "Traceback" not in capsys.readouterr().err

    def test_unreadable_file(self, monkeypatch, capsys):
        monkeypatch.setattr(doctor_module, "examine", lambda platform, target: Path("no/such/file").read_text())
        assert cli.main(["doctor"]) == 2
        assert "no/such/file: No such file or directory" in capsys.readouterr().err

    def test_a_bug_is_not_hidden(self, monkeypatch):
        def examine(platform, target):
            raise ZeroDivisionError

        monkeypatch.setattr(doctor_module, "examine", examine)
        with pytest.raises(ZeroDivisionError):
            cli.main(["doctor"])

    @pytest.mark.parametrize("arguments", [["nonsense"], ["doctor", "--nonsense"], ["replay", "--verify", "some"]])
    def test_wrong_usage(self, arguments, capsys):
        assert cli.main(arguments) == 2
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["doctor", "--platform", "nope"], "platform: found 'nope', which no installed package registers"),
            (["replay", "--platform", "nope"], "platform: found 'nope', which no installed package registers"),
            (["doctor", "--platform", "cuda", "--target", "sm90"], "target: found 'sm90'; legal: 'vendor:arch'"),
            (["doctor", "--platform", "cuda", "--target", "hip:gfx942"], "which the platform 'cuda' cannot serve"),
            (["doctor", "--target", "tpu:5"], "target: found 'tpu:5', which no platform serves"),
            (["doctor", "--target", "sm90"], "target: found 'sm90'; legal: 'vendor:arch'"),
        ],
    )
    def test_wrong_platform_or_target(self, arguments, said, capsys):
        assert cli.main(arguments) == 2
        assert said in capsys.readouterr().err

    def test_doctor_prints_what_it_found(self, capsys):
        assert cli.main(["doctor"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        for word in ("cpu", "cuda", "rocm", "reference", "V4-Flash", "triton", "not usable"):
            assert word in out

    def test_doctor_tells_of_a_forced_provider(self, monkeypatch, capsys):
        monkeypatch.setenv("SWA_BACKEND_ATTENTION", "nope")
        assert cli.main(["doctor", "--platform", "cpu", "--json"]) == 2
        (backend,) = json.loads(capsys.readouterr().out)["backends"]
        (provider,) = backend["providers"]
        assert provider["models"]["V4-Flash"] == ["SWA_BACKEND_ATTENTION names 'nope'"]
        monkeypatch.setenv("SWA_BACKEND_ATTENTION", "Reference")
        assert cli.main(["doctor", "--platform", "cpu", "--json"]) == 0
        (backend,) = json.loads(capsys.readouterr().out)["backends"]
        assert backend["providers"][0]["models"]["V4-Flash"] == []

    def test_warm_up_without_kernels_shows_no_progress(self, capsys):
        assert cli.main(["warmup", "--platform", "cpu", "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert json.loads(out)["targets"][0]["kernels"] == []

    def test_option_names_fit_80_columns(self, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "80")
        assert cli.main(["replay", "--help"]) == 0
        text = capsys.readouterr().out
        assert "\u2026" not in text
        assert all(name in text for name in ("--max-batched-tokens", "--compressed-layout", "--skip-bad-rows"))

    @pytest.mark.parametrize("platform", [[], ["--platform", "cuda"]])
    def test_doctor_for_a_target(self, platform, capsys):
        assert cli.main(["doctor", *platform, "--target", "cuda:90", "--json"]) == 0
        (backend,) = json.loads(capsys.readouterr().out)["backends"]
        assert (backend["platform"], backend["target"]) == ("cuda", "cuda:90")


class TestOwnCommand:
    @pytest.mark.parametrize(
        ("argv", "orig_argv", "own"),
        [
            (["/usr/bin/swa-backend", "doctor"], ["python", "/usr/bin/swa-backend", "doctor"], True),
            (["-m", "doctor"], ["python", "-m", "swa_backend", "doctor"], True),
            (["-m"], ["python", "-X", "dev", "-Im", "swa_backend"], True),
            (["-m"], ["python", "-mswa_backend"], True),
            (["-m", "-m", "swa_backend"], ["python", "-m", "other", "-m", "swa_backend"], False),
            (["-m"], ["python", "-m", "pytest"], False),
            (["-c"], ["python", "-c", "import swa_backend"], False),
            (["serve.py"], ["python", "serve.py"], False),
            ([""], ["python"], False),
            ([], ["python"], False),
        ],
    )
    def test_recognised_by_how_the_process_was_started(self, monkeypatch, argv, orig_argv, own):
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "orig_argv", orig_argv)
        assert is_own_command() is own

    def test_anything_else_still_gets_the_exception(self):
        done = command([sys.executable, "-c", "import swa_backend"], SWA_BACKEND_PLATFORM="nope")
        assert done.returncode == 1
        assert "PlatformError" in done.stderr
        assert issubclass(PlatformError, Exception)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:44:50.0847330,40,5\n"


class TestReplayRefusals:
    """Bad input ends with one message that names the place, status 2, and nothing on standard output."""

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (AZURE + "2023-11-16 18:44:50.10,x,83\n", "trace:3: ContextTokens: found 'x'"),
            ('{"timestamp":0,"input_length":-4,"output_length":2,"hash_ids":[1]}\n', "trace:1: input_length: found -4"),
            (AZURE + "2023-11-16 18:44:50.10,40000000,5\n", "trace:3: "),
            ("hello\nworld\n", "trace:1: "),
            ("", "an empty file"),
            (None, "No such file"),
        ],
    )
    def test_trace(self, tmp_path, capsys, text, said):
        path = tmp_path / "trace"
        if text is not None:
            path.write_text(text)
        assert cli.main(["replay", "--platform", "cpu", "--trace", str(path), "--json"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = (line for line in err.splitlines() if "error:" in line)
        assert line.startswith(f"swa-backend: error: {path}")
        assert said in line
        assert "legal:" in line

    def test_model_config_without_a_key(self, tmp_path, capsys):
        (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
        assert cli.main(["replay", "--platform", "cpu", "--model", str(tmp_path / "config.json")]) == 2
        err = capsys.readouterr().err
        assert f"error: num_hidden_layers: found nothing in {tmp_path / 'config.json'}" in err

    @pytest.mark.parametrize(
        ("option", "value", "legal"),
        [
            ("--model", "V5", "V4-Flash, V4-Pro"),
            ("--layers", "c2a", "swaonly, c4a, c128a"),
            ("--layers", "", "swaonly"),
        ],
    )
    def test_name_that_is_not_known(self, capsys, option, value, legal):
        assert cli.main(["replay", "--platform", "cpu", option, value]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"error: {option.lstrip('-')}: found" in err
        assert legal in err


def test_replay_shows_the_whole_path_in_a_narrow_terminal(tmp_path, monkeypatch, capsys):
    path = tmp_path / ("long" * 20)
    path.write_text(AZURE)
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["replay", "--platform", "cpu", "--trace", str(path), "--attention", "none", "--pages", "8"]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    rows = [line.split("\u2502") for line in out.splitlines() if "\u2502" in line]
    assert str(path) in "".join(row[2].strip() for row in rows)
