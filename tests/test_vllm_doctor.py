"""The report behind ``swa-backend doctor --vllm``."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from swa_backend import cli
from swa_backend.commands import doctor_command
from swa_backend.integrations.vllm import plugin
from swa_backend.integrations.vllm.doctor import GROUP, examine_vllm
from tests.vllm_fake import SPARSE_SWA, Fake

POINTS = (EntryPoint("swa_backend", "swa_backend_vllm:register", GROUP), EntryPoint("other", "other:go", GROUP))


def test_a_vllm_that_can_be_switched_on() -> None:
    fake = Fake()
    before = fake.sparse_swa.DeepseekV4SWACache.get_attn_backend
    report = examine_vllm(fake.load, {"SWA_BACKEND_VLLM": "attention", "VLLM_PLUGINS": "other,swa_backend"}, POINTS)
    assert json.loads(json.dumps(report.to_dict()))["version"] == "0.33.0"
    assert report.modes == {"metadata": (), "attention": ()}
    assert report.plugin == ()
    assert report.problem is None
    assert any("forward_mqa" in one for one in report.replaces["attention"])
    assert not any("forward_mqa" in one for one in report.replaces["metadata"])
    assert fake.sparse_swa.DeepseekV4SWACache.get_attn_backend is before  # a report replaces nothing
    assert plugin.activation() is None


def test_every_reason_is_told() -> None:
    report = examine_vllm(Fake("0.34.1").load, {"SWA_BACKEND_VLLM": "metadata", "VLLM_PLUGINS": "other"}, POINTS[1:])
    assert report.version == "0.34.1"
    assert len(report.plugin) == 2
    assert report.problem is not None
    for reason in ("no entry point swa_backend", "VLLM_PLUGINS='other' leaves it out", "0.34.1 is installed"):
        assert reason in report.problem


@pytest.mark.parametrize(("value", "problem"), [("", False), (None, False), ("metadata", True), ("nonsense", True)])
def test_without_vllm_only_what_asks_for_it_is_a_problem(value: str | None, problem: bool) -> None:
    def load(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    report = examine_vllm(load, {} if value is None else {"SWA_BACKEND_VLLM": value}, POINTS)
    assert report.version == "none"
    assert "No module named 'vllm'" in report.modes["metadata"][0]
    assert (report.problem is not None) == problem


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake()
    del fake.sparse_swa.get_mla_metadata
    env = {"SWA_BACKEND_VLLM": "metadata"}
    monkeypatch.setattr(doctor_command, "_examine_vllm", lambda: examine_vllm(fake.load, env, POINTS))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--vllm", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["vllm"]["modes"]["metadata"] == [f"{SPARSE_SWA} has no get_mla_metadata"]
    assert "has no get_mla_metadata" in err
    assert cli.main(["doctor", "--vllm"]) == 2
    out, _ = capsys.readouterr()
    assert "vLLM 0.33.0 (made for 0.33.x)" in out
    assert "metadata (asked for)" in out
    assert "9 window metadata builders" in out
    assert "deepseek_v4.nvidia.flashmla.DeepseekV4FlashMLAAttention.forward_mqa" in out
    assert cli.main(["doctor", "--json"]) == 0
    assert "vllm" not in json.loads(capsys.readouterr().out)
