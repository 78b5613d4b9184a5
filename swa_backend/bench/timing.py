"""How things are timed: host and GPU time apart, contenders interleaved, medians, launches counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROUNDS = 15
CALLS_PER_ROUND = 40  # few enough that the launch queue never fills, which would make the host wait


@dataclass(frozen=True, slots=True)
class Timing:
    """One contender. Times in microseconds a call.

    Attributes:
        host: median over rounds of what a call costs the host, launches included, nothing waited for.
        host_p90: ninetieth percentile of the rounds.
        gpu: time that kernels and copies of a call run on the GPU, by the profiler.
        launches: kernels and copies a call.
    """

    host: float
    host_p90: float
    gpu: float
    launches: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def compare(contenders: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
    """Time every contender, in turns within each round, after warming all of them up."""
    for call in contenders.values():
        for _ in range(2 * CALLS_PER_ROUND):
            call()
    torch.cuda.synchronize()
    host: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            begin = time.perf_counter()
            for _ in range(CALLS_PER_ROUND):
                call()
            host[name].append((time.perf_counter() - begin) / CALLS_PER_ROUND * 1e6)
            torch.cuda.synchronize()
    result = {}
    for name, call in contenders.items():
        gpu, launches = on_gpu(call)
        result[name] = Timing(statistics.median(host[name]), statistics.quantiles(host[name], n=10)[-1], gpu, launches)
    return result


def on_gpu(call: Callable[[], Any], calls: int = CALLS_PER_ROUND) -> tuple[float, float]:
    """(microseconds, launches) a call spends on the GPU, copies included."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return sum(event.device_time for event in events) / calls, len(events) / calls


def machine() -> dict[str, str]:
    """What a table of timings has to name."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
