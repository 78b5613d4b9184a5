"""Which platform a machine gets: device nodes, visibility variables, what torch was built for (X1 to X3)."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import swa_platform_cpu
import swa_platform_cuda
import swa_platform_rocm
from swa_backend.backend import Backend
from swa_backend.doctor import _shapes
from swa_backend.errors import PlatformError, ProviderError
from swa_backend.layer_types import LayerType
from swa_backend.machine import Machine, hides_devices, load_library
from swa_backend.platform import CacheRole, Target
from swa_backend.registry import Choice, choose
from swa_platform_cuda.probe import probe as cuda_probe
from swa_platform_rocm.probe import probe as rocm_probe
from tests.fakes import fake_machine, fake_nvml, own, registry_of

NVML = "libnvidia-ml.so.1"


def chosen_on(machine: Machine, requested: str | None = None) -> Choice:
    """The choice that the three bundled platforms make on a machine."""
    cuda = replace(swa_platform_cuda.PLATFORM, probe=lambda: cuda_probe(machine))
    rocm = replace(swa_platform_rocm.PLATFORM, probe=lambda: rocm_probe(machine))
    return choose(registry_of(own(swa_platform_cpu.PLATFORM), own(cuda), own(rocm)), requested)


def test_x1_the_torch_build_decides_between_vendors():
    both = {"nodes": ("/dev/kfd", "/dev/nvidia0", "/dev/nvidiactl"), "libraries": {NVML: fake_nvml(1)}}
    assert chosen_on(fake_machine(hip="6.4", **both)).platform.name == "rocm"
    assert chosen_on(fake_machine(cuda="12.8", **both)).platform.name == "cuda"
    assert chosen_on(fake_machine(**both)).platform.name == "cpu"


def test_x1_the_variable_overrides_what_is_found():
    machine = fake_machine(hip="6.4", nodes=("/dev/kfd", "/dev/nvidia0"))
    assert chosen_on(machine, "cpu").platform.name == "cpu"
    assert chosen_on(machine, "rocm").platform.name == "rocm"
    with pytest.raises(PlatformError, match="not built for CUDA"):
        chosen_on(machine, "cuda")


@pytest.mark.parametrize("library", [{}, {NVML: fake_nvml(0, init=9)}, {NVML: object()}])
def test_x2_nvml_missing_or_failing_does_not_matter(library):
    assert chosen_on(fake_machine(cuda="12.8", nodes=("/dev/nvidia3",), libraries=library)).platform.name == "cuda"


def test_x3_amd_device_node_is_enough():
    assert chosen_on(fake_machine(hip="6.4", nodes=("/dev/kfd",))).platform.name == "rocm"


def test_x3_without_a_device_cpu_is_chosen_and_said_why():
    choice = chosen_on(fake_machine(hip="6.4"))
    assert choice.platform.name == "cpu"
    assert "torch 2.13.0 is built for HIP 6.4" in choice.why
    assert "no AMD device: no /dev/kfd" in choice.why


@pytest.mark.parametrize(
    ("machine", "present"),
    [
        ({"nodes": ("/dev/nvidia0",)}, True),
        ({"nodes": tuple(f"/dev/nvidia{i}" for i in range(16))}, True),
        ({"nodes": ("/dev/nvidiactl",)}, True),
        ({"nodes": ("/dev/nvidia-uvm", "/dev/nvidia-modeset")}, False),
        ({"nodes": ("/dev/dxg",)}, False),
        ({"nodes": ("/dev/dxg",), "libraries": {"libcuda.so.1": object()}}, True),
        ({"libraries": {"libcuda.so.1": object()}}, False),
        ({"libraries": {NVML: fake_nvml(2)}}, True),
        ({"libraries": {NVML: fake_nvml(0)}}, False),
        ({"libraries": {NVML: fake_nvml(2, init=9)}}, False),
        ({"nodes": ("/dev/kfd",)}, False),
    ],
)
def test_nvidia_presence(machine, present):
    found = cuda_probe(fake_machine(cuda="12.8", **machine))
    assert (found.usable, found.preferred) == (present, present)
    assert len(found.reasons) == 2


@pytest.mark.parametrize("value", ["", " ", "-1", "-1,0", "NoDevFiles", ",0"])
@pytest.mark.parametrize(
    ("build", "node", "variable"),
    [
        ("cuda", "/dev/nvidia0", "CUDA_VISIBLE_DEVICES"),
        ("hip", "/dev/kfd", "HIP_VISIBLE_DEVICES"),
        ("hip", "/dev/kfd", "ROCR_VISIBLE_DEVICES"),
        ("hip", "/dev/kfd", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_variable_set_to_nothing_hides_the_devices(build, node, variable, value):
    choice = chosen_on(fake_machine(nodes=(node,), env={variable: value}, **{build: "1.0"}))
    assert choice.platform.name == "cpu"
    assert f"{variable}={value!r} hides every device" in choice.why


@pytest.mark.parametrize("value", ["0", "7", "0,1,2", "0,-1", "GPU-8932f937", "MIG-1d7e"])
def test_a_variable_that_names_a_device_hides_nothing(value):
    assert not hides_devices(value)
    assert (
        chosen_on(fake_machine(cuda="12.8", nodes=("/dev/nvidia0",), env={"CUDA_VISIBLE_DEVICES": value})).platform.name
        == "cuda"
    )


def test_variables_of_the_other_vendor_do_not_matter():
    machine = fake_machine(cuda="12.8", nodes=("/dev/nvidia0",), env={"HIP_VISIBLE_DEVICES": ""})
    assert chosen_on(machine).platform.name == "cuda"


def test_contradicting_variables_are_reported_on_rocm():
    def reasons(**env: str) -> str:
        found = rocm_probe(fake_machine(hip="6.4", nodes=("/dev/kfd",), env=env))
        assert found.usable
        return "; ".join(found.reasons)

    assert "contradict" in reasons(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1")
    assert "contradict" not in reasons(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="0")
    assert "contradict" not in reasons(HIP_VISIBLE_DEVICES="0", ROCR_VISIBLE_DEVICES="1")


def test_cpu_is_usable_and_never_preferred():
    found = swa_platform_cpu.PLATFORM.probe()
    assert (found.usable, found.preferred) == (True, False)


def test_the_real_machine_reports_what_torch_was_built_for():
    import torch

    machine = Machine.here()
    assert machine.torch_version == torch.__version__
    assert machine.built_for("cuda") == torch.version.cuda
    assert machine.built_for("hip") == torch.version.hip
    assert "git_version" not in machine.torch_build
    assert machine.nodes(("/dev/null",)) == ("/dev/null",)
    assert load_library("libno_such_library.so.9") is None


@pytest.mark.parametrize(
    ("role", "arch", "dialect"),
    [
        (CacheRole.SWA, "gfx942", "fnuz"),
        (CacheRole.COMPRESSED, "gfx942", "ocp"),
        (CacheRole.SWA, "gfx950", "ocp"),
        (CacheRole.COMPRESSED, "gfx950", "ocp"),
    ],
)
def test_fp8_dialect_on_amd(role, arch, dialect):
    assert swa_platform_rocm.PLATFORM.cache_dialect(role, Target("hip", arch)) == dialect


@pytest.mark.parametrize("platform", [swa_platform_cuda.PLATFORM, swa_platform_rocm.PLATFORM])
@pytest.mark.parametrize("part", ["load_operations", "load_warmup"])
def test_missing_triton_is_named_with_the_extra_that_brings_it(platform, part, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ProviderError, match=rf"triton.*swa-backend\[{platform.name}\]"):
        getattr(platform, part)()


@pytest.mark.parametrize("platform", [swa_platform_cuda.PLATFORM, swa_platform_rocm.PLATFORM])
def test_parts_of_a_gpu_platform(platform):
    builder_cls = platform.load_builder()
    assert builder_cls.wants_ragged_rows == (platform.name == "rocm")
    assert platform.load_providers(None)[-1].name == "reference"
    target = Target("cuda", "120") if platform.name == "cuda" else None
    assert set(platform.load_scheduler(target).fresh_plans([LayerType.SWAONLY]).values()) == {None}


def test_x5_triton_is_refused_on_a_chip_without_bf16_products(monkeypatch):
    pytest.importorskip("triton")
    import torch

    triton = next(one for one in swa_platform_cuda.PLATFORM.load_providers(None) if one.name == "triton")
    shape = next(iter(_shapes(Backend(swa_platform_cuda.PLATFORM, Target("cuda", "90"))).values()))
    assert triton.supports(shape) == ()
    old = "the compute capability 75 is below 80, the first with bf16"
    for capability, reasons in (((7, 5), (old,)), ((8, 0), ())):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert triton.supports(replace(shape, device=torch.device("cuda", 0))) == reasons
