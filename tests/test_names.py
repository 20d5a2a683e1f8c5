"""Pins operations that are matched by name: whatever the order on each rank, mixed with others, on overlapping groups;
and what a name that does not fit is told. The engine's own rules are in tests/cpp/engine_test.cpp.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import multicomm
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same
from harness.jobs import launch, say

pytestmark = needs_multicomm("matches by name")

GROUPS = ("world", "twin_a", "pair", "unsorted", "ring_0", "ring_1")


def shuffled(me: Rank, count: int, salt: int) -> list[int]:
    """An order of each rank's own."""
    generator = torch.Generator().manual_seed(me.seed * 1000 + me.rank * 100 + salt)
    return torch.randperm(count, generator=generator).tolist()


@on_ranks(1, 2, 3, 4)
def test_any_order(me: Rank) -> None:
    """Training steps that repeat their names, on overlapping groups at once, with unnamed operations in between."""
    groups = list(me.joined(*GROUPS))
    names = [(group, f"layer.{number}.weight") for group in groups for number in range(20)]
    for step in range(4):
        data = {
            (group.kind, name): torch.full((int(name.split(".")[1]) % 7 * 40 + 1,), float(group.own + step))
            for group, name in names
        }
        order = shuffled(me, len(names), step)
        handles: list[Any] = []
        unnamed = {}
        for place in order:
            group, name = names[place]
            tensor = data[group.kind, name]
            handles.append(multicomm.allreduce_async_(tensor, name=name, op=multicomm.Sum, group=group.handle))
            if name.endswith(".3.weight"):  # one per group, so that each group's unnamed ones have one order
                unnamed[group.kind] = torch.ones(5)
                handles.append(dist.all_reduce(unnamed[group.kind], group=group.handle, async_op=True))
        for handle in handles:
            multicomm.synchronize(handle)
        for (kind, name), tensor in data.items():
            size = me.groups[kind].size
            total = float(sum(range(size)) + size * step)
            same(tensor, torch.full_like(tensor, total), f"{name} on {kind}, step {step}")
        for kind, tensor in unnamed.items():
            same(tensor, [float(me.groups[kind].size)] * 5, f"unnamed on {kind}")


@on_ranks(2, 3)
def test_every_verb_by_name(me: Rank) -> None:
    rows = torch.full((me.rank + 1, 2), float(me.rank))
    calls = {
        "reduce": lambda: multicomm.allreduce_async(torch.ones(3), name="reduce", op=multicomm.Sum),
        "gather": lambda: multicomm.allgather_async(rows, name="gather"),
        "broadcast": lambda: multicomm.broadcast_async(torch.full((4,), float(me.rank)), 1, name="broadcast"),
        "exchange": lambda: multicomm.alltoall_async(torch.arange(me.world), [1] * me.world, name="exchange"),
        "scatter": lambda: multicomm.reducescatter_async(torch.ones(me.world, 2), name="scatter", op=multicomm.Sum),
        "group": lambda: multicomm.grouped_allreduce_async([torch.ones(2), torch.ones(3)], name="group"),
        "adasum": lambda: multicomm.allreduce_async(torch.ones(5), name="adasum", op=multicomm.Adasum),
    }
    for turn in range(3):
        names = [list(calls)[place] for place in shuffled(me, len(calls), turn)]
        handles = {name: calls[name]() for name in names}
        results = {name: multicomm.synchronize(handles[name]) for name in reversed(names)}
        same(results["reduce"], [float(me.world)] * 3, "reduce")
        same(results["gather"], [[float(r)] * 2 for r in range(me.world) for _ in range(r + 1)], "gather")
        same(results["broadcast"], [1.0] * 4, "broadcast")
        same(results["exchange"][0], [me.rank] * me.world, "exchange")
        same(results["scatter"], [[float(me.world)] * 2], "scatter")
        same(results["group"][1], [1.0] * 3, "group")
        same(results["adasum"], [1.0] * 5, "adasum")


@on_ranks(2, 3)
def test_steps_cost_a_round_per_batch(me: Rank) -> None:
    group = me.groups["twin_b"]
    tensors = [torch.ones(100) for _ in range(200)]
    costs = []
    for step in range(12):
        dist.barrier()
        before = multicomm.stats()[group.handle.group_name]
        order = shuffled(me, len(tensors), step)
        handles = [
            multicomm.allreduce_async_(tensors[place], name=f"cheap.{place}", group=group.handle) for place in order
        ]
        for handle in handles:
            multicomm.synchronize(handle)
        after = multicomm.stats()[group.handle.group_name]
        costs.append((after["rounds"] - before["rounds"], after["batches"] - before["batches"]))
    # The first teaches the names. Ranks that are interrupted while they submit need some more rounds.
    rounds, batches = sorted(costs[1:])[len(costs) // 2]
    assert batches <= 30 and rounds <= batches + 20, costs


@on_ranks(2, 3)
def test_same_name_on_two_groups(me: Rank) -> None:
    """Names belong to their group."""
    first, second = torch.ones(3), torch.full((3,), 2.0)
    pair = me.groups["pair"]
    one = multicomm.allreduce_async_(first, name="x", op=multicomm.Sum)
    if pair.own >= 0:
        two = multicomm.allreduce_async_(second, name="x", op=multicomm.Sum, group=pair.handle)
        multicomm.synchronize(two)
        same(second, [4.0] * 3, "on the pair")
    multicomm.synchronize(one)
    same(first, [float(me.world)] * 3, "on the world")


@on_ranks(2, 3)
def test_misfits_under_one_name(me: Rank) -> None:
    wrong = [
        lambda: multicomm.allreduce(torch.ones(3 + me.rank), name="y"),
        lambda: multicomm.allreduce(torch.ones(3, dtype=torch.int32 if me.rank else torch.int64), name="y"),
        lambda: (
            multicomm.allgather(torch.ones(3), name="y") if me.rank else multicomm.allreduce(torch.ones(3), name="y")
        ),
        lambda: multicomm.broadcast(torch.ones(3), me.rank % 2, name="y"),
    ]
    for number, call in enumerate(wrong):
        text = raises(
            call, f"call {number}", dist.DistBackendError, "disagree on collective 'y'", "under the same name"
        )
        assert re.search(r"\n  ranks? 0", text) and "sequence" not in text
        same(multicomm.allreduce(torch.ones(3), name="y", op=multicomm.Sum), [float(me.world)] * 3, "afterwards")
        dist.barrier()


@on_ranks(2)
def test_name_in_flight_twice(me: Rank) -> None:
    first, again = torch.ones(3), torch.ones(3)
    if me.rank == 0:
        handles = [multicomm.allreduce_async_(tensor, name="twice", op=multicomm.Sum) for tensor in (first, again)]
        me.store.set("submitted", "1")
    else:
        me.store.wait(["submitted"])
        handles = [multicomm.allreduce_async_(first, name="twice", op=multicomm.Sum)]
        multicomm.synchronize(handles[0])
        handles.append(multicomm.allreduce_async_(again, name="twice", op=multicomm.Sum))
    multicomm.synchronize(handles[0])
    same(first, [2.0] * 3, "the first")
    raises(lambda: multicomm.synchronize(handles[1]), "the second", dist.DistBackendError, "'twice'", "rank 0: .*again")
    same(again, [1.0] * 3, "the second's tensor")
    same(multicomm.allreduce(torch.ones(2), name="twice", op=multicomm.Sum), [2.0] * 2, "afterwards")


def one_rank_lacks_a_name() -> None:
    dist.init_process_group("multicomm")
    rank = dist.get_rank()
    lost = multicomm.allreduce_async(torch.ones(3), name="head.bias") if rank != 1 else None
    for _ in range(20):
        multicomm.allreduce(torch.ones(3), name="body.weight")
    if lost is None:
        dist.distributed_c10d._get_default_store().wait(["told"])
        multicomm.allreduce(torch.ones(3), name="head.bias")
    else:
        if rank == 0:
            dist.distributed_c10d._get_default_store().wait(["told"])
        else:
            time.sleep(2.5)  # the warning is due after 1 s, and nothing tells of it
            dist.distributed_c10d._get_default_store().set("told", "1")
        multicomm.synchronize(lost)
    say(f"rank {rank} is done")
    dist.destroy_process_group()


def test_missing_name_is_in_the_stall_report(tmp_path: Path) -> None:
    job = launch(one_rank_lacks_a_name, 3, tmp_path, environment={"MULTICOMM_STALL_WARNING": "1"}).check()
    job.says("collective 'head.bias', all_reduce(AVG) of Float [3]")
    job.says("rank 1 has not submitted it")
    job.says(" is done", 3)
