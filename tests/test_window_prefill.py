"""Which calls the ring kernel serves: decided on the host, from what a captured graph cannot change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # what the module under test imports

from swa_backend.cache_layout import Dialect
from swa_backend.provider import AttentionCall, CompressedRows
from swa_backend.registry import get_backend
from tests.attention_scene import SCALE, ProviderUnderTest, Scene


def call_of(**options: Any) -> AttentionCall:
    scene = Scene(ProviderUnderTest("reference", get_backend("cpu"), "cpu"), [5, 3], [140, 3], heads=8, **options)
    out, lse = torch.empty_like(scene.q), scene.q.new_empty(scene.q.shape[:2], dtype=torch.float32)
    return AttentionCall(scene.q, out, lse, scene.metadata, scene.cache.pages, scene.sink, SCALE, None)


def supports(call: AttentionCall) -> bool:
    from swa_platform_cuda.hopper_window_prefill import WindowPrefill

    return WindowPrefill().supports(call)


def test_window_rows_of_a_usual_cache_are_served() -> None:
    assert supports(call_of())
    assert supports(replace(call_of(), lse=None))
    assert supports(call_of(config={"page_tokens": 96}))
    assert supports(call_of(batch={"padding": 3}))


def second_cache(call: AttentionCall) -> AttentionCall:
    assert call.metadata.prefill_swa_lens is not None
    rows = torch.zeros(8, 4, dtype=torch.int32)
    return replace(call, compressed=CompressedRows(call.pages, 4, rows, torch.zeros(8, dtype=torch.int32)))


def other_dialect(call: AttentionCall) -> AttentionCall:
    return replace(call, pages=replace(call.pages, layout=call.pages.layout.with_dialect(Dialect.FNUZ)))


def heads_apart(call: AttentionCall) -> AttentionCall:
    return replace(call, q=torch.empty(8, 8, 512, dtype=torch.bfloat16).transpose(0, 1))


def at_an_odd_address(call: AttentionCall) -> AttentionCall:
    return replace(call, out=torch.empty(8 * 8 * 512 + 1, dtype=torch.bfloat16)[1:].view(8, 8, 512))


@pytest.mark.parametrize("change", [second_cache, other_dialect, heads_apart, at_an_odd_address])
def test_other_calls_are_left_to_others(change: Callable[[AttentionCall], AttentionCall]) -> None:
    call = call_of()
    assert supports(call)
    assert not supports(change(call))


def test_rows_that_an_image_widens_are_left_to_others() -> None:
    images = {"config": {"max_image_tokens": 64}}
    assert not supports(call_of(batch={"spans": {0: [(136, 139)]}}, **images))
    assert supports(call_of(**images))


@pytest.mark.parametrize("layout", ["fp8_ds_mla_v41", "bf16", "fp8_per_tensor"])
def test_other_layouts_are_left_to_others(layout: str) -> None:
    assert not supports(call_of(layout=layout))
