"""How the tests run kernels: in one of four ways per process, since Triton decides when a kernel is declared.

==========  =======================================================================  =================================
--kernels   what happens to ``kernel.on(device, ..).launch(..)``                     which tests run
==========  =======================================================================  =================================
interpret   Triton's interpreter, repaired, on CPU tensors (the default)             all but ``compiled`` and ``gpu``
compile     nothing by itself: tests compile for chips that are not here             those marked ``compiled``
simulate    compiled for the AMD chip of --target and executed on CPU tensors        those with the ``device`` fixture
device      compiled for and run on the GPU of this machine                          those with ``device``, or ``gpu``
==========  =======================================================================  =================================

A kernel test asks for the ``device`` fixture, makes its tensors there, and is the same test in every way. See
``tests/tools/README.md``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

WAYS = ("interpret", "compile", "simulate", "device")
HAS_TRITON = importlib.util.find_spec("triton") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernels")
    group.addoption("--kernels", choices=WAYS, default="interpret", help="how kernels run in this process")
    group.addoption("--target", default="hip:gfx942", help="the chip to simulate, hip:gfx942 or hip:gfx950")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "compiled: needs Triton's compiler instead of its interpreter")
    interpreted = config.getoption("--kernels") == "interpret"
    # Before anything imports a kernel: Triton reads this when a kernel is declared.
    os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    if interpreted and HAS_TRITON:
        from tests.tools import interpreter_repairs

        interpreter_repairs.apply()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    way = config.getoption("--kernels")
    if way == "interpret":
        for item in items:
            for marker, other in (("compiled", "compile"), ("gpu", "device")):
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"runs under --kernels {other}"))
        return
    chosen = [item for item in items if _runs(item, way)]
    left_out = [item for item in items if not _runs(item, way)]
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


def _runs(item: pytest.Item, way: str) -> bool:
    compiled, simulate, gpu = (bool(item.get_closest_marker(name)) for name in ("compiled", "simulate", "gpu"))
    on_device = "device" in getattr(item, "fixturenames", ())
    if way == "compile":
        return compiled and not simulate
    if way == "simulate":
        return (on_device and not gpu) or (compiled and simulate)
    return on_device or gpu


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a kernel test puts its tensors; while the test runs, launches there are run the way that was chosen."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    way = request.config.getoption("--kernels")
    if way == "device":
        yield torch.device("cuda", torch.cuda.current_device())
    elif way == "simulate":
        from tests.tools.simulator import simulate

        with simulate(request.config.getoption("--target")):
            yield torch.device("cpu")
    else:
        yield torch.device("cpu")
