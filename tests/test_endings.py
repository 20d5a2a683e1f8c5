"""Pins how processes end while something is under way: by an exception, sys.exit, a signal, destroy or abort, on one rank
or on all. Whatever the way, the process is gone within five seconds, the interpreter's own end included, with the exit
code and the words that Python gives it; and whoever waits for it hears of it as soon, and of whom.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, needs_multicomm, raises
from harness.by_hand import ended, happens, launch_ranks, side
from harness.checks import check_sum
from harness.jobs import say

pytestmark = needs_multicomm("waits for its time-out, which is 30 minutes")
SOON = 5.0  # seconds
BOTH = (4, 100_000)  # rides in the agreement, has a batch of its own
Body = Callable[[], None]


def name(body: Body) -> str:
    return body.__name__


def join() -> tuple[int, dist.Store]:
    dist.init_process_group(BACKEND)
    check_sum()
    return dist.get_rank(), side()


def told(action: Callable[[], object], *patterns: str) -> None:
    """This rank waits for one that will not come, and is told so soon."""
    begin = time.monotonic()
    raises(action, "a wait for good", dist.DistBackendError, *patterns)
    waited = time.monotonic() - begin
    assert waited < SOON, f"told after {waited:.1f} s"


# --- one rank goes; the others wait for it ---


def one_goes(go: Body) -> None:
    rank, store = join()
    pair = dist.new_group([0, 1])
    if rank == 2:
        store.wait(["0 waits", "1 waits"])
        time.sleep(0.3)  # they are in their calls by then; if not, they meet the same a moment later
        happens()
        go()
        return
    store.set(f"{rank} waits", "1")
    told(lambda: dist.all_reduce(torch.ones(BOTH[rank])), r"\brank 2\b")
    told(lambda: dist.all_reduce(torch.ones(4)), r"\brank 2\b")  # later calls, too
    for size in BOTH:
        check_sum(pair, size)
    say(f"rank {rank} was told")


def fail() -> None:
    raise ArithmeticError("planned failure")


def raises_an_error() -> None:
    one_goes(fail)


def exits() -> None:
    one_goes(lambda: sys.exit(3))


def exits_at_once() -> None:
    one_goes(lambda: os._exit(4))


def comes_to_its_end() -> None:
    one_goes(lambda: None)


def is_killed() -> None:
    one_goes(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        (raises_an_error, 1, "ArithmeticError: planned failure"),
        (exits, 3, ""),
        (exits_at_once, 4, ""),
        (comes_to_its_end, 0, ""),
        (is_killed, -signal.SIGKILL, ""),
    ],
    ids=lambda value: name(value) if callable(value) else "",
)
def test_whoever_waits_for_a_rank_that_goes_is_told(tmp_path: Path, way: Body, code: int, words: str) -> None:
    ranks = launch_ranks(way, 3, tmp_path)
    ranks.check({0: 0, 1: 0, 2: code}, dict.fromkeys(range(3), SOON))
    ranks.job.says(" was told", 2)
    assert words in ranks.job.output, ranks.job.output


# --- a rank goes while it waits itself ---


def pending(*groups: dist.ProcessGroup | None) -> list[dist.Work]:
    return [dist.all_reduce(torch.ones(size), group=group, async_op=True) for group in groups for size in BOTH]


def one_goes_with_work_pending(go: Callable[[list[dist.Work]], object]) -> None:
    """What rank 0 has begun, rank 1 has begun as well, and rank 2 never: it is busy with something else."""
    rank, store = join()
    groups = [None, dist.new_group([0, 1, 2]), dist.new_group([0, 2]), dist.new_group([2, 0])]
    if rank == 2:
        store.wait([ended(0), ended(1)])
        return
    works = pending(*(groups if rank == 0 else groups[:2]))
    if rank == 0:
        store.wait(["1 waits"])
        happens()
        go(works)
        return
    store.set("1 waits", "1")
    for work in works:
        raises(work.wait, "a wait for good", dist.DistBackendError, r"\brank 0\b")
    late = time.monotonic() - float(store.get(ended(0)))
    assert late < SOON, f"told {late:.1f} s after the end of rank 0"
    say("rank 1 was told")


def ends_with_work_pending() -> None:
    one_goes_with_work_pending(lambda _: None)


def fails_with_work_pending() -> None:
    one_goes_with_work_pending(lambda _: fail())


def exits_while_a_thread_waits() -> None:
    def go(works: list[dist.Work]) -> None:
        threading.Thread(target=works[0].wait, daemon=True).start()
        sys.exit(3)

    one_goes_with_work_pending(go)


def destroys_with_work_pending() -> None:
    def go(works: list[dist.Work]) -> None:
        dist.destroy_process_group()
        for work in works:
            told(work.wait)

    one_goes_with_work_pending(go)


def aborts_with_work_pending() -> None:
    def go(works: list[dist.Work]) -> None:
        for group in dist.distributed_c10d._world.pg_map:
            group.abort()
        for work in works:
            told(work.wait, "abort")
        dist.destroy_process_group()

    one_goes_with_work_pending(go)


def destroys_then_aborts() -> None:
    def go(works: list[dist.Work]) -> None:
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        for group in groups:
            group.abort()
        for work in works:
            told(work.wait)

    one_goes_with_work_pending(go)


def is_interrupted() -> None:
    def go(works: list[dist.Work]) -> None:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        works[-1].wait()

    one_goes_with_work_pending(go)


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        (ends_with_work_pending, 0, ""),
        (fails_with_work_pending, 1, "ArithmeticError: planned failure"),
        (exits_while_a_thread_waits, 3, ""),
        (destroys_with_work_pending, 0, ""),
        (aborts_with_work_pending, 0, ""),
        (destroys_then_aborts, 0, ""),
        (is_interrupted, -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=lambda value: name(value) if callable(value) else "",
)
def test_a_rank_that_goes_with_work_pending(tmp_path: Path, way: Body, code: int, words: str) -> None:
    ranks = launch_ranks(way, 3, tmp_path)
    ranks.check({0: code, 1: 0, 2: 0}, {0: SOON})
    ranks.job.says("rank 1 was told", 1)
    assert words in ranks.job.output, ranks.job.output
