"""Image spans of a batch: checked on the host and laid out for one asynchronous copy to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swa_backend._checks import show
from swa_backend.batch import ImageSpans
from swa_backend.errors import BatchError


def check_spans(spans: ImageSpans, num_reqs: int, max_image_tokens: int) -> None:
    """Refuse spans that bidirectional visibility cannot mean.

    Args:
        spans: request number in the batch -> inclusive absolute positions (first, last).
        num_reqs: requests in the batch.
        max_image_tokens: longest legal span.

    Raises:
        BatchError: naming request and span.
    """
    for request, own in spans.items():
        if type(request) is not int or not 0 <= request < num_reqs:
            raise BatchError(
                f"mm_req_doc_ranges[{request}]",
                found=f"request {request!r}",
                legal=f"0 to {num_reqs - 1}",
                fix="Key the spans by the request's number in this batch.",
            )
        if not isinstance(own, Sequence) or not all(map(_is_span, own)):
            raise BatchError(
                f"mm_req_doc_ranges[{request}]",
                found=show(own),
                legal="pairs of Python ints (first, last)",
                fix="Give each image its own inclusive span of absolute positions.",
            )
        previous = -1
        for first, last in sorted(own):
            length = last - first + 1
            if first < 0 or length < 1 or length > max_image_tokens:
                raise BatchError(
                    f"mm_req_doc_ranges[{request}]",
                    found=f"span [{first}, {last}] of {length} tokens",
                    legal=f"0 <= first <= last, at most max_image_tokens = {max_image_tokens} tokens",
                    fix="Give each image its own inclusive span of absolute positions.",
                )
            if first <= previous:
                raise BatchError(
                    f"mm_req_doc_ranges[{request}]",
                    found=f"span [{first}, {last}] beginning at or before position {previous} of the one before",
                    legal="spans of one request that do not overlap",
                    fix="Give each image its own inclusive span of absolute positions.",
                )
            previous = last


def _is_span(span: object) -> bool:
    return isinstance(span, Sequence) and len(span) == 2 and type(span[0]) is type(span[1]) is int


def spans_in_step(
    spans: ImageSpans, first_prefill: int, prefixes: list[int], seq_lens: list[int]
) -> list[tuple[int, int, int]]:
    """Spans of prefill requests that hold a token of this step, as (request, first, last), sorted.

    Each such span holds at least one query token of its own, so there are never more than query tokens.

    Args:
        spans: checked spans.
        first_prefill: number of the first prefill request.
        prefixes, seq_lens: host lengths of the prefill requests, before and after this step.
    """
    return sorted(
        (request, first, last)
        for request, own in spans.items()
        if request >= first_prefill
        for first, last in own
        if last >= prefixes[request - first_prefill] and first < seq_lens[request - first_prefill]
    )


class SpanUpload:
    """A device buffer for a step's spans, filled by one copy that the host does not wait for."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._buffer = torch.empty((capacity, 3), dtype=torch.int32, device=device)
        self._pinned = device.type != "cpu"

    def __call__(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """[num_spans, 3] int32 view of the device buffer.

        The pinned staging tensor is a new one each time: the pinned allocator keeps it until the copy has run, which
        a staging buffer reused by the next step would not.
        """
        view = self._buffer[: len(spans)]
        if spans:
            staged = torch.tensor(spans, dtype=torch.int32, pin_memory=self._pinned)
            view.copy_(staged, non_blocking=True)
        return view
