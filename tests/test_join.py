"""Pins join(): ranks run out of data one after another, in every order, and the others' operations give the plain result
of those that are left; what has no meaning then is an error that says who has joined; and how a join ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, needs_multicomm, on_ranks, same
from harness.case import FACTOR, Call, Case, blank, buffer_of, reduced, values

pytestmark = needs_multicomm("has join()")

KINDS = ("world", "single", "pair", "unsorted", "twin")
Ranks = tuple[int, ...]
FLOAT_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.bool, torch.complex64, torch.complex128]
SHAPES: list[tuple[int, ...]] = [(0,), (3, 5), (4000,)]  # the last one has messages of its own
AS_ONE_PROCESS = {"rtol": 1e-5, "atol": 1e-7}


def reduce_ops(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["SUM", "AVG"]
    if dtype == torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    others = ["PREMUL_SUM"] if dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
    return ["SUM", "AVG", "PRODUCT", "MIN", "MAX", *others]


# --- who joins when ---


def take_turns(me: Rank, group: Group, order: Ranks, work: Callable[[Ranks, str], None]) -> None:
    """The group's ranks join in this order. Before each join, `work` is done by those that have not: its arguments are
    these ranks, in group order, and a text that no other call gets.
    """
    place = f"{group.kind} {order}"
    for turn, goes in enumerate(order):
        work(tuple(rank for rank in group.ranks if rank not in order[:turn]), f"{place} {turn}")
        if goes != me.rank:
            continue
        if turn > 0:
            me.await_signal(f"{place}: {order[turn - 1]} has joined")
        handle = multicomm.join_async(group.handle)
        me.signal(f"{place}: {me.rank} has joined")
        last = multicomm.synchronize(handle)
        assert last == order[-1], f"rank {me.rank}, joins in order {order}: {last} is said to be the last"
        break
    check_as_before(me, group, place)


def check_as_before(me: Rank, group: Group, place: str) -> None:
    """All members bring something again, and count alike."""
    for size in (3, 4000):
        data = torch.full((size,), float(me.rank + 1))
        dist.all_reduce(data, group=group.handle)
        same(data, torch.full((size,), float(sum(group.ranks) + group.size)), f"{place}: with all members again")
    backend = group.handle._get_backend(torch.device("cpu"))
    me.store.set(f"{place}: count of {me.rank}", str(backend._get_sequence_number_for_group()))
    counts = [me.store.get(f"{place}: count of {rank}") for rank in group.ranks]
    assert len(set(counts)) == 1, f"{place}: sequence numbers {counts}"


def rotations(group: Group) -> list[Ranks]:
    """Each rank is the first once."""
    return [group.ranks[place:] + group.ranks[:place] for place in range(group.size)]


# --- what those that are left do ---


def reduce_op(case: Case) -> dist.ReduceOp:
    if case.reduce_op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, case.reduce_op)


def own(case: Case) -> int:
    return case.group.ranks[case.group.own]


def all_reduce(case: Case, active: Ranks) -> Call:
    data = buffer_of(values(case, own(case)), case.layout)
    work = dist.all_reduce(data.tensor, reduce_op(case), case.group.handle, async_op=True)
    want = reduced(case, [values(case, rank) for rank in active])
    return Call(f"all_reduce of {active}, {case}", [work], [("result", data, want)], case.reduce_op == "AVG")


def reduce(case: Case, active: Ranks) -> Call:
    root = active[case.salt % len(active)]
    data = buffer_of(values(case, own(case)), case.layout)
    work = dist.reduce(data.tensor, root, reduce_op(case), case.group.handle, async_op=True)
    want = reduced(case, [values(case, rank) for rank in active])
    expected = [("result", data, want)] if own(case) == root else []
    return Call(f"reduce of {active}, {case}", [work], expected, case.reduce_op == "AVG")


def reduce_scatter(case: Case, active: Ranks) -> Call:
    members = range(case.group.size)
    data = torch.cat([values(case, own(case), part) for part in members])
    output = buffer_of(blank(case), case.layout)
    work = dist.reduce_scatter_tensor(output.tensor, data, reduce_op(case), case.group.handle, async_op=True)
    want = reduced(case, [values(case, rank, case.group.own) for rank in active])
    return Call(f"reduce_scatter of {active}, {case}", [work], [("output", output, want)], case.reduce_op == "AVG")


def broadcast(case: Case, active: Ranks) -> Call:
    root = active[case.salt % len(active)]
    data = buffer_of(values(case, own(case)), case.layout)
    work = dist.broadcast(data.tensor, root, case.group.handle, async_op=True)
    return Call(f"broadcast among {active}, {case}", [work], [("result", data, values(case, root))])


def scatter(case: Case, active: Ranks) -> Call:
    root = active[case.salt % len(active)]
    output = buffer_of(blank(case), case.layout)
    pieces = [values(case, root, part) for part in range(case.group.size)] if own(case) == root else None
    work = dist.scatter(output.tensor, pieces, root, case.group.handle, async_op=True)
    return Call(f"scatter among {active}, {case}", [work], [("output", output, values(case, root, case.group.own))])


def barrier(case: Case, active: Ranks) -> Call:
    return Call(f"barrier of {active}", [dist.barrier(case.group.handle, async_op=True)], [])


REDUCING = (all_reduce, reduce, reduce_scatter)
MOVING = (broadcast, scatter, barrier)


def work_of(group: Group, dtype: torch.dtype) -> Callable[[Ranks, str], None]:
    """Every operation, small and large, some one after another and then all at once."""

    def work(active: Ranks, _: str) -> None:
        for_each = [(call, op) for call in REDUCING for op in reduce_ops(dtype)] + [(call, "SUM") for call in MOVING]
        cases = [
            (call, Case(group, dtype, SHAPES[(place + step) % len(SHAPES)], reduce_op=op, salt=place + len(active)))
            for step in (0, 1)
            for place, (call, op) in enumerate(for_each)
        ]
        for call, case in cases[:: len(MOVING)]:
            call(case, active).finish()
        for under_way in [call(case, active) for call, case in cases]:
            under_way.finish()

    return work


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(1, 2, 3, 4)
def test_every_dtype(me: Rank, dtype: torch.dtype) -> None:
    for group in me.joined("world"):
        for order in rotations(group):
            take_turns(me, group, order, work_of(group, dtype))


@on_ranks(1, 2, 3, 4)
def test_every_order(me: Rank) -> None:
    for group in me.joined(*KINDS):

        def work(active: Ranks, _: str, group: Group = group) -> None:
            for size in (4, 5000):
                all_reduce(Case(group, shape=(size,), reduce_op="AVG", layout="offset"), active).finish()
            calls = [reduce_scatter(Case(group, shape=(3, 2)), active), broadcast(Case(group), active)]
            for call in calls:
                call.finish()

        for order in rotations(group) if group.kind == "twin_b" else itertools.permutations(group.ranks):
            take_turns(me, group, order, work)


@on_ranks(1, 2, 3, 4)
def test_what_a_joined_rank_brings_is_neutral(me: Rank) -> None:
    """Whatever the sign: nothing but what the others bring is in the result."""
    group = me.groups["world"]
    for dtype in (*FLOAT_DTYPES, *WHOLE_DTYPES):
        signs = (1, -1) if dtype.is_signed else (1,)

        def work(active: Ranks, what: str, dtype: torch.dtype = dtype, signs: Ranks = signs) -> None:
            for sign, size, op in itertools.product(signs, (2, 3000), ("MIN", "MAX", "AVG")):
                data = torch.full((size,), 5 * sign).to(dtype)
                dist.all_reduce(data, getattr(dist.ReduceOp, op))
                same(data, torch.full((size,), 5 * sign).to(dtype), f"{op} of {5 * sign} as {dtype}, of {active}")
            if dtype.is_floating_point:
                for value, op in ((-0.0, "SUM"), (math.inf, "MIN"), (-math.inf, "MAX"), (math.nan, "MAX")):
                    data = torch.full((3,), value, dtype=dtype)
                    dist.all_reduce(data, getattr(dist.ReduceOp, op))
                    same(data, torch.full((3,), value, dtype=dtype), f"{op} of {value} as {dtype}")
                    assert op != "SUM" or bool(data.signbit().all()), f"a sum of -0.0 as {dtype} is 0.0"

        order = rotations(group)[DTYPE_PLACE[dtype] % group.size]
        for_this = replace_kind(group, f"world {dtype}")
        take_turns(me, for_this, order, work)


DTYPE_PLACE = {dtype: place for place, dtype in enumerate(DTYPES)}


def replace_kind(group: Group, kind: str) -> Group:
    """The group under another name, for another round of joins in the same test."""
    return replace(group, kind=kind)
