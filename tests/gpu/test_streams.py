"""Two builders at work at the same time, each on a CUDA stream of its own, do not disturb each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from swa_backend.fuzz import CaseFailedError, Mode, Profile, random_case, run_case
from swa_backend.registry import get_backend
from tests.support import Batch, make_builder, make_config

pytestmark = pytest.mark.gpu

SEEDS = 6  # histories of each thread


def backend():
    return get_backend("rocm" if torch.version.hip else "cuda")


def at_the_same_time(*jobs: Callable[[], None]) -> list[BaseException]:
    """Run each in a thread with a stream of its own; what they raised."""
    raised: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
                job()
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_builds_on_two_streams_of_two_threads() -> None:
    """Steps of different shapes, thousands at once; each builder's result is that of its own batch."""
    cases = [Batch([1] * 40, [100 + 31 * i for i in range(40)]), Batch([3] * 9 + [200], [400] * 9 + [900])]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda:0") for _ in cases]

    def job(number: int) -> Callable[[], None]:
        config = make_config(k=2)
        right = make_builder(config).build(0, cases[number].metadata())

        def run() -> None:
            builder = make_builder(config, backend=backend(), device="cuda:0")
            batch = cases[number].metadata("cuda:0")
            rows, lens = right.decode_swa_indices.cuda(), right.decode_swa_lens.cuda()
            for _ in range(3000):
                metadata = builder.build(0, batch)
                wrong[number] += (metadata.decode_swa_indices != rows).sum() + (metadata.decode_swa_lens != lens).sum()

        return run

    assert at_the_same_time(job(0), job(1)) == []
    assert [int(count) for count in wrong] == [0, 0]


@pytest.mark.parametrize("provider", [None, "reference"])
def test_whole_histories_on_two_streams_of_two_threads(monkeypatch: pytest.MonkeyPatch, provider: str | None) -> None:
    """Writes, builds and attention of two engines, with the provider that the platform prefers and with another."""
    if provider is not None:
        monkeypatch.setenv("SWA_BACKEND_ATTENTION", provider)
    chosen = backend()
    run_case(random_case(900, Profile.CHIP, 10), chosen, torch.device("cuda:0"))  # compiles; threads need not

    def job(first: int) -> Callable[[], None]:
        def run() -> None:
            for seed in range(first, first + SEEDS):
                run_case(random_case(seed, Profile.CHIP, 40), chosen, torch.device("cuda:0"), Mode.EAGER)

        return run

    raised = at_the_same_time(job(1000), job(2000))
    wrong = [error for error in raised if isinstance(error, CaseFailedError)]
    assert not wrong, [str(error) for error in wrong]
    assert raised == []
