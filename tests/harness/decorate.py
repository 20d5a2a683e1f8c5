"""Turns a body that runs on every rank into a pytest test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from harness.pool import RankPool
from harness.settings import seed_of

DEFAULT_LIMIT = 60.0


Test = Callable[..., None]


def on_ranks(
    *worlds: int, planes: Iterable[str | None] = (None,), limit: float = DEFAULT_LIMIT
) -> Callable[[Test], Test]:
    """A test whose body runs on every rank of pools of these sizes, with a `Rank` as its first argument.

    `planes` (see planes.py): in the body tensors are made on a simulated device unless it says otherwise.

    Further arguments come from `pytest.mark.parametrize`, above this decorator; they are pickled. The body is
    found again in the rank's process by its module and name, so it has to be at the top level of its module.
    """

    def decorate(body: Test) -> Test:
        @functools.wraps(body)
        def test(pool: RankPool, request: pytest.FixtureRequest, **arguments: Any) -> None:
            seed = seed_of(request.node.name)
            print(f"seed {seed}")
            pool.run(body.__module__, body.__name__, arguments, seed, limit)

        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("pool", "request")]
        passed = list(inspect.signature(body).parameters.values())[1:]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            own + [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in passed]
        )
        test.body = body  # type: ignore[attr-defined]
        pools = [(plane, world) for plane in planes for world in worlds]
        ids = [f"{plane}-{world}ranks" if plane else f"{world}ranks" for plane, world in pools]
        return pytest.mark.parametrize("pool", pools, indirect=True, ids=ids)(test)

    return decorate


def again_on_ranks(test: Test, *worlds: int, planes: Iterable[str | None], limit: float = DEFAULT_LIMIT) -> Test:
    """The body of a test once more, with its parameters and marks, on other pools."""
    again = on_ranks(*worlds, planes=planes, limit=limit)(test.body)  # type: ignore[attr-defined]
    for mark in test.pytestmark:  # type: ignore[attr-defined]
        if mark.args[:1] != ("pool",):
            again = getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(again)
    return again
