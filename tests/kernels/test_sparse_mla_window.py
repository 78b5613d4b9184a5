"""Window attention of neighbouring tokens together: both kernels, against a plain history of keys in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import pytest
import torch

from swa_backend.attention import AttentionResult
from swa_backend.cache_layout import Dialect
from swa_backend.kernels import window_plan
from swa_backend.kernels.sparse_mla_window_launch import WindowAttention
from swa_backend.pages import PageView
from swa_backend.provider import AttentionCall, AttentionProvider
from swa_backend.reference.codec import write_kv
from swa_backend.registry import get_backend
from tests.attention_scene import INF, SCALE, ProviderUnderTest, Scene, W, check
from tests.kernels.on_device import kernel_builder
from tests.support import Batch, make_config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, at NaN
Seen = list[torch.Tensor | None]
KERNELS = ("tiles", "held")


class Windows(Protocol):
    """Prefill of layers that see their window only."""

    def supports(self, call: AttentionCall) -> bool: ...

    def attend(self, call: AttentionCall) -> None: ...


class OnlyWindows(AttentionProvider):
    """What of a provider these tests take."""

    name = "windows"

    def __init__(self, attention: Windows, *, asks: bool) -> None:
        self.attention = attention
        self.asks = asks

    def prefill(self, call: AttentionCall) -> None:
        assert not self.asks or self.attention.supports(call)
        self.attention.attend(call)


MakeScene = Callable[..., Scene]


@pytest.fixture(params=KERNELS)
def scene(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> MakeScene:
    """Scenes whose prefill tokens go to one of the two kernels."""
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "reference")
    backend = get_backend("cuda" if device.type == "cuda" else "cpu")
    attention = WindowAttention(hold=request.param == "held")
    if request.param == "held" and not attention.can_hold(device):
        pytest.skip("no tuning for a kernel that holds a window on this chip")

    return maker(attention, ProviderUnderTest("reference", backend, str(device)), asks=request.param == "held")


def maker(attention: Windows, provider: ProviderUnderTest, *, asks: bool) -> MakeScene:
    """Makes scenes whose prefill tokens go to ``attention``, which has to support them if it is asked."""

    def make(queries: Sequence[int], seqs: Sequence[int], **options: Any) -> Scene:
        made = Scene(provider, queries, seqs, **options)
        made.metadata.provider = OnlyWindows(attention, asks=asks)
        return made

    return make


def seen_from(scene: Scene, starts: Sequence[int]) -> Seen:
    """The window of each token, cut off below a position of its request."""
    found: Seen = []
    for t in range(sum(scene.queries)):
        request, position = scene.token(t)
        found.append(scene.history[request][max(position - W + 1, starts[request], 0) : position + 1])
    return found


@pytest.mark.simulate
def test_requests_of_any_length(scene: MakeScene) -> None:
    one = scene([7, 1, 9], [140, 1, 9], heads=5)
    check(one.run(), one.expected())


@pytest.mark.parametrize("heads", [1, 16, 64])
def test_n4_head_counts(scene: MakeScene, heads: int) -> None:
    one = scene([3, 2], [130, 40], heads=heads)
    check(one.run(), one.expected())


def test_a_chunk_longer_than_a_program(scene: MakeScene) -> None:
    one = scene([45], [190], heads=2)
    check(one.run(), one.expected())


@pytest.mark.parametrize("page_tokens", [32, 96, 256])
def test_c6_page_sizes(scene: MakeScene, page_tokens: int) -> None:
    one = scene([5, 4], [131, 300], heads=2, config={"page_tokens": page_tokens})
    check(one.run(), one.expected())


@pytest.mark.parametrize("layout", ["fp8_ds_mla_v41", "bf16", "fp8_per_tensor"])
def test_layouts(scene: MakeScene, layout: str) -> None:
    one = scene([5, 4], [131, 12], heads=2, layout=layout)
    check(one.run(), one.expected())


def test_r8_replay_start(scene: MakeScene) -> None:
    one = scene([14, 5], [142, 200], heads=2, batch={"replay": [128, 190]})
    check(one.run(), one.expected(seen_from(one, [128, 190])))


def test_g4_padded_and_foreign_tokens_see_nothing(scene: MakeScene) -> None:
    slots = Batch([9, 5], [140, 60]).slot_mapping().tolist()
    foreign = (0, 3, 4, 13)
    for t in foreign:
        slots[t] = -1
    one = scene([9, 5], [140, 60], heads=2, batch={"slots": slots + [-1] * 4})
    seen: Seen = [None if t in foreign else one.window(t) for t in range(14)]
    check(one.run(), one.expected([*seen, None, None, None, None]))


def spans_seen(scene: Scene, spans: dict[int, tuple[int, int]]) -> Seen:
    found: Seen = []
    for t in range(scene.tokens):
        request, position = scene.token(t)
        first, end = max(position - W + 1, 0), position + 1
        low, high = spans.get(request, (1, 0))
        if low <= position <= high:
            first, end = min(first, low), high + 1
        query, seq = scene.queries[request], scene.seqs[request]
        gathered = seq - query - min(seq - query, W - 1)
        found.append(scene.history[request][max(first, gathered) : min(end, seq)])
    return found


def test_r7_image_rows_look_ahead_and_further_back(scene: MakeScene) -> None:
    spans = {0: (10, 159), 1: (3, 6)}
    one = scene(
        [12, 9], [170, 9], heads=2, batch={"spans": {r: [span] for r, span in spans.items()}},
        config={"max_image_tokens": 192},
    )  # fmt: skip
    assert one.metadata.prefill_right_visible is not None
    check(one.run(), one.expected(spans_seen(one, spans)))


def test_r9_a_missing_page(scene: MakeScene) -> None:
    one = scene([6], [134], heads=2, batch={"table": [[7, -1, 9]]})
    seen: Seen = [torch.cat([one.history[0][t + 1 : 64], one.history[0][128 : 129 + t]]) for t in range(6)]
    check(one.run(), one.expected(seen))


def test_n1_c8_entries_missing_in_single_rows(scene: MakeScene) -> None:
    one = scene([9], [20], heads=2)
    rows = one.metadata.prefill_swa_indices
    assert rows is not None
    seen: Seen = [one.window(t) for t in range(9)]
    rows[2, 0, 3:5] = -1
    rows[4, 0, :] = -1
    rows[5, 0, 0] = one.num_pages * 64
    rows[6, 0, 1] = rows[6, 0, 2]  # counts twice
    window = [one.window(t) for t in range(9)]
    seen[2] = torch.cat([window[2][:3], window[2][5:]])
    seen[4] = None
    seen[5] = window[5][1:]
    seen[6] = torch.cat([window[6][:1], window[6][2:3], window[6][2:]])
    check(one.run(), one.expected(seen))


def test_n2_sinks_of_any_value(scene: MakeScene) -> None:
    one = scene([5, 3], [140, 3], heads=4)
    one.sink = torch.tensor([-INF, INF, 0.5, 40.0], device=one.device)
    check(one.run(), one.expected())


def test_nan_in_a_key_stays_in_the_rows_that_see_it(scene: MakeScene) -> None:
    one = scene([9, 3], [140, 60], heads=2)
    clean = one.run()
    rows = one.metadata.prefill_swa_indices
    assert rows is not None
    slots = torch.stack([rows[2, 0, 0], rows[6, 0, 127]]).long()  # the first token to lose its oldest key; a new key
    write_kv(torch.full((2, 512), math.nan, device=one.device).bfloat16(), one.cache.pages, slots)
    result = one.run()
    hit = torch.tensor([t < 3 or 6 <= t < 9 for t in range(12)], device=one.device)
    assert result.lse is not None
    assert torch.isnan(result.out[hit]).all()
    assert torch.isnan(result.lse[hit]).all()
    assert torch.equal(result.out[~hit], clean.out[~hit])


def test_nan_in_a_query_stays_in_its_row(scene: MakeScene) -> None:
    one = scene([6], [140], heads=2)
    clean = one.run()
    one.q[3, 1, 100] = math.nan
    result = one.run()
    assert torch.isnan(result.out[3, 1]).all()
    one.q[3, 1] = 0
    result.out[3, 1] = clean.out[3, 1]
    assert torch.equal(result.out, clean.out)


def test_n5_a_row_alone_equals_the_row_in_a_batch(scene: MakeScene, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--kernels") == "interpret":
        pytest.skip("a row of a numpy product may depend on where it stands")
    queries, seqs = [6, 19], [141, 150]
    whole = scene(queries, seqs, heads=2)
    together = whole.run()
    again = whole.run()
    assert torch.equal(together.out, again.out)
    for request, first in ((0, 0), (1, 6)):
        query, seq = queries[request], seqs[request]
        pages = whole.spec.block_table()[request : request + 1]
        alone = scene([query], [seq], heads=2, batch={"table": pages.tolist()})
        alone.cache.pages.data.copy_(whole.cache.pages.data[: alone.num_pages])
        alone.q = whole.q[first : first + query]
        result = alone.run()
        assert torch.equal(result.out, together.out[first : first + query])
        assert result.lse is not None
        assert together.lse is not None
        assert torch.equal(result.lse, together.lse[first : first + query])


def test_tensors_at_odd_addresses_with_strides(scene: MakeScene) -> None:
    one = scene([5], [131], heads=3)
    plain = one.run()
    q = torch.full((5, 4, 520), math.nan, device=one.device).bfloat16()[:, 1:, 3:515]
    q.copy_(one.q)
    out = torch.full((5, 2, 3, 519), math.nan, device=one.device).bfloat16()[:, 1, :, 7:]
    result = one.run(q=q, out=out)
    assert torch.equal(out, plain.out)
    check(AttentionResult(out, result.lse), one.expected())


def test_pages_apart_and_the_other_dialect(scene: MakeScene) -> None:
    """Codes of the fnuz dialect are half as large: the same bytes with twice the query give the same logits."""
    one = scene([4], [131], heads=2)
    plain = one.run()
    pages = one.cache.pages
    apart = torch.full((pages.num_pages, pages.data.shape[1] + 1024), 0xFF, dtype=torch.uint8, device=one.device)
    apart[:, : pages.data.shape[1]] = pages.data
    moved = PageView.of(apart.as_strided((pages.num_pages, 64, 584), (apart.stride(0), 584, 1)), pages.layout, 64)
    call = AttentionCall(one.q, torch.empty_like(one.q), None, one.metadata, moved, one.sink, SCALE, None)
    WindowAttention(hold=one.metadata.provider.attention.hold).attend(call)
    assert torch.equal(call.out, plain.out)
    call = replace(call, pages=replace(moved, layout=moved.layout.with_dialect(Dialect.FNUZ)))
    half = [torch.cat([keys[:, :448] / 2, keys[:, 448:]], 1) for keys in (one.window(t).float() for t in range(4))]
    WindowAttention(hold=one.metadata.provider.attention.hold).attend(call)
    check(AttentionResult(call.out, plain.lse), (one.expected(half)[0], one.expected()[1]))


def test_a_step_is_planned_once_for_its_layers(scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scene([5], [131], heads=2)
    one.run()
    plans = one.metadata.provider.attention._plans
    monkeypatch.setattr(window_plan, "plan_step", lambda *_: pytest.fail("planned again"))
    one.run()
    assert one.metadata.prefill_swa_indices is not None
    one.metadata.prefill_swa_indices[0, 0, 0] = -1
    monkeypatch.undo()
    first, joins = plans.of(one.metadata)
    assert joins[:5].tolist() == [0, 0, 2, 2, 2]
    assert first[:5].tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("images", [0, 40])
def test_the_plan_tells_which_rows_share_their_places(device: torch.device, images: int) -> None:
    queries, seqs = [9, 1, 12, 6], [20, 1, 150, 6]
    spans = {2: [(140, 147)], 3: [(2, 4)]} if images else None
    slots = Batch(queries, seqs).slot_mapping().tolist()
    slots[4] = -1
    batch = Batch(queries, seqs, spans=spans, slots=[*slots, -1, -1])
    config = make_config(num_heads=2, max_image_tokens=images)
    metadata = kernel_builder(config, device).build(0, batch.metadata(str(device)))
    rows, lens = metadata.prefill_swa_indices, metadata.prefill_swa_lens
    rows[7, 0, 3] = -1
    seen: list[dict[int, int]] = []
    requests = [request for request, query in enumerate(queries) for _ in range(query)] + [-1, -1]
    for t, request in enumerate(requests):
        position = seqs[request] - sum(queries[: request + 1]) + t
        right = 0
        for low, high in (spans or {}).get(request, ()):
            right = high - position if low <= position <= high else right
        end = min(position + right + 1, seqs[request])
        length = int(lens[t])
        seen.append({end - length + i: int(rows[t, 0, i]) for i in range(length)})
    first, joins = window_plan.WindowPlans().of(metadata)
    for t, own in enumerate(seen):
        if not own:
            assert joins[t] == 0
            continue
        assert first[t] == min(own)
        before = seen[t - 1] if t and requests[t - 1] == requests[t] else {}
        agree = all(before[place] == own[place] for place in before.keys() & own.keys())
        grown = bool(before) and min(own) >= min(before) and max(own) >= max(before)
        right = 0 if not (agree and grown) else 2 if max(own) == max(before) + 1 else 1
        assert joins[t] == right, t
    assert {int(one) for one in joins[: len(seen)]} == ({0, 1, 2} if images else {0, 2})


def test_tokens_that_would_not_share_a_window_are_left_to_others(scene: MakeScene, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("chips differ in how many rows a program has; without one it has 32")

    def supports(heads: int, **options: Any) -> bool:
        one = scene([3], [20], heads=heads, **options)
        attention = one.metadata.provider.attention
        call = AttentionCall(one.q, one.q, None, one.metadata, one.cache.pages, one.sink, SCALE, None)
        found: bool = attention.supports(call)
        assert found is (heads <= 16 or (attention.hold and not options))
        return found

    assert supports(1)
    assert supports(16)
    supports(64)  # only where windows are held
    image = {"batch": {"spans": {0: [(1, 9)]}}, "config": {"max_image_tokens": 16}}
    assert not supports(64, **image)
    assert supports(16, **image)
