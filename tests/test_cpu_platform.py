"""What the embedded platform supplies."""

from __future__ import annotations

import torch

from swa_backend import AttentionShape, DeepseekSparseSWAMetadataBuilder, Dialect, LayerType, get_backend, get_layout
from swa_backend.platform import CacheRole
from swa_backend.reference.operations import ReferenceOperations
from swa_backend.reference.provider import ReferenceAttention
from tests.attention_scene import ProviderUnderTest, Scene


def shape(num_heads: int = 64, head_dim: int = 512, device: str | None = "cpu", layout: str = "fp8_ds_mla"):
    return AttentionShape(
        num_heads=num_heads,
        head_dim=head_dim,
        swa_layout=get_layout(layout),
        swa_page_tokens=64,
        compressed_layouts=(get_layout("fp4_ds_mla_v41"),),
        decode_widths=(128, 192),
        batch_invariant=True,
        device=None if device is None else torch.device(device),
    )


def test_descriptor():
    backend = get_backend("cpu")
    assert isinstance(backend.operations, ReferenceOperations)
    assert [one.name for one in backend.providers] == ["reference"]
    assert backend.scheduler.fresh_plans([LayerType.SWAONLY, LayerType.C4A]) == {
        LayerType.SWAONLY: None,
        LayerType.C4A: None,
    }
    assert {backend.cache_dialect(role) for role in CacheRole} == {Dialect.OCP}
    assert backend.warmup(None) == ()
    assert backend.get_name() == "DEEPSEEK_SPARSE_SWA"
    assert backend.get_supported_head_sizes() == [512]
    assert backend.get_preferred_page_tokens() == 256
    pages = range(-64, 300)
    assert [page for page in pages if backend.supports_page_tokens(page)] == [32, 64, 96, 128, 160, 192, 224, 256, 288]


def test_builder_class_is_bound_to_the_descriptor_and_stays_the_same():
    backend = get_backend("cpu")
    builder_cls = backend.get_builder_cls()
    assert builder_cls is backend.get_builder_cls()
    assert issubclass(builder_cls, DeepseekSparseSWAMetadataBuilder)
    assert builder_cls.backend is backend
    assert not builder_cls.wants_ragged_rows


def test_reference_serves_every_head_count_and_layout():
    reference = ReferenceAttention()
    for heads in (1, 8, 96, 128):
        assert reference.supports(shape(heads, device=None)) == ()
    for layout in ("bf16", "fp8_per_tensor", "fp8_ds_mla_v41"):
        assert reference.supports(shape(layout=layout)) == ()


def test_reference_gives_every_reason_against_a_shape():
    reasons = ReferenceAttention().supports(shape(129, 256, "meta"))
    assert [reason.split()[0] for reason in reasons] == ["num_heads", "head_dim"]


def test_reference_gives_padded_tokens_zero_whatever_their_compressed_row_holds(monkeypatch):
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "reference")
    provider = ProviderUnderTest("reference", get_backend("cpu"), "cpu")
    scene = Scene(provider, [1, 3], [200, 90], second=(4, "fp8_ds_mla", 256), batch={"padding": 2})
    cache, rows, lens = scene.topk(torch.arange(5).repeat(6, 1))
    assert lens.tolist() == [5, 5, 5, 5, 0, 0]
    right = scene.run(compressed=(cache, rows, lens)).out
    rows[4:], lens[4:] = rows[0], 5
    result = scene.run(compressed=(cache, rows, lens))
    assert torch.equal(result.out, right)
    assert not result.out[4:].any()
    assert torch.all(result.lse[4:] == -torch.inf)
