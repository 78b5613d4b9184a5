"""When the Hopper provider serves, why it refuses, and to which kernel each part of a call goes. Fake kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.platform import Target
from swa_backend.provider import AttentionShape
from swa_platform_cuda import hopper_provider
from swa_platform_cuda.hopper_probe import TESTED, Taken, Toolchain, resource_reasons
from swa_platform_cuda.hopper_provider import HopperAttention, Kernels

DEVICE = torch.device("cuda:0")
V4 = get_layout("fp8_ds_mla")
SHAPE = AttentionShape(
    num_heads=64, head_dim=512, swa_layout=V4, swa_page_tokens=64, compressed_layouts=(V4,), decode_widths=(128,),
    batch_invariant=False, device=DEVICE,
)  # fmt: skip
WINDOW_ONLY = replace(SHAPE, compressed_layouts=())
VERSION = next(iter(TESTED))
FINE = Taken(registers=168, spilled_bytes=0, shared_bytes=200_000, shared_limit=232_448)


class FakeFlashMLA:
    """Says what the test tells it to, and notes what it is asked for."""

    def __init__(self, reasons: Sequence[str] = ()) -> None:
        self.reasons = reasons
        self.calls: list[str] = []

    def supports(self, shape: AttentionShape) -> Sequence[str]:
        return self.reasons

    def reserve(self, config: Any, device: torch.device) -> None:
        self.calls.append("reserve")

    def prefill(self, call: Any) -> None:
        self.calls.append("prefill")

    def decode(self, call: Any) -> None:
        self.calls.append("decode")


class FakeWindow:
    def __init__(self, serves: bool = True) -> None:
        self.serves = serves
        self.calls: list[str] = []

    def reserve(self, config: Any, device: torch.device) -> None:
        self.calls.append("reserve")

    def supports(self, call: Any) -> bool:
        return self.serves

    def attend(self, call: Any) -> None:
        self.calls.append("attend")


class FakePaged:
    made: list[tuple[torch.device, bool]]
    calls: list[tuple[int, int, Any, Any]]

    def __init__(self) -> None:
        self.made, self.calls = [], []

    def __call__(self, device: torch.device, batch_invariant: bool) -> FakePaged:
        self.made.append((device, batch_invariant))
        return self

    def attend(self, call: Any, tokens: slice, rows: Any, lens: Any) -> None:
        self.calls.append((tokens.start, tokens.stop, rows, lens))


class Bench:
    """A provider with everything around it made up."""

    def __init__(
        self, arch: str | None = "90", target: Target | None = None, version: str | None = VERSION,
        importing: Callable[[], None] = lambda: None, taken: Callable[..., Taken] = lambda *_: FINE,
        flashmla: FakeFlashMLA | None = None, window: FakeWindow | None = None,
    ) -> None:  # fmt: skip
        self.flashmla, self.window, self.paged = flashmla or FakeFlashMLA(), window or FakeWindow(), FakePaged()
        self.asked: list[tuple[torch.device, int, bool]] = []

        def noted(device: torch.device, heads: int, two: bool) -> Taken:
            self.asked.append((device, heads, two))
            return taken(device, heads, two)

        self.provider = HopperAttention(
            target,
            SimpleNamespace(capability=lambda device: arch),  # type: ignore[arg-type]
            Toolchain(lambda: version, importing),
            lambda: Kernels(self.paged, self.window, noted),  # type: ignore[arg-type]
            self.flashmla,  # type: ignore[arg-type]
        )

    def call(self, decodes: int, prefills: int, second: bool = False, shape: AttentionShape | None = SHAPE) -> Any:
        metadata = SimpleNamespace(
            num_decode_tokens=decodes, num_tokens=decodes + prefills, decode_swa_indices="rows", decode_swa_lens="lens",
            prefill_swa_indices="more rows" if prefills else None, prefill_swa_lens="more lens", shape=shape,
        )  # fmt: skip
        return SimpleNamespace(
            metadata=metadata, q=SimpleNamespace(device=DEVICE), compressed=object() if second else None
        )


def broken() -> None:
    raise AttributeError("module 'gluon' has no attribute 'warp_specialize'")


# Refusals.


def test_layers_of_the_model_are_served_on_sm90() -> None:
    bench = Bench()
    assert bench.provider.supports(SHAPE) == ()
    assert bench.asked == [(DEVICE, 64, False), (DEVICE, 64, True)]


@pytest.mark.parametrize("heads", [1, 5, 8, 64, 96, 128])
def test_n4_head_counts_need_no_padding(heads: int) -> None:
    assert Bench().provider.supports(replace(SHAPE, num_heads=heads)) == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_heads": 129}, "num_heads is 129; it takes 1 to 128"),
        ({"head_dim": 576}, "head_dim is 576; it takes 512"),
        ({"swa_layout": get_layout("bf16")}, "it reads fp8_ds_mla, not bf16"),
        ({"swa_layout": get_layout("fp8_ds_mla", Dialect.FNUZ)}, "fp8_ds_mla is in the fnuz dialect; it reads ocp"),
        ({"compressed_layouts": (get_layout("fp8_ds_mla_v41"),)}, "it reads fp8_ds_mla, not fp8_ds_mla_v41"),
    ],
)
def test_other_shapes_are_refused(change: dict[str, Any], reason: str) -> None:
    bench = Bench()
    assert reason in bench.provider.supports(replace(SHAPE, **change))
    assert not bench.asked, "nothing is compiled for layers that are refused anyway"


@pytest.mark.parametrize(("arch", "name"), [("100", "sm100"), ("89", "sm89"), ("120", "sm120"), (None, "no device")])
def test_x5_other_chips_are_refused_before_the_compiler_is_looked_at(arch: str | None, name: str) -> None:
    bench = Bench(arch, importing=lambda: pytest.fail("the kernels were imported"))
    assert bench.provider.supports(SHAPE) == (f"its kernels are for sm90, not {name}",)


def test_a_target_is_believed_without_a_device() -> None:
    assert Bench(None, Target("cuda", "90")).provider.supports(SHAPE) == ()
    assert Bench("90", Target("cuda", "100")).provider.supports(SHAPE) == ("its kernels are for sm90, not sm100",)
    assert not Bench("90", Target("cuda", "90")).asked, "another machine's kernels are not compiled here"


@pytest.mark.parametrize("version", ["3.5.1", "3.9.0", "3.60.0", "4.0.0"])
def test_a_version_of_triton_that_was_not_tested_is_refused(version: str) -> None:
    (reason,) = Bench(version=version).provider.supports(SHAPE)
    assert reason == f"it is written in Triton's experimental Gluon, tested with {', '.join(TESTED)}, not {version}"


def test_a_local_build_of_a_tested_version_is_taken() -> None:
    assert Bench(version=f"{VERSION}+git1234").provider.supports(SHAPE) == ()


def test_no_triton_and_a_broken_gluon_are_reasons() -> None:
    assert Bench(version=None).provider.supports(SHAPE) == ("Triton is not installed",)
    (reason,) = Bench(importing=broken).provider.supports(SHAPE)
    assert reason == (
        "its Gluon kernels cannot be imported: AttributeError: module 'gluon' has no attribute 'warp_specialize'"
    )


def test_kernels_that_take_more_than_was_tested_are_refused() -> None:
    greedy = replace(FINE, spilled_bytes=400)
    bench = Bench(taken=lambda device, heads, two: greedy if two else FINE)
    (reason,) = bench.provider.supports(SHAPE)
    assert reason.startswith("the decode kernel over 2 cache(s) takes 400 bytes a thread spilled; at most ")
    assert bench.provider.supports(WINDOW_ONLY) == (), "the other key is what was tested"


@pytest.mark.parametrize("field", ["registers", "spilled_bytes", "shared_bytes"])
def test_each_resource_has_its_limit(field: str) -> None:
    limit = getattr(TESTED[VERSION], field)
    at_most = replace(FINE, shared_limit=10**9, **{field: limit})
    assert resource_reasons(["it"], lambda _: at_most, VERSION) == ()
    (reason,) = resource_reasons(["it"], lambda _: replace(at_most, **{field: limit + 1}), VERSION)
    assert f"it takes {limit + 1} " in reason
    assert f"at most {limit} " in reason


def test_a_device_with_less_shared_memory_is_refused() -> None:
    (reason,) = resource_reasons(["it"], lambda _: replace(FINE, shared_limit=100_000), VERSION)
    assert reason == "it takes 200000 bytes of shared memory; at most 100000 were tested"


def test_a_kernel_that_does_not_compile_is_a_reason() -> None:
    def fail(*_: Any) -> Taken:
        raise RuntimeError("PassManager::run failed")

    reasons = Bench(taken=fail).provider.supports(SHAPE)
    assert len(reasons) == 2
    assert all("does not compile: RuntimeError: PassManager::run failed" in reason for reason in reasons)


def test_what_was_compiled_is_looked_at_once() -> None:
    bench = Bench()
    for _ in range(3):
        assert bench.provider.supports(SHAPE) == ()
    assert len(bench.asked) == 2


# Where calls go.


def test_decodes_go_to_the_paged_kernel() -> None:
    bench = Bench()
    bench.provider.decode(bench.call(7, 3))
    assert bench.paged.calls == [(0, 7, "rows", "lens")]
    assert bench.paged.made == [(DEVICE, False)]


@pytest.fixture(autouse=True)
def _nothing_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)


@pytest.mark.parametrize(
    ("least", "tokens", "ours"), [(None, 5000, False), (64, 63, False), (64, 64, True), (0, 1, True)]
)
def test_decodes_with_a_second_cache_go_where_they_were_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, least: int | None, tokens: int, ours: bool
) -> None:
    monkeypatch.setattr(hopper_provider, "TWO_CACHES_FROM_TOKENS", least)
    bench = Bench()
    assert bench.provider.supports(SHAPE) == ()
    assert bench.provider.takes_plans
    bench.provider.decode(bench.call(tokens, 0, second=True))
    assert bench.flashmla.calls == ([] if ours else ["decode"])
    assert bool(bench.paged.calls) == ours
    bench.provider.decode(bench.call(1, 0))
    assert len(bench.paged.calls) == 1 + ours, "with one cache it is always ours"


@pytest.mark.parametrize("why", ["forced", "batch-invariant", "no FlashMLA", "unknown layers"])
def test_decodes_with_a_second_cache_are_ours_where_flashmla_is_no_choice(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(hopper_provider, "TWO_CACHES_FROM_TOKENS", None)
    if why == "forced":
        monkeypatch.setenv("SWA_BACKEND_ATTENTION", "hopper")
    shape = replace(SHAPE, batch_invariant=why == "batch-invariant")
    bench = Bench(flashmla=FakeFlashMLA(("not here",) if why == "no FlashMLA" else ()))
    assert bench.provider.supports(shape) == ()
    assert bench.provider.takes_plans == (why in ("batch-invariant", "unknown layers"))
    bench.provider.decode(bench.call(3, 0, second=True, shape=None if why == "unknown layers" else shape))
    assert not bench.flashmla.calls
    assert bench.paged.calls == [(0, 3, "rows", "lens")]


def test_the_batch_invariant_mode_has_kernels_of_its_own() -> None:
    bench = Bench()
    for invariant in (True, False, True):
        bench.provider.decode(bench.call(1, 0, shape=replace(SHAPE, batch_invariant=invariant)))
    assert bench.paged.made == [(DEVICE, True), (DEVICE, False)]


@pytest.mark.parametrize("serves", [True, False])
def test_window_prefill_goes_to_the_ring_where_it_serves(serves: bool) -> None:
    bench = Bench(window=FakeWindow(serves))
    bench.provider.prefill(bench.call(7, 3))
    assert bench.window.calls == (["attend"] if serves else [])
    assert bench.paged.calls == ([] if serves else [(7, 10, "more rows", "more lens")])
    assert not bench.flashmla.calls


@pytest.mark.parametrize("reasons", [(), ("no FlashMLA here",)])
def test_prefill_with_a_second_cache_goes_to_flashmla_where_it_serves(reasons: tuple[str, ...]) -> None:
    bench = Bench(flashmla=FakeFlashMLA(reasons))
    assert bench.provider.supports(SHAPE) == ()
    bench.provider.prefill(bench.call(7, 3, second=True))
    assert bench.flashmla.calls == ([] if reasons else ["prefill"])
    assert bench.paged.calls == ([(7, 10, "more rows", "more lens")] if reasons else [])
    assert not bench.window.calls


def test_what_flashmla_serves_is_known_by_shape() -> None:
    bench = Bench()
    other = replace(SHAPE, num_heads=8)
    assert bench.provider.supports(SHAPE) == ()
    bench.flashmla.reasons = ("not these",)
    assert bench.provider.supports(other) == ()
    bench.provider.prefill(bench.call(0, 3, second=True, shape=other))
    bench.provider.prefill(bench.call(0, 3, second=True, shape=None))
    assert not bench.flashmla.calls
    assert len(bench.paged.calls) == 2
    bench.provider.prefill(bench.call(0, 3, second=True))
    assert bench.flashmla.calls == ["prefill"]


def test_a_step_without_prefill_rows_launches_nothing() -> None:
    bench = Bench()
    bench.provider.prefill(bench.call(3, 0))
    assert not bench.paged.calls
    assert not bench.window.calls


def test_memory_is_reserved_for_what_will_be_called() -> None:
    config: Any = SimpleNamespace(batch_invariant=True)
    bench = Bench()
    bench.provider.supports(WINDOW_ONLY)
    bench.provider.reserve(config, DEVICE)
    assert bench.paged.made == [(DEVICE, True)]
    assert bench.window.calls == ["reserve"]
    assert not bench.flashmla.calls, "no layer has a second cache"
    bench.provider.supports(SHAPE)
    bench.provider.reserve(config, DEVICE)
    assert bench.flashmla.calls == ["reserve"]
    assert bench.paged.made == [(DEVICE, True)], "made once a device and mode"
