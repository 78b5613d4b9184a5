"""Whether a machine gets the ROCm platform, and which chips it serves: X1 to X3, X5, X6 and what lies between them."""

from __future__ import annotations

import logging
import subprocess
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.backend import Backend
from swa_backend.errors import PlatformError
from swa_backend.platform import Target
from swa_backend.provider_choice import choose_provider
from swa_backend.registry import get_backend
from swa_platform_rocm import PLATFORM
from swa_platform_rocm.builder import _check_chip
from swa_platform_rocm.chips import reasons_against, remark_on
from swa_platform_rocm.probe import check_target
from swa_platform_rocm.probe import probe as rocm_probe
from tests.fakes import fake_machine, fake_nvml
from tests.rocm_support import rocm_backend, rocm_builder
from tests.support import make_config
from tests.test_probes import NVML, chosen_on

NODE = ("/dev/kfd",)
VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def seen_with(**env: str) -> tuple[bool, str]:
    found = rocm_probe(fake_machine(hip="6.4", nodes=NODE, env=env))
    assert found.usable == found.preferred
    return found.usable, "; ".join(found.reasons)


@pytest.mark.parametrize("nvml", [fake_nvml(1), fake_nvml(8), object()])
def test_x1_hip_build_and_amd_device_beside_an_nvidia_one(nvml: Any) -> None:
    machine = fake_machine(hip="6.4", nodes=("/dev/kfd", "/dev/nvidia0", "/dev/nvidiactl"), libraries={NVML: nvml})
    choice = chosen_on(machine)
    assert choice.platform.name == "rocm"
    assert "torch 2.13.0 is not built for CUDA" in choice.why
    assert chosen_on(machine, "cpu").platform.name == "cpu"
    with pytest.raises(PlatformError, match="not built for CUDA"):
        chosen_on(machine, "cuda")


def test_x2_a_cuda_build_is_not_taken_for_rocm_however_much_of_amd_there_is() -> None:
    machine = fake_machine(cuda="12.8", nodes=("/dev/kfd", "/dev/nvidia0"), env={"HIP_VISIBLE_DEVICES": "0"})
    assert chosen_on(machine).platform.name == "cuda"
    found = rocm_probe(machine)
    assert not found.usable
    assert "torch 2.13.0 is not built for HIP" in found.reasons


def test_x3_neither_amdsmi_nor_a_count_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("counted"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked the driver"))
    assert seen_with() == (
        True, "torch 2.13.0 is built for HIP 6.4; an AMD device is present (/dev/kfd)",
    )  # fmt: skip


def test_x3_without_a_device_cpu_and_why() -> None:
    choice = chosen_on(fake_machine(hip="6.4", nodes=("/dev/nvidia0",)))
    assert choice.platform.name == "cpu"
    assert "no AMD device: no /dev/kfd" in choice.why


@pytest.mark.parametrize("values", list(product((None, "", "-1", "0", "0,1"), repeat=3)))
def test_every_combination_of_the_three_variables(values: tuple[str | None, ...]) -> None:
    """Hidden where one of them hides; a conflict is told in any case, and only a conflict."""
    env = {name: value for name, value in zip(VARIABLES, values, strict=True) if value is not None}
    usable, said = seen_with(**env)
    assert usable == (not {"", "-1"} & set(env.values()))
    for name, value in env.items():
        assert (f"{name}={value!r} hides every device" in said) == (value in ("", "-1"))
    _, hip, cuda = values
    assert ("contradict each other" in said) == (None not in (hip, cuda) and hip != cuda)


@pytest.mark.parametrize(
    ("env", "usable"),
    [
        ({"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "0"}, True),
        ({"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}, False),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1,7"}, True),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2"}, False),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, True),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1f2e", "HIP_VISIBLE_DEVICES": "GPU-1f2e"}, True),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1f2e", "HIP_VISIBLE_DEVICES": "1"}, False),
        ({"HIP_VISIBLE_DEVICES": "7"}, True),
    ],
)
def test_hip_counts_within_what_rocr_leaves(env: dict[str, str], usable: bool) -> None:
    """The numbers of one list are not those of the other: a common mistake that leaves no device at all."""
    found, said = seen_with(**env)
    assert found == usable
    assert ("no device is left" in said) == (not usable)
    if not usable:
        assert f"ROCR_VISIBLE_DEVICES={env['ROCR_VISIBLE_DEVICES']!r}" in said
        assert chosen_on(fake_machine(hip="6.4", nodes=NODE, env=env)).platform.name == "cpu"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201", "gfx1250"])
def test_chips_that_are_served(arch: str) -> None:
    assert check_target(Target("hip", arch)) == ()
    remark = remark_on(arch)
    assert (remark is None) == (arch in ("gfx942", "gfx950"))
    assert remark is None or "no test executes them" in remark


@pytest.mark.parametrize("arch", ["gfx906", "gfx908", "gfx803", "gfx1030", "gfx940"])
def test_x5_chips_that_are_refused_say_why(arch: str) -> None:
    (reason,) = check_target(Target("hip", arch))
    assert reason.startswith(f"{arch} has no matrix units")
    with pytest.raises(PlatformError, match=f"{arch} has no matrix units"):
        get_backend("rocm", target=f"hip:{arch}")


@pytest.mark.parametrize("arch", ["942", "gfx", "gfx94z", "sm90"])
def test_what_is_no_architecture_is_told_from_one_that_is_not_served(arch: str) -> None:
    (reason,) = reasons_against(arch)
    assert "is not written as 'gfx'" in reason
    assert check_target(Target("cuda", arch))[0] == "the vendor is 'cuda', not 'hip'"


def test_x5_a_device_is_refused_when_the_builder_is_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at import, which asks no driver, and not deep in a forward."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(gcnArchName="gfx906:sramecc+", multi_processor_count=60)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    backend = Backend(rocm_backend("cpu").platform)  # no target: the device decides
    builder_cls = backend.get_builder_cls()
    spec = SimpleNamespace()
    with pytest.raises(PlatformError, match="gfx906 has no matrix units"):
        builder_cls(spec, ["layers.0"], make_config(), "cpu")  # type: ignore[arg-type]


def test_x5_gfx1201_is_served_with_reasons_and_a_remark(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    _check_chip.cache_clear()  # which says it once a process
    with caplog.at_level(logging.WARNING, "swa_backend"):
        builder = rocm_builder(make_config(), torch.device("cpu"), "hip:gfx1201")
        rocm_builder(make_config(), torch.device("cpu"), "hip:gfx1201")
    assert [record.getMessage() for record in caplog.records if "gfx1201" in record.getMessage()] == [
        "gfx1201: kernels are compiled for it, but no test executes them; gfx942 and gfx950 are tested"
    ]
    assert builder.provider.name != "aiter"
    backend = builder.backend
    assert choose_provider(backend, builder.shape).name == builder.provider.name
    aiter = backend.providers[0]
    assert aiter.supports(builder.shape) == ("it reads this cache on gfx950 only; the target is gfx1201",)


def test_x6_nothing_of_the_vendor_is_imported_by_loading_the_platform() -> None:
    """Not by the platform's parts either, until a device is known to be a gfx950."""
    pytest.importorskip("triton")
    code = (
        "import sys; from swa_backend import get_backend;"
        "b = get_backend('rocm', target='hip:gfx950'); b.get_builder_cls(), b.operations, b.scheduler, b.providers;"
        "from swa_backend.doctor import examine; examine('rocm', 'hip:gfx950');"
        "print([m for m in sys.modules if m.partition('.')[0] in ('aiter', 'amdsmi', 'flash_mla')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_scheduler_and_the_operations_are_those_of_every_chip() -> None:
    for target in (None, Target("hip", "gfx942"), Target("hip", "gfx950")):
        assert set(PLATFORM.load_scheduler(target).fresh_plans(("swaonly",)).values()) == {None}  # type: ignore[arg-type]
