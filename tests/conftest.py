"""The pools of ranks: one per module, plane and world size, started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.planes import PLANES
from harness.pool import RankPool
from harness.settings import BACKEND
from harness.two_hosts import two_hosts

Pools = dict[tuple[str | None, int], RankPool]  # by plane and world size


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """The module's pools."""
    made: Pools = {}
    yield made
    try:
        for pool in made.values():  # all at once: each takes a moment
            pool.begin_to_end()
        for pool in made.values():
            pool.close()
    finally:
        for pool in made.values():
            pool.kill()


@pytest.fixture
def pool(request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> RankPool:
    """The pool that the test asks for."""
    key: tuple[str | None, int] = request.param
    if key not in pools:
        plane, world = key
        folder = tmp_path_factory.mktemp(f"ranks{world}")
        pools[key] = RankPool(world, folder, PLANES[plane] if plane else None)
    return pools[key]


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Two hosts on this machine: per host, the words before a command that run it there."""
    with two_hosts() as prefixes:
        yield prefixes


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", r"ignore:.*torch\.jit:DeprecationWarning")  # torch's own use


def pytest_report_header() -> str:
    return f"backend under test: {BACKEND}"
