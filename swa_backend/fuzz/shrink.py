"""Makes a failing history small: fewer steps and requests, shorter ones, plainer settings, as long as it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

from swa_backend.fuzz.case import Case, Knobs, RequestSpec
from swa_backend.fuzz.runner import CaseFailedError

Run = Callable[[Case], object]

# Smaller values of each setting that keep a case well-formed; tried from the left.
_SMALLER: dict[str, tuple[int | str, ...]] = {
    "preempt": (0,),
    "drain": (0,),
    "holes": (0,),
    "foreign": (0,),
    "hostile": (0,),
    "captured": (0,),
    "validate": (False,),
    "image_tokens": (0,),
    "second_page_tokens": (0,),
    "layout": ("fp8_ds_mla",),
    "dspark": (False,),
    "parallel": (False,),
    "drafts": (0, 1, 2),
    "acceptance": (100,),
    "heads": (1,),
    "topk": (1,),
    "max_seqs": (1, 2, 3),
    "max_len": (300,),
}


def shrink(case: Case, run: Run, seconds: float = 60.0) -> tuple[Case, CaseFailedError | None]:
    """The smallest case found that fails, and how it fails; the case itself and None if it does not.

    Args:
        case: a history that fails.
        run: runs one; raises `CaseFailedError` if it fails.
        seconds: time after which no further case is tried.
    """
    end = time.monotonic() + seconds
    failure = _failure(case, run)
    if failure is None:
        return case, None
    best = replace(case, steps=failure.step + 1)
    again = True
    while again and time.monotonic() < end:
        again = False
        for smaller in _smaller(best):
            if time.monotonic() > end:
                break
            found = _failure(smaller, run)
            if found is not None:
                best, failure = replace(smaller, steps=found.step + 1), found
                again = True
                break
    return best, failure


def _failure(case: Case, run: Run) -> CaseFailedError | None:
    try:
        run(case)
    except CaseFailedError as failure:
        return failure
    return None


def _smaller(case: Case) -> Iterator[Case]:
    """Smaller cases, the boldest cuts first."""
    requests = case.requests
    size = len(requests) // 2
    while size:
        for first in range(0, len(requests), size):
            yield replace(case, requests=requests[:first] + requests[first + size :])
        size //= 2
    for knobs in _plainer(case.knobs):
        yield replace(case, knobs=knobs)
    for number, request in enumerate(requests):
        for smaller in _shorter(request):
            yield replace(case, requests=_with(requests, number, smaller))


def _plainer(knobs: Knobs) -> Iterator[Knobs]:
    if knobs.ratios:
        yield replace(knobs, ratios=(), newer=False)
    if len(knobs.ratios) > 1:
        yield from (replace(knobs, ratios=(ratio,)) for ratio in knobs.ratios)
    for field in fields(Knobs):
        now = getattr(knobs, field.name)
        for value in _SMALLER.get(field.name, ()):
            if value != now and (field.name in ("acceptance", "layout") or value < now):
                changes = {field.name: value}
                if field.name == "drafts" and not value:
                    changes |= {"dspark": False, "parallel": False}
                yield replace(knobs, **changes)  # type: ignore[arg-type]


def _shorter(request: RequestSpec) -> Iterator[RequestSpec]:
    if request.images:
        yield replace(request, images=())
        for i in range(len(request.images)):
            yield replace(request, images=request.images[:i] + request.images[i + 1 :])
    if request.shared:
        yield replace(request, shared=0)
    if request.arrival:
        yield replace(request, arrival=0)
    for prompt in _less(request.prompt):
        images = tuple(span for span in request.images if span[1] < prompt)
        yield replace(request, prompt=prompt, shared=min(request.shared, prompt), images=images)
    for output in _less(request.output):
        yield replace(request, output=output)


def _less(value: int) -> Iterator[int]:
    """Values from 1 to below ``value``, small ones first."""
    seen = set()
    for smaller in (1, value // 4, value // 2, value * 3 // 4, value - 16, value - 1):
        if 1 <= smaller < value and smaller not in seen:
            seen.add(smaller)
            yield smaller


def _with(requests: Sequence[RequestSpec], at: int, one: RequestSpec) -> tuple[RequestSpec, ...]:
    return (*requests[:at], one, *requests[at + 1 :])
