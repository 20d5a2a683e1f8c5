"""Pins process groups themselves: the ways to make them, many at once, one after another without a trace, and what
becomes of a group, and of the others, when a member does not come, leaves, or gives up.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path

import mpi4py
import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same, unless_gloo
from harness.rank import ordered_group

mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

Handle = dist.ProcessGroup


def check_sum(handle: Handle | None, size: int = 5) -> None:
    """A sum of the global ranks of the group."""
    data = torch.full((size,), float(dist.get_rank()))
    dist.all_reduce(data, group=handle)
    ranks = dist.get_process_group_ranks(handle)
    same(data, torch.full((size,), float(sum(ranks))), f"all_reduce on ranks {ranks}")


@on_ranks(4)
def test_ways_to_make_groups(me: Rank) -> None:
    halves, _ = dist.new_subgroups(group_size=2)
    listed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    for handle in (halves, listed):
        check_sum(handle)
        gathered = torch.empty(2)
        dist.all_gather_into_tensor(gathered, torch.tensor([float(me.rank)]), group=handle)
        same(gathered, [float(rank) for rank in dist.get_process_group_ranks(handle)], "order of the ranks")


@on_ranks(3, 4)
def test_the_given_order_is_the_rank_order(me: Rank) -> None:
    ranks = list(range(me.world))[::-1]
    handle = ordered_group(ranks)
    assert dist.get_rank(handle) == ranks.index(me.rank)
    gathered = torch.empty(me.world)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(me.rank)]), group=handle)
    same(gathered, [float(rank) for rank in ranks], "gathered in group order")
    data = torch.tensor([float(me.rank)])
    dist.broadcast(data, group=handle, group_src=0)
    same(data, [float(ranks[0])], "broadcast from the first of the group")
    dist.destroy_process_group(handle)


@needs_multicomm("hangs")
@on_ranks(3)
def test_pairs_round_a_ring_in_cyclic_order(me: Rank) -> None:
    """Each rank begins with another pair: nobody may wait for the one before to be complete."""
    pairs = [[0, 1], [1, 2], [0, 2]]
    mine = [pair for pair in pairs[me.rank :] + pairs[: me.rank] if me.rank in pair]
    for turn in range(20):
        handles = []
        for pair in mine:
            handles.append(dist.new_group(pair, use_local_synchronization=True))
        size = 5 if turn % 2 else 20_000
        data = [torch.full((size,), float(me.rank)) for _ in pairs]
        works = [dist.all_reduce(data[k], group=handle, async_op=True) for k, handle in enumerate(handles)]
        for k, work in reversed(list(enumerate(works))):
            work.wait()
            same(data[k], torch.full((size,), float(sum(mine[k]))), f"pair {mine[k]}")
        for handle in handles:
            dist.destroy_process_group(handle)


@needs_multicomm("hangs")
@on_ranks(3)
def test_a_late_member_holds_up_nobody_else(me: Rank) -> None:
    def pair(*ranks: int) -> Handle:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    if me.rank == 1:
        me.await_signal("0 and 2 have met")
        late = pair(0, 1)
    elif me.rank == 0:
        late = pair(0, 1)
        waiting = dist.all_reduce(torch.ones(3), group=late, async_op=True)
    if me.rank != 1:
        for _ in range(3):
            prompt = pair(0, 2)
            for size in (5, 50_000):
                check_sum(prompt, size)
            dist.destroy_process_group(prompt)
        me.signal("0 and 2 have met")
    if me.rank == 0:
        assert not waiting.is_completed()
        waiting.wait()
    elif me.rank == 1:
        dist.all_reduce(torch.ones(3), group=late)
    if me.rank != 2:
        check_sum(late)
        dist.destroy_process_group(late)
    check_sum(None)


@needs_multicomm("names nobody")
@on_ranks(3)
def test_a_member_that_never_comes_is_named(me: Rank) -> None:
    if me.rank != 1:
        begin = time.monotonic()
        handle = dist.new_group([0, 1, 2], use_local_synchronization=True, timeout=timedelta(seconds=2))
        raises(lambda: check_sum(handle), "a group without rank 1", dist.DistBackendError, r"\brank 1 did not come")
        waited = time.monotonic() - begin
        assert 1 < waited < 10, f"the time-out of 2 s came after {waited:.1f} s"
        me.signal(f"{me.rank} was told")
    else:
        for rank in (0, 2):
            me.await_signal(f"{rank} was told")
        handle = dist.new_group([0, 1, 2], use_local_synchronization=True)
        begin = time.monotonic()
        told = r"\brank [02] has given it up"
        raises(lambda: check_sum(handle), "a group that the others gave up", dist.DistBackendError, told)
        assert time.monotonic() - begin < 5
    dist.destroy_process_group(handle)
    handle = dist.new_group([0, 1, 2], use_local_synchronization=True)  # and so everybody is in step again
    check_sum(handle)
    dist.destroy_process_group(handle)
    check_sum(None)


@unless_gloo("waits for good where ranks have made different numbers of groups before")
@on_ranks(4)
def test_only_the_members_make_a_group(me: Rank) -> None:
    pair = [me.rank // 2 * 2, me.rank // 2 * 2 + 1]
    first, second = (dist.new_group(pair, use_local_synchronization=True) for _ in range(2))
    assert first is not second
    for size in (3, 20_000):
        data = [torch.full((size,), float(me.rank)), torch.full((size,), float(10 * me.rank))]
        works = [dist.all_reduce(data[k], group=handle, async_op=True) for k, handle in enumerate((first, second))]
        for work in reversed(works):
            work.wait()
        same(data[0], torch.full((size,), float(sum(pair))), "first")
        same(data[1], torch.full((size,), 10.0 * sum(pair)), "second")
    for handle in (first, second):
        dist.destroy_process_group(handle)


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    memory: float  # MB
    files: int
    threads: int
    mappings: int
    shared: int  # of the mappings, those of entries in /dev/shm
    handles: int  # of MPI: the number that the next communicator gets

    @staticmethod
    def now() -> Usage:
        gc.collect()
        mappings = Path("/proc/self/maps").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Usage(
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(mappings),
            sum("/dev/shm/" in mapping for mapping in mappings),
            _next_handle(),
        )

    def check_no_more_than(self, before: Usage, megabytes: float) -> None:
        grown = {field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        limits = {"memory": megabytes, "files": 4, "threads": 3, "mappings": 60, "shared": 2, "handles": 3}
        excess = {what: f"by {grown[what]:g}" for what, limit in limits.items() if grown[what] > limit}
        assert not excess, f"grew: {excess}"


def _next_handle() -> int:
    if not MPI.Is_initialized():
        return 0
    made = MPI.COMM_SELF.Dup()
    number = made.py2f()
    made.Free()
    return number


def settled() -> Usage:
    """Once every rank is through with what it frees in the background."""
    usage, deadline = Usage.now(), time.monotonic() + 10
    dist.barrier()
    while time.monotonic() < deadline:
        time.sleep(0.2)  # nothing announces that a communicator has been freed
        before, usage = usage, Usage.now()
        if (before.handles, before.mappings, before.threads) == (usage.handles, usage.mappings, usage.threads):
            break
    dist.barrier()
    return usage


def come_and_go(turns: int) -> None:
    for turn in range(turns):
        handle = dist.new_group()
        check_sum(handle, 5 if turn % 4 else 50_000)
        dist.destroy_process_group(handle)
        del handle


def all_alive(count: int) -> None:
    handles = [dist.new_group() for _ in range(count)]
    data = [torch.full((8,), float(k)) for k in range(count)]
    works = [dist.all_reduce(tensor, group=handle, async_op=True) for tensor, handle in zip(data, handles, strict=True)]
    for k in reversed(range(count)):
        works[k].wait()
        same(data[k], torch.full((8,), float(k * dist.get_world_size())), f"group {k} of {count}")
    for handle in handles:
        dist.destroy_process_group(handle)


def leaves_no_trace(first: tuple[int, int], then: tuple[int, int], megabytes: float) -> None:
    """Groups made and destroyed one after the other, and alive at once: what is held afterwards has not grown."""
    usages = []
    for turns, alive in (first, then):
        come_and_go(turns)
        all_alive(alive)
        usages.append(settled())
    print(f"rank {dist.get_rank()}: before {usages[0]}, after {usages[1]}", file=sys.stderr)
    usages[1].check_no_more_than(usages[0], megabytes)


@on_ranks(2)
def test_groups_come_and_go_without_a_trace(me: Rank) -> None:
    leaves_no_trace((20, 20), (60, 60), megabytes=30)


@pytest.mark.skipif("MULTICOMM_TEST_SOAK" not in os.environ, reason="takes a minute or two: make soak")
@on_ranks(2, 3, limit=300)
def test_thousands_of_groups_leave_no_trace(me: Rank) -> None:
    leaves_no_trace((1000, 500), (1000, 500), megabytes=15)


@on_ranks(4)
def test_many_groups_at_once(me: Rank) -> None:
    members = [[0, 1], [1, 2, 3], [0, 3], [0, 1, 2, 3], [2, 3], [0, 2]]
    before = Usage.now()
    handles = [(members[k % 6], dist.new_group(members[k % 6])) for k in range(48)]
    for _ in range(2):
        calls = []
        for k, (ranks, handle) in enumerate(handles):
            if me.rank in ranks:
                data = torch.full((8,), float(me.rank + k))
                calls.append((k, ranks, data, dist.all_reduce(data, group=handle, async_op=True)))
        for k, ranks, data, work in reversed(calls):
            work.wait()
            same(data, torch.full((8,), float(sum(ranks) + k * len(ranks))), f"group {k}")
    if me.backend == "multicomm":
        assert Usage.now().threads - before.threads < 12, "threads pile up with the groups"
    dist.barrier()
    for ranks, handle in handles:
        if me.rank in ranks:
            dist.destroy_process_group(handle)


@on_ranks(2)
def test_a_destroyed_group_is_refused(me: Rank) -> None:
    gone, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    for handle in (gone, other):
        check_sum(handle)
    dist.barrier()
    dist.destroy_process_group(gone)
    data = torch.ones(2)
    try:  # torch keeps the handle alive: an error or a right result, never a hang
        dist.all_reduce(data, group=gone, async_op=True).wait(timedelta(seconds=10))
        same(data, [2.0, 2.0], "a sum on a destroyed group")
    except (RuntimeError, ValueError):
        same(data, [1.0, 1.0], "the tensor of a refused sum")
    raises(lambda: dist.destroy_process_group(gone), "a second destroy")
    check_sum(other)
    dist.destroy_process_group(other)


def elapsed(action: Callable[[], object]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def check_given_up(handle: Handle, size: int) -> None:
    """The group's other members have given it up: this one is told, soon.

    A sum that they had offered before may still come about, and is then right.
    """
    begin = time.monotonic()
    data = torch.ones(size)
    try:
        dist.all_reduce(data, group=handle)
    except dist.DistBackendError:
        same(data, [1.0] * size, "the tensor of a refused sum")
    else:
        same(data, [float(dist.get_world_size(handle))] * size, "a sum that the others had offered")
        raises(lambda: dist.all_reduce(data, group=handle), "the next sum", dist.DistBackendError)
    waited = time.monotonic() - begin
    assert waited < 15, f"the others' giving up was noticed after {waited:.1f} s"


@pytest.mark.parametrize("size", [4, 50_000])
@on_ranks(2, 3)
def test_the_time_out_of_a_group_is_its_own(me: Rank, size: int) -> None:
    everybody, late = list(range(me.world)), me.world - 1
    short, twin = dist.new_group(everybody, timeout=timedelta(seconds=2)), dist.new_group(everybody)
    for handle in (short, twin, None):
        check_sum(handle)
    if me.rank != late:
        data = torch.ones(size)
        waited = elapsed(lambda: raises(lambda: dist.all_reduce(data, group=short), "time-out", RuntimeError))
        assert 1 < waited < 15, f"the group's time-out of 2 s came after {waited:.1f} s"
        me.signal(f"{me.rank} timed out")
    for rank in range(late):
        me.await_signal(f"{rank} timed out")
    check_sum(twin, size)
    check_sum(None, size)
    if me.backend == "multicomm" and me.rank == late:
        check_given_up(short, size)
    check_sum(twin, size)
    for handle in (short, twin):
        dist.destroy_process_group(handle)


def set_time_out(handle: Handle, seconds: float, *, by_backend: bool) -> None:
    limit = timedelta(seconds=seconds)
    if by_backend:
        handle._get_backend(torch.device("cpu"))._set_default_timeout(limit)
    else:
        handle.set_timeout(limit)


@needs_multicomm("keeps the time-out of a call")
@pytest.mark.parametrize("by_backend", [False, True], ids=["set_timeout", "_set_default_timeout"])
@on_ranks(2)
def test_a_time_out_that_is_set_counts_at_once(me: Rank, by_backend: bool) -> None:
    """Also for an operation that waits already, both ways, unless it was given one of its own."""
    longer, shorter = dist.new_group(timeout=timedelta(seconds=2)), dist.new_group()
    for handle in (longer, shorter):
        check_sum(handle)
    if me.rank == 0:
        works = [dist.all_reduce(torch.ones(4), group=handle, async_op=True) for handle in (longer, shorter)]
        set_time_out(longer, 30, by_backend=by_backend)
        set_time_out(shorter, 1, by_backend=by_backend)
        waited = elapsed(lambda: raises(works[1].wait, "time-out", dist.DistBackendError, r"\brank 1\b"))
        assert waited < 5, f"the time-out of 1 s came after {waited:.1f} s"
        time.sleep(2)  # past the first time-out of `longer`
        me.signal("rank 0 has waited")
        works[0].wait()
    else:
        me.await_signal("rank 0 has waited")
        dist.all_reduce(torch.ones(4), group=longer)
        check_given_up(shorter, 4)
    check_sum(None)
    for handle in (longer, shorter):
        dist.destroy_process_group(handle)


@needs_multicomm("names nobody")
@pytest.mark.parametrize("size", [4, 50_000])
@on_ranks(3)
def test_a_time_out_of_one_operation(me: Rank, size: int) -> None:
    handle = dist.new_group()
    check_sum(handle)
    if me.rank < 2:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1 if me.rank == 0 else 2)
        data = torch.ones(size)
        work = handle.allreduce([data], options)
        set_time_out(handle, 50, by_backend=True)  # has no say in it
        waited = elapsed(lambda: raises(work.wait, "time-out", dist.DistBackendError, r"\brank 2\b"))
        assert 0.5 < waited < 10, f"the operation's time-out came after {waited:.1f} s"
        same(data, torch.ones(size), "the tensor of a sum that timed out")
        me.signal(f"{me.rank} timed out")
    else:
        for rank in range(2):
            me.await_signal(f"{rank} timed out")
        check_given_up(handle, size)
    check_sum(None)
    dist.destroy_process_group(handle)


@needs_multicomm("names nobody")
@on_ranks(3)
def test_a_time_out_names_who_did_not_come(me: Rank) -> None:
    handle = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    check_sum(handle)
    if me.rank != 2:
        text = raises(lambda: dist.all_reduce(torch.ones(4), group=handle), "time-out", dist.DistBackendError)
        assert re.search(r"\brank 2\b", text), f"the time-out does not name rank 2:\n{text}"
        me.signal(f"{me.rank} timed out")
    for rank in range(2):
        me.await_signal(f"{rank} timed out")
    dist.destroy_process_group(handle)
    check_sum(None)


@needs_multicomm("waits for the time-out")
@on_ranks(2, 3)
def test_a_member_that_has_left_is_reported(me: Rank) -> None:
    handle = dist.new_group(list(range(me.world)))
    check_sum(handle)
    if me.rank == 0:
        dist.destroy_process_group(handle)
        check_sum(None)
        return
    data = torch.ones(4)
    waited = elapsed(
        lambda: raises(lambda: dist.all_reduce(data, group=handle), "left", dist.DistBackendError, "rank 0")
    )
    assert waited < 15, f"the error came after {waited:.1f} s"
    same(data, [1.0] * 4, "the tensor of the refused sum")
    check_sum(None)
    dist.destroy_process_group(handle)


@needs_multicomm("cannot be aborted")
@on_ranks(2)
def test_an_aborted_group_fails_everywhere(me: Rank) -> None:
    handle = dist.new_group([0, 1])
    check_sum(handle)
    if me.rank == 0:
        works = [dist.all_reduce(torch.ones(size), group=handle, async_op=True) for size in (4, 50_000)]
        handle._get_backend(torch.device("cpu")).abort()
        for work in works:
            raises(work.wait, "a sum under way", dist.DistBackendError)
        raises(lambda: dist.all_reduce(torch.ones(4), group=handle), "a later sum", dist.DistBackendError)
        me.signal("aborted")
    else:
        me.await_signal("aborted")
        check_given_up(handle, 4)
    check_sum(None)
    dist.destroy_process_group(handle)
    check_sum(None, 50_000)
