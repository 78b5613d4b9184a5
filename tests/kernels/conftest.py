"""Every interpreted kernel test looks at dead lanes too: the tests of case H2 are all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _every_lane_inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.config.getoption("--kernels") != "interpret" or "device" not in request.fixturenames:
        yield
        return
    from tests.kernels.lanes import every_lane

    with every_lane(monkeypatch):
        yield
