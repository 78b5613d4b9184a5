"""How things are timed: host and GPU time apart, contenders interleaved, medians, caches warm and cold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROUNDS = 15
COLD_BYTES = 256 << 20  # written between two cold calls; no last-level cache of today's GPUs holds more
CALLS_PER_ROUND = 40  # few enough that the launch queue never fills, which would make the host wait


@dataclass(frozen=True, slots=True)
class Timing:
    """One contender. Times in microseconds a call.

    Attributes:
        host: median over rounds of what a call costs the host, launches included, nothing waited for.
        host_p90: ninetieth percentile of the rounds.
        gpu: time that kernels and copies of a call run on the GPU, by the profiler: median over calls.
        launches: kernels and copies a call.
        gpu_p90: ninetieth percentile over calls; None where calls could not be told apart.
        gpu_cold, gpu_cold_p90: the same with other memory read and written before each call, so that nothing of its
            inputs is left in the GPU's caches; None where it was not measured.
    """

    host: float
    host_p90: float
    gpu: float
    launches: float
    gpu_p90: float | None = None
    gpu_cold: float | None = None
    gpu_cold_p90: float | None = None

    def to_dict(self) -> dict[str, float | None]:
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
        warm, launches = _calls_on_gpu(call, CALLS_PER_ROUND)
        cold = cold_on_gpu(call)
        result[name] = Timing(
            statistics.median(host[name]),
            _p90(host[name]),
            statistics.median(warm),
            launches,
            _p90(warm) if len(warm) > 1 else None,
            statistics.median(cold),
            _p90(cold),
        )
    return result


def on_gpu(call: Callable[[], Any], calls: int = CALLS_PER_ROUND) -> tuple[float, float]:
    """(microseconds, launches) a call spends on the GPU, copies included; mean over calls, caches warm."""
    times, launches = _calls_on_gpu(call, calls)
    return statistics.fmean(times), launches


def cold_on_gpu(call: Callable[[], Any], calls: int = CALLS_PER_ROUND // 2) -> list[float]:
    """Microseconds on the GPU of each of ``calls`` calls whose inputs come from memory, not from a cache."""
    # An operation that nothing here times, so that its kernel marks in the profile where a call begins.
    other = torch.empty(COLD_BYTES // 8, dtype=torch.int64, device="cuda")

    def flushed() -> None:
        other.bitwise_not_()
        call()

    times: list[float] = []
    for event in _events(flushed, calls):
        if "bitwise_not" in event.name:
            times.append(0.0)
        else:
            times[-1] += event.device_time
    if len(times) != calls:
        raise RuntimeError(f"the profile shows {len(times)} of {calls} cold calls")
    return times


def _calls_on_gpu(call: Callable[[], Any], calls: int) -> tuple[list[float], float]:
    """(microseconds of each call, launches a call); one mean where calls differ in launches."""
    times = [event.device_time for event in _events(call, calls)]
    each, rest = divmod(len(times), calls)
    if rest or not each:
        return [sum(times) / calls], len(times) / calls
    return [sum(times[i : i + each]) for i in range(0, len(times), each)], float(each)


def _events(call: Callable[[], Any], calls: int) -> list[Any]:
    """What ``calls`` calls run on the GPU, in its order."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return sorted(events, key=lambda event: event.time_range.start)


def _p90(times: list[float]) -> float:
    return statistics.quantiles(times, n=10, method="inclusive")[-1]


def machine() -> dict[str, str]:
    """What a table of timings has to name."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
