"""Pins how processes end while something is under way: by an exception, sys.exit, a signal, destroy or abort, on one
rank or on all. Whatever the way, the process is gone within five seconds, the interpreter's own end included, with the
exit code and the words that Python gives it; and whoever waits for it hears of it as soon, and of whom.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, needs_multicomm, raises
from harness.by_hand import WAYS_TO_CRASH, ended, happens, launch_ranks, side
from harness.checks import check_sum
from harness.jobs import launch, say
from harness.two_hosts import two_hosts, why_not

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


# --- what the others still have from a rank that is gone ---


def sends_before_it_goes() -> None:
    rank, store = join()
    data = torch.full((4,), 7.0 * rank)
    if rank == 1:
        dist.send(data, 0)
        happens()
        os._exit(0)
    store.wait([ended(1)])
    time.sleep(2)  # it has been known to be gone for long
    dist.recv(data, 1)
    assert (data == 7).all()
    told(lambda: dist.recv(data, 1), r"\brank 1\b")
    say("has what was sent")


def test_what_was_sent_before_the_end_arrives(tmp_path: Path) -> None:
    ranks = launch_ranks(sends_before_it_goes, 2, tmp_path)
    ranks.check({0: 0, 1: 0}, {})
    ranks.job.says("has what was sent", 1)


# --- ranks that are stopped ---


def stops_while_a_group_is_made() -> None:
    """Rank 1 has announced {0, 1}, so rank 0 begins to make it, and waits inside MPI for rank 1."""
    rank, store = join()
    limit = timedelta(seconds=3)
    if rank == 1:
        dist.new_group([0, 1], use_local_synchronization=True)
        time.sleep(1)  # announced by then
        store.set("1 stops", "1")
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        store.wait(["1 stops"])
        time.sleep(0.3)
        stuck = dist.new_group([0, 1], use_local_synchronization=True, timeout=limit)
        work = dist.all_reduce(torch.ones(4), group=stuck, async_op=True)
    for size in BOTH:
        for _ in range(2):
            group = dist.new_group([0, 2], use_local_synchronization=True)
            check_sum(group, size)
            dist.destroy_process_group(group)
    if rank == 0:
        raises(work.wait, "a sum with the stopped rank", dist.DistBackendError, "stopped")
        happens()
    say(f"rank {rank} goes on")


def test_a_stopped_rank_does_not_hold_up_the_making_of_groups(tmp_path: Path) -> None:
    ranks = launch_ranks(stops_while_a_group_is_made, 3, tmp_path)
    ranks.check({0: 0, 1: -signal.SIGKILL, 2: 0}, {0: SOON})
    ranks.job.says(" goes on", 2)


# --- two hosts, where each rank's host tells the other's ---


def one_of_another_host_goes(go: Body) -> None:
    rank, store = join()
    without = dist.new_group([0, 1, 3])
    gone = 2  # the first of the second host
    if rank == gone:
        store.wait([f"{r} waits" for r in (0, 1, 3)])
        time.sleep(0.3)
        happens()
        go()
        return
    store.set(f"{rank} waits", "1")
    told(lambda: dist.all_reduce(torch.ones(BOTH[rank % 2])), r"\brank 2\b")
    for size in BOTH:
        check_sum(without, size)
    say(f"rank {rank} was told")


def is_killed_on_its_host() -> None:
    one_of_another_host_goes(lambda: os.kill(os.getpid(), signal.SIGKILL))


def fails_on_its_host() -> None:
    one_of_another_host_goes(fail)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("way", "code"), [(is_killed_on_its_host, -signal.SIGKILL), (fails_on_its_host, 1)], ids=["killed", "raises"]
)
def test_whoever_waits_on_another_host_is_told(tmp_path: Path, way: Body, code: int) -> None:
    with two_hosts() as hosts:
        ranks = launch_ranks(way, 4, tmp_path, hosts=hosts)
    ranks.check({0: 0, 1: 0, 2: code, 3: 0}, {2: SOON})
    ranks.job.says(" was told", 3)


# --- torchrun is told to end ---


def launcher_ends(number: int) -> None:
    """All ranks wait for rank 2, which tells their launcher to end."""
    rank, store = join()
    if rank < 2:
        store.set(f"{rank} waits", "1")
        dist.all_reduce(torch.ones(BOTH[rank]))
    store.wait(["0 waits", "1 waits"])
    time.sleep(0.3)
    say(f"it happens at {time.monotonic()}")
    os.killpg(os.getpgid(os.getppid()), number)
    time.sleep(30)


def launcher_is_terminated() -> None:
    launcher_ends(signal.SIGTERM)


def launcher_is_interrupted() -> None:
    launcher_ends(signal.SIGINT)


@pytest.mark.parametrize("way", [launcher_is_terminated, launcher_is_interrupted], ids=name)
def test_a_launcher_that_is_told_to_end(tmp_path: Path, way: Body) -> None:
    job = launch(way, 3, tmp_path).check(ok=False)
    happened = re.search(r"it happens at ([\d.]+)", job.output)
    assert happened, job.output
    took = job.ended - float(happened.group(1))
    assert took < SOON, f"the job ended {took:.1f} s after the signal\n{job.output}"
    for way_to_crash in WAYS_TO_CRASH:
        assert way_to_crash not in job.output, job.output
