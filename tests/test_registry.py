"""Discovery, the selection rule and its errors, `get_backend`."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import swa_backend
from swa_backend import PlatformError, Target, get_backend
from swa_backend import registry as registry_module
from swa_backend.registry import choose, registry
from tests.fakes import FakePoint, fake_platform, own, registry_of

CPU = own(fake_platform("cpu", preferred=False, rank=100))


def fails() -> None:
    raise ImportError("no module\nnamed vendor_kit")


def leaves() -> None:
    raise SystemExit(3)


@pytest.fixture
def process(monkeypatch):
    """A process of its own for `choose_at_import` and `get_backend`: call it with the registered points."""

    def start(*points: FakePoint) -> registry_module._Process:
        fresh = registry_module._Process()
        fresh.registry = registry_of(*points)
        monkeypatch.setattr(registry_module, "_process", fresh)
        return fresh

    return start


def test_bundled_platforms_are_registered():
    found = registry().all()
    assert [one.name for one in found[:3]] == ["cpu", "cuda", "rocm"]
    assert all(one.bundled and one.problem is None for one in found[:3])


class TestAutomaticChoice:
    def test_smallest_rank_of_the_preferred_bundled_platforms_wins(self):
        second, first = own(fake_platform("b", rank=20)), own(fake_platform("c", rank=10))
        assert choose(registry_of(CPU, second, first), None).platform.name == "c"

    def test_unusable_or_unwanted_platforms_are_passed_over_with_their_reasons(self):
        broken = own(fake_platform("b", usable=False, preferred=True, rank=1))
        idle = own(fake_platform("c", usable=True, preferred=False, rank=2))
        choice = choose(registry_of(broken, idle, own(fake_platform("d", rank=3))), "auto")
        assert choice.platform.name == "d"
        for reason in ("b says False/True", "c says True/False", "d says True/True"):
            assert reason in choice.why

    def test_without_a_preferred_platform_the_first_usable_bundled_one_is_the_fallback(self):
        guest = FakePoint("guest", fake_platform("guest", preferred=False, rank=1))
        assert choose(registry_of(guest, CPU), None).platform.name == "cpu"

    def test_third_party_takes_part_only_when_it_says_so(self):
        assert (
            choose(registry_of(CPU, FakePoint("guest", fake_platform("guest", rank=5))), None).platform.name == "guest"
        )
        assert choose(registry_of(CPU, FakePoint("guest", fake_platform("guest"))), None).platform.name == "cpu"

    def test_third_party_comes_after_ours_whatever_its_rank_and_is_not_even_loaded(self):
        guest = FakePoint("guest", fake_platform("guest", rank=-1000))
        assert choose(registry_of(guest, CPU, own(fake_platform("big", rank=50))), None).platform.name == "big"
        assert guest.loads == []

    @pytest.mark.parametrize("text", [None, "", " ", "auto", " AUTO "])
    def test_spellings(self, text):
        assert choose(registry_of(CPU), text).platform.name == "cpu"

    def test_nothing_usable(self):
        with pytest.raises(PlatformError, match="b says False/False"):
            choose(registry_of(own(fake_platform("b", usable=False, preferred=False, rank=1))), None)

    def test_nothing_installed(self):
        with pytest.raises(PlatformError, match=r"\(none\)"):
            choose(registry_of(), None)

    def test_failing_probe_is_a_reason(self):
        def probe():
            raise RuntimeError("driver on fire")

        bad = own(fake_platform("bad", rank=1, probe=probe))
        odd = own(fake_platform("odd", rank=2, probe=lambda: True))
        choice = choose(registry_of(bad, odd, CPU), None)
        assert choice.platform.name == "cpu"
        assert "driver on fire" in choice.why
        assert "its probe returned a bool" in choice.why


class TestNamedChoice:
    def test_named(self):
        guest = FakePoint("guest", fake_platform("guest", preferred=False))
        choice = choose(registry_of(CPU, guest), " Guest ")
        assert (choice.platform.name, choice.why) == ("guest", "named by SWA_BACKEND_PLATFORM")

    @pytest.mark.parametrize(
        ("name", "said"), [("nope", "no installed package registers"), ("b", "cannot be used here")]
    )
    def test_refused_with_every_platform_and_its_reasons(self, name, said):
        points = CPU, own(fake_platform("b", usable=False)), FakePoint("guest", loader=fails)
        with pytest.raises(PlatformError) as caught:
            choose(registry_of(*points), name)
        message = str(caught.value)
        assert caught.value.field == "SWA_BACKEND_PLATFORM"
        assert repr(name) in message
        assert said in message
        for reason in (
            "cpu (swa-backend 1.5): usable; cpu says True/False",
            "b (swa-backend 1.5): not usable here; b says False/True",
            "guest (acme-kit 1.5): cannot be loaded; loading guest_module:PLATFORM failed: "
            "ImportError: no module named vendor_kit",
        ):
            assert reason in message


@pytest.mark.parametrize(
    ("point", "problem"),
    [
        (FakePoint("guest", loader=fails), "ImportError"),
        (FakePoint("guest", loader=leaves), "SystemExit: 3"),
        (FakePoint("guest", {"name": "guest"}), "is a dict, not a swa_backend.Platform"),
        (
            FakePoint("guest", loader=lambda: fake_platform("guest", interface_version=99)),
            "interface_version: found 99",
        ),
        (FakePoint("guest", fake_platform("other")), "they must be the same"),
        (FakePoint("guest", fake_platform("guest", rank="first")), "auto_rank is a str"),
        (FakePoint("cpu", fake_platform("cpu")), "swa-backend 1.5 already registers the name 'cpu'"),
    ],
)
def test_a_platform_that_cannot_be_loaded_is_kept_with_its_reason(point, problem):
    found = registry_of(point, CPU)
    assert choose(found, None).platform is CPU.thing
    assert choose(found, "cpu").platform is CPU.thing
    refused = [one for one in found.all() if one.platform is None]
    assert [one.name for one in refused] == [point.name]
    assert problem in refused[0].problem
    if point.name != "cpu":
        with pytest.raises(PlatformError, match="which cannot be loaded"):
            found.require(point.name)


class TestImport:
    def test_logs_one_line(self, process, caplog):
        process(CPU)
        with caplog.at_level(logging.INFO, "swa_backend"):
            registry_module.choose_at_import({})
        (record,) = caplog.records
        assert record.name == "swa_backend"
        assert record.getMessage() == "platform cpu: chosen automatically (cpu: cpu says True/False)"

    def test_raises_only_for_a_name(self, process):
        process()
        registry_module.choose_at_import({})
        with pytest.raises(PlatformError, match="no platform that takes part"):
            get_backend()
        with pytest.raises(PlatformError, match="'nope'"):
            registry_module.choose_at_import({"SWA_BACKEND_PLATFORM": "nope"})

    def test_own_command_keeps_the_error_for_its_report(self, process, monkeypatch):
        process(CPU)
        monkeypatch.setattr(registry_module, "is_own_command", lambda: True)
        registry_module.choose_at_import({"SWA_BACKEND_PLATFORM": "nope"})
        with pytest.raises(PlatformError, match="'nope'"):
            get_backend()
        assert get_backend("cpu").name == "cpu"

    def test_a_platform_package_may_be_imported_first(self):
        code = "import swa_platform_cpu as p, swa_backend as s; print(s.get_backend().platform is p.PLATFORM)"
        env = {"SWA_BACKEND_PLATFORM": "cpu"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "True"


class TestGetBackend:
    def test_same_object_for_the_same_arguments(self):
        assert get_backend("cpu") is get_backend("CPU") is get_backend(" cpu")
        assert get_backend("cuda", "cuda:90") is get_backend("cuda", Target("cuda", "90"))
        assert get_backend("cuda", "cuda:90") is not get_backend("cuda", "cuda:100")

    def test_default_is_the_one_chosen_at_import(self, process):
        process(CPU, own(fake_platform("big", rank=1)))
        registry_module.choose_at_import({"SWA_BACKEND_PLATFORM": "cpu"})
        assert get_backend() is get_backend("cpu")

    def test_without_target_the_machine_is_probed(self, process):
        process(CPU, own(fake_platform("b", usable=False)))
        registry_module.choose_at_import({})
        with pytest.raises(PlatformError, match="'b', which cannot be used here"):
            get_backend("b")

    def test_with_target_it_is_not(self, process):
        def probe():
            raise KeyboardInterrupt  # not even a failing probe would hide it

        process(CPU, own(fake_platform("chip", probe=probe, check_target=lambda target: ())))
        backend = get_backend("chip", "chip:7")
        assert (backend.name, str(backend.target)) == ("chip", "chip:7")

    @pytest.mark.parametrize(
        ("name", "target"),
        [
            ("cuda", "cuda:80"),
            ("cuda", "cuda:90"),
            ("cuda", "cuda:120"),
            ("rocm", "hip:gfx942"),
            ("rocm", "hip:gfx1201"),
        ],
    )
    def test_targets(self, name, target):
        assert str(get_backend(name, target).target) == target

    @pytest.mark.parametrize(
        ("name", "target", "said"),
        [
            ("cuda", "hip:gfx942", "not 'cuda'"),
            ("cuda", "cuda:75", "below 80"),
            ("cuda", "cuda:sm_90", "two or three digits"),
            ("rocm", "cuda:90", "not 'hip'"),
            ("rocm", "hip:942", "such as 'gfx942'"),
            ("cpu", "cpu:avx512", "takes no target"),
            ("cuda", "sm90", "vendor:arch"),
        ],
    )
    def test_wrong_target(self, name, target, said):
        with pytest.raises(PlatformError, match=said) as caught:
            get_backend(name, target)
        assert caught.value.field == "target"

    def test_unknown(self):
        with pytest.raises(PlatformError, match="rocm"):
            get_backend("tpu")
        with pytest.raises(PlatformError, match="Pass a string"):
            get_backend(3)


def test_public_names_agree_with_each_other():
    lazy = set(swa_backend._MODULE_OF)
    eager = set(swa_backend.__all__) - lazy - {"__version__"}
    assert lazy <= set(swa_backend.__all__)
    assert all(name in vars(swa_backend) for name in eager)
    with pytest.raises(AttributeError, match="nothing_here"):
        swa_backend.nothing_here  # noqa: B018
