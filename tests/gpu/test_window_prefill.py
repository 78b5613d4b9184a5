"""Window-only prefill on a GPU: the ring kernel and both portable ones, on batches of realistic size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("tests.kernels.test_sparse_mla_window", "tests.attention_scene")

from swa_backend.attention import AttentionResult  # noqa: E402
from swa_backend.kernels.sparse_mla_window_launch import WindowAttention  # noqa: E402
from swa_backend.registry import get_backend  # noqa: E402
from swa_platform_cuda import hopper_window_prefill  # noqa: E402
from tests.attention_scene import INF, SCALE, ProviderUnderTest, Scene, W, check  # noqa: E402
from tests.independent_codec import decode  # noqa: E402
from tests.kernels.test_sparse_mla_window import (  # noqa: E402, F401
    MakeScene,
    Seen,
    Windows,
    maker,
    test_a_chunk_longer_than_a_program,
    test_c6_page_sizes,
    test_g4_padded_and_foreign_tokens_see_nothing,
    test_n1_c8_entries_missing_in_single_rows,
    test_n2_sinks_of_any_value,
    test_n4_head_counts,
    test_n5_a_row_alone_equals_the_row_in_a_batch,
    test_nan_in_a_key_stays_in_the_rows_that_see_it,
    test_nan_in_a_query_stays_in_its_row,
    test_r8_replay_start,
    test_r9_a_missing_page,
    test_requests_of_any_length,
)

pytestmark = pytest.mark.gpu
KERNELS: dict[str, Callable[[], Windows]] = {
    "ring": hopper_window_prefill.WindowPrefill,
    "held": WindowAttention,
    "tiles": lambda: WindowAttention(hold=False),
}


@pytest.fixture(params=[("ring", 4), ("ring", 64), ("held", 0), ("tiles", 0)], ids=str)
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeScene:
    """Scenes for each kernel; the ring kernel with short and with long runs of tokens a program."""
    name, span = request.param
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "reference")
    monkeypatch.setattr(hopper_window_prefill, "LEAST_SPAN", span)
    device = torch.device("cuda", 0)
    if name != "tiles" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("a kernel for sm90")
    provider = ProviderUnderTest("reference", get_backend("cuda"), str(device))
    return maker(KERNELS[name](), provider, asks=name != "tiles")


def expected(scene: Scene, seen: Seen) -> tuple[Any, Any]:
    """float64 on the GPU: (out, lse) of tokens that see these keys."""
    heads, sinks = scene.q.shape[1], scene.sink.double()
    out = torch.zeros(scene.tokens, heads, 512, dtype=torch.float64, device=scene.device)
    lse = torch.full((scene.tokens, heads), -INF, dtype=torch.float64, device=scene.device)
    for t, keys in enumerate(seen):
        if keys is not None and len(keys):
            table = keys.to(scene.device).double()
            logits = SCALE * (scene.q[t].double() @ table.T)
            lse[t] = torch.logsumexp(logits, 1)
            out[t] = torch.exp(logits - lse[t][:, None]) @ table * torch.sigmoid(lse[t] - sinks)[:, None]
    return out.cpu().numpy(), lse.cpu().numpy()


@pytest.mark.parametrize("heads", [8, 24, 64, 100, 128])
def test_many_requests(scene: MakeScene, heads: int) -> None:
    """Fresh, resumed and replayed prefills of 1 to 300 tokens, foreign tokens among them, padding behind."""
    dice = random.Random(heads)
    queries = [300, *(dice.choice([1, 2, 7, 8, 9, 63, 64, 65, 129, dice.randint(1, 300)]) for _ in range(11))]
    prefixes = [dice.choice([0, 1, 127, 128, 129, dice.randint(0, 2000)]) for _ in queries]
    seqs = [query + prefix for query, prefix in zip(queries, prefixes, strict=True)]
    replay = [dice.randint(0, prefix) if dice.random() < 0.3 else 0 for prefix in prefixes]
    one = scene(
        queries, seqs, heads=heads, batch={"replay": replay, "padding": 9},
        config={"max_num_batched_tokens": 4096, "page_tokens": dice.choice([32, 64, 256])},
    )  # fmt: skip
    seen: Seen = []
    for t in range(sum(queries)):
        request, position = one.token(t)
        seen.append(one.history[request][max(position - W + 1, replay[request], 0) : position + 1])
    result = one.run()
    check(result, expected(one, [*seen, *[None] * 9]))
    again = one.run()
    assert torch.equal(again.out, result.out)
    assert again.lse is not None
    assert result.lse is not None
    assert torch.equal(again.lse, result.lse)


def test_c7_every_scale_byte_with_every_code(scene: MakeScene) -> None:
    """A token that sees one key returns it: exactly, or NaN where a value is not finite in bf16."""
    count = 256
    one = scene([2] + [1] * count, [2] + [1] * count, heads=1, config={"max_num_seqs": count + 1})
    assert one.metadata.num_prefill_tokens == count + 2
    data = np.random.default_rng(3).integers(0, 256, (count, 576), dtype=np.uint8)
    data[:, 0:448][(data[:, 0:448] & 0x7F) == 0x7F] = 0x55  # NaN codes have their own test
    data[:, 449::2] &= 0xBF  # the bf16 tail stays finite
    data[5, 7] = 0x7F
    scales = np.repeat(np.arange(count, dtype=np.uint8)[:, None], 8, 1)
    scales[:, 7] = 0
    pages = one.cache.pages
    for t in range(count):
        row = pages.data[int(one.spec.block_table()[t + 1, 0])]
        row[:576] = torch.from_numpy(data[t]).to(one.device)
        row[64 * 576 :][:8] = torch.from_numpy(scales[t]).to(one.device)
    one.sink.fill_(-INF)
    one.q.zero_()
    found = one.run().out[2:, 0].float().cpu()
    keys = torch.from_numpy(decode(data, scales, "fp8_ds_mla")).float().bfloat16().float()
    whole = torch.isfinite(keys).all(1)
    assert 230 < int(whole.sum()) < 256
    assert torch.equal(found[whole], keys[whole])
    assert torch.isnan(found[~whole]).all()


def test_p3_whatever_is_not_seen_is_poison(scene: MakeScene) -> None:
    """Everything that no row names is NaN, page 0 included, or made of other bytes: the result is the same."""
    results = []
    for poison in (0xFF, 0x7E, 0):
        one = scene([70, 20], [200, 20], heads=16, poison=poison)
        results.append(one.run())
    assert torch.isfinite(results[0].out).all()
    for other in results[1:]:
        assert torch.equal(other.out, results[0].out)


def test_g5_a_captured_step_plans_again(scene: MakeScene) -> None:
    """The rows change under a captured graph: what follows what is found out in the graph."""
    one = scene([40, 24], [140, 24], heads=16)
    out = torch.empty_like(one.q)
    one.run(out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.run(out=out, return_lse=False)
    rows, lens = one.metadata.prefill_swa_indices, one.metadata.prefill_swa_lens
    assert rows is not None
    assert lens is not None
    seen: Seen = [one.window(t) for t in range(64)]
    for t in (3, 20, 50):
        rows[t, 0, 0] = -1
        seen[t] = one.window(t)[1:]
    lens[30] = 0
    seen[30] = None
    out.fill_(math.nan)
    graph.replay()
    right = expected(one, seen)
    check(AttentionResult(out, torch.from_numpy(right[1])), right)


def test_c1_a_cache_above_2_gib(scene: MakeScene) -> None:
    table = [[0, 57_358, 57_359, 60_000]]
    one = scene([20], [200], heads=8, batch={"table": table})
    assert one.cache.pages.data.shape[0] > 60_000
    check(one.run(), one.expected())
