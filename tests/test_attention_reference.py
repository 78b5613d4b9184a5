"""The reference attention against recorded results and a float64 oracle."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.cache_layout import Dialect, get_layout
from swa_backend.pages import PageView
from swa_backend.reference.attention import Segment, sparse_attention
from swa_backend.reference.codec import write_kv
from tests.oracle_attention import Keys, attention, relative_error, worst_row_error

GOLDEN = Path(__file__).parent / "golden" / "attention"
SCALE = 512**-0.5


def floats(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def new_view(layout: str, pages: int, entries: int, dialect: Dialect = Dialect.OCP, poison: int = 0xFF) -> PageView:
    """Pages a little further apart than they are long, every byte ``poison``."""
    form = get_layout(layout, dialect)
    stride = form.page_bytes(entries) + form.alignment
    storage = torch.full((pages * stride,), poison, dtype=torch.uint8)
    rows = storage.as_strided((pages, entries, form.bytes_per_token), (stride, form.bytes_per_token, 1))
    scale = torch.tensor([1 / 32]) if form.scale_format == "tensor" else None
    return PageView.of(rows, form, entries, scale)


def run(
    q: torch.Tensor, segments: list[Segment], sink: torch.Tensor, scale: float = SCALE, dtype: Any = torch.bfloat16
) -> tuple[Any, Any]:
    out, lse = torch.full(q.shape, math.nan, dtype=dtype), torch.full(q.shape[:2], math.nan)
    sparse_attention(q, segments, sink, scale, out, lse)
    return out, lse


class TestGolden:
    """Recorded on a GPU by the established kernels."""

    @staticmethod
    def load(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        with np.load(GOLDEN / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files if key != "meta_json"}
            meta = json.loads(str(file["meta_json"]))
        tensors = {
            key.removesuffix("__bf16"): torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
            if key.endswith("__bf16")
            else torch.from_numpy(value)
            for key, value in arrays.items()
        }
        return tensors, meta

    @staticmethod
    def paged(pages: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, entries: int) -> Segment:
        rows = pages.as_strided((pages.shape[0], entries, 584), (pages.stride(0), 584, 1))
        return Segment(PageView.of(rows, get_layout("fp8_ds_mla"), entries), indices.squeeze(1), lens)

    NAMES = ("decode_c4a_h64", "decode_swaonly_h64", "prefill_h64")

    def test_no_recorded_case_is_left_out(self) -> None:
        assert sorted(path.stem for path in GOLDEN.glob("*.npz")) == list(self.NAMES)

    @pytest.mark.parametrize("name", NAMES)
    def test_recorded_case(self, name: str) -> None:
        case, meta = self.load(name)
        q = case["q"].reshape(-1, *case["q"].shape[-2:])
        if name == "prefill_h64":
            keys = PageView.of(case["kv"].reshape(1, -1, 512), get_layout("bf16"), len(case["kv"]))
            segments = [Segment(keys, case["indices"].squeeze(1), case["lens"])]
        else:
            segments = [self.paged(case["pages"], case["indices"], case["lens"], meta["block_size"])]
        if "extra_pages" in case:
            extra = case["extra_pages"], case["extra_indices"], case["extra_lens"]
            segments.append(self.paged(*extra, meta["extra_block_size"]))
        out, lse = run(q, segments, case["attn_sink"], meta["softmax_scale"])

        expected, expected_lse = floats(case["out"].reshape(out.shape)), floats(case["lse"].reshape(lse.shape))
        assert relative_error(floats(out), expected) <= 3e-3
        assert worst_row_error(floats(out), expected) <= 4e-3
        empty = np.isposinf(expected_lse)
        assert empty.any()
        assert np.isneginf(floats(lse)[empty]).all(), "recorded as +inf; ours is -inf"
        assert np.abs(floats(lse)[~empty] - expected_lse[~empty]).max() <= 1e-4
        if "max_logits" in case:  # not a result of ours; a bound of the lse by the length of the row
            gap = floats(lse)[~empty] - floats(case["max_logits"])[~empty]
            assert gap.min() >= -1e-4
            assert (gap <= np.log(floats(case["lens"])[:, None].repeat(64, 1)[~empty]) + 1e-4).all()


def exact_keys(count: int, seed: int) -> torch.Tensor:
    """Keys that every writable layout and both fp8 dialects store exactly."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-15, 16, (count, 512), generator=generator).double()
    keys = whole / 8 * 2.0 ** torch.randint(-1, 2, (count, 1), generator=generator)
    return keys.bfloat16()


CACHES = [
    ("fp8_ds_mla", Dialect.OCP),
    ("fp8_ds_mla", Dialect.FNUZ),
    ("fp8_ds_mla_v41", Dialect.OCP),
    ("fp8_ds_mla_v41", Dialect.FNUZ),
    ("bf16", Dialect.OCP),
    ("fp8_per_tensor", Dialect.OCP),
    ("fp8_per_tensor", Dialect.FNUZ),
]


class TestOracle:
    @pytest.mark.parametrize(("layout", "dialect"), CACHES)
    @pytest.mark.parametrize("entries", [2, 64])
    def test_random_rows_in_every_layout(self, layout: str, dialect: Dialect, entries: int) -> None:
        tokens, heads, width, slots = 37, 5, 150, 5 * entries
        generator = torch.Generator().manual_seed(entries)
        keys = exact_keys(slots, 3)
        view = new_view(layout, 5, entries, dialect)
        write_kv(keys, view, torch.arange(slots))
        rows = torch.randint(-4, slots + 4, (tokens, width), dtype=torch.int32, generator=generator)
        rows[:5, :3] = torch.tensor([-(2**31), 2**31 - 1, slots])
        lens = torch.randint(-2, width + 5, (tokens,), dtype=torch.int32, generator=generator)
        lens[:3] = torch.tensor([0, 2**31 - 1, -(2**31)])
        q = torch.randn(tokens, heads, 512, generator=generator).bfloat16()
        sink = torch.linspace(-2, 2, heads)

        out, lse = run(q, [Segment(view, rows, lens)], sink, dtype=torch.float32)

        expected, expected_lse = attention(
            floats(q), [Keys(floats(keys), rows.tolist(), lens.tolist())], sink.tolist(), SCALE
        )
        self.compare(out, lse, expected, expected_lse)
        assert torch.equal(run(q, [Segment(view, rows, lens)], sink)[0], out.bfloat16()), "rounded once"

    @staticmethod
    def compare(out: torch.Tensor, lse: torch.Tensor, expected: np.ndarray, expected_lse: np.ndarray) -> None:
        """Before the rounding to bf16, each head of each token by itself."""
        assert worst_row_error(floats(out).reshape(-1, 512), expected.reshape(-1, 512)) <= 5e-6
        seen = np.isfinite(expected_lse)
        assert np.array_equal(floats(lse)[~seen], expected_lse[~seen])
        assert np.abs(floats(lse)[seen] - expected_lse[seen]).max(initial=0) <= 2e-5

    def test_three_segments_of_any_width(self) -> None:
        generator = torch.Generator().manual_seed(9)
        tokens, heads = 20, 3
        q = torch.randn(tokens, heads, 512, generator=generator).bfloat16()
        segments, plain = [], []
        for width, pages in ((1500, 40), (128, 2), (70, 900)):
            keys = exact_keys(pages * 64, width)
            view = new_view("bf16", pages, 64)
            write_kv(keys, view, torch.arange(pages * 64))
            rows = torch.randint(-9, pages * 64, (tokens, width), dtype=torch.int32, generator=generator)
            lens = torch.randint(0, width + 1, (tokens,), dtype=torch.int32, generator=generator)
            segments.append(Segment(view, rows, lens))
            plain.append(Keys(floats(keys), rows.tolist(), lens.tolist()))
        sink = torch.randn(heads)
        out, lse = run(q, segments, sink, dtype=torch.float32)
        self.compare(out, lse, *attention(floats(q), plain, sink.tolist(), SCALE))

    def test_distinct_keys_beyond_one_table(self) -> None:
        """200 tokens that share no key: more than is held dequantised at a time."""
        tokens, width = 200, 200
        keys = exact_keys(tokens * width, 1)
        view = new_view("bf16", tokens * width // 100, 100)
        write_kv(keys, view, torch.arange(tokens * width))
        rows = torch.randperm(tokens * width).int().reshape(tokens, width)
        lens = torch.full((tokens,), width, dtype=torch.int32)
        q, sink = torch.randn(tokens, 1, 512).bfloat16(), torch.zeros(1)
        out, lse = run(q, [Segment(view, rows, lens)], sink, dtype=torch.float32)
        self.compare(out, lse, *attention(floats(q), [Keys(floats(keys), rows.tolist(), lens.tolist())], [0.0], SCALE))

    def test_rows_so_wide_that_chunks_are_short(self) -> None:
        """18 tokens of 9000 entries each: two tiles, each a chunk of its own."""
        tokens, width = 18, 9000
        keys = exact_keys(500, 1)
        view = new_view("bf16", 5, 100)
        write_kv(keys, view, torch.arange(500))
        generator = torch.Generator().manual_seed(5)
        rows = torch.randint(-50, 500, (tokens, width), dtype=torch.int32, generator=generator)
        lens = torch.randint(width - 500, width + 1, (tokens,), dtype=torch.int32, generator=generator)
        q, sink = torch.randn(tokens, 1, 512, generator=generator).bfloat16(), torch.zeros(1)
        out, lse = run(q, [Segment(view, rows, lens)], sink, dtype=torch.float32)
        self.compare(out, lse, *attention(floats(q), [Keys(floats(keys), rows.tolist(), lens.tolist())], [0.0], SCALE))

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
    def test_flat_and_sharp_softmax(self, scale: float) -> None:
        keys = exact_keys(300, 2)
        view = new_view("bf16", 3, 100)
        write_kv(keys, view, torch.arange(300))
        rows = torch.arange(300, dtype=torch.int32).repeat(4, 1)
        lens = torch.full((4,), 300, dtype=torch.int32)
        q, sink = torch.randn(4, 4, 512).bfloat16(), torch.tensor([-5.0, 0.0, 5.0, 1e4])
        out, lse = run(q, [Segment(view, rows, lens)], sink, scale)
        expected, expected_lse = attention(
            floats(q), [Keys(floats(keys), rows.tolist(), lens.tolist())], sink.tolist(), scale
        )
        # A logit of 1e3 is known to 1e-4 in float32, and so is its share of the softmax.
        assert relative_error(floats(out), expected) <= 3e-3
        np.testing.assert_allclose(floats(lse), expected_lse, rtol=1e-6, atol=1e-5)


class TestNotFinite:
    def scene(self) -> tuple[torch.Tensor, Segment, torch.Tensor]:
        keys = exact_keys(200, 2)
        view = new_view("bf16", 2, 100)
        write_kv(keys, view, torch.arange(200))
        rows = torch.randint(0, 190, (6, 140), dtype=torch.int32)
        return torch.randn(6, 2, 512).bfloat16(), Segment(view, rows, torch.full((6,), 140)), torch.zeros(2)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_key_that_is_not_finite(self, value: float) -> None:
        q, segment, sink = self.scene()
        before, _ = run(q, [segment], sink)
        segment.rows[3, 135] = 195
        segment.rows[4, 139] = 196  # past the length below
        segment.lens[4] = 139
        other, _ = run(q, [segment], sink)
        write_kv(torch.full((2, 512), value).bfloat16(), segment.view, torch.tensor([195, 196]))
        out, _ = run(q, [segment], sink)
        kept = [0, 1, 2, 5]
        assert torch.equal(out[kept], before[kept])
        assert torch.equal(out[4], other[4])
        assert out[3].isnan().all()

    def test_a_query_that_is_not_finite(self) -> None:
        q, segment, sink = self.scene()
        segment.rows[3, ::2] = -1
        before, _ = run(q, [segment], sink)
        q[3, 1, 7] = math.inf
        q[5, 0, 8] = math.nan
        segment.lens[5] = 0
        out, lse = run(q, [segment], sink)
        assert out[3, 1].isnan().all()
        assert torch.equal(out[3, 0], before[3, 0])
        assert not out[5].any(), "nothing was seen"
        assert torch.equal(lse[5], torch.full((2,), -math.inf))
        assert torch.equal(out[[0, 1, 2, 4]], before[[0, 1, 2, 4]])

    def test_sinks(self) -> None:
        q, segment, _ = self.scene()
        plain, lse = run(q, [segment], torch.tensor([-math.inf, -math.inf]))
        out, same = run(q, [segment], torch.tensor([math.inf, math.nan]))
        assert not out[:, 0].any()
        assert out[:, 1].isnan().all()
        assert torch.equal(lse, same)
        assert plain.isfinite().all()

    def test_segments_without_width_or_tokens(self) -> None:
        q, segment, sink = self.scene()
        nothing = Segment(segment.view, segment.rows[:, :0], segment.lens)
        assert torch.equal(run(q, [nothing, segment], sink)[0], run(q, [segment], sink)[0])
        out, lse = run(q, [nothing], sink)
        assert not out.any()
        assert torch.all(lse == -math.inf)
        none = Segment(segment.view, segment.rows[:0], segment.lens[:0])
        assert run(q[:0], [none], sink)[0].shape == (0, 2, 512)
        assert not run(q, [], sink)[0].any()


@pytest.mark.parametrize("heads", [1, 3, 8, 9, 64])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_n5_a_row_does_not_depend_on_its_batch(heads: int, threads: int) -> None:
    """Bit for bit: neither on its neighbours nor on how wide the rows are."""
    generator = torch.Generator().manual_seed(heads)
    keys = torch.randn(400, 512, generator=generator).bfloat16()
    view = PageView.of(keys.reshape(4, 100, 512), get_layout("bf16"), 100)
    tokens = 18
    q = torch.randn(tokens, heads, 512, generator=generator).bfloat16()
    rows = torch.randint(-20, 400, (tokens, 300), dtype=torch.int32, generator=generator)
    lens = torch.randint(0, 301, (tokens,), dtype=torch.int32, generator=generator)
    sink = torch.zeros(heads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, lse = run(q, [Segment(view, rows, lens)], sink)
        for t in range(tokens):
            cut = max(1, int(lens[t]))
            alone = run(q[t : t + 1], [Segment(view, rows[t : t + 1, :cut], lens[t : t + 1])], sink)
            assert torch.equal(alone[0][0], out[t])
            assert torch.equal(alone[1][0], lse[t])
    finally:
        torch.set_num_threads(before)


MEMORY = """
import sys
import torch
from swa_backend import *

tokens, kind = 8192, sys.argv[1]
torch.set_num_threads(1)
config = BackendConfig(ModelConfig.packaged("V4-Flash"), SchedulerConfig(tokens, 1, tokens))
backend = get_backend("cpu")
cache = DeepseekV4SWACache(512, 128, torch.uint8, "window", None, backend)
cache.bind_kv_cache(cache.allocate(tokens // 64, "cpu"))
cache.pages.data.random_(120)
builder = backend.get_builder_cls()(cache.get_kv_cache_spec(config), ["layer"], config, "cpu")
starts, length = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
metadata = builder.build(0, CommonAttentionMetadata(
    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=length, seq_lens_cpu_upper_bound=length,
    num_reqs=1, num_actual_tokens=tokens, max_query_len=tokens, max_seq_len=tokens,
    block_table_tensor=torch.arange(tokens // 64, dtype=torch.int32)[None], slot_mapping=torch.arange(tokens),
))
compressed = None
if kind == "c4a":
    second = CompressedCache(4, "fp8_ds_mla", 256, "entries", None, backend)
    second.bind_kv_cache(second.allocate(tokens // 256, "cpu"))
    second.pages.data.random_(120)
    # The last tokens alone see entries: several times what is held at once, and every kind of block.
    lens = torch.where(torch.arange(tokens) < tokens - 512, 0, 512).int()
    compressed = second, torch.randint(0, 2048, (tokens, 512), dtype=torch.int32), lens
q, sink = torch.ones(tokens, config.num_heads, 512, dtype=torch.bfloat16), torch.zeros(config.num_heads)

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

attend(q[:16], None, cache, sink)
torch.bmm(torch.ones(2, 64, 64), torch.ones(2, 64, 64))  # what libraries allocate once
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = status("VmRSS")
out = attend(q, metadata, cache, sink, compressed=compressed).out
assert out.shape == (8192, 64, 512) and out[-1].any()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", ["swaonly", "c4a"])
def test_8192_prefill_tokens_need_less_than_a_gibibyte(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, kind], capture_output=True, text=True, check=True)
    extra, own = int(done.stdout.split()[-1]), 8192 * 64 * 512 * 2
    assert own < extra < 2**30, f"{extra / 2**20:.0f} MiB, the output of {own / 2**20:.0f} MiB among them"
