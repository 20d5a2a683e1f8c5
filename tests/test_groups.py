"""Pins process groups themselves: the ways to make them, many at once, one after another without a trace, and what
becomes of a group, and of the others, when a member does not come, leaves, or gives up.
"""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same, unless_gloo
from harness.rank import ordered_group

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


def usage() -> tuple[float, int, int]:
    """MB of memory, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


@on_ranks(2)
def test_groups_come_and_go_without_a_trace(me: Rank) -> None:
    before = usage()
    for turn in range(80):
        handle = dist.new_group([0, 1])
        check_sum(handle, 5 if turn % 4 else 50_000)
        dist.destroy_process_group(handle)
        del handle
        if turn == 20:
            gc.collect()
            before = usage()
    gc.collect()
    dist.barrier()
    grown = [after - then for after, then in zip(usage(), before, strict=True)]
    assert grown[0] < 40, f"memory grew by {grown[0]:.0f} MB"
    assert grown[1] <= 10, f"open files grew by {grown[1]}"
    assert grown[2] <= 4, f"threads grew by {grown[2]}"


@on_ranks(4)
def test_many_groups_at_once(me: Rank) -> None:
    members = [[0, 1], [1, 2, 3], [0, 3], [0, 1, 2, 3], [2, 3], [0, 2]]
    before = usage()
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
        assert usage()[2] - before[2] < 12, "threads pile up with the groups"
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
