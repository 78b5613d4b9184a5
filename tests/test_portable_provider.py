"""The portable provider: what it says about shapes and chips, what it reserves, where the platforms put it."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from swa_backend.cache_layout import LAYOUT_NAMES, Dialect, get_layout
from swa_backend.config import BackendConfig
from swa_backend.doctor import examine
from swa_backend.platform import Target
from swa_backend.portable.launch import SparseAttention
from swa_backend.portable.provider import TritonAttention
from swa_backend.provider import AttentionShape
from swa_backend.provider_choice import choose_provider
from swa_backend.registry import get_backend
from tests.support import make_config

CPU = torch.device("cpu")
SHAPE = AttentionShape(
    num_heads=64, head_dim=512, swa_layout=get_layout("fp8_ds_mla"), swa_page_tokens=64,
    compressed_layouts=(get_layout("fp8_ds_mla"),), decode_widths=(128,), batch_invariant=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "target", ["cuda:80", "cuda:89", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950"]
)
def test_every_layout_dialect_and_head_count_of_every_chip(target: str) -> None:
    provider = TritonAttention(Target.parse(target))
    for name in LAYOUT_NAMES:
        for dialect in Dialect:
            shape = replace(SHAPE, swa_layout=get_layout(name, dialect), compressed_layouts=(get_layout(name),))
            assert not provider.supports(shape)
    assert not any(provider.supports(replace(SHAPE, num_heads=heads)) for heads in (1, 7, 65, 128))
    assert not provider.supports(replace(SHAPE, batch_invariant=True))


def test_every_reason_is_given_the_chips_too() -> None:
    provider = TritonAttention(chip_reasons=lambda device: ("sm75 is too old",))
    reasons = provider.supports(replace(SHAPE, num_heads=129, head_dim=576))
    assert [reason.split()[0] for reason in reasons] == ["num_heads", "head_dim", "sm75"]


def test_x5_without_triton_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    (reason,) = TritonAttention(Target.parse("cuda:90")).supports(SHAPE)
    assert "Triton cannot be imported" in reason


@pytest.mark.parametrize(("platform", "target"), [("cuda", "cuda:80"), ("rocm", "hip:gfx942")])
def test_the_platforms_take_it_before_the_reference(
    monkeypatch: pytest.MonkeyPatch, platform: str, target: str
) -> None:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    backend = get_backend(platform, target=target)
    names = [one.name for one in backend.providers]
    assert names.index("triton") < names.index("reference")
    assert choose_provider(backend, SHAPE).name == "triton"
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "triton")
    assert choose_provider(get_backend(platform, target=target), SHAPE).name == "triton"


def test_doctor_says_why() -> None:
    (backend,) = examine("cuda", "cuda:90").backends
    (report,) = (one for one in backend.providers if one.name == "triton")
    assert not any(report.models.values())


def room_of(config: BackendConfig, units: int = 4, tile: int = 64) -> int:
    """Partial results of programs of ``tile`` heads; unaligned tensors take the smaller tile."""
    attention = SparseAttention(CPU, None, units)
    attention.reserve(config)
    assert sorted(attention._partials) == [16, 64]
    return attention._partials[tile].programs


def test_room_follows_from_the_chip_not_from_the_batch() -> None:
    small, large = make_config(max_num_seqs=1, max_num_batched_tokens=8), make_config(max_num_seqs=512)
    assert room_of(small) == room_of(large) == 8, "two partial results a compute unit"
    assert room_of(small, units=132) == 264


def test_a_batch_invariant_token_always_has_room() -> None:
    config = make_config(batch_invariant=True, max_model_len=1_000_000, num_heads=128)
    splits = -(-(128 + 1_000_000 // 128) // 512)
    assert room_of(config, units=1) >= 2 * splits, "two tiles of heads"
    assert room_of(config, units=1, tile=16) >= 8 * splits


def test_what_is_outgrown_is_kept() -> None:
    attention = SparseAttention(CPU, None, 1)
    attention.reserve(make_config())
    before = attention._partials[64]
    attention.reserve(make_config(batch_invariant=True, max_model_len=1_000_000))
    after = attention._partials[64]
    assert after.programs > before.programs
    assert before in attention._outgrown, "a captured graph may still write there"
