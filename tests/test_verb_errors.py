"""Pins what the verbs refuse, by errors that say what to do; that the next operation works; and which groups they
take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same
from harness.checks import check_sum
from harness.jobs import launch, say

pytestmark = needs_multicomm("has the verbs")

ONES = torch.ones(4)


def check_usable(me: Rank) -> None:
    """All verbs, on the world."""
    same(multicomm.allreduce(torch.ones(2), op=multicomm.Sum), [float(me.world)] * 2, "allreduce afterwards")
    same(multicomm.allgather(torch.tensor([me.rank])), list(range(me.world)), "allgather afterwards")
    same(multicomm.alltoall(torch.full((me.world,), me.rank)), list(range(me.world)), "alltoall afterwards")
    check_sum()


WRONG: dict[str, tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = {
    "both groups": (
        lambda: multicomm.allreduce(ONES, group=dist.group.WORLD, communicator_id=0),
        ValueError,
        ("rank 0", "group and communicator_id are both given"),
    ),
    "no group": (lambda: multicomm.allreduce(ONES, group="world"), TypeError, ("process group", "mpi4py", "not str")),
    "no communicators": (lambda: multicomm.allreduce(ONES, communicator_id=0), ValueError, (r"init\(comms=",)),
    "both averages": (
        lambda: multicomm.allreduce(ONES, average=True, op=multicomm.Sum),
        ValueError,
        ("average and op are both given",),
    ),
    "an unknown op": (lambda: multicomm.allreduce(ONES, op=17), ValueError, ("Average, Sum, Min, Max or Product",)),
    "adasum of integers": (
        lambda: multicomm.allreduce(torch.arange(3), op=multicomm.Adasum),
        ValueError,
        ("Adasum", "floating-point"),
    ),
    "adasum of a reducescatter": (
        lambda: multicomm.reducescatter(ONES, op=multicomm.Adasum),
        NotImplementedError,
        ("Adasum",),
    ),
    "complex minimum": (
        lambda: multicomm.allreduce(torch.ones(2, dtype=torch.complex64), op=multicomm.Min),
        ValueError,
        ("rank 0: group", "allreduce: MIN has no meaning"),
    ),
    "a fraction of integers": (
        lambda: multicomm.allreduce(torch.ones(2, dtype=torch.int32), prescale_factor=0.5),
        ValueError,
        ("prescale_factor 0.5 is not a whole number", "cast it"),
    ),
    "a root outside": (
        lambda: multicomm.broadcast(ONES, 7),
        ValueError,
        (r"group .* \(ranks \[0, 1, 2\]\): broadcast: root_rank 7 is not a member", "global rank"),
    ),
    "a scalar to scatter": (lambda: multicomm.reducescatter(torch.tensor(1.0)), ValueError, ("reshape",)),
    "a scalar to deal out": (lambda: multicomm.alltoall(torch.tensor(1.0)), ValueError, ("no dimension to split",)),
    "rows that do not come out even": (
        lambda: multicomm.alltoall(torch.ones(4)),
        ValueError,
        ("alltoall: dimension 0 of the input is 4, not divisible by the 3 ranks",),
    ),
    "splits that do not add up": (
        lambda: multicomm.alltoall(ONES, [1, 1, 0]),
        ValueError,
        ("splits add up to 2, dimension 0 is 4",),
    ),
    "too many splits": (lambda: multicomm.alltoall(ONES, [1, 1, 1, 1]), ValueError, ("4 input splits for 3 ranks",)),
    "negative splits": (lambda: multicomm.alltoall(ONES, [-1, 5, 0]), ValueError, ("negative input split",)),
    "empty splits": (lambda: multicomm.alltoall(ONES, []), ValueError, ("splits are empty",)),
    "splits of fractions": (lambda: multicomm.alltoall(ONES, torch.ones(2)), ValueError, ("one integer per rank",)),
    "shared elements": (
        lambda: multicomm.allreduce_(torch.ones(1).expand(3)),
        ValueError,
        ("share memory",),
    ),
    "a tensor for a list": (lambda: multicomm.grouped_allreduce(ONES), TypeError, ("a list of tensors",)),
    "no tensor": (lambda: multicomm.allreduce_async_([1.0]), TypeError, ()),
    "no handle": (lambda: multicomm.synchronize(ONES), TypeError, ("takes a handle",)),
}


@pytest.mark.parametrize("what", WRONG)
@on_ranks(3)
def test_wrong_arguments(me: Rank, what: str) -> None:
    """On one rank alone: nothing was sent, so the next operation fits."""
    action, kind, patterns = WRONG[what]
    if me.rank == 0:
        raises(action, what, kind, *patterns)
    check_usable(me)


# What rank 0 does while the others call allreduce_() of a [4].
MISFITS: dict[str, Callable[[torch.Tensor], object]] = {
    "another shape": lambda data: multicomm.allreduce(data[:2]),
    "another dtype": lambda data: multicomm.allreduce(data.double()),
    "another op": lambda data: multicomm.allreduce(data, op=multicomm.Max),
    "a broadcast": lambda data: multicomm.broadcast(data, 0),
    "an allgather": lambda data: multicomm.allgather(data),
    "an alltoall": lambda data: multicomm.alltoall(data, [4] + [0] * (dist.get_world_size() - 1)),
    "a barrier": lambda data: multicomm.barrier(),
}


@pytest.mark.parametrize("what", MISFITS)
@on_ranks(3)
def test_ranks_that_disagree(me: Rank, what: str) -> None:
    data = torch.full((4,), 5.0)
    calls = {True: partial(MISFITS[what], data), False: lambda: multicomm.allreduce_(data)}
    raises(calls[me.rank == 0], what, dist.DistBackendError, "the ranks disagree", "rank 0: ")
    same(data, [5.0] * 4, "the tensor")
    check_usable(me)


@on_ranks(3)
def test_rows_that_differ(me: Rank) -> None:
    """Only dimension 0 may."""
    raises(lambda: multicomm.allgather(torch.ones(2, 3 + me.rank)), "allgather", dist.DistBackendError, r"\[2, 5\]")
    check_usable(me)
    raises(lambda: multicomm.allgather(torch.ones(*[1] * (me.rank + 1))), "dimensions", dist.DistBackendError)
    check_usable(me)
    raises(lambda: multicomm.alltoall(torch.ones(me.world, 3 + me.rank)), "alltoall", dist.DistBackendError, "5]")
    check_usable(me)


@on_ranks(3)
def test_only_members_call(me: Rank) -> None:
    group = me.groups["pair"]
    if group.own < 0:
        raises(lambda: multicomm.allreduce(ONES, group=group.handle), "a non-member", ValueError, "not a member")
    else:
        same(multicomm.allreduce(ONES, group=group.handle, op=multicomm.Sum), [2.0] * 4, "members")
        raises(lambda: multicomm.broadcast(ONES, 0, group=group.handle), "a root outside", ValueError, "root_rank 0")
    check_usable(me)


@on_ranks(3)
def test_groups_of_other_backends(me: Rank) -> None:
    other = dist.new_group(backend="gloo")
    raises(lambda: multicomm.allreduce(ONES, group=other), "gloo", ValueError, "is not a multicomm group")
    dist.destroy_process_group(other)
    check_usable(me)


@on_ranks(3)
def test_places(me: Rank) -> None:
    assert (multicomm.rank(), multicomm.size()) == (me.rank, 3)
    for group in me.joined():
        assert (multicomm.rank(group.handle), multicomm.size(group.handle)) == (group.own, group.size)
    assert (multicomm.local_rank(), multicomm.local_size()) == (me.rank, 3)
    assert (multicomm.cross_rank(), multicomm.cross_size()) == (0, 1)
    assert multicomm.is_initialized()


def communicators() -> None:
    raises(multicomm.rank, "too early", ValueError, r"call multicomm.init\(\)")
    raises(lambda: multicomm.allreduce(ONES), "too early", ValueError, r"call multicomm.init\(\)")
    assert not multicomm.is_initialized()
    world = multicomm.world()
    halves, backwards = world.Split(world.rank % 2, world.rank), world.Split(0, -world.rank)
    multicomm.init(comms=[halves, backwards])
    rank = world.rank
    data = torch.tensor([2.0**rank])
    half = 5.0 if rank % 2 == 0 else 10.0
    for chosen in (
        {"group": halves},
        {"group": multicomm.group(0)},
        {"group": 0},
        {"communicator_id": 0},
    ):
        same(multicomm.allreduce(data, op=multicomm.Sum, **chosen), [half], f"{chosen}")
    same(multicomm.allreduce(data, op=multicomm.Sum), [15.0], "the world")
    same(multicomm.allgather(data, communicator_id=1), [8.0, 4.0, 2.0, 1.0], "in the communicator's order")
    assert multicomm.rank(communicator_id=1) == 3 - rank
    same(multicomm.broadcast(data, 3, group=backwards), [8.0], "broadcast from a global rank")
    raises(lambda: multicomm.allreduce(data, group=world), "not passed", ValueError, "there is no group of this")
    raises(lambda: multicomm.allreduce(data, communicator_id=2), "out of range", ValueError, "out of range")
    multicomm.barrier(communicator_id=1)
    multicomm.shutdown()
    assert not multicomm.is_initialized()
    multicomm.shutdown()
    say("communicators work")


@pytest.mark.parametrize("mpirun", [False, True], ids=["torchrun", "mpirun"])
def test_groups_by_communicator(tmp_path: Path, mpirun: bool) -> None:
    launch(communicators, 4, tmp_path, mpirun=mpirun).check().says("communicators work", times=4)
