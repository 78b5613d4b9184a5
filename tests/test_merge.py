"""Merging partial results and applying the sink afterwards, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swa_backend.cache_layout import get_layout
from swa_backend.errors import BatchError
from swa_backend.merge import apply_sink, merge_states
from swa_backend.pages import PageView
from swa_backend.reference.attention import Segment, sparse_attention
from tests.oracle_attention import Keys, attention, relative_error, worst_row_error

SCALE = 512**-0.5
INF = math.inf


def partial(
    q: torch.Tensor, view: PageView, rows: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    lens = torch.full(rows.shape[:1], rows.shape[1], dtype=torch.int32)
    sparse_attention(q, [Segment(view, rows, lens)], sink, SCALE, out, lse)
    return out, lse


def float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


class TestMerge:
    def test_n3_3072_and_64_keys_equal_one_pass(self) -> None:
        torch.manual_seed(3)
        tokens, heads = 3, 8
        keys = torch.randn(49, 64, 512).bfloat16()
        view = PageView.of(keys, get_layout("bf16"), 64)
        q = (2 * torch.randn(tokens, heads, 512)).bfloat16()
        order = torch.stack([torch.randperm(49 * 64) for _ in range(tokens)]).int()
        none, sink = torch.full((heads,), -INF), torch.linspace(-2, 2, heads)

        merged, lse = merge_states(*partial(q, view, order[:, :3072], none), *partial(q, view, order[:, 3072:], none))
        with_sink = apply_sink(merged, lse, sink)

        table = float64(keys).reshape(-1, 512)
        expected, expected_lse = attention(
            float64(q), [Keys(table, order.tolist(), [3136] * tokens)], sink.tolist(), SCALE
        )
        assert np.abs(float64(lse) - expected_lse).max() <= 1e-4, "the lse is a natural logarithm"
        assert relative_error(float64(with_sink), expected) <= 3e-3
        assert worst_row_error(float64(with_sink), expected) <= 4e-3
        whole, whole_lse = partial(q, view, order, sink)
        torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=0)
        assert relative_error(float64(with_sink), float64(whole)) <= 4e-3

    def test_one_side_empty_is_the_other_side(self) -> None:
        out, lse = torch.randn(2, 4, 512).bfloat16(), torch.randn(2, 4)
        empty, nothing = torch.full_like(out, math.nan), torch.full_like(lse, -INF)
        for result in (merge_states(out, lse, empty, nothing), merge_states(empty, nothing, out, lse)):
            assert torch.equal(result[0], out)
            assert torch.equal(result[1], lse)

    def test_both_empty_is_empty(self) -> None:
        junk, nothing = torch.full((2, 4, 512), math.nan), torch.full((2, 4), -INF)
        out, lse = merge_states(junk, nothing, junk, nothing)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, nothing)

    @pytest.mark.parametrize("gap", [0.0, 50.0, 1e4, 1e30])
    def test_far_apart_lse_does_not_overflow(self, gap: float) -> None:
        a, b = torch.ones(1, 1, 512), torch.full((1, 1, 512), 3.0)
        low, high = torch.full((1, 1), -gap), torch.full((1, 1), gap)
        out, lse = merge_states(a, low, b, high)
        assert torch.allclose(out, torch.full_like(out, 2.0 if gap == 0 else 3.0))
        assert lse.item() == pytest.approx(gap if gap else math.log(2))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_dtype_is_kept_and_nothing_is_written_in_place(self, dtype: torch.dtype) -> None:
        out_a, out_b = torch.randn(5, 2, 512).to(dtype), torch.randn(5, 2, 512).to(dtype)
        lse_a, lse_b = torch.randn(5, 2), torch.randn(5, 2)
        before = [t.clone() for t in (out_a, lse_a, out_b, lse_b)]
        out, lse = merge_states(out_a, lse_a, out_b, lse_b)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert all(torch.equal(x, y) for x, y in zip(before, (out_a, lse_a, out_b, lse_b), strict=True))

    def test_no_token(self) -> None:
        out, lse = merge_states(*[torch.empty(0, 4, 512), torch.empty(0, 4)] * 2)
        assert (out.shape, lse.shape) == ((0, 4, 512), (0, 4))

    @pytest.mark.parametrize(
        ("position", "bad", "field"),
        [
            (0, torch.zeros(2, 4, 512, dtype=torch.int32), "out_a"),
            (0, None, "out_a"),
            (1, torch.zeros(2, 4, dtype=torch.float64), "lse_a"),
            (1, torch.zeros(4, 2), "lse_a"),
            (2, torch.zeros(2, 4, 512).bfloat16(), "out_b"),
            (2, torch.zeros(1, 4, 512), "out_b"),
            (3, torch.zeros(2), "lse_b"),
            (3, 0.5, "lse_b"),
        ],
    )
    def test_bad_argument_is_named(self, position: int, bad: object, field: str) -> None:
        arguments: list = [torch.zeros(2, 4, 512), torch.zeros(2, 4)] * 2
        arguments[position] = bad
        with pytest.raises(BatchError) as error:
            merge_states(*arguments)
        assert error.value.field == field


class TestSink:
    def test_n2_finite_sinks(self) -> None:
        out, lse = torch.randn(6, 4, 512), 3 * torch.randn(6, 4)
        sink = torch.tensor([-2.0, -0.5, 0.5, 2.0])
        expected = float64(out) / (1 + np.exp(float64(sink) - float64(lse)))[..., None]
        assert relative_error(float64(apply_sink(out, lse, sink)), expected) < 1e-6

    def test_n2_infinite_sinks(self) -> None:
        out, lse = torch.randn(6, 2, 512).bfloat16(), torch.randn(6, 2)
        result = apply_sink(out, lse, torch.tensor([INF, -INF]))
        assert torch.equal(result[:, 0], torch.zeros_like(result[:, 0]))
        assert torch.equal(result[:, 1], out[:, 1])

    @pytest.mark.parametrize("sink", [-INF, -2.0, 0.0, INF])
    def test_an_empty_row_is_zero_whatever_the_sink(self, sink: float) -> None:
        result = apply_sink(torch.full((3, 1, 512), math.nan), torch.full((3, 1), -INF), torch.tensor([sink]))
        assert torch.equal(result, torch.zeros_like(result))

    @pytest.mark.parametrize(
        ("bad", "value"),
        [
            ("attn_sink", torch.zeros(3)),
            ("attn_sink", torch.zeros(4).bfloat16()),
            ("lse", torch.zeros(2, 3)),
            ("out", 1),
        ],
    )
    def test_bad_argument_is_named(self, bad: str, value: object) -> None:
        arguments: dict = {"out": torch.zeros(2, 4, 512), "lse": torch.zeros(2, 4), "attn_sink": torch.zeros(4)}
        with pytest.raises(BatchError) as error:
            apply_sink(**{**arguments, bad: value})
        assert error.value.field == bad
