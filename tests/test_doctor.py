"""The report behind ``swa-backend doctor``."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from swa_backend import PlatformError, packaged_models
from swa_backend import registry as registry_module
from swa_backend.cli import main
from swa_backend.doctor import examine
from tests.fakes import FakePoint, fake_platform, own, registry_of


@pytest.fixture
def process(monkeypatch):
    """Registers these points and chooses as at import."""

    def start(*points: FakePoint, requested: str | None = None) -> None:
        fresh = registry_module._Process()
        fresh.registry = registry_of(*points)
        monkeypatch.setattr(registry_module, "_process", fresh)
        monkeypatch.setattr(registry_module, "is_own_command", lambda: True)
        registry_module.choose_at_import({"SWA_BACKEND_PLATFORM": requested} if requested else {})

    return start


def test_the_real_report_is_plain_data(monkeypatch):
    monkeypatch.setenv("SWA_BACKEND_VALIDATE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = json.loads(json.dumps(examine().to_dict()))
    assert report["chosen"] == registry_module.get_backend().name
    assert report["error"] is None
    assert {"swa-backend", "python", "torch", "triton", "typer", "rich"} <= set(report["versions"])
    assert report["environment"]["SWA_BACKEND_VALIDATE"] == "1"
    assert report["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert [one["name"] for one in report["platforms"][:3]] == ["cpu", "cuda", "rocm"]
    assert all(one["reasons"] for one in report["platforms"])
    (cpu,) = (one for one in report["backends"] if one["platform"] == "cpu")
    assert cpu["problem"] is None
    (reference,) = cpu["providers"]
    assert reference["name"] == "reference"
    assert reference["models"] == {name: [] for name in packaged_models()}


def test_reasons_against_a_provider_and_one_that_cannot_be_loaded(process):
    def broken(target):
        raise ImportError("libkit.so.3 is missing")

    picky = SimpleNamespace(name="picky", supports=lambda shape: ("too many heads",) if shape.num_heads > 64 else ())
    process(own(fake_platform("good", rank=1, load_providers=lambda target: (picky,))))
    (backend,) = examine().backends
    assert backend.providers[0].models["V4-Flash"] == ()
    assert backend.providers[0].models["V4-Pro"] == ("too many heads",)

    process(own(fake_platform("bad", rank=1, load_providers=broken)))
    (backend,) = examine().backends
    assert backend.problem == "ImportError: libkit.so.3 is missing"


def test_broken_packages_and_a_failed_choice_are_part_of_the_report(process):
    def fails():
        raise ImportError("no vendor kit")

    process(own(fake_platform("cpu", rank=1)), FakePoint("guest", loader=fails), requested="nope")
    report = examine()
    assert report.chosen is None
    assert "'nope'" in report.error
    guest = report.platforms[1]
    assert not guest.usable
    assert "no vendor kit" in guest.reasons[0]


def test_a_target_limits_the_providers_to_what_was_asked_for():
    report = examine("cuda", "cuda:90")
    assert [(one.platform, one.target) for one in report.backends] == [("cuda", "cuda:90")]
    with pytest.raises(PlatformError, match="cannot serve"):
        examine("cuda", "hip:gfx942")
    with pytest.raises(PlatformError, match="no installed package"):
        examine("tpu")


def test_a_forced_provider_that_there_is_not_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "referense")
    assert main(["doctor", "--platform", "cpu"]) == 2
    assert "SWA_BACKEND_ATTENTION: found 'referense'; legal: reference." in " ".join(capsys.readouterr().err.split())
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "reference")
    assert main(["doctor", "--platform", "cpu"]) == 0
