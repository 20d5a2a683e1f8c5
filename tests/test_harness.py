"""Pins the harness itself: a test that hangs, fails or dies is told apart, says where each rank stood, and leaves
neither processes nor trouble for the next test.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import Rank, on_ranks
from harness.pool import RankPool


@on_ranks(2)
def test_ranks_know_each_other(me: Rank) -> None:
    assert (me.rank, me.world) == (dist.get_rank(), dist.get_world_size())
    me.signal(f"hello from {me.rank}")
    me.await_signal(f"hello from {1 - me.rank}")
    me.meet("the end")


@on_ranks(2)
def rank_1_does_not_come(me: Rank) -> None:
    if me.rank == 0:
        me.await_signal("what nobody signals")


@on_ranks(2)
def rank_1_fails(me: Rank) -> None:
    assert me.rank == 0, "planned"


@on_ranks(2)
def rank_1_dies(me: Rank) -> None:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(2)
def all_is_well(me: Rank) -> None:
    assert len(list(me.joined("twin"))) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rank_1_does_not_come, ["exceeded the limit", "rank 0: still running", "in rank_1_does_not_come"]),
        (rank_1_fails, ["rank 1: Traceback", "AssertionError: planned", "seed 5"]),
        (rank_1_dies, ["rank 1: died: signal SIGKILL"]),
    ],
    ids=["hangs", "fails", "dies"],
)
def test_what_goes_wrong_is_told(tmp_path: Path, body: object, words: list[str]) -> None:
    pool = RankPool(2, tmp_path)
    name, good = body.__name__, all_is_well.__name__  # type: ignore[attr-defined]
    try:
        pool.run(__name__, good, {}, seed=5, limit=30)
        first = pool.processes()
        with pytest.raises(pytest.fail.Exception) as failure:
            pool.run(__name__, name, {}, seed=5, limit=2)
        for word in words:
            assert word in str(failure.value)
        assert not any(Path(f"/proc/{pid}").exists() for pid in first)
        pool.run(__name__, good, {}, seed=5, limit=30)
        pool.close()
    finally:
        pool.kill()
