"""Pins groups as sets of ranks that work side by side through the verbs: what one of them computes, refuses, waits for
or loses is nothing to the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, needs_multicomm, on_ranks, raises, same
from harness.by_hand import happens, launch_ranks, side
from harness.checks import check_sum
from harness.jobs import launch, say
from torch import nn

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = needs_multicomm("has the verbs")

Started = tuple[str, multicomm.Handle, Any]  # what it is, and its right result


def parity(me: Rank) -> Group:
    """The even or the odd ranks, whichever this one belongs to; made by its members alone."""
    ranks = tuple(range(me.rank % 2, me.world, 2))
    name = ["even", "odd"][me.rank % 2]
    handle = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    assert isinstance(handle, dist.ProcessGroup)
    return Group(name, ranks, handle, ranks.index(me.rank))


def start_all(group: Group, rank: int, salt: int = 0, name: str | None = None) -> list[Started]:
    """Every verb, with results that no other group has and no other salt."""
    factor = 1 + sum(3**member for member in group.ranks) + 1000 * salt + 100 * len(group.kind)
    on: dict[str, Any] = {"group": group.handle}

    def named(verb: str) -> str | None:
        return name and f"{name}.{verb}"

    mine, total = float(factor * (rank + 1)), float(factor * sum(member + 1 for member in group.ranks))
    root = group.ranks[salt % group.size]
    rows = torch.full((rank % 3, 2), rank + factor)
    gathered = torch.cat([torch.full((member % 3, 2), member + factor) for member in group.ranks])
    shares = torch.arange(float(group.size)).mul(mine).view(-1, 1)
    sums = [total * group.own]
    dealt = torch.arange(group.size) + factor * (rank + 1)
    received = [group.own + factor * (member + 1) for member in group.ranks]
    large = torch.full((5000,), mine)
    return [
        ("sum", multicomm.allreduce_async(torch.tensor([mine]), name=named("sum"), op=multicomm.Sum, **on), [total]),
        ("large", multicomm.allreduce_async(large, name=named("large"), op=multicomm.Sum, **on), [total] * 5000),
        ("max", multicomm.allreduce_async(torch.tensor([mine]), name=named("max"), op=multicomm.Max, **on),
         [float(factor * (max(group.ranks) + 1))]),
        ("root", multicomm.broadcast_async(torch.tensor([mine]), root, named("root"), **on), [factor * (root + 1.0)]),
        ("rows", multicomm.allgather_async(rows, named("rows"), **on), gathered),
        ("share", multicomm.reducescatter_async(shares, named("share"), multicomm.Sum, **on), [sums]),
        ("dealt", multicomm.alltoall_async(dealt, [1] * group.size, named("dealt"), **on), received),
    ]  # fmt: skip


def finish_all(started: list[Started], what: str) -> None:
    for name, handle, want in started:
        got = multicomm.synchronize(handle)
        same(got[0] if name == "dealt" else got, want, f"{what}: {name}")


@on_ranks(2, 3, 4)
def test_even_and_odd_ranks_at_the_same_time(me: Rank) -> None:
    group = parity(me)
    for salt in range(5):
        whole = start_all(me.groups["world"], me.rank, salt)
        finish_all(start_all(group, me.rank, salt), f"{group.kind} {salt}")
        again = start_all(group, me.rank, salt + 10, "again")
        finish_all(whole, f"world {salt}")
        finish_all(again, f"{group.kind} {salt}, by name")
    dist.destroy_process_group(group.handle)


@on_ranks(2, 3, 4)
def test_equal_names_in_every_group(me: Rank) -> None:
    """All of a rank's groups have operations of the same names under way, begun in an order of the rank's own."""
    groups = list(me.joined())
    for turn in range(3):
        calls = [(group, salt) for group in groups for salt in range(2)]
        order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(10 * me.rank + turn)).tolist()
        started = {}
        for place in order:
            group, salt = calls[place]
            started[place] = start_all(group, me.rank, salt, f"layer {salt}")
        for place in reversed(order):
            group, salt = calls[place]
            finish_all(started[place], f"{group.kind}, salt {salt}, turn {turn}")


@on_ranks(2, 3, 4)
def test_unequal_numbers_of_operations(me: Rank) -> None:
    """One group is busy, one does little, one nothing at all; nested, overlapping and equal ones among them."""
    groups = [group for group in me.joined() if group.kind != "twin_b"]  # idle
    before = {name: all_["rounds"] for name, all_ in multicomm.stats().items()}
    for number in range(40):
        under_way = []
        for group in groups:
            place = list(me.groups).index(group.kind)  # the same on all ranks
            if number % (1 + 3 * place) == 0:
                under_way.append((start_all(group, me.rank, number, "busy" if place % 2 else None), group.kind))
        for started, kind in reversed(under_way):
            finish_all(started, f"{kind}, {number}")
    idle = me.groups["twin_b"].handle.group_name
    assert multicomm.stats()[idle]["rounds"] == before[idle], "a group that nobody uses has rounds"
    check_sum(me.groups["twin_b"].handle)


@on_ranks(4)
def test_nested_groups(me: Rank) -> None:
    """Each rank is in one to four groups, each of which is part of the one before."""
    nested = [
        Group(f"first {size}", tuple(range(size)), handle, me.rank)
        for size in (4, 3, 2, 1)
        if (handle := dist.new_group(range(size))) is not dist.GroupMember.NON_GROUP_MEMBER
    ]
    for turn in range(3):
        order = nested if (me.rank + turn) % 2 else nested[::-1]
        started = [(start_all(group, me.rank, turn), group.kind) for group in order]
        for calls, kind in started:
            finish_all(calls, f"{kind}, turn {turn}")
    for group in nested:
        dist.destroy_process_group(group.handle)


@on_ranks(3, 4)
def test_a_group_that_waits_holds_up_no_other(me: Rank) -> None:
    """Rank 0 does not come to the barrier and the sums of one group until all is done on the others."""
    held, twin = me.groups["twin_a"], me.groups["twin_b"]
    others = [group for group in me.joined() if group.kind != "twin_a"]
    waiting: list[multicomm.Handle] = []
    if me.rank != 0:
        waiting = [multicomm.allreduce_async(torch.ones(size), group=held.handle) for size in (3, 5000)]
        waiting.append(dist.barrier(held.handle, async_op=True))
    for group in others:
        multicomm.barrier(group=group.handle)
        finish_all(start_all(group, me.rank), f"{group.kind}, while one group waits")
    multicomm.barrier(group=twin.handle)
    if me.rank != 0:
        done = [bool(handle.is_completed()) for handle in waiting[2:]] + [multicomm.poll(one) for one in waiting[:2]]
        assert not any(done), f"done without rank 0: {done}"
    multicomm.barrier(group=twin.handle)
    if me.rank == 0:
        waiting = [multicomm.allreduce_async(torch.ones(size), group=held.handle) for size in (3, 5000)]
        waiting.append(dist.barrier(held.handle, async_op=True))
    for handle in waiting:
        handle.wait()


# --- errors stay where they are ---


def shapes(group: Group, rank: int) -> object:
    return multicomm.allreduce(torch.ones(2 + group.own), name="misfit", group=group.handle)


def dtypes(group: Group, rank: int) -> object:
    dtype = torch.float64 if group.own else torch.float32
    return multicomm.allgather(torch.ones(3, dtype=dtype), group=group.handle)


def roots(group: Group, rank: int) -> object:
    return multicomm.broadcast(torch.ones(5000), rank, group=group.handle)


def operations(group: Group, rank: int) -> object:
    if group.own:
        return multicomm.reducescatter(torch.ones(group.size), group=group.handle)
    return multicomm.allreduce(torch.ones(group.size), group=group.handle)


def verbs_and_torch(group: Group, rank: int) -> object:
    if group.own:
        return multicomm.allgather(torch.ones(4), group=group.handle)
    return dist.all_gather_into_tensor(torch.ones(4 * group.size), torch.ones(4), group=group.handle)


@pytest.mark.parametrize("misfit", [shapes, dtypes, roots, operations, verbs_and_torch], ids=lambda one: one.__name__)
@on_ranks(3, 4)
def test_an_error_of_one_group_is_nothing_to_the_others(me: Rank, misfit: Callable[[Group, int], object]) -> None:
    group, world = parity(me), me.groups["world"]
    for turn in range(3):
        whole = start_all(world, me.rank, turn, "whole")
        if me.rank % 2 == turn % 2 and group.size > 1:  # one group at a time
            start = f"multicomm: rank {me.rank}: group '{group.handle.group_name}' .*the ranks disagree on collective"
            text = raises(lambda: misfit(group, me.rank), misfit.__name__, dist.DistBackendError, start)
            for rank in group.ranks:
                assert f"rank {rank}: " in text or f", {rank}: " in text, text
            strangers = set(range(me.world)) - set(group.ranks)
            assert not any(f"\n  rank {rank}: " in text for rank in strangers), text
            assert "the group can be used further" in text and "Make every rank of the group call the same" in text
        else:
            finish_all(start_all(group, me.rank, turn), f"{group.kind}, while the others have an error")
        finish_all(start_all(group, me.rank, turn + 5), f"{group.kind}, after the error")
        finish_all(whole, "world, begun before the error")
    dist.destroy_process_group(group.handle)


# --- groups end, by themselves ---


def with_work_pending(me: Rank, remove: Callable[[Group], object]) -> None:
    """Rank 0 removes a group with work pending, which all or not all members have begun."""
    kept = me.groups["twin_a"]
    ranks = tuple(range(me.world))
    # Begun by all: waited for, and done everywhere.
    group = Group("all begin", ranks, dist.new_group(), me.rank)
    started = start_all(group, me.rank)
    me.meet("all have begun")
    remove(group)
    finish_all(started, "begun by all before the removal")
    call = lambda: multicomm.allreduce(torch.ones(3), group=group.handle)  # noqa: E731
    raises(call, "a removed group", dist.DistBackendError, "this rank has destroyed or aborted the group; make a new")
    # Not begun by rank 0, which removes the group.
    group = Group("rank 0 removes", ranks, dist.new_group(), me.rank)
    multicomm.barrier(group=group.handle)
    if me.rank == 0:
        me.await_signal("1 waits")
        remove(group)
        me.signal("0 has left")
    else:
        handles = [multicomm.allreduce_async(torch.ones(size), group=group.handle) for size in (3, 5000)]
        handles.append(multicomm.allreduce_async(torch.ones(3), name="by name", group=group.handle))
        if me.rank == 1:
            me.signal("1 waits")
        begin = time.monotonic()
        gone = f"rank {me.rank}: group .*: rank 0 has destroyed this group"
        for handle in handles:
            raises(lambda h=handle: multicomm.synchronize(h), "left alone", dist.DistBackendError, gone)
        raises(lambda: multicomm.barrier(group=group.handle), "again", dist.DistBackendError, gone)
        assert time.monotonic() - begin < 5, "late"
        remove(group)
    # Begun by rank 0 only, which removes the group.
    group = Group("rank 0 begins", ranks, dist.new_group(), me.rank)
    multicomm.barrier(group=group.handle)
    if me.rank == 0:
        on: dict[str, Any] = {"op": multicomm.Sum, "group": group.handle}
        handles = [multicomm.allreduce_async(torch.ones(size), **on) for size in (3, 5000)]
        begin = time.monotonic()
        remove(group)
        for handle in handles:
            text = "this rank has destroyed or aborted the group"
            raises(lambda h=handle: multicomm.synchronize(h), "removed", dist.DistBackendError, text)
        assert time.monotonic() - begin < 4, "the wait for pending work is bounded"
        me.signal("0 has left the other one")
    else:
        me.await_signal("0 has left the other one")
        gone = f"rank {me.rank}: group .*: rank 0 has destroyed this group"
        data = torch.full((3,), float(me.rank))
        try:  # rank 0 may have sent its part before it left, and that is then right
            multicomm.allreduce_(data, op=multicomm.Sum, group=group.handle)
            same(data, [1.0 + sum(range(1, me.world))] * 3, "what rank 0 had begun")
        except dist.DistBackendError as error:
            assert "rank 0 has destroyed this group" in str(error), error
        for size in (5000, 3):
            call = lambda n=size: multicomm.allreduce(torch.ones(n), group=group.handle)  # noqa: E731
            raises(call, "left by rank 0", dist.DistBackendError, gone)
        remove(group)
    finish_all(start_all(kept, me.rank), "another group of the same ranks")


@on_ranks(2, 3)
def test_a_group_is_destroyed_with_work_pending(me: Rank) -> None:
    with_work_pending(me, lambda group: dist.destroy_process_group(group.handle))


@on_ranks(2)
def test_a_destroyed_group_is_called_so(me: Rank) -> None:
    """Also by the first verb that is called on it, and also when another group has been used since."""
    used, unused, third = dist.new_group(), dist.new_group(), dist.new_group()
    multicomm.barrier(group=used)
    for group in (used, unused):
        dist.destroy_process_group(group)
    for _ in range(2):
        for group, what in ((used, "used before"), (unused, "never used")):
            call = lambda g=group: multicomm.allreduce(torch.ones(3), group=g)  # noqa: E731
            raises(call, what, (ValueError, dist.DistBackendError), f"rank {me.rank}", "destroyed")
        multicomm.barrier(group=third)
    dist.destroy_process_group(third)


def one_member_dies() -> None:
    dist.init_process_group("multicomm")
    rank, store = dist.get_rank(), side()
    plan = {"of the dead": (0, 1, 3), "its twin": (0, 1, 3), "of the others": (0, 1, 2), "a pair": (1, 2)}
    groups = []
    for kind, ranks in plan.items():
        handle = dist.new_group(list(ranks), group_desc=kind)
        if rank in ranks:
            groups.append(Group(kind, ranks, handle, ranks.index(rank)))
    for group in groups:
        finish_all(start_all(group, rank), group.kind)
    if rank == 3:
        store.wait(["0 waits", "1 waits"])
        happens()
        os.kill(os.getpid(), signal.SIGKILL)
    lost = [group for group in groups if 3 in group.ranks]
    waiting = [call for group in lost for call in start_all(group, rank, 1) + start_all(group, rank, 2, "named")]
    store.set(f"{rank} waits", "1")
    alive = [group for group in groups if group not in lost]
    for turn in range(3):  # while rank 3 dies
        for group in alive:
            finish_all(start_all(group, rank, turn), f"{group.kind}, while rank 3 dies")
    for name, handle, _ in waiting:
        call = lambda h=handle: multicomm.synchronize(h)  # noqa: E731
        text = raises(call, f"{name} with the dead", dist.DistBackendError, r"\brank 3\b")
        assert text.startswith(f"multicomm: rank {rank}: group '"), text
    for group in lost:
        raises(lambda g=group: multicomm.barrier(group=g.handle), "later", dist.DistBackendError, "rank 3 has ended")
    for group in alive:
        finish_all(start_all(group, rank, 9), f"{group.kind}, after the death of rank 3")
    store.set(f"{rank} is done", "1")
    store.wait([f"{other} is done" for other in (0, 1, 2)])
    say(f"rank {rank} went on")


def test_the_groups_of_the_living_go_on(tmp_path: Path) -> None:
    ranks = launch_ranks(one_member_dies, 4, tmp_path)
    ranks.check({0: 0, 1: 0, 2: 0, 3: -signal.SIGKILL}, dict.fromkeys(range(4), 5.0))
    ranks.job.says(" went on", 3)


# --- training on a set ---


@on_ranks(2, 3, 4)
def test_an_optimizer_per_set(me: Rank) -> None:
    """The ranks of each parity train a model of their own, and all train a common one, with equal names in between."""
    half, world = parity(me), me.groups["world"]
    steps = 3

    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)).double()

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        data = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)
        return model(data).square().mean()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Callable[[int], torch.Tensor]) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            losses(step).backward()
            optimizer.step()

    models = {group.kind: network() for group in (half, world)}
    optimizers = {
        group.kind: multicomm.DistributedOptimizer(
            torch.optim.SGD(models[group.kind].parameters(), 0.1),
            models[group.kind].named_parameters(),
            group=group.handle,
        )
        for group in (half, world)
    }
    for step in range(steps):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        # One backward pass for both: their gradients are under way at once.
        losses = [loss(model, me.rank, step) for model in models.values()]
        sum(losses if me.rank % 2 else losses[::-1]).backward()
        for optimizer in optimizers.values():
            optimizer.step()
    for group in (half, world):
        want = network()
        train(
            want,
            torch.optim.SGD(want.parameters(), 0.1),
            lambda step, g=group, w=want: torch.stack([loss(w, rank, step) for rank in g.ranks]).mean(),
        )
        for got, expected in zip(models[group.kind].parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(got, expected, msg=lambda text, g=group: f"{g.kind}: {text}")
    dist.destroy_process_group(half.handle)


# --- by communicator ---


def communicators() -> None:
    """The verbs by process group, communicator, index, and communicator_id; sets that come and go."""
    world: MPI.Intracomm = multicomm.world()
    rank, size = world.rank, world.size
    comms = [world, world.Split(rank % 2, rank), world.Split(0, -rank), world.Dup()]
    multicomm.init(comms=comms, timeout=timedelta(seconds=30))
    ranks = [tuple(comm.allgather(rank)) for comm in comms]
    places = [
        [{"group": multicomm.group(index)}, {"group": comm}, {"group": index}, {"communicator_id": index}]
        for index, comm in enumerate(comms)
    ]
    orders = [(turn + rank) % len(comms) for turn in range(len(comms))]
    started = []
    for way in range(4):
        for index in orders:
            on = places[index][way]
            data = torch.tensor([2.0**rank * (index + 1)])
            handle = multicomm.allreduce_async(data, name=f"way {way}", op=multicomm.Sum, **on)
            total = float(sum(2**member for member in ranks[index]) * (index + 1))
            started.append((handle, [total], f"{on} of {ranks[index]}"))
            rows = multicomm.allgather_async(torch.tensor([rank]), **on)
            started.append((rows, list(ranks[index]), f"rows of {on}"))
    for handle, want, what in started:
        same(multicomm.synchronize(handle), want, what)
    for index, on in enumerate(places):
        for way in on:
            assert multicomm.size(**way) == len(ranks[index]) and multicomm.rank(**way) == ranks[index].index(rank)
    # An error of the odd ones while the even ones go on.
    if rank % 2:
        call = lambda: multicomm.allreduce(torch.ones(rank), communicator_id=1)  # noqa: E731
        raises(call, "misfit", dist.DistBackendError, rf"rank {rank}: group .*\[1, 3\].*disagree")
    same(multicomm.allreduce(torch.ones(2), op=multicomm.Sum, group=comms[1]), [2.0, 2.0], "after the error")
    # Ranks join on one of them while all use the others.
    if rank == 0:
        last = multicomm.join_async(communicator_id=2)
    else:
        mean = multicomm.allreduce(torch.tensor([float(rank)]), group=comms[2])
        same(mean, [sum(range(1, size)) / (size - 1)], "without rank 0")
        last = multicomm.join_async(comms[2])
    same(multicomm.allreduce(torch.ones(1), op=multicomm.Sum, communicator_id=3), [float(size)], "beside the join")
    assert multicomm.synchronize(last) != 0
    # Removed with work pending, which all have begun; the index is gone, the others stay.
    pending = multicomm.allreduce_async(torch.ones(5000), op=multicomm.Sum, communicator_id=3)
    multicomm.remove_comm(3)
    same(multicomm.synchronize(pending), [float(size)] * 5000, "pending at the removal")
    for way in ({"group": 3}, {"communicator_id": 3}, {"group": comms[3]}):
        raises(lambda w=way: multicomm.allreduce(torch.ones(1), **w), f"{way}", ValueError, f"rank {rank}: .*no group")
    # Removed by rank 0 alone.
    index = multicomm.add_comm(world.Dup())
    multicomm.barrier(communicator_id=index)
    if rank == 0:
        multicomm.remove_comm(index)
        world.barrier()
    else:
        world.barrier()
        call = lambda: multicomm.allreduce(torch.ones(1), communicator_id=index)  # noqa: E731
        raises(call, "left by rank 0", dist.DistBackendError, "rank 0 has destroyed this group")
        multicomm.remove_comm(index)
    same(multicomm.allreduce(torch.ones(1), op=multicomm.Sum, group=world), [float(size)], "what is left")
    say("all sets")


def test_sets_by_communicator(tmp_path: Path) -> None:
    launch(communicators, 4, tmp_path, mpirun=True).check().says("all sets", 4)
