"""Image spans: which tokens see how far, what is uploaded, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swa_backend import image_spans
from swa_backend.config import BackendConfig, ImageMode
from swa_backend.errors import BatchError
from swa_backend.image_spans import SpanUpload, spans_in_step
from swa_backend.model_config import ModelConfig
from tests.support import Batch, make_builder, make_config


def build(batch: Batch, cap: int = 16, **config: Any) -> Any:
    config = {"k": 2, "max_image_tokens": cap, **config}
    return make_builder(make_config(**config)).build(0, batch.metadata())


def visibility(metadata: Any) -> tuple[list[int], list[int]]:
    left, right = metadata.prefill_left_visible, metadata.prefill_right_visible
    assert left.shape == right.shape == (metadata.num_tokens,)
    assert left.dtype == right.dtype == torch.int32
    return left.tolist(), right.tolist()


def test_row_t_is_token_t_of_the_whole_step() -> None:
    """Two decodes before the prefill, padding behind it; the span goes on past the chunk."""
    batch = Batch([1, 2, 10], [50, 9, 30], spans={2: [(22, 24), (25, 25), (28, 35)]}, padding=2)
    left, right = visibility(build(batch))
    # Positions 20 to 29 of request 2 are tokens 3 to 12.
    assert left[3:13] == [0, 0, 0, 1, 2, 0, 0, 0, 0, 1]
    assert right[3:13] == [0, 0, 2, 1, 0, 0, 0, 0, 7, 6]
    assert left[13:] == right[13:] == [0, 0]


def test_the_row_ends_with_the_context_though_the_visibility_does_not() -> None:
    metadata = build(Batch([10], [30], spans={0: [(28, 35)]}, table=[[1]]))
    assert metadata.prefill_swa_lens.tolist() == [*range(21, 29), 30, 30]
    assert metadata.prefill_swa_indices[8, 0, :30].tolist() == list(range(64, 94))


def test_the_longest_span_is_seen_whole() -> None:
    """16 tokens, the cap: 15 to the left of the last one, 15 to the right of the first."""
    left, right = visibility(build(Batch([40], [40], spans={0: [(10, 25)]})))
    assert left[10:26] == list(range(16))
    assert right[10:26] == list(range(15, -1, -1))
    assert sum(left) == sum(right) == 120


def test_a_token_that_is_not_real_sees_nothing() -> None:
    slots = [5] * 10
    slots[4] = -1
    left, right = visibility(build(Batch([10], [10], spans={0: [(3, 6)]}, slots=slots)))
    assert left == [0, 0, 0, 0, 0, 2, 3, 0, 0, 0]
    assert right == [0, 0, 0, 3, 0, 1, 0, 0, 0, 0]


def test_decodes_never_widen() -> None:
    spans = {0: [(125, 135)], 1: [(2, 5)]}
    metadata = build(Batch([2, 10], [130, 10], spans=spans, table=[[1, 2, 3], [4, 5, 6]]))
    assert metadata.decode_swa_lens.tolist() == [128, 128]
    assert metadata.decode_swa_indices[1, 0, -1] == 3 * 64 + 1
    assert metadata.prefill_swa_lens.tolist() == [1, 2, 6, 6, 6, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("spans", [None, {}, {1: []}, {0: [(3, 5)]}, {0: [(3, 5)], 1: []}])
def test_no_visibility_unless_a_prefill_has_a_span(spans: Any) -> None:
    batch, plain = Batch([1, 10], [50, 10], spans=spans), Batch([1, 10], [50, 10])
    metadata, text = build(batch), build(plain, cap=0)
    assert metadata.prefill_left_visible is None
    assert metadata.prefill_right_visible is None
    assert metadata.prefill_swa_indices.shape == (10, 1, 144)
    assert torch.equal(metadata.prefill_swa_indices[..., :128], text.prefill_swa_indices)
    assert metadata.prefill_swa_indices[..., 128:].eq(-1).all()
    assert torch.equal(metadata.prefill_swa_lens, text.prefill_swa_lens)


@pytest.mark.parametrize("span", [(0, 9), (40, 50)])
def test_a_span_before_or_behind_the_chunk_leaves_zeros(span: tuple[int, int]) -> None:
    builder = make_builder(make_config(k=2, max_image_tokens=16))
    builder.build(0, Batch([10], [30], spans={0: [(20, 29)]}).metadata())  # leaves its visibility in the buffers
    metadata = builder.build(0, Batch([10], [30], spans={0: [span]}).metadata())
    assert visibility(metadata) == ([0] * 10, [0] * 10)
    assert metadata.prefill_swa_lens.tolist() == list(range(21, 31))


def test_spans_may_come_in_any_order() -> None:
    spans = [(22, 24), (28, 29), (25, 26)]
    expected = visibility(build(Batch([10], [30], spans={0: sorted(spans)})))
    assert visibility(build(Batch([10], [30], spans={0: spans}))) == expected
    two = {1: [(3, 5)], 0: spans}
    assert visibility(build(Batch([10, 8], [30, 8], spans=two)))[0][:10] == expected[0]


@pytest.mark.parametrize(
    ("spans", "named"),
    [
        ({0: [(0, 16)]}, r"\[0\].*\[0, 16\] of 17 tokens"),
        ({0: [(5, 4)]}, r"\[0\].*\[5, 4\]"),
        ({0: [(-1, 3)]}, r"\[0\].*\[-1, 3\]"),
        ({0: [(0, 3)], 1: [(0, 9), (9, 12)]}, r"\[1\].*\[9, 12\].*position 9"),
        ({1: [(4, 6), (0, 9)]}, r"\[1\].*\[4, 6\]"),
        ({1: [(4, 6), (4, 6)]}, r"\[1\].*\[4, 6\]"),
        ({2: [(0, 1)]}, r"\[2\].*request 2"),
        ({-1: [(0, 1)]}, r"\[-1\].*request -1"),
        ({"0": [(0, 1)]}, r"\[0\].*request '0'"),
        ({0: 3}, r"\[0\].*pairs of Python ints"),
        ({0: [3]}, r"\[0\].*pairs of Python ints"),
        ({0: [(3,)]}, r"\[0\].*pairs of Python ints"),
        ({0: [(0, 3), (4, 5.0)]}, r"\[0\].*pairs of Python ints"),
    ],
)
def test_a_wrong_span_is_named_with_its_request(spans: Any, named: str) -> None:
    with pytest.raises(BatchError, match="mm_req_doc_ranges" + named):
        build(Batch([20, 20], [20, 20], spans=spans))


def test_decode_spans_are_checked_too() -> None:
    with pytest.raises(BatchError, match=r"mm_req_doc_ranges\[0\]"):
        build(Batch([1, 20], [90, 20], spans={0: [(0, 20)]}))


def test_v1_the_v41_config_keeps_images_causal() -> None:
    """Span [1900, 3947], far longer than any cap: ignored, position 1900 sees 1773 to 1900."""
    model = ModelConfig.packaged("V4.1-Flash")
    assert (model.image_mode, model.max_image_tokens) == (ImageMode.CAUSAL, 0)
    config = BackendConfig(model, make_config(max_num_batched_tokens=2100).scheduler)
    batch = Batch([2100], [4000], table=[list(range(63))], spans={0: [(1900, 3947)]}).metadata()
    metadata = make_builder(config).build(0, batch)
    assert metadata.prefill_swa_indices.shape == (2100, 1, 128)
    assert metadata.prefill_swa_indices[0, 0].tolist() == list(range(1773, 1901))
    assert metadata.prefill_swa_lens.unique().tolist() == [128]
    assert metadata.prefill_left_visible is None


class Copies(TorchDispatchMode):
    """Records every copy between tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.seen.append((args[0].data_ptr(), bool(args[2]) if len(args) > 2 else False))
        return func(*args, **(kwargs or {}))


def test_h4_all_spans_of_a_step_go_up_in_one_copy_that_is_not_waited_for() -> None:
    upload = SpanUpload(64, torch.device("cpu"))
    spans = [(1, 3, 9), (1, 12, 20), (4, 0, 5)]
    with Copies() as copies:
        view = upload(spans)
    assert copies.seen == [(view.data_ptr(), True)]
    assert view.tolist() == [list(span) for span in spans]
    with Copies() as copies:
        assert upload([]).shape == (0, 3)
        again = upload([(0, 1, 2)])
    assert copies.seen == [(view.data_ptr(), True)], "nothing to copy without spans; the buffer stays the same"
    assert again.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("meta", True)])
def test_h4_the_staging_tensor_of_a_device_is_pinned(
    device: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any device but the CPU: without one here, torch is watched while it is asked for pinned memory."""
    asked = []
    make = torch.tensor

    def watch(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append((kwargs.get("device"), pin_memory))
        return make(*args, **kwargs)

    upload = SpanUpload(8, torch.device(device))
    monkeypatch.setattr(image_spans.torch, "tensor", watch)
    upload([(0, 1, 2), (0, 4, 5)])
    assert asked == [(None, pinned)]


def test_spans_in_step_are_those_that_hold_a_token() -> None:
    spans = {0: [(0, 5)], 2: [(9, 9), (0, 3), (4, 7), (10, 12), (13, 14)], 1: [(0, 0), (1, 5)]}
    found = spans_in_step(spans, 1, prefixes=[1, 7], seq_lens=[9, 13])
    assert found == [(1, 1, 5), (2, 4, 7), (2, 9, 9), (2, 10, 12)]
