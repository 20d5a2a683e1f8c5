"""What docs/scale.md claims of the engine's cost holds in small runs. `make scale` is the large run."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from scale import PROGRAM, all_reduce_messages, broken_claims, run
from scale_report import TITLES


@functools.cache
def result(ranks: int, steps: int, scheme: str = "engine") -> dict[str, Any]:
    assert PROGRAM.exists(), f"{PROGRAM} is missing: run the tests by `make test`, or `make build/scale/scale` first"
    return run(ranks, steps, scheme)


@pytest.mark.parametrize(("ranks", "steps"), [(64, 20), (96, 20), (352, 10), (1024, 5), (4096, 2)])
def test_the_engine_costs_what_is_claimed(ranks: int, steps: int) -> None:
    """Messages per round, time to agree, state per rank, silence when idle; also where sizes are no powers of two."""
    assert broken_claims(result(ranks, steps), result(64, 20)) == []


def test_messages_of_an_all_reduce() -> None:
    assert [all_reduce_messages(n) for n in (2, 4, 8, 1024)] == [1, 2, 3, 10]
    assert all_reduce_messages(3) == pytest.approx((2 + 2) / 3)
    assert all_reduce_messages(96) == pytest.approx((64 * 6 + 2 * 32) / 96)


def test_a_run_repeats_exactly() -> None:
    runs = [run(96, 3, "engine") for _ in range(2)]
    for once in runs:
        del once["seconds"], once["process_megabytes"]
    assert runs[0] == runs[1]


def test_the_claims_can_fail() -> None:
    """Open MPI's tree sends other messages than recursive doubling; a round 10 times as long is too slow."""
    broken = broken_claims(result(352, 10, "tree"), result(64, 20))
    assert any("messages per rank" in line for line in broken)
    good = result(64, 20)
    slow = good["world"]["agreement"] | {"p99_ns": 10 * good["world"]["agreement"]["p99_ns"]}
    assert broken_claims({**good, "world": good["world"] | {"agreement": slow}}, good) != []


@pytest.mark.parametrize(
    ("changed", "value"),
    [("idle_messages", 1), ("state_most", 50_000), ("state_peak", 50_000), ("disagreement_told", "")],
)
def test_each_claim_is_looked_at(changed: str, value: object) -> None:
    assert broken_claims({**result(64, 20), changed: value}, result(64, 20)) != []


def test_the_programs_need_the_second_phase() -> None:
    """They submit to overlapping groups in different orders: without one order of launch, devices deadlock."""
    with pytest.raises(RuntimeError, match="a deadlock"):
        run(64, 20, "relaxed")


@pytest.mark.parametrize("scheme", sorted(TITLES))
def test_every_scheme_brings_the_programs_to_their_end(scheme: str) -> None:
    small, large = result(64, 5, scheme), result(256, 5, scheme)
    for kind in ("world", "data", "tensor"):
        assert large[kind]["agreement"]["count"] > 0
    growth = large["busiest_messages"] / small["busiest_messages"]
    assert growth > 3 if scheme == "central" else growth < 2  # 4 times the ranks
    assert (large["idle_messages"] > 0) == scheme.startswith("lockstep")
