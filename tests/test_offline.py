"""The compile-only driver: binaries for chips that are not here, their limits, a cache that others find."""
# ruff: noqa: N803

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from swa_backend.errors import ConfigError, PlatformError  # noqa: E402
from swa_backend.kernels import jit, offline  # noqa: E402
from swa_backend.kernels.offline import cache_mismatches, compile_only, rebase_cache  # noqa: E402

NVIDIA = ("cuda:80", "cuda:89", "cuda:90", "cuda:100", "cuda:120")
AMD = ("hip:gfx942", "hip:gfx950")
ELF_MACHINE = {"hip:gfx942": 0x4C, "hip:gfx950": 0x4F}  # EF_AMDGPU_MACH, the low byte of e_flags
ROOT = Path(__file__).parents[1]


@triton.jit
def add_one(values, count, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(values + i, tl.load(values + i, mask=i < count) + 1, mask=i < count)


@triton.jit
def product(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i)))


@pytest.mark.compiled
@pytest.mark.parametrize("target", NVIDIA + AMD)
def test_binary_is_for_the_target(target):
    values = torch.zeros(100, dtype=torch.int32)
    with compile_only(target) as driver:
        add_one[(2, 1, 1)](values, 100, 64)
    (compiled,) = driver.compiled
    arch = target.split(":")[1]
    if target in NVIDIA:
        assert f".target sm_{arch}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
    else:
        assert compiled.asm["hsaco"][:4] == b"\x7fELF"
        assert compiled.asm["hsaco"][48] == ELF_MACHINE[target]
    assert driver.launches == [("add_one", (2, 1, 1))]
    assert not values.any()


@pytest.mark.compiled
def test_launches_are_handed_over_by_name():
    seen = []

    class Noting(offline.OfflineDriver):
        def on_launch(self, metadata, grid, arguments):
            seen.append((metadata.name, grid, dict(arguments)))

    values = torch.zeros(100, dtype=torch.int32)
    with compile_only(Noting("hip:gfx942")):
        add_one[(2,)](values, 77, 64)
    assert seen == [("add_one", (2, 1, 1), {"values": values, "count": 77})]


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["cuda:120", "hip:gfx942"])
def test_too_much_shared_memory_is_refused(target):
    matrices = [torch.empty(256, 256, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    with compile_only(target), pytest.raises(OutOfResources, match=rf"shared memory \(product on {target}\)"):
        product[(1,)](*matrices, torch.empty(256, 256, device="meta"), 256, num_warps=8)


@pytest.mark.compiled
def test_too_many_threads_are_refused():
    with compile_only("hip:gfx942"), pytest.raises(OutOfResources, match="threads"):
        add_one[(1,)](torch.empty(4096, dtype=torch.int32), 1, 4096, num_warps=32)


@pytest.mark.compiled
def test_nothing_is_left_behind(tmp_path):
    active, hooks = triton.runtime.driver._active, triton.knobs.runtime.jit_post_compile_hook
    cache = triton.knobs.cache.dir

    def fail():
        with compile_only("cuda:90", cache=tmp_path):
            add_one[(1,)](torch.zeros(4, dtype=torch.int32), 4, 64)
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="caller"):
        fail()
    assert triton.runtime.driver._active is active
    assert triton.knobs.runtime.jit_post_compile_hook is hooks
    assert triton.knobs.cache.dir == cache
    assert not any(index >= 1 << 20 for index in add_one.device_caches)


@pytest.mark.compiled
def test_two_targets_do_not_meet():
    values = torch.zeros(4, dtype=torch.int32)
    with compile_only("cuda:90") as outer:
        add_one[(1,)](values, 4, 64)
        with compile_only("hip:gfx950") as inner:
            add_one[(1,)](values, 4, 64)
        add_one[(1,)](values, 4, 64)
    assert ["cubin" in k.asm for k in outer.compiled] == [True]
    assert ["hsaco" in k.asm for k in inner.compiled] == [True]


@pytest.mark.compiled
def test_declared_kernels_compile_without_tensors():
    """A `Kernel` of the launch layer, which is what warm-up for a fleet compiles, under an explicit key."""
    fill = jit.Kernel(
        _fill,
        {"rows": "*i32", "count": "i32", "stride": "i64"},
        {"cuda": jit.Tuning(2, tiles={"TILE": 64}), "hip": jit.Tuning(1, tiles={"TILE": 128})},
        lambda config, dialects: (),
    )
    jit._registry.pop(fill.name)
    for target, warps, tile in (("cuda:90", 2, 64), ("hip:gfx942", 1, 128)):
        with compile_only(target) as driver:
            launcher = fill.on(torch.device("cpu"), VALUE=3)
            launcher.compile()
            assert str(launcher.target) == target
            assert launcher.tiles["TILE"] == tile
            # Neither the size nor the alignment of what comes later compiles again.
            for size, stride in ((7, 1), (16, 16), (1 << 20, 1 << 33)):
                launcher.launch((1, 1, 1), torch.zeros(size, dtype=torch.int32)[1:], size - 1, stride)
        assert len(driver.compiled) == 1
        assert driver.compiled[0].metadata.num_warps == warps
        assert len(driver.launches) == 3


def _fill(rows, count, stride, VALUE: tl.constexpr, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    tl.store(rows + i * stride, VALUE, mask=i < count)


FILL = """
import sys, torch
from swa_backend.kernels.offline import compile_only
from tests.test_offline import add_one, product
with compile_only(sys.argv[1], cache=sys.argv[2]):
    add_one[(1,)](torch.zeros(8, dtype=torch.int32), 8, 64)
    matrix = torch.empty(32, 32, dtype=torch.bfloat16)
    product[(1,)](matrix, matrix, torch.empty(32, 32), 32)
"""


def _kernels(cache):
    files = (path for path in cache.glob("*/*") if "__grp__" not in path.name)
    return {path.relative_to(cache): path.stat().st_mtime_ns for path in files}


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_a_moved_cache_is_found_by_another_process(target, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    matrix = torch.empty(32, 32, dtype=torch.bfloat16)
    with compile_only(target, cache=here, mounted_at=there):
        add_one[(1,)](torch.zeros(8, dtype=torch.int32), 8, 64)
    with compile_only(target, cache=here, mounted_at=there) as driver:  # adds to what is there, and finds it
        before = _kernels(here)
        add_one[(1,)](torch.zeros(8, dtype=torch.int32), 8, 64)
        assert _kernels(here) == before
        product[(1,)](matrix, matrix, torch.empty(32, 32), 32)
    assert len(driver.compiled) == 2
    here.rename(there)
    before = _kernels(there)
    assert len([path for path in before if path.suffix in (".cubin", ".hsaco")]) == 2
    subprocess.run([sys.executable, "-c", FILL, target, str(there)], cwd=ROOT, env=dict(os.environ), check=True)
    assert _kernels(there) == before


@pytest.mark.compiled
def test_a_cache_moved_without_saying_so_is_not_found(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with compile_only("hip:gfx942", cache=here):
        add_one[(1,)](torch.zeros(8, dtype=torch.int32), 8, 64)
    here.rename(there)
    (group,) = there.glob("*/__grp__*.json")
    assert all(path.startswith(str(here)) for path in json.loads(group.read_text())["child_paths"].values())
    assert rebase_cache(there) == 1
    assert all(Path(path).exists() for path in json.loads(group.read_text())["child_paths"].values())


@pytest.mark.compiled
def test_conditions_of_a_cache(tmp_path):
    with compile_only("cuda:90", cache=tmp_path):
        pass
    assert cache_mismatches(tmp_path, "cuda:90") == ()
    assert cache_mismatches(tmp_path, "cuda:80") == (f"{tmp_path} was not filled for cuda:80",)
    stored = tmp_path / "swa_backend-cuda-90.json"
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "Triton version": "3.5.0"}))
    (reason,) = cache_mismatches(tmp_path, "cuda:90")
    assert reason == f"Triton version: filled with '3.5.0', here {triton.__version__!r}"


@pytest.mark.parametrize("target", ["gfx942", "cuda:", "cuda:75", "hip:gfx906"])
def test_unknown_targets_are_refused(target):
    with pytest.raises(PlatformError, match="target"):
        offline.chip_for(target)


def test_refused_where_triton_interprets(request):
    if request.config.getoption("--kernels") != "interpret":
        pytest.skip("Triton does not interpret here")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"), compile_only("cuda:90"):
        pass
