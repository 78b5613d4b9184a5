"""Which FlashMLA is taken, and why the others are not (field cases X5 to X7), with made-up installations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend.cache_layout import get_layout
from swa_backend.platform import Target
from swa_backend.provider import AttentionShape
from swa_platform_cuda.flashmla_discovery import LIBRARY_VARIABLE, Finder, find_flashmla
from swa_platform_cuda.flashmla_provider import FlashMLAAttention
from tests.flashmla_fake import (
    DECODE_SCHEMA,
    PREFILL_SCHEMA,
    SM100,
    UPSTREAM_2026_09_30,
    V4,
    VLLM,
    fake_finder,
    fake_package,
    registered,
)

NO_EXTRA = DECODE_SCHEMA.replace("Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, ", "")
NO_LENGTHS = PREFILL_SCHEMA.replace("Tensor? topk_length, ", "")
V4_PAIR = {("fp8_ds_mla", "fp8_ds_mla")}


def get_mla_metadata(*args: Any, **kwargs: Any) -> Any:
    return object(), None


def flash_mla_with_kvcache(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: Any, tile_scheduler_metadata: Any,
    num_splits: Any = None, softmax_scale: Any = None, causal: Any = False, is_fp8_kvcache: Any = False,
    indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices_in_kvcache: Any = None,
    topk_length: Any = None, extra_topk_length: Any = None,
) -> Any:  # fmt: skip
    return q + 1, "lse"


def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: Any = 512, attn_sink: Any = None, topk_length: Any = None
) -> Any:
    return q + 2, "logits", "lse"


FUNCTIONS = {
    "get_mla_metadata": get_mla_metadata,
    "flash_mla_with_kvcache": flash_mla_with_kvcache,
    "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
}


def package(root: Path, name: str, library: str, contents: bytes = V4 + b"4sm906decode6sparse") -> Path:
    folder = root / name
    folder.mkdir()
    (folder / library).write_bytes(contents)
    return folder


def explode(*_: Any) -> Any:
    pytest.fail("something of a vendor's was imported or loaded")


def shape(**changes: Any) -> AttentionShape:
    v4 = get_layout("fp8_ds_mla")
    values: dict[str, Any] = {
        "num_heads": 64, "head_dim": 512, "swa_layout": v4, "swa_page_tokens": 64, "compressed_layouts": (v4,),
        "decode_widths": (128,), "batch_invariant": False,
    }  # fmt: skip
    return AttentionShape(**(values | changes))


def test_x7_nothing_is_installed() -> None:
    found = find_flashmla("90", fake_finder())
    assert found.build is None
    text = "\n".join(found.reasons)
    for word in (
        f"{LIBRARY_VARIABLE} is not set",
        "flash_mla: not",
        "vllm: not",
        "sgl_kernel: not",
        "no package index",
    ):
        assert word in text


@pytest.mark.parametrize("arch", ["120", "121", "89", "80"])
def test_x5_x6_other_chips_are_refused_before_anything_is_looked_at(arch: str) -> None:
    finder = Finder({LIBRARY_VARIABLE: "x.so"}, explode, explode, explode, explode, lambda device: arch)
    found = find_flashmla(arch, finder)
    assert found.build is None
    assert found.reasons == (f"FlashMLA has kernels for sm90, sm100 and sm103, not for sm{arch}",)
    reasons = FlashMLAAttention(Target("cuda", arch), finder).supports(shape())
    assert list(reasons) == list(found.reasons)


def test_x5_no_device_and_no_target() -> None:
    finder = Finder({}, explode, explode, explode, explode, lambda device: None)
    (reason,) = FlashMLAAttention(None, finder).supports(shape())
    assert "no device" in reason


def test_x6_a_package_without_kernels_for_the_chip_is_not_imported(tmp_path: Path) -> None:
    folders = {"flash_mla": package(tmp_path, "flash_mla", "cuda.abi3.so", V4 + SM100)}
    finder = fake_finder(packages=folders)
    found = find_flashmla("90", Finder(**{**vars(finder), "import_module": explode, "load_library": explode}))
    assert "flash_mla: it holds no sparse decode kernel for sm90" in found.reasons


class TestLibrary:
    @pytest.fixture
    def library(self, tmp_path: Path) -> Path:
        path = tmp_path / "build.so"
        path.write_bytes(VLLM + b"_fake_C")
        return path

    @pytest.fixture
    def operators(self, request: pytest.FixtureRequest) -> Iterator[None]:
        options = getattr(request, "param", {})
        with registered("_fake_C", **options):
            yield

    def find(self, path: Path, arch: str = "90", loaded: bool = False) -> Any:
        """As if the operators appeared when the library was loaded, or had been there before."""
        there = [loaded]

        def operators(name: str) -> Any:
            return {
                full: one
                for full, one in Finder.here().operators(name).items()
                if full.startswith("_fake_C") and there[0]
            }

        def load(name: str) -> None:
            assert name == str(path)
            if loaded:
                raise RuntimeError("Only a single TORCH_LIBRARY can be used to register the namespace _fake_C")
            there[0] = True

        finder = fake_finder(env={LIBRARY_VARIABLE: str(path)}, load_library=load, operators=operators)
        return find_flashmla(arch, finder)

    @pytest.mark.usefixtures("operators")
    @pytest.mark.parametrize("loaded", [False, True])
    def test_x7_a_bare_library(self, library: Path, loaded: bool) -> None:
        found = self.find(library, loaded=loaded)
        assert found.reasons == ()
        assert found.build.origin == f"{LIBRARY_VARIABLE}={library}"
        assert found.build.pairs["90"] == V4_PAIR
        assert found.build.pairs["100"] == V4_PAIR | {
            ("fp8_ds_mla_v41", "fp8_ds_mla_v41"), ("fp8_ds_mla_v41", "fp4_ds_mla_v41"),
        }  # fmt: skip
        assert found.build.prefill_heads["90"] == (8, 16, 32, 64, 128)
        assert found.build.prefill_heads["100"] == (64, 128)
        assert found.build.takes_out
        assert found.build.batch_invariant == {"100", "103"}

    @pytest.mark.usefixtures("operators")
    @pytest.mark.parametrize(
        ("operators", "reason"),
        [
            (
                {"decode": NO_EXTRA},
                "sparse_decode_fwd takes no extra_kv, extra_indices, extra_topk_length",
            ),
            (
                {"decode": DECODE_SCHEMA.replace("Tensor q, Tensor kv,", "Tensor kv, Tensor q,")},
                "takes its arguments in another order",
            ),
            ({"prefill": NO_LENGTHS}, "sparse_prefill_fwd takes no topk_length"),
            ({"prefill": ""}, "it registers no operator sparse_prefill_fwd"),
            ({"decode": ""}, "it registers no operator sparse_decode_fwd"),
        ],
        indirect=["operators"],
    )  # fmt: skip
    def test_x7_other_operators_are_refused_by_what_they_lack(self, library: Path, reason: str) -> None:
        found = self.find(library)
        assert found.build is None
        assert reason in found.reasons[0]

    @pytest.mark.usefixtures("operators")
    @pytest.mark.parametrize(
        "operators", [{"decode": DECODE_SCHEMA.replace("Tensor(c!)? out_=None, ", "").replace("Tensor(c!)", "Tensor"),
                       "prefill": PREFILL_SCHEMA.replace(", Tensor(a!)? out_", "")}], indirect=True,
    )  # fmt: skip
    def test_x7_operators_that_allocate_their_output(self, library: Path) -> None:
        assert not self.find(library).build.takes_out

    @pytest.mark.parametrize("arch", ["90", "100"])
    def test_x7_upstream_from_2026_09_30(self, library: Path, arch: str) -> None:
        """V4.1 rows on sm100 alone; on Hopper refused with that reason, without loading it."""
        library.write_bytes(UPSTREAM_2026_09_30)
        finder = fake_finder(env={LIBRARY_VARIABLE: str(library)}, arch=arch, load_library=explode)
        if arch == "90":
            found = find_flashmla("90", finder)
            assert found.build is None
            assert "upstream build from 2026-09-30" in found.reasons[0]
            assert "584" in found.reasons[0]
            return
        with registered("_fake_C"):
            build = self.find(library.with_name("build.so"), arch).build
            assert ("fp8_ds_mla", "fp8_ds_mla") not in build.pairs["100"]
            assert ("fp8_ds_mla_v41", "fp4_ds_mla_v41") in build.pairs["100"]

    def test_a_file_that_is_not_there_or_cannot_be_loaded(self, library: Path) -> None:
        reasons = self.find(library.with_name("gone.so")).reasons
        assert "gone.so cannot be read" in reasons[0]

        def load(name: str) -> None:
            raise OSError("Could not load this library") from OSError("libcudart.so.13: cannot open it\nmore")

        finder = fake_finder(env={LIBRARY_VARIABLE: str(library)}, load_library=load, operators=lambda name: {})
        assert "(OSError: libcudart.so.13: cannot open it)" in find_flashmla("90", finder).reasons[0]


class TestPackages:
    @pytest.mark.parametrize(
        ("name", "module", "library"),
        [("flash_mla", "flash_mla", "cuda.abi3.so"), ("sgl_kernel", "sgl_kernel.flash_mla", "flashmla_ops.abi3.so")],
    )
    def test_x7_a_package(self, tmp_path: Path, name: str, module: str, library: str) -> None:
        finder = fake_finder(
            packages={name: package(tmp_path, name, library)}, modules={module: fake_package(module, **FUNCTIONS)}
        )
        build = find_flashmla("90", finder).build
        assert build is not None
        assert build.origin == f"the package {name}"
        assert build.pairs["90"] == V4_PAIR
        assert build.prefill_heads["90"] == (64, 128)
        assert not build.takes_out
        q = torch.zeros(1)
        found = build.decode(q, q, q, q, None, None, None, q, 1.0, build.new_plan(), None, False)
        assert found == (q + 1, "lse")
        assert build.prefill(q, q, q, q, q, 1.0, None) == (q + 2, "lse")

    def test_x7_an_old_build_is_refused(self, tmp_path: Path) -> None:
        def old_metadata(
            cache_seqlens: Any, num_q_tokens_per_head_k: Any, num_heads_k: Any, num_heads_q: Any = None,
            is_fp8_kvcache: Any = False, topk: Any = None,
        ) -> Any:  # fmt: skip
            return explode()

        def old_decode(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, indices: Any = None) -> Any:
            return explode()

        old = fake_package(
            "flash_mla", **FUNCTIONS | {"get_mla_metadata": old_metadata, "flash_mla_with_kvcache": old_decode}
        )
        finder = fake_finder(
            packages={"flash_mla": package(tmp_path, "flash_mla", "cuda.so")}, modules={"flash_mla": old}
        )
        found = find_flashmla("90", finder)
        assert found.build is None
        text = "\n".join(found.reasons)
        assert "an old build, whose get_mla_metadata wants cache_seqlens, num_q_tokens_per_head_k, num_heads_k" in text
        assert "takes no attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length" in text

    def test_x7_the_build_inside_vllm_without_importing_vllm(self, tmp_path: Path) -> None:
        folders = {"vllm": package(tmp_path, "vllm", "_flashmla_C.abi3.so", VLLM)}
        there = [False]

        def operators(name: str) -> Any:
            own = {full: one for full, one in Finder.here().operators(name).items() if full.startswith("_fake_C")}
            return own if there[0] else {}

        def load(path: str) -> None:
            assert path == str(folders["vllm"] / "_flashmla_C.abi3.so")
            there[0] = True

        finder = fake_finder(packages=folders, load_library=load, operators=operators)
        with registered("_fake_C"):
            build = find_flashmla("90", Finder(**{**vars(finder), "import_module": explode})).build
        assert build is not None
        assert build.origin == "the build inside vllm"

    def test_a_broken_package_is_a_reason_and_the_next_is_taken(self, tmp_path: Path) -> None:
        finder = fake_finder(
            packages={
                "flash_mla": package(tmp_path, "flash_mla", "cuda.so"),
                "sgl_kernel": package(tmp_path, "sgl_kernel", "flashmla_ops.so"),
            },
            modules={
                "flash_mla": ImportError("libc10_cuda.so"),
                "sgl_kernel.flash_mla": fake_package("sgl_kernel.flash_mla", **FUNCTIONS),
            },
        )
        found = find_flashmla("90", finder)
        assert found.build is not None
        assert found.build.origin == "the package sgl_kernel"
        assert "flash_mla: cannot be imported (ImportError: libc10_cuda.so)" in found.reasons


class TestSupports:
    @pytest.fixture
    def finder(self, tmp_path: Path) -> Finder:
        return fake_finder(
            packages={"flash_mla": package(tmp_path, "flash_mla", "cuda.so", VLLM)},
            modules={"flash_mla": fake_package("flash_mla", **FUNCTIONS)},
        )

    def test_what_it_serves(self, finder: Finder) -> None:
        provider = FlashMLAAttention(None, finder)
        for good in (
            shape(),
            shape(num_heads=5),
            shape(num_heads=128),
            shape(compressed_layouts=()),
            shape(decode_widths=(192,)),
        ):
            assert not provider.supports(good)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_heads": 129}, ["129", "128"]),
            ({"head_dim": 576}, ["576", "512"]),
            ({"swa_layout": get_layout("bf16"), "compressed_layouts": ()}, ["bf16", "fp8_ds_mla"]),
            ({"compressed_layouts": (get_layout("fp8_ds_mla_v41"),)}, ["fp8_ds_mla_v41", "sm90"]),
            ({"swa_layout": get_layout("fp8_ds_mla", "fnuz")}, ["fnuz"]),
            ({"batch_invariant": True}, ["batch_invariant", "sm90"]),
        ],
    )  # fmt: skip
    def test_each_reason_names_what_is_wrong(self, finder: Finder, changes: dict[str, Any], words: list[str]) -> None:
        (reason,) = FlashMLAAttention(None, finder).supports(shape(**changes))
        assert all(word in reason for word in words), reason

    def test_all_reasons_at_once(self, finder: Finder) -> None:
        assert (
            len(FlashMLAAttention(None, finder).supports(shape(num_heads=129, head_dim=64, batch_invariant=True))) == 3
        )


def test_x4_loading_the_platform_imports_nothing_of_a_vendor() -> None:
    code = (
        "import sys, swa_backend\n"
        "backend = swa_backend.get_backend('cuda', target='cuda:90')\n"
        "names = [one.name for one in backend.providers]; backend.scheduler; backend.get_builder_cls()\n"
        "assert names[0] == 'flashmla' and names[-1] == 'reference', names\n"
        "assert not {'flash_mla', 'vllm', 'sgl_kernel'} & sys.modules.keys()\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
