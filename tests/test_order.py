"""Pins that the order between groups is free: ranks may use overlapping groups in any order of their own, and
operations of one group that share memory still take effect one after another.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, on_ranks, same, unless_gloo
from harness.calls import OPERATIONS, start
from harness.case import Call, Case

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)
RANDOM_SIZES = (0, 1, 1, 3, 64, 1000, 4097)


def filled(value: float, size: int) -> torch.Tensor:
    return torch.full((size,), float(value))


def run_shuffled(calls: list[Call], random: Random) -> None:
    """Finishes the calls in random order."""
    random.shuffle(calls)
    for call in calls:
        call.finish()


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("size", [16, 20_000])
@on_ranks(3, 4)
def test_a_ring_of_groups_in_cyclic_order(me: Rank, size: int, asynchronous: bool) -> None:
    """Every rank turns to another group first. Without agreement, launches in call order never meet.

    Synchronous calls in that order would deadlock by themselves, so there one thread per group makes them.
    """
    first, second = me.groups[f"ring_{me.rank}"], me.groups[f"ring_{(me.rank - 1) % me.world}"]
    for turn in range(20):
        cases = [Case(group, shape=(size,), salt=turn, asynchronous=asynchronous) for group in (first, second)]
        if asynchronous:
            run_shuffled([start("all_reduce", case) for case in cases], me.random)
            continue
        with ThreadPoolExecutor(2) as threads:
            for call in threads.map(lambda case: start("all_reduce", case), cases):
                call.finish()


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o not in ("all_to_all_uneven", "send_recv")])
@on_ranks(2, 3)
def test_twin_groups_in_opposite_order(me: Rank, operation: str) -> None:
    """Two groups of the same ranks are two groups."""
    twins = [me.groups["twin_a"], me.groups["twin_b"]]
    for turn in range(15):
        sizes = (5, 7) if turn % 2 else (4000, 9)
        cases = [
            Case(twin, shape=(size,), salt=10 * turn + k, asynchronous=True)
            for k, (twin, size) in enumerate(zip(twins, sizes, strict=True))
        ]
        order = cases if me.rank % 2 else cases[::-1]
        run_shuffled([start(operation, case) for case in order], Random(me.rank + turn))


@on_ranks(3, 4)
def test_threads_with_a_group_each(me: Rank) -> None:
    """One group per thread, so that calls of one group keep their order; synchronous, so that threads block."""
    begin = threading.Barrier(len(list(me.joined())))

    def work(group: Group) -> None:
        begin.wait(20)
        for turn in range(25):
            for size in (3, 5000):
                start("all_reduce", Case(group, shape=(size,), salt=turn)).finish()
            start("broadcast", Case(group, shape=(9,), salt=turn)).finish()

    groups = list(me.joined())
    with ThreadPoolExecutor(len(groups)) as threads:
        for done in [threads.submit(work, group) for group in groups]:
            done.result(50)


def random_program(me: Rank, random: Random, length: int) -> list[tuple[str, Case]]:
    """The same on every rank: which operation, where, of what."""
    kinds = list(me.groups)
    operations = [o for o in OPERATIONS if o != "send_recv"]
    if me.backend == "gloo":
        operations.remove("all_to_all_uneven")
    program = []
    for k in range(length):
        operation = random.choice(operations)
        group = me.groups[random.choice(kinds)]
        dtype = random.choice(DTYPES)
        shape = (random.choice(RANDOM_SIZES),) if k != length // 2 else (400_000,)
        reduce_op = random.choice(("SUM", "MIN", "MAX", "PRODUCT"))
        program.append((operation, Case(group, dtype, shape, reduce_op=reduce_op, salt=k, asynchronous=True)))
    return program


@pytest.mark.parametrize("program", range(8))
@on_ranks(2, 3, 4)
def test_random_programs(me: Rank, program: int) -> None:
    """Each rank keeps the order of every group, mixes the groups in a way of its own, and waits at the end."""
    shared, own = Random(me.seed), Random(me.seed + 1 + me.rank)
    queues: dict[str, list[tuple[str, Case]]] = {}
    for operation, case in random_program(me, shared, 120):
        if case.group.own >= 0:
            queues.setdefault(case.group.kind, []).append((operation, case))
    calls: list[Call] = []
    while queues:
        kind = own.choice(list(queues))
        operation, case = queues[kind].pop(0)
        if not queues[kind]:
            del queues[kind]
        calls.append(start(operation, case))
    run_shuffled(calls, own)


@on_ranks(2, 3)
def test_a_thousand_small_sums(me: Rank) -> None:
    data = [filled(me.rank + k, 1 + k % 9) for k in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in data]
    for work in works:
        work.wait()
    for k, tensor in enumerate(data):
        same(tensor, filled(me.world * k + sum(range(me.world)), 1 + k % 9), f"sum {k}")


@on_ranks(2)
def test_one_rank_queues_everything_before_the_other_begins(me: Rank) -> None:
    if me.rank == 1:
        me.await_signal("all is queued")
    groups = [me.groups[kind] for kind in ("world", "twin_a", "twin_b")]
    calls = [
        start(("all_reduce", "broadcast")[k % 2], Case(groups[k % 3], shape=(7,), salt=k, asynchronous=True))
        for k in range(400)
    ]
    if me.rank == 0:
        me.signal("all is queued")
    run_shuffled(calls, me.random)


@pytest.mark.parametrize("size", [5, 100_000])
@unless_gloo("runs operations on the same memory at the same time")
@on_ranks(2, 3)
def test_the_same_tensor_twice(me: Rank, size: int) -> None:
    """Submitted twice means summed twice, in one group as across groups."""
    world, twin = me.groups["world"], me.groups["twin_a"]
    for groups in ([world] * 3, [world, twin], [twin, world, twin]):
        data = filled(1, size)
        works = [dist.all_reduce(data, group=group.handle, async_op=True) for group in groups]
        for work in reversed(works):
            work.wait()
        same(data, filled(me.world ** len(groups), size), f"summed on {[group.kind for group in groups]}")


@pytest.mark.parametrize("size", [6, 60_000])
@unless_gloo("runs operations on the same memory at the same time")
@on_ranks(2, 3)
def test_overlapping_views(me: Rank, size: int) -> None:
    """Each view's sum begins when the one before it, with which it shares elements, is done."""
    third = size // 3
    data = filled(1, size)
    works = [
        dist.all_reduce(data[: 2 * third], async_op=True),
        dist.all_reduce(data[third:], group=me.groups["twin_a"].handle, async_op=True),
        dist.broadcast(data[: third // 2], 0, async_op=True),
    ]
    for work in works:
        work.wait()
    want = torch.cat([filled(me.world, third), filled(me.world**2, third), filled(me.world, size - 2 * third)])
    same(data, want, "elements summed once, twice and once")


@unless_gloo("runs operations on the same memory at the same time")
@on_ranks(2, 3)
def test_a_result_feeds_the_next_operation(me: Rank) -> None:
    """A chain without waits: sum, gather of the sums, sum of the gathered."""
    for size in (3, 30_000):
        data, gathered = filled(me.rank + 1, size), filled(0, size * me.world)
        works = [
            dist.all_reduce(data, async_op=True),
            dist.all_gather_into_tensor(gathered, data, group=me.groups["twin_a"].handle, async_op=True),
            dist.all_reduce(gathered, group=me.groups["twin_b"].handle, async_op=True),
        ]
        for work in works:
            work.wait()
        total = sum(range(1, me.world + 1))
        same(gathered, filled(total * me.world, size * me.world), f"chain of {size}")


@unless_gloo("runs operations on the same memory at the same time")
@on_ranks(2)
def test_ranks_whose_memory_overlaps_differently(me: Rank) -> None:
    """What overlaps on one rank alone is run in order there, and holds nobody up for good."""
    a, b = me.groups["twin_a"].handle, me.groups["twin_b"].handle
    for size in (4, 50_000):
        whole = filled(1, 2 * size)
        first = whole[:size] if me.rank == 0 else filled(1, size)
        second = whole[size // 2 : size // 2 + size] if me.rank == 0 else filled(1, size)
        order = [(first, a), (second, b)] if me.rank == 0 else [(second, b), (first, a)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in order]
        for work in works:
            work.wait()
        half = size // 2
        want = torch.cat([filled(2, half), filled(3, half), filled(2, half)])
        if me.rank == 0:
            same(whole[: size + half], want, f"views of {size}")
        else:
            same(first, filled(2, size), "first")
            same(second, torch.cat([filled(3, half), filled(2, half)]), "second")


@on_ranks(2, 3)
def test_columns_of_one_matrix_do_not_overlap(me: Rank) -> None:
    if me.backend == "gloo":
        matrix = [filled(me.rank + k, 30) for k in range(4)]
        columns = matrix
    else:
        whole = torch.stack([filled(me.rank + k, 30) for k in range(4)], 1)
        columns = [whole[:, k] for k in range(4)]
    works = [dist.all_reduce(column, async_op=True) for column in columns]
    for work in works:
        work.wait()
    for k, column in enumerate(columns):
        same(column, filled(me.world * k + sum(range(me.world)), 30), f"column {k}")
