"""The pools of ranks: one per module and world size, started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.pool import RankPool
from harness.settings import BACKEND
from harness.two_hosts import two_hosts


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """The module's pools by world size."""
    made: dict[int, RankPool] = {}
    yield made
    try:
        for pool in made.values():
            pool.close()
    finally:
        for pool in made.values():
            pool.kill()


@pytest.fixture
def pool(
    request: pytest.FixtureRequest, pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory
) -> RankPool:
    """The pool of the world size that the test asks for."""
    world: int = request.param
    if world not in pools:
        pools[world] = RankPool(world, tmp_path_factory.mktemp(f"ranks{world}"))
    return pools[world]


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Two hosts on this machine: per host, the words before a command that run it there."""
    with two_hosts() as prefixes:
        yield prefixes


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", r"ignore:.*torch\.jit:DeprecationWarning")  # torch's own use


def pytest_report_header() -> str:
    return f"backend under test: {BACKEND}"
