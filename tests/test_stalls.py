"""Pins that whoever waits is told for whom: which ranks did not come, and what each of them is doing instead. Each test
is a whole job, since ranks are stopped or killed, and what is printed counts.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from harness import BACKEND, needs_multicomm, raises
from harness.jobs import launch, say

pytestmark = needs_multicomm("names nobody")


def store() -> dist.Store:
    return dist.PrefixStore("side", dist.distributed_c10d._get_default_store())


def some_are_elsewhere() -> None:
    dist.init_process_group(BACKEND)
    everybody = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=4), group_desc="everybody")
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=60))
    for group in (everybody, None):
        dist.all_reduce(torch.ones(3), group=group)
    rank = dist.get_rank()
    if rank == 0:
        text = raises(lambda: dist.all_reduce(torch.ones(5), group=everybody), "time-out", dist.DistBackendError)
        say(f"<<{text}>>")
        store().set("over", "1")
    elif rank == 1:
        work = dist.broadcast(torch.ones(2, 3), 1, group=pair, async_op=True)
        store().wait(["over"], timedelta(seconds=30))
        work.wait()
    elif rank == 2:
        deadline = time.monotonic() + 30
        while not store().check(["over"]):  # in Python, never in a call of ours
            assert time.monotonic() < deadline
        dist.broadcast(torch.ones(2, 3), 1, group=pair)
    else:
        store().wait(["over"], timedelta(seconds=30))
    dist.barrier()
    dist.destroy_process_group()


def test_a_time_out_says_what_the_missing_are_doing(tmp_path: Path) -> None:
    job = launch(some_are_elsewhere, 4, tmp_path).check()
    found = re.search(r"<<(.*?)>>", job.output, re.DOTALL)
    assert found, job.output
    text = found.group(1)
    for part in (
        r"rank 0: group '.*' \(ranks \[0, 1, 2, 3\]\): time-out of collective 1, all_reduce\(SUM\) of Float \[5\]",
        r"ranks 1-3 have not submitted it",
        r"\n  rank 1 has submitted 1 collective of this group; it waits in group '.*' \(ranks \[1, 2\]\) for "
        r"collective 0, broadcast from rank 1 of Float \[2, 3\], for \d s",
        r"\n  rank 2 has submitted 1 collective of this group; it waits for no operation of multicomm",
        r"\n  rank 3 has submitted 1 collective",
    ):
        assert re.search(part, text), f"/{part}/ is not in:\n{text}"


def one_is_late() -> None:
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(3))
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(5)  # what is tested is how long the others wait
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    if rank == 0:
        data = torch.ones(4)
        work = dist.irecv(data, 1, tag=7)
        store().set("receives", "1")
        work.wait()
    elif rank == 1:
        store().wait(["receives"], timedelta(seconds=30))
        time.sleep(4)
        dist.send(torch.ones(4), 0, tag=7)
    dist.barrier()
    dist.destroy_process_group()


def test_what_waits_for_long_is_reported_once(tmp_path: Path) -> None:
    job = launch(one_is_late, 3, tmp_path, environment={"MULTICOMM_STALL_WARNING": "2"}).check()
    what = r"group '0' \(ranks \[0, 1, 2\]\): collective 1, all_reduce\(SUM\) of Float \[3\] has been waiting for 2 s: "
    who = r"rank 2 has not submitted it\n  rank 2 has submitted 1 collective of this group"
    for rank in (0, 1):
        assert len(re.findall(f"multicomm: rank {rank}: {what}{who}", job.output)) == 1, job.output
    what = r"message 0, recv from rank 1, tag 7, of Float \[4\] has been waiting for 2 s: the peer did not come"
    who = r"\n  rank 1 has submitted 4 collectives of this group; it waits for no operation of multicomm"
    assert len(re.findall(f"multicomm: rank 0: .*{what}{who}", job.output)) == 1, job.output
    job.says("all_reduce(SUM) of Float [3] has been waiting", 2)


def test_no_report_when_switched_off(tmp_path: Path) -> None:
    job = launch(one_is_late, 3, tmp_path, environment={"MULTICOMM_STALL_WARNING": "0"}).check()
    assert "has been waiting" not in job.output, job.output


def stopped(rank: int, file: str) -> None:
    importlib.import_module(BACKEND)  # registers it
    dist.init_process_group(BACKEND, init_method=f"file://{file}", rank=rank, world_size=4)
    group = dist.new_group([0, 1, 3], timeout=timedelta(seconds=4))
    if rank != 2:
        dist.all_reduce(torch.ones(3), group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank != 2:
        text = raises(lambda: dist.all_reduce(torch.ones(3), group=group), "time-out", dist.DistBackendError)
        say(f"<<{text}>>")


def killed(rank: int, file: str) -> None:
    importlib.import_module(BACKEND)
    dist.init_process_group(BACKEND, init_method=f"file://{file}", rank=rank, world_size=4)  # 30 minutes
    without = dist.new_group([0, 1, 3])
    dist.all_reduce(torch.ones(3))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    for size in (3, 100_000):  # of the first, the round is under way; the second meets a group given up
        text = raises(lambda s=size: dist.all_reduce(torch.ones(s)), "a sum with the dead", dist.DistBackendError)
        assert "the process of rank 2 has ended" in text, text
    say(f"<<{text} after {time.monotonic() - begin:.1f} s>>")
    for size in (3, 100_000):
        data = torch.ones(size)
        dist.all_reduce(data, group=without)
        assert (data == 3).all()


def by_hand(target: Callable[[int, str], None]) -> None:
    """Not under torchrun, which ends a job as soon as a rank dies."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=target, args=(rank, f"{folder}/store")) for rank in range(4)]
        for process in ranks:
            process.start()
        for rank in (0, 3):
            ranks[rank].join(40)
        for process in ranks:
            process.kill()
            process.join()


def one_is_stopped() -> None:
    by_hand(stopped)


def one_is_killed() -> None:
    by_hand(killed)


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    job = launch(one_is_stopped, None, tmp_path).check()
    texts = re.findall(r"<<(.*?)>>", job.output, re.DOTALL)
    assert len(texts) == 2, job.output
    for text in texts:
        assert "rank 1 does not answer (stopped, or cut off)" in text, text


def test_a_death_ends_what_waits_for_it_and_nothing_else(tmp_path: Path) -> None:
    job = launch(one_is_killed, None, tmp_path).check()
    texts = re.findall(r"<<(.*?) after (.*?) s>>", job.output, re.DOTALL)
    assert len(texts) == 3, job.output
    assert all(float(seconds) < 20 for _, seconds in texts), texts
