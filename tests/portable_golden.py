"""The portable provider on the recorded attention cases; a test module imports all of it and supplies ``provider``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from swa_backend.cache_layout import PageLayout, get_layout
from swa_backend.pages import PageView
from swa_backend.portable.provider import TritonAttention
from swa_backend.provider import AttentionCall, CompressedRows
from tests.attention_scene import ProviderUnderTest, floats
from tests.oracle_attention import relative_error, worst_row_error
from tests.support import GOLDEN, GoldenCase, load_golden

NAMES = ("decode_c4a_h64", "decode_swaonly_h64", "prefill_h64")
TOKENS = {"cpu": 3, "cuda": None}  # of each case; interpreted, one takes half a second


def recorded_call(case: GoldenCase, device: str) -> AttentionCall:
    """A layer's call with the recorded tensors; prefill's flat keys are one page of a bf16 cache."""
    count = TOKENS[torch.device(device).type]
    tokens = slice(0, count)

    def on(name: str) -> torch.Tensor:
        return case.tensor(name).to(device)

    q = on("q").reshape(-1, 64, 512)[tokens]
    if "pages" in case.values:
        pages = packed(on("pages"), case["block_size"], get_layout("fp8_ds_mla"))
    else:
        kv = on("kv").reshape(1, -1, 512).contiguous()
        pages = PageView.of(kv, get_layout("bf16"), kv.shape[1])
    second = None
    if "extra_pages" in case.values:
        extra = packed(on("extra_pages"), case["extra_block_size"], get_layout("fp8_ds_mla"))
        second = CompressedRows(extra, 4, on("extra_indices").squeeze(1)[tokens], on("extra_lens")[tokens])
    rows = on("indices").reshape(len(on("indices")), 1, -1)[tokens]
    metadata = SimpleNamespace(
        num_decode_tokens=q.shape[0], decode_swa_indices=rows, decode_swa_lens=on("lens")[tokens],
        decode_swa_ragged_indices=None, decode_swa_ragged_indptr=None, max_seq_len=0, shape=None,
        is_valid_token=torch.ones(q.shape[0], dtype=torch.bool, device=device),
    )  # fmt: skip
    return AttentionCall(
        q=q, out=torch.full_like(q, torch.nan), lse=torch.full(q.shape[:2], torch.nan, device=device),
        metadata=metadata,  # type: ignore[arg-type]
        pages=pages, attn_sink=on("attn_sink"), scale=case["softmax_scale"], compressed=second,
    )  # fmt: skip


def packed(pages: torch.Tensor, entries: int, layout: PageLayout) -> PageView:
    size = layout.bytes_per_token
    return PageView.of(pages.as_strided((pages.shape[0], entries, size), (pages.stride(0), size, 1)), layout, entries)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_attention(provider: ProviderUnderTest, name: str) -> None:
    case = load_golden(GOLDEN / "attention" / f"{name}.npz")
    call = recorded_call(case, provider.device)
    assert call.lse is not None
    TritonAttention().decode(call)
    tokens = slice(0, call.q.shape[0])
    recorded = case.tensor("out").reshape(-1, 64, 512)[tokens]
    assert relative_error(floats(call.out), floats(recorded)) <= 3e-3
    assert worst_row_error(floats(call.out), floats(recorded)) <= 4e-3
    lse = case.tensor("lse").reshape(-1, 64)[tokens]
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    torch.testing.assert_close(call.lse.cpu(), lse, atol=1e-4, rtol=0)
