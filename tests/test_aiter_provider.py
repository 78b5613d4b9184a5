"""What aiter's provider passes to the kernel, by both of its published forms, and what it never asks of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.attention_scene")

from swa_backend.backend import Backend  # noqa: E402
from swa_backend.provider import AttentionCall, AttentionShape  # noqa: E402
from swa_backend.reference.provider import ReferenceAttention  # noqa: E402
from swa_platform_rocm import aiter_provider, aiter_room  # noqa: E402
from swa_platform_rocm.aiter_discovery import CURRENT, OLD, AiterKernel, Found  # noqa: E402
from tests import aiter_fake  # noqa: E402
from tests.aiter_fake import ONLY_OLD, PRESENT, calls, fake_backend, from_here, installed  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, mixed  # noqa: E402

C4 = (4, "fp8_ds_mla", 256)
OLD_WITH_OUT = {aiter_fake.OLD: from_here("pa_decode_sparse", "pa_decode_sparse_with_out", aiter_fake.STRIDE_FIX)}
FORMS = {"sparse_mla_fwd": PRESENT, "pa_decode_sparse": ONLY_OLD, "pa_decode_sparse_with_out": OLD_WITH_OUT}


class Counting(ReferenceAttention):
    """The reference, which counts what it is asked."""

    def __init__(self, *refusals: str) -> None:
        self.refusals = refusals
        self.asked: list[str] = []

    def supports(self, shape: AttentionShape) -> tuple[str, ...]:
        return self.refusals

    def reserve(self, config: Any, device: torch.device) -> None:
        self.asked.append("reserve")

    def decode(self, call: AttentionCall) -> None:
        self.asked.append("decode")
        super().decode(call)

    def prefill(self, call: AttentionCall) -> None:
        self.asked.append("prefill")
        super().prefill(call)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "aiter")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    calls.clear()
    yield
    calls.clear()


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with installed(tmp_path, FORMS[request.param]):
        yield request.param


@pytest.fixture
def current(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, PRESENT):
        yield


def under_test(backend: Backend | None = None) -> ProviderUnderTest:
    return ProviderUnderTest("aiter", backend or fake_backend(), "cpu", batch_invariant=False)


def with_picks(provider: ProviderUnderTest, **options: Any) -> tuple[Scene, Any]:
    scene = mixed(provider, second=C4, **options)
    local = torch.randint(-3, 60, (scene.tokens, 24), generator=torch.Generator().manual_seed(3))
    return scene, scene.topk(local)


def test_the_calls_are_what_the_published_signature_takes(form: str) -> None:
    scene, compressed = with_picks(under_test())
    scene.run(return_lse=False)
    scene.run(return_lse=False, compressed=compressed)
    assert [call["function"] for call in calls] == [form] * 4, "decode and prefill of two layers"
    parameters = inspect.signature(getattr(aiter_fake, form)).parameters
    named = {*CURRENT.needed} if form == "sparse_mla_fwd" else {*OLD.needed, *OLD.optional} & parameters.keys()
    for call in calls:
        assert {name for name, one in parameters.items() if call[name] is not one.default} <= named
        assert call["has_invalid"] is False, "ragged rows hold no -1"
        assert call["softmax_scale"] == 512**-0.5


def test_the_current_form_is_told_the_geometry_of_the_row(current: None) -> None:
    mixed(under_test()).run(return_lse=False)
    for call in calls:
        assert (call["kv_lora_rank"], call["qk_rope_head_dim"], call["return_lse"]) == (512, 0, False)


def test_every_form_gives_the_same_output(tmp_path: Path) -> None:
    results = []
    for number, files in enumerate(FORMS.values()):
        with installed(tmp_path / str(number), files):
            scene, compressed = with_picks(under_test())
            results.append(scene.run(return_lse=False, compressed=compressed).out)
    assert all(torch.equal(one, results[0]) for one in results)
    assert results[0].isfinite().all()


def test_only_partial_results_in_float32_are_split(form: str) -> None:
    """As of the revision that takes ``out``, aiter rounds them to bf16."""
    mixed(under_test(fake_backend(target="hip:gfx950"))).run(return_lse=False)
    assert {call["kv_splits"] for call in calls} == ({2} if form == "pa_decode_sparse" else {1})


def test_rows_and_caches_are_passed_as_they_are(form: str) -> None:
    """No dense-to-ragged pass for the window: the builder's own buffers, and the pages where they lie."""
    scene, compressed = with_picks(under_test())
    out = torch.empty_like(scene.q)
    scene.run(return_lse=False, compressed=compressed, out=out)
    decode, prefill = calls
    metadata, border = scene.metadata, scene.metadata.num_decode_tokens
    for call, kind, first in ((decode, "decode", 0), (prefill, "prefill", border)):
        for part in ("indices", "indptr"):
            assert call[f"kv_{part}"].data_ptr() == getattr(metadata, f"{kind}_swa_ragged_{part}").data_ptr()
        assert call["q"].data_ptr() == scene.q[first].data_ptr()
        if form != "pa_decode_sparse":
            assert call["out"].data_ptr() == out[first].data_ptr()
        window, second = ("kv_buffer", "extra_kv") if form == "sparse_mla_fwd" else ("unified_kv", "extra_cache")
        for name, cache in ((window, scene.cache), (second, compressed[0])):
            pages = cache.pages
            assert call[name].data_ptr() == pages.data.data_ptr()
            assert call[name].shape == (pages.num_pages, pages.entries, 584)
            assert call[name].stride(0) == pages.page_stride == pages.entries * 585, "padding between pages"
    assert decode["kv_indptr"].shape == (border + 1,)
    assert prefill["kv_indptr"].shape == (scene.tokens - border + 1,)


def test_a_call_for_the_lse_goes_to_the_next_provider_that_serves(current: None) -> None:
    unable, able, last = Counting("not this shape"), Counting(), Counting()
    scene = mixed(under_test(fake_backend(others=(unable, able, last))))
    result = scene.run()
    assert result.lse is not None
    assert result.lse.isfinite().all()
    assert not calls
    assert able.asked == ["reserve", "decode", "prefill"]
    assert unable.asked == last.asked == ["reserve"], "each keeps what it takes"
    scene.run(return_lse=False)
    assert len(calls) == 2
    assert len(able.asked) == 3


def test_a_merge_of_partial_results_uses_the_other_provider_for_both(current: None) -> None:
    scene, compressed = with_picks(under_test())
    none = torch.full_like(scene.sink, -torch.inf)
    whole = scene.run(attn_sink=none, compressed=compressed)
    assert not calls
    assert torch.equal(scene.run(attn_sink=none, compressed=compressed).out, whole.out)


@pytest.mark.parametrize("most", [1, 3, 64])
def test_many_tokens_go_in_several_calls(current: None, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    scene, compressed = with_picks(under_test())
    whole = scene.run(return_lse=False, compressed=compressed).out
    calls.clear()
    monkeypatch.setattr(aiter_provider, "MOST_TOKENS", most)
    assert torch.equal(scene.run(return_lse=False, compressed=compressed).out, whole)
    decodes = scene.metadata.num_decode_tokens
    assert len(calls) == -(-decodes // most) + -(-(scene.tokens - decodes) // most)


def test_rows_wider_than_the_room_go_in_several_calls(current: None) -> None:
    scene, (cache, slots, lens) = with_picks(under_test())
    whole = scene.run(return_lse=False, compressed=(cache, slots, lens)).out
    room = scene.builder.provider._rooms.on(torch.device("cpu"))
    width = room.indices.numel() // 50
    wide = torch.cat([slots, slots.new_full((len(slots), width - slots.shape[1]), 2**31 - 1)], dim=1)
    calls.clear()
    assert torch.equal(scene.run(return_lse=False, compressed=(cache, wide, lens)).out, whole)
    assert max(call["q"].shape[0] for call in calls) == 50
    assert scene.builder.provider._rooms.on(torch.device("cpu")) is room
    one = room.indices.numel() + 1
    wide = torch.cat([slots, slots.new_full((len(slots), one - slots.shape[1]), 7)], dim=1)
    assert torch.equal(scene.run(return_lse=False, compressed=(cache, wide, lens)).out, whole)


def test_offsets_stay_within_32_bits(current: None, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = mixed(under_test())
    whole = scene.run(return_lse=False).out
    monkeypatch.setattr(aiter_provider, "_MOST_BYTES", 2 * scene.q.stride(0) * 5)
    calls.clear()
    assert torch.equal(scene.run(return_lse=False).out, whole)
    assert max(call["q"].shape[0] for call in calls) == 5


def test_nothing_is_allocated_by_a_step(current: None) -> None:
    provider = under_test()
    scene, compressed = with_picks(provider)
    rooms = scene.builder.provider._rooms
    before = rooms.on(torch.device("cpu"))
    scene.run(return_lse=False, compressed=compressed)
    scene.metadata = scene.build()
    scene.run(return_lse=False, compressed=scene.topk(torch.full((scene.tokens, 24), 5)))
    assert rooms.on(torch.device("cpu")) is before
    for call in calls[1::2]:
        if call["extra_indices"] is not None:
            assert call["extra_indices"].data_ptr() == before.indices.data_ptr()


def test_room_grows_and_keeps_what_a_graph_may_use() -> None:
    rooms = aiter_room.Rooms()
    small = rooms.on(torch.device("cpu"), 10)
    large = rooms.on(torch.device("cpu"), 11)
    assert rooms.on(torch.device("cpu"), 4) is large
    assert rooms._rooms[torch.device("cpu")] == [small, large]


@pytest.mark.parametrize(
    ("requests", "seq", "splits"),
    # 256 compute units, two workgroups each; 8 heads are one tile. Keys come in tiles of 64: two of the window's, and
    # of the 600 picks as many as a context of this length has entries.
    [(1, 70, 3), (1, 400, 4), (1, 4000, 12), (64, 4000, 6), (170, 4000, 3), (513, 4000, 1)],
)
def test_split_count_follows_compute_units_and_live_entries(requests: int, seq: int, splits: int) -> None:
    def note(**given: Any) -> torch.Tensor:
        calls.append(given)
        return torch.empty_like(given["q"])

    kernel = AiterKernel(OLD, note, frozenset(OLD.needed))
    sizes = {"max_num_seqs": 1024, "max_num_batched_tokens": 1024}
    backend = fake_backend(target="hip:gfx950", find=lambda: Found(kernel, ()))
    scene = Scene(under_test(backend), [1] * requests, [70] * requests, second=C4, config=sizes)
    scene.metadata.max_seq_len = seq  # as the engine says it; contexts of that length would take a while to write
    local = torch.zeros((scene.tokens, 600), dtype=torch.int64)
    scene.run(return_lse=False, compressed=scene.topk(local))
    assert [call["kv_splits"] for call in calls] == [splits]
