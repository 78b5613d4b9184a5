"""FlashMLA's provider on the recorded attention cases; a test module imports all of it and supplies ``provider``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.cache_layout import get_layout
from swa_backend.pages import PageView
from swa_backend.provider import AttentionCall, CompressedRows
from swa_backend.provider_choice import choose_provider
from tests.attention_scene import ProviderUnderTest, floats
from tests.oracle_attention import relative_error, worst_row_error
from tests.support import GOLDEN, GoldenCase, load_golden

NAMES = ("decode_c4a_h64", "decode_swaonly_h64", "prefill_h64")


def chosen(provider: ProviderUnderTest) -> Any:
    """The provider object that a builder would take."""
    from tests.attention_scene import Scene

    scene = Scene(provider, [1], [5], heads=64)
    return choose_provider(provider.backend, scene.builder.shape)


def golden_call(case: GoldenCase, device: str) -> AttentionCall:
    """One layer's call with the recorded tensors; rows of the padded tokens' kind are known by their length 0."""

    def on(name: str) -> torch.Tensor:
        return case.tensor(name).to(device)

    q = on("q").reshape(-1, 64, 512)
    second = None
    if "extra_pages" in case.values:
        pages = paged(on("extra_pages"), case["extra_block_size"])
        second = CompressedRows(pages, 4, on("extra_indices").squeeze(1), on("extra_lens"))
    metadata = SimpleNamespace(
        num_decode_tokens=q.shape[0],
        plans={},
        decode_swa_indices=on("indices"),
        decode_swa_lens=on("lens"),
        is_valid_token=torch.ones(q.shape[0], dtype=torch.bool, device=device),
        generation=1,
        compressed={},
        shape=None,
    )
    return AttentionCall(
        q=q,
        out=torch.full_like(q, torch.nan),
        lse=torch.full(q.shape[:2], torch.nan, device=device),
        metadata=metadata,  # type: ignore[arg-type]
        pages=paged(on("pages"), case["block_size"]) if "pages" in case.values else None,  # type: ignore[arg-type]
        attn_sink=on("attn_sink"),
        scale=case["softmax_scale"],
        compressed=second,
    )


def paged(pages: torch.Tensor, entries: int) -> PageView:
    return PageView.of(
        pages.as_strided((pages.shape[0], entries, 584), (pages.stride(0), 584, 1)), get_layout("fp8_ds_mla"), entries
    )


@pytest.mark.parametrize("name", NAMES)
def test_recorded_attention(provider: ProviderUnderTest, name: str) -> None:
    case = load_golden(GOLDEN / "attention" / f"{name}.npz")
    flashmla = chosen(provider)
    call = golden_call(case, provider.device)
    assert call.lse is not None
    if name.startswith("decode"):
        flashmla.decode(call)
    else:
        kv, rows, lens = (case.tensor(key).to(provider.device) for key in ("kv", "indices", "lens"))
        flashmla._gathered_on(call.q.device)._launch(call, slice(0, call.q.shape[0]), kv, rows, lens)
    recorded = case.tensor("out").reshape(call.out.shape)
    print(f"{name}: bit for bit {torch.equal(call.out.cpu(), recorded)}")
    assert relative_error(floats(call.out), floats(recorded)) <= 3e-3
    assert worst_row_error(floats(call.out), floats(recorded)) <= 4e-3
    lse = case.tensor("lse").reshape(call.lse.shape)
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    torch.testing.assert_close(call.lse.cpu(), lse, atol=1e-4, rtol=0)
