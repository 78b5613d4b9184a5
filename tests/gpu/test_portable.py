"""The portable Triton attention on an NVIDIA GPU: the semantic suite, recorded cases, fuzz, captured graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

for helper in ("attention_scene", "attention_suite", "portable_golden", "kernels.attention_calls", "gpu.captured_step"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.kernels.jit import stats  # noqa: E402
from swa_backend.kernels.sparse_mla import sparse_mla  # noqa: E402
from swa_backend.kernels.sparse_mla_reduce import sparse_mla_reduce  # noqa: E402
from swa_backend.platform import CacheRole  # noqa: E402
from swa_backend.portable.provider import TritonAttention  # noqa: E402
from swa_backend.registry import get_backend  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, check, mixed  # noqa: E402
from tests.attention_suite import *  # noqa: E402, F403
from tests.gpu.captured_step import check_replays  # noqa: E402
from tests.kernels.attention_calls import Case, keyed_twin, make_case  # noqa: E402
from tests.portable_golden import *  # noqa: E402, F403

pytestmark = pytest.mark.gpu

LAYOUTS = ("fp8_ds_mla", "fp8_ds_mla_v41", "bf16", "fp8_per_tensor")
DEVICE = torch.device("cuda:0")


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "triton")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    pairs = tuple((a, b) for a in LAYOUTS for b in LAYOUTS)
    return ProviderUnderTest("triton", get_backend("cuda"), "cuda:0", LAYOUTS, pairs)


SECONDS = (None, "fp8_ds_mla", "fp8_ds_mla_v41", "fp4_ds_mla_v41", "bf16", "fp8_per_tensor")


@pytest.mark.parametrize("seed", range(48))
def test_fuzz_against_float64(seed: int) -> None:
    """Random heads, widths, layouts, page sizes and gaps; wild entries; NaN in everything that no row names."""
    rng = np.random.default_rng(seed)
    first = LAYOUTS[0] if seed % 2 else LAYOUTS[int(rng.integers(len(LAYOUTS)))]
    second = SECONDS[seed % len(SECONDS)]
    dialect = "fnuz" if first != "bf16" and seed % 5 == 0 else "ocp"
    case = make_case(
        DEVICE, (first, dialect), None if second is None else (second, "ocp"), tokens=int(rng.integers(2, 9)),
        width=int(rng.integers(1, 300)), second_width=int(rng.integers(1, 700)), seed=seed,
        entries=int(rng.choice([2, 16, 48, 64, 100])), second_entries=int(rng.choice([1, 2, 16, 64])),
        heads=int(rng.choice([1, 3, 8, 16, 17, 32, 64, 65, 96, 128])), ragged=seed % 7 == 0,
        batch_invariant=seed % 4 == 3,
    )  # fmt: skip
    if case.ragged:
        slots = case.window.view.num_slots
        case.rows = np.where((case.rows < 0) | (case.rows >= slots), -1, case.rows)
    out, _ = case.check(TritonAttention(units=int(rng.choice([1, 8, 132]))))
    assert torch.equal(out, case.run(TritonAttention(units=132))[0]) or not case.batch_invariant


def test_the_chips_conversions_and_integer_arithmetic_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code with every scale byte, NaN included: the result of a key seen alone, whatever it is."""
    twin = keyed_twin(DEVICE, "fp8_ds_mla", entries=2, pages=256)
    for byte in range(256):
        for slot in (2 * byte, 2 * byte + 1):
            data, scales = twin.pool.places(slot)
            twin.pool.memory[data] = 0
            twin.pool.memory[data][:256] = np.arange(256) if slot % 2 else np.arange(256) & 0x77
            twin.pool.memory[scales] = byte
    twin.memory.copy_(torch.from_numpy(twin.pool.memory))
    rows = np.arange(512, dtype=np.int32)[:, None]
    case = Case(DEVICE, twin, rows, np.ones(512, np.int32), heads=2)
    case.q.zero_()
    case.sink.fill_(-math.inf)
    results = []
    target = next(name for name in ("cuda:90", "cuda") if name in sparse_mla.tuning)
    tuning = sparse_mla.tuning[target]
    for hw in (0, 1):
        monkeypatch.setitem(sparse_mla.tuning, target, replace(tuning, tiles={**tuning.tiles, "HW_FP8": hw}))
        monkeypatch.setattr(sparse_mla, "_launchers", {})
        twin.view.launches.clear()
        results.append(case.run(TritonAttention())[0])
    assert torch.equal(results[0].isnan(), results[1].isnan())
    assert torch.equal(results[0].nan_to_num(7.0), results[1].nan_to_num(7.0))
    assert results[0].isnan().any()


def test_g5_g6_t3_a_captured_step_equals_an_eager_one_bit_for_bit(provider: ProviderUnderTest) -> None:
    check_replays()


def test_h1_calls_after_warm_up_compile_and_allocate_nothing(
    provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = mixed(provider, second=(4, "fp8_ds_mla", 256), heads=64)
    compressed = scene.topk(torch.randint(0, 50, (scene.tokens, 20), generator=torch.Generator().manual_seed(4)))
    dialects = {role: provider.backend.cache_dialect(role) for role in CacheRole}
    for one in (sparse_mla, sparse_mla_reduce):
        monkeypatch.setattr(one, "_launchers", {})
        for key in one.keys(scene.settings, dialects):
            one.on(DEVICE, **key).compile()
    out = torch.empty_like(scene.q)
    compiled = stats().compilations
    scene.run(compressed=compressed, out=out, return_lse=False)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        scene.run(compressed=compressed, out=out, return_lse=False)
    assert stats().compilations == compiled
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_many_tokens_at_once(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1] * 300, [1 + t % 200 for t in range(300)], heads=64, config={"max_num_seqs": 300})
    check(scene.run(), scene.expected())
