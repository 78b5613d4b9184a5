"""What importing the library does not do (X4)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import swa_backend

CODE = """
import os, sys
import torch
before = set(sys.modules)
import swa_backend
new = set(sys.modules) - before
vendor = [name for name in ("aiter", "flash_mla", "pynvml", "amdsmi", "vllm", "sgl_kernel") if name in sys.modules]
assert not vendor, vendor
brought = [name for name in ("triton", "typer", "rich", "numpy") if name in new]
assert not brought, brought
parts = ("swa_backend.kernels", "swa_backend.reference", "swa_backend.replay", "swa_backend.commands")
heavy = [name for name in new if name.startswith(parts)]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
swa_backend.get_backend()
assert not torch.cuda.is_initialized()

child = os.fork()
if child == 0:
    try:
        assert not torch.cuda._is_in_bad_fork()
        if torch.cuda.is_available():
            torch.ones(1, device="cuda").item()
        assert swa_backend.get_backend().name
        assert torch.ones(2).sum().item() == 2
    except BaseException:
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("fine")
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_x4_import_initialises_nothing_and_a_forked_child_works():
    done = python(CODE, SWA_BACKEND_PLATFORM="auto")
    assert done.stdout == "fine\n", done.stderr


def test_importing_prints_nothing():
    done = python("import swa_backend", SWA_BACKEND_PLATFORM="auto")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("name", ["nope", "cuda", "rocm"])
def test_a_platform_that_cannot_be_had_stops_the_import_and_leaves_it_repeatable(name):
    code = """
import os
try:
    import swa_backend
except Exception as error:
    assert type(error).__name__ == "PlatformError", error
    assert all(name in str(error) for name in ("cpu", "cuda", "rocm")), error
else:
    raise SystemExit("it was imported")
os.environ["SWA_BACKEND_PLATFORM"] = "cpu"
import swa_backend
print(swa_backend.get_backend().name)
"""
    done = python(code, SWA_BACKEND_PLATFORM=name, CUDA_VISIBLE_DEVICES="")
    assert done.stdout == "cpu\n", done.stderr


def test_the_variable_is_read_once():
    code = """
import os, swa_backend
os.environ["SWA_BACKEND_PLATFORM"] = "nope"
print(swa_backend.get_backend().name)
"""
    assert python(code, SWA_BACKEND_PLATFORM="cpu").stdout == "cpu\n"


TORCH_ALONE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "typer", "click", "rich", "triton", "hypothesis", "pytest"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
from swa_backend import *

config = BackendConfig(ModelConfig.packaged("V4-Flash"), SchedulerConfig(256, 4, 64))
backend = get_backend("cpu")
cache = DeepseekV4SWACache(512, 128, torch.uint8, "layer", CacheConfig(), backend)
cache.bind_kv_cache(cache.allocate(4, "cpu"))
group = CompressedGroup("c4a", 4, 256)
builder = backend.get_builder_cls()(
    cache.get_kv_cache_spec(config), ["layer"], config, "cpu", compressed_groups=[group]
)
starts, lens = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
table, slots = torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([64, 128, 129, 130])
batch = CommonAttentionMetadata(
    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, seq_lens_cpu_upper_bound=lens, num_reqs=2,
    num_actual_tokens=4, max_query_len=3, max_seq_len=3, block_table_tensor=table, slot_mapping=slots,
)
metadata = builder.build(0, batch, groups={"c4a": (table, slots)})
write_kv(torch.ones(4, 512, dtype=torch.bfloat16), cache, slots)
out, lse = attend(
    torch.ones(4, 64, 512, dtype=torch.bfloat16), metadata, cache, torch.full((64,), -torch.inf), return_lse=True
)
assert (out == 1).all(), out
expected = 512 ** 0.5 + torch.tensor([1.0, 1.0, 2.0, 3.0]).log()
assert torch.allclose(lse, expected[:, None].expand(4, 64)), lse
merge_states(out, lse, out, lse), apply_sink(out, lse, torch.zeros(64)), workspace_bytes(config)
assert backend.warmup(config) == ()
loaded = {"numpy", "typer", "rich", "triton"} & set(sys.modules)
assert not loaded, loaded
print("fine")
"""


def test_the_core_needs_torch_alone():
    done = python(TORCH_ALONE, SWA_BACKEND_PLATFORM="auto", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.stdout == "fine\n", done.stderr


def test_broken_vendor_packages_do_not_break_the_import(tmp_path):
    """Whatever is installed and cannot be imported, or takes the process down with it, is not even tried."""
    for name in ("flash_mla", "vllm", "sgl_kernel", "aiter", "triton"):
        (tmp_path / f"{name}.py").write_text(f"import os, sys\nsys.stderr.write('{name}!')\nos._exit(7)\n")
    code = """
import swa_backend
from swa_backend.registry import registry
print(swa_backend.get_backend("cpu").name, *(one.name for one in registry().all()))
"""
    done = python(code, PYTHONPATH=str(tmp_path), SWA_BACKEND_PLATFORM="auto")
    assert (done.stdout, done.stderr) == ("cpu cpu cuda rocm\n", "")


# Names of the calls that an engine makes, beside the classes in the annotations of these.
ENGINE_NAMES = (
    "BackendConfig ModelConfig SchedulerConfig SpeculativeConfig get_backend DeepseekV4SWACache CompressedCache "
    "CommonAttentionMetadata write_kv gather_kv attend map_topk merge_states apply_sink workspace_bytes "
    "SwaBackendError ConfigError BatchError CacheError PlatformError ProviderError TraceError ValidationError"
)


def test_every_call_of_an_engine_is_a_public_name():
    assert set(ENGINE_NAMES.split()) <= set(swa_backend.__all__)


def test_every_error_is_of_one_family():
    errors = [name for name in swa_backend.__all__ if name.endswith("Error")]
    assert len(errors) == 8
    assert all(issubclass(getattr(swa_backend, name), swa_backend.SwaBackendError) for name in errors)


def test_every_public_name_can_be_imported():
    done = python("import swa_backend\nfor name in swa_backend.__all__: getattr(swa_backend, name)\nprint('fine')")
    assert done.stdout == "fine\n", done.stderr
