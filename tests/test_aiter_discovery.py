"""Which aiter serves and what is said of one that does not: present, old, missing, broken, for another architecture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swa_backend.backend import Backend
from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.doctor import examine
from swa_backend.errors import ProviderError
from swa_backend.platform import Target
from swa_backend.provider import AttentionShape
from swa_backend.provider_choice import choose_provider
from swa_platform_rocm import PLATFORM
from swa_platform_rocm.aiter_discovery import CURRENT, OLD, find_aiter
from tests import aiter_fake
from tests.aiter_fake import ONLY_OLD, PRESENT, fake_backend, from_here, imported, installed

OCP, FNUZ = get_layout("fp8_ds_mla"), get_layout("fp8_ds_mla", Dialect.FNUZ)
SHAPE = AttentionShape(64, 512, OCP, 64, (OCP,), (128,), batch_invariant=False)
WITHOUT_SINK = {aiter_fake.CURRENT: from_here("sparse_mla_fwd", "sparse_mla_fwd_without_sink")}
WHEEL = {aiter_fake.OLD: from_here("pa_decode_sparse", "pa_decode_sparse_of_a_wheel")}
FIRST_PACKED = {aiter_fake.OLD: from_here("pa_decode_sparse", "pa_decode_sparse")}
ASYNC_ITERATORS = {"aiter/__init__.py": "async def anext(): ..."}  # what an index has under the name aiter
NOT_INSTALLED = "aiter is not installed"


@pytest.fixture(autouse=True)
def _no_forced_provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    assert not imported()
    yield
    assert not imported()


def reasons_of(backend: Backend, shape: AttentionShape = SHAPE) -> str:
    return "; ".join(backend.providers[0].supports(shape))


def test_the_current_form_is_preferred(tmp_path: Path) -> None:
    with installed(tmp_path, {**PRESENT, **ONLY_OLD}):
        found = find_aiter()
        assert found.kernel is not None
        assert (found.kernel.form, found.reasons) == (CURRENT, ())
        assert found.kernel.function is aiter_fake.sparse_mla_fwd
        assert choose_provider(fake_backend(), SHAPE).name == "aiter"


def test_an_aiter_before_sparse_mla_fwd_serves_by_its_old_name(tmp_path: Path) -> None:
    with installed(tmp_path, ONLY_OLD):
        found = find_aiter()
        assert found.kernel is not None
        assert found.kernel.form is OLD
        assert "out" not in found.kernel.arguments
        assert not reasons_of(fake_backend())


def test_one_between_the_two_serves_by_the_old_name_too(tmp_path: Path) -> None:
    """`sparse_mla_fwd` had neither sink nor second cache at first."""
    module = from_here("pa_decode_sparse", "pa_decode_sparse_with_out", aiter_fake.STRIDE_FIX)
    with installed(tmp_path, {**WITHOUT_SINK, aiter_fake.OLD: module}):
        found = find_aiter()
        assert found.kernel is not None
        assert found.kernel.form is OLD
        assert "out" in found.kernel.arguments


def test_the_forms_name_arguments_that_are_published() -> None:
    current = inspect.signature(aiter_fake.sparse_mla_fwd).parameters
    assert set(CURRENT.needed) <= current.keys()
    assert list(current)[:5] == list(CURRENT.needed)[:5]
    old = inspect.signature(aiter_fake.pa_decode_sparse_with_out).parameters
    assert {*OLD.needed, *OLD.optional} <= old.keys()
    assert set(OLD.needed) <= inspect.signature(aiter_fake.pa_decode_sparse).parameters.keys()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, [NOT_INSTALLED]),
        (ASYNC_ITERATORS, ["has no aiter.ops"]),
        (WHEEL, ["has no aiter.ops.triton.attention.sparse_mla", "takes no extra_cache, extra_indices, extra_indptr"]),
        (FIRST_PACKED, ["has no aiter.ops.triton.attention.sparse_mla", "older than aiter's commit e6e7070"]),
        (WITHOUT_SINK, ["sparse_mla_fwd of", "takes no attn_sink, extra_kv, extra_indptr, extra_indices"]),
        ({aiter_fake.CURRENT: ""}, ["has no sparse_mla_fwd in aiter.ops.triton.attention.sparse_mla"]),
        ({aiter_fake.CURRENT: "sparse_mla_fwd = 3"}, ["has no sparse_mla_fwd"]),
        (
            {"aiter/__init__.py": "raise RuntimeError('No HIP GPUs are available\\nsecond line')", **PRESENT},
            ["cannot be imported (RuntimeError: No HIP GPUs are available)"],
        ),
        ({"aiter/__init__.py": "import no_such_module", **PRESENT}, ["it misses no_such_module"]),
        ({"aiter/__init__.py": "def f(:", **PRESENT}, ["cannot be imported (SyntaxError: "]),
        ({"aiter/__init__.py": "raise OSError()", **PRESENT}, ["cannot be imported (OSError: no message)"]),
    ],
    ids=[
        "missing", "another package", "release", "before the stride fix", "no sink", "no function", "no callable",
        "no GPU", "dependency", "syntax", "no message",
    ],
)  # fmt: skip
def test_an_aiter_that_cannot_serve_says_why(tmp_path: Path, files: dict[str, str], said: list[str]) -> None:
    backend = fake_backend()
    with installed(tmp_path, files):
        reasons = reasons_of(backend)
    for part in said:
        assert part in reasons
    assert "second line" not in reasons
    assert reasons_of(backend) == reasons, "looked for once"
    assert choose_provider(backend, SHAPE).name == "reference"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def sparse_mla_fwd({known}, workspace): ...", "wants workspace, which is not known here"),
        ("def sparse_mla_fwd({known}, *, page_table): ...", "wants page_table"),
        ("def sparse_mla_fwd({first}, /, {rest}): ...", "takes q by position alone"),
        ("def sparse_mla_fwd(*args, **kwargs): ...", "takes no q, kv_buffer, kv_indptr"),
        ("class sparse_mla_fwd: __signature__ = 3", "does not say what it takes"),
    ],
)
def test_a_changed_signature_is_refused_and_not_guessed(tmp_path: Path, source: str, said: str) -> None:
    first, *rest = CURRENT.needed
    text = source.format(known=", ".join(CURRENT.needed), first=first, rest=", ".join(rest))
    with installed(tmp_path, {aiter_fake.CURRENT: text}):
        assert said in reasons_of(fake_backend())


def test_further_arguments_with_a_default_do_not_matter(tmp_path: Path) -> None:
    text = f"def sparse_mla_fwd({', '.join(CURRENT.needed)}, later=None, **more): ..."
    with installed(tmp_path, {aiter_fake.CURRENT: text}):
        assert not reasons_of(fake_backend())


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201", "gfx90a", "NVIDIA H200", None])
def test_x6_aiter_is_not_imported_on_another_chip(tmp_path: Path, arch: str | None) -> None:
    with installed(tmp_path, {"aiter/__init__.py": "raise SystemError('imported')", **PRESENT}):
        backend = fake_backend(arch=arch)
        found = "no GPU is visible" if arch is None else f"the device is {arch}"
        assert reasons_of(backend) == f"it reads this cache on gfx950 only; {found}"
        assert choose_provider(backend, SHAPE).name == "reference"
        assert not imported()


@pytest.mark.parametrize("target", ["hip:gfx942", "hip:gfx950"])
def test_x6_a_target_alone_imports_nothing(tmp_path: Path, target: str) -> None:
    """Compiling for a fleet: the chip of the target is not the one that importing aiter asks for."""
    with installed(tmp_path, {"aiter/__init__.py": "raise SystemError('imported')", **PRESENT}):
        for arch in (None, "gfx942"):
            said = reasons_of(fake_backend(arch=arch, target=target))
            assert "on gfx950 only" in said
            assert ("the target is gfx942" in said) == (target == "hip:gfx942")
        assert not imported()


def test_x6_a_module_built_for_another_chip_is_a_reason(tmp_path: Path) -> None:
    raising = "raise OSError('module_mla.so: no kernel image for gfx950')"
    with installed(tmp_path, {aiter_fake.CURRENT: raising}):
        assert "no kernel image for gfx950" in reasons_of(fake_backend())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_heads": 129}, "num_heads is 129"),
        ({"head_dim": 576}, "head_dim is 576"),
        ({"swa_layout": FNUZ}, "it reads fp8_ds_mla in the ocp dialect, not in fnuz"),
        ({"swa_layout": get_layout("bf16")}, "it reads fp8_ds_mla, not bf16"),
        ({"compressed_layouts": (get_layout("fp4_ds_mla_v41"),)}, "it reads fp8_ds_mla, not fp4_ds_mla_v41"),
        ({"swa_layout": get_layout("fp8_ds_mla_v41")}, "it reads fp8_ds_mla, not fp8_ds_mla_v41"),
        ({"batch_invariant": True}, "batch_invariant is set"),
    ],
)
def test_layers_that_it_does_not_serve(tmp_path: Path, change: dict[str, object], said: str) -> None:
    with installed(tmp_path, PRESENT):
        backend = fake_backend()
        assert said in reasons_of(backend, replace(SHAPE, **change))  # type: ignore[arg-type]


def test_every_reason_is_given_not_the_first_alone() -> None:
    shape = replace(SHAPE, num_heads=0, swa_layout=FNUZ, batch_invariant=True)
    assert len(fake_backend(arch="gfx942").providers[0].supports(shape)) == 4


def test_forced_and_refused_it_is_an_error_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "aiter")
    with pytest.raises(ProviderError, match="aiter: it reads this cache on gfx950 only; the device is gfx942"):
        choose_provider(fake_backend(arch="gfx942"), SHAPE)


@pytest.mark.parametrize("target", [None, "hip:gfx942", "hip:gfx950"])
def test_the_platform_tries_aiter_first_and_the_reference_last(target: str | None) -> None:
    backend = Backend(PLATFORM, None if target is None else Target.parse(target))
    names = [one.name for one in backend.providers]
    assert (names[0], names[-1]) == ("aiter", "reference")


def test_doctor_shows_the_reasons() -> None:
    (backend,) = examine("rocm", "hip:gfx942").backends
    aiter, *_, reference = backend.providers
    assert (aiter.name, reference.name) == ("aiter", "reference")
    assert set(aiter.models) == {"V4-Flash", "V4-Pro", "V4-Flash-Vision-Exp", "V4.1-Flash"}
    for reasons in aiter.models.values():
        assert "it reads this cache on gfx950 only; the target is gfx942" in reasons
        assert "it reads fp8_ds_mla in the ocp dialect, not in fnuz" in reasons
    assert not any(reference.models.values())


def test_looking_for_the_chip_asks_for_the_device_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from swa_platform_rocm.chips import arch_of, device_arch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_arch() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    names = ["gfx942:sramecc+:xnack-", "gfx950:sramecc+:xnack-"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(gcnArchName=names[i]))
    assert device_arch() == "gfx950"
    assert device_arch(torch.device("cuda")) == "gfx950"
    assert device_arch(torch.device("cuda:0")) == "gfx942"
    assert arch_of(Target("hip", "gfx90a"), torch.device("cuda:0")) == "gfx90a"
