"""Pins MPI communicators as process groups: any kind of communicator, in its rank order, under mpirun and torchrun;
lists that do not fit together; communicators that come and go. Each test is a whole job.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import needs_multicomm, raises, same
from harness.jobs import launch, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = needs_multicomm("makes groups of MPI communicators")

EXAMPLE = Path(__file__).parents[1] / "examples" / "alltoall_two_communicators.py"
SOON = timedelta(seconds=3)


def members(world: MPI.Intracomm, comm: MPI.Intracomm) -> list[int]:
    """By the communicator itself."""
    return comm.allgather(world.rank)


def check_group(world: MPI.Intracomm, comm: MPI.Intracomm, group: dist.ProcessGroup) -> None:
    """The group has the communicator's rank order, and gives the results of its members."""
    ranks = members(world, comm)
    assert dist.get_process_group_ranks(group) == ranks
    assert len(set(comm.allgather(group.group_name))) == 1, "members agree on the group's name"
    assert dist.get_rank(group) == comm.rank and dist.get_world_size(group) == comm.size
    data = torch.full((300,), 2.0**world.rank)
    dist.all_reduce(data, group=group)
    same(data, torch.full((300,), sum(2.0**rank for rank in ranks)), f"all_reduce on {ranks}")
    gathered = torch.empty(comm.size, dtype=torch.int64)
    dist.all_gather(list(gathered.split(1)), torch.tensor([world.rank]), group=group)
    same(gathered, ranks, "all_gather, in rank order")
    data = torch.tensor([float(world.rank)])
    dist.broadcast(data, ranks[-1], group=group)
    same(data, [float(ranks[-1])], "broadcast")


def kinds(world: MPI.Intracomm) -> list[MPI.Intracomm]:
    """Communicators of every kind, some of which this rank is not a member of."""
    from mpi4py import MPI

    rank, size = world.rank, world.size
    cart = world.Create_cart([size], periods=[True])
    index = [2 * (node + 1) for node in range(size)]
    edges = [neighbour % size for node in range(size) for neighbour in (node - 1, node + 1)]
    overlapping = [
        world.Create(world.group.Incl([first, (first + 1) % size])) for first in range(size if size > 2 else 0)
    ]
    return [
        world,
        world.Split(rank % 2, rank),
        world.Split(0, -rank),  # reversed
        world.Split(0 if rank else MPI.UNDEFINED, rank),  # null on rank 0
        *overlapping,  # round a ring, the last in the order [size - 1, 0]
        world.Dup(),  # equal ones
        cart,
        cart.Sub([True]),
        world.Create_graph(index, edges),
        MPI.COMM_SELF,
    ]


def every_kind() -> None:
    if multicomm.launched_by_mpi():
        from mpi4py import MPI

        world = MPI.COMM_WORLD  # starts MPI; multicomm takes it as it is
    else:
        world = multicomm.world()
    every = kinds(world)
    # The order of a list is the rank's own affair; only equal ones are told apart by it.
    comms = sorted(every, key=lambda comm: comm.size if comm else 0) if world.rank % 2 else every
    multicomm.init(comms=comms, timeout=timedelta(seconds=30))
    from mpi4py import MPI

    assert multicomm.world() == MPI.COMM_WORLD
    here = [index for index, comm in enumerate(comms) if comm != MPI.COMM_NULL]
    for index in set(range(len(comms))) - set(here):
        raises(lambda index=index: multicomm.group(index), "a null one", ValueError, "COMM_NULL")
    ours = {id(comm): index for index, comm in enumerate(comms)}
    for comm in every:
        if comm != MPI.COMM_NULL:
            check_group(world, comm, multicomm.group(ours[id(comm)]))
    # All at once; the ranks start with different ones.
    data = [torch.full((50,), float(world.rank + 1)) for _ in here]
    works = [dist.all_reduce(d, group=multicomm.group(i), async_op=True) for d, i in zip(data, here, strict=True)]
    for work in works:
        work.wait()
    for tensor, index in zip(data, here, strict=True):
        ranks = dist.get_process_group_ranks(multicomm.group(index))
        same(tensor, torch.full((50,), float(sum(ranks) + len(ranks))), f"sum on {ranks}, all at once")
    # torch's own groups work on as ever: their names count alike on all ranks.
    pair = dist.new_group(sorted({0, world.size - 1}))
    assert len(set(world.allgather(dist.distributed_c10d._world.group_count))) == 1
    if world.rank in (0, world.size - 1):
        dist.all_reduce(torch.ones(3), group=pair)
    if world.size == 4:  # DDP's imports are slow
        train(multicomm.group(ours[id(every[1])]))
    dist.destroy_process_group()
    raises(lambda: multicomm.group(0), "after the end", ValueError, "multicomm.init")
    multicomm.init()  # a second life
    check_group(world, world, multicomm.group(0))
    say("every kind")


def train(group: dist.ProcessGroup) -> None:
    """DDP gives the gradient of the mean over the group's members."""

    def gradients(ranks: list[int], wrap: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = wrap(nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 1)))
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in ranks]
        torch.stack([model(batch).pow(2).mean() for batch in batches]).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    got = gradients([dist.get_rank()], lambda model: DistributedDataParallel(model, process_group=group))
    want = gradients(dist.get_process_group_ranks(group), lambda model: model)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_kind_of_communicator_under_mpirun(tmp_path: Path, ranks: int) -> None:
    launch(every_kind, ranks, tmp_path, mpirun=True).check().says("every kind", ranks)


def test_every_kind_of_communicator_under_torchrun(tmp_path: Path) -> None:
    launch(every_kind, 4, tmp_path).check().says("every kind", 4)


def lists_that_differ() -> None:
    world = multicomm.world()  # three ranks
    rank = world.rank
    parity = world.Split(rank % 2, rank)
    again = "init.. can be called again"

    def fails(comms: object, *patterns: str, kind: type[Exception] = ValueError) -> str:
        return raises(lambda: multicomm.init(comms=comms), f"{comms}", kind, again, *patterns)

    texts = [
        fails(
            [world, parity] if rank < 2 else [world],
            r"\[0, 2\] is passed not by rank 2, once by rank 0\n",
            r"rank 0: \[0, 1, 2\], \[0, 2\]\n",
            r"rank 1: \[0, 1, 2\], \[1\]\n",
            r"rank 2: \[0, 1, 2\]\n",
        ),
        fails([world] * (1 + (rank == 1)), "once by ranks 0, 2, 2 times by rank 1", r"ranks 0, 2: \[0, 1, 2\]\n"),
        fails([] if rank == 1 else [world], r"rank 1: none"),
    ]
    assert len(set(map(tuple, world.allgather(texts)))) == 1, "every rank has the same text"
    # Arguments that one rank has wrong are errors on all of them.
    local = world.Split(0 if rank == 0 else 1, 0)
    inter = local.Create_intercomm(0, world, 1 if rank == 0 else 0)
    fails([inter if rank == 1 else world], r"rank 1: comms\[0\] is an inter-communicator", "Merge")
    fails(
        [world, 5 if rank == 2 else world],
        r"rank 2: comms\[1\].* not an mpi4py communicator but int",
        kind=TypeError if rank == 2 else ValueError,
    )
    fails(
        world if rank == 0 else [world],
        "rank 0: comms must be a list",
        r"pass \[comm\]",
        kind=TypeError if rank == 0 else ValueError,
    )
    raises(lambda: multicomm.group(0), "no group yet", ValueError, "multicomm.init")
    # A rank that does not come is named, also to itself when it comes late.
    if rank == 2:
        world.recv(source=0)
        time.sleep(0.2)
    short = timedelta(seconds=0.7)
    raises(lambda: multicomm.init(timeout=short), "a rank that is late", dist.DistBackendError, "rank 2 did not come")
    if rank == 0:
        world.send(None, dest=2)
    check = torch.ones(2)
    dist.all_reduce(check)
    same(check, [3.0, 3.0], "torch's world is usable")
    multicomm.init(comms=[world, parity])
    check_group(world, world, multicomm.group(0))
    check_group(world, parity, multicomm.group(1))
    raises(lambda: multicomm.init(comms=[world]), "twice", ValueError, "called before", "add_comm")
    for index in (2, -1):
        raises(lambda index=index: multicomm.group(index), "no such", ValueError, f"{index} is out of range.*0 to 1")
    raises(lambda: multicomm.group("0"), "a text", TypeError, "integer, not str")
    raises(lambda: multicomm.comm_of(dist.group.WORLD), "torch's own", ValueError, "multicomm.group")
    raises(lambda: multicomm.add_comm(None), "no communicator", TypeError, "comm is not an mpi4py communicator")
    raises(lambda: multicomm.add_comm(inter), "an inter-communicator", ValueError, "inter-communicator")
    say("all errors")


def test_lists_that_differ_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    launch(lists_that_differ, 3, tmp_path, mpirun=True).check().says("all errors", 3)


def come_and_go() -> None:
    from mpi4py import MPI

    dist.init_process_group("multicomm", init_method="mpi://")  # init() takes it
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    multicomm.init(comms=[world, world], timeout=timedelta(seconds=30))
    # The user's own calls, while ours are under way.
    own, other = multicomm.comm_of(0), multicomm.comm_of(multicomm.group(1))
    assert own is multicomm.comm_of(multicomm.group(0)) and own != other and own != world
    assert MPI.Comm.Compare(own, world) == MPI.CONGRUENT
    for turn in range(20):
        data = [torch.full((40_000 if k == 5 else 100,), float(rank)) for k in range(10)]
        works = [dist.all_reduce(d, group=multicomm.group(k % 2), async_op=True) for k, d in enumerate(data)]
        assert own.allreduce(rank + turn) == size * (size - 1) // 2 + size * turn
        assert other.bcast(turn * 7, root=turn % size) == turn * 7
        for tensor, work in zip(data, works, strict=True):
            work.wait()
            same(tensor, torch.full_like(tensor, size * (size - 1) / 2), "beside calls of the user's own")
    # Added by its members only, in an order of each rank's own; with its topology.
    for turn in range(3):
        ring = [world.Create(world.group.Incl([k, (k + 1) % size])) for k in range(size)]
        mine = [comm for comm in ring if comm != MPI.COMM_NULL]
        cart = world.Create_cart([size])
        begin = 2 + 3 * turn
        added = [multicomm.add_comm(comm) for comm in (*mine[:: 1 - 2 * (rank % 2)], cart)]
        assert added == [begin, begin + 1, begin + 2], "an index is not used again"
        assert multicomm.comm_of(added[2]).Get_topology() == MPI.CART
        cart.Free()
        works, data = [], [torch.full((1000,), 1.0) for _ in range(60)]
        for k, tensor in enumerate(data):
            works.append(dist.all_reduce(tensor, group=multicomm.group(added[k % 3]), async_op=True))
        for index in added:  # with work pending, which is waited for
            multicomm.remove_comm(index)
            raises(lambda index=index: multicomm.group(index), "removed", ValueError, "was removed")
            raises(lambda index=index: multicomm.comm_of(index), "removed", ValueError, "was removed")
        for k, work in enumerate(works):
            work.wait()
            same(data[k], torch.full((1000,), float(size if k % 3 == 2 else 2)), "pending at the removal")
    raises(lambda: multicomm.remove_comm(added[0]), "twice", ValueError, "was removed")
    freed = world.Dup()
    index = multicomm.add_comm(freed)
    freed.Free()
    check_group(world, multicomm.comm_of(index), multicomm.group(index))
    raises(lambda: multicomm.add_comm(freed), "freed", ValueError, "COMM_NULL")
    dist.destroy_process_group(multicomm.group(index))
    multicomm.remove_comm(index)  # what the user has destroyed himself
    say("come and gone")


def test_communicators_come_and_go(tmp_path: Path) -> None:
    launch(come_and_go, 3, tmp_path, mpirun=True).check().says("come and gone", 3)


def a_member_that_does_not_come() -> None:
    world = multicomm.world()
    multicomm.init(timeout=SOON)
    index = multicomm.add_comm(world.Dup())
    if world.rank == 0:
        raises(lambda: multicomm.comm_of(index), "alone", dist.DistBackendError, "rank 1 did not come within 3 s")
        dist.all_reduce(torch.ones(3), group=multicomm.group(index), async_op=True)  # rank 1 never will
    world.barrier()
    if world.rank == 1:
        raises(lambda: multicomm.comm_of(index), "too late", dist.DistBackendError, "rank 1 did not come within 3 s")
    assert multicomm.comm_of(index).allreduce(1) == 2, "both try again"
    begin = time.monotonic()
    multicomm.remove_comm(index)
    assert time.monotonic() - begin < 4, "the wait for pending work is bounded"
    say("not alone")


def test_a_member_that_does_not_come(tmp_path: Path) -> None:
    launch(a_member_that_does_not_come, 2, tmp_path).check().says("not alone", 2)


def mpi4py_first() -> None:
    from mpi4py import MPI  # without a launcher of MPI each process is a world of its own

    assert MPI.COMM_WORLD.size == 1
    raises(
        lambda: multicomm.init(comms=[MPI.COMM_WORLD]), "mpi4py first", ValueError, r"call multicomm.world\(\) before"
    )
    say("told")


def test_mpi4py_before_multicomm_under_torchrun(tmp_path: Path) -> None:
    # Open MPI's own singletons leave a segment behind; without shared memory they have none.
    launch(mpi4py_first, 2, tmp_path, environment={"OMPI_MCA_btl": "self"}).check().says("told", 2)


def example() -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.parametrize("mpirun", [True, False], ids=["mpirun", "torchrun"])
def test_example(tmp_path: Path, mpirun: bool) -> None:
    job = launch(example, 4, tmp_path, mpirun=mpirun).check()
    job.says("rank 2, parity [0, 2]: received [1, 21]", 1)
    job.says("rank 3, world [0, 1, 2, 3]: received [3, 13, 23, 33]", 1)


def test_mpi4py_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mpi4py" else found(name))
    for call in (lambda: multicomm.init(comms=[]), multicomm.world):
        raises(call, "no mpi4py", ImportError, "pip install mpi4py")
    assert not dist.is_initialized()


def without_mpi4py() -> None:
    found = importlib.util.find_spec
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    importlib.util.find_spec = lambda name, *rest: None if name == "mpi4py" else found(name, *rest)
    multicomm.init()
    same(multicomm.allreduce(torch.ones(2), op=multicomm.Sum), [2.0, 2.0], "the world")
    raises(lambda: multicomm.group(0), "no communicators", ValueError, "there are no communicators")
    say("works without")


@pytest.mark.parametrize("mpirun", [True, False], ids=["mpirun", "torchrun"])
def test_the_world_needs_no_mpi4py(tmp_path: Path, mpirun: bool) -> None:
    launch(without_mpi4py, 2, tmp_path, mpirun=mpirun).check().says("works without", 2)
