"""Pins join(): ranks run out of data one after another, in every order, and the others' operations give the plain
result of those that are left; what has no meaning then is an error that says who has joined; and how a join ends.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, needs_multicomm, on_ranks, raises, same
from harness.by_hand import happens, launch_ranks, side
from harness.case import FACTOR, Call, Case, blank, buffer_of, reduced, values
from harness.checks import check_sum
from harness.jobs import say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def rows_of(case: Case, rank: int, turn: int) -> torch.Tensor:
    """Another number of rows from each rank and in each turn, none from some."""
    return values(replace(case, shape=((2 * rank + turn) % 4, *case.shape[1:])), rank)


@on_ranks(1, 2, 3, 4)
def test_allgather(me: Rank) -> None:
    """Whoever has joined adds no row."""
    for group in me.joined("world", "unsorted", "twin_a"):

        def work(active: Ranks, what: str, group: Group = group) -> None:
            turn = len(active)
            shapes = [(0,), (0, 3), (0, 0), (0, 2, 3), (0, 5000)]
            cases = [Case(group, dtype, shape) for shape in shapes for dtype in (torch.float32, torch.bool)]
            inputs = [rows_of(case, me.rank, turn) for case in cases]
            wants = [torch.cat([rows_of(case, rank, turn) for rank in active]) for case in cases]
            for data, want in zip(inputs, wants, strict=True):
                same(multicomm.allgather(data, group=group.handle), want, f"{what}: rows")
                same(multicomm.allgather(data, name="rows", group=group.handle), want, f"{what}: rows by name")
            handles = [multicomm.allgather_async(data, group=group.handle) for data in inputs]
            for handle, want in zip(handles, wants, strict=True):
                same(multicomm.synchronize(handle), want, f"{what}: all at once")
            grouped = multicomm.grouped_allgather(inputs, name="grouped", group=group.handle)
            for got, want in zip(grouped, wants, strict=True):
                same(got, want, f"{what}: grouped")
            same(multicomm.allgather(torch.tensor(me.rank), group=group.handle), list(active), f"{what}: scalars")

        for order in rotations(group):
            take_turns(me, group, order, work)


def sparse(dtype: torch.dtype, rank: int, large: int) -> torch.Tensor:
    """Not coalesced; row 4 is everybody's."""
    return torch.sparse_coo_tensor([[rank, 4, rank]], torch.full((3, large), rank + 1).to(dtype), (5, large))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@on_ranks(1, 2, 3, 4)
def test_sparse_tensors(me: Rank, dtype: torch.dtype) -> None:
    for group in me.joined("world", "pair"):

        def work(active: Ranks, what: str, group: Group = group) -> None:
            for large in (1, 3000):
                total = torch.stack([sparse(dtype, rank, large).to_dense() for rank in active]).sum(0).to(dtype)
                data = sparse(dtype, me.rank, large)
                if dtype.is_complex:  # torch's own call reduces a copy of it, not the tensor
                    multicomm.allreduce_(data, op=multicomm.Sum, group=group.handle)
                else:
                    dist.all_reduce(data, group=group.handle)
                same(data.to_dense(), total, f"{what}: sum of sparse {dtype}")
                if dtype == torch.int64:
                    continue  # of their average, see below
                mean = total / len(active)
                for name in (None, "sparse"):
                    got = multicomm.allreduce(sparse(dtype, me.rank, large), name=name, group=group.handle)
                    same(got.to_dense(), mean, f"{what}: average of sparse {dtype}", close=True)
            empty = torch.sparse_coo_tensor(size=(5, 1), dtype=torch.float32)
            same(multicomm.allreduce(empty, group=group.handle).to_dense(), torch.zeros(5, 1), f"{what}: no entries")

        for order in rotations(group):
            take_turns(me, group, order, work)


@on_ranks(2)
def test_average_of_sparse_integers(me: Rank) -> None:
    """Rounded towards zero, as of dense ones."""
    data = torch.sparse_coo_tensor([[me.rank, 2]], torch.tensor([5, -3 - me.rank]), (3,))
    same(multicomm.allreduce(data.to_dense()), [2, 2, -3], "dense")
    same(multicomm.allreduce(data).to_dense(), [2, 2, -3], "sparse")


def shuffled(me: Rank, count: int, salt: int) -> list[int]:
    """An order of each rank's own."""
    generator = torch.Generator().manual_seed(me.seed * 1000 + me.rank * 100 + salt)
    return torch.randperm(count, generator=generator).tolist()


@on_ranks(1, 2, 3, 4)
def test_verbs_by_name_in_any_order(me: Rank) -> None:
    """Every rank issues the named operations in an order of its own, with unnamed ones in between."""
    for group in me.joined("world", "twin_a", "unsorted"):

        def work(active: Ranks, what: str, group: Group = group) -> None:
            mine, count = me.rank + 1.0, len(active)
            total = float(sum(active) + count)
            share = torch.full((group.size, 2), mine)
            on: dict[str, Any] = {"group": group.handle}
            calls: dict[str, tuple[Callable[[str], multicomm.Handle], object]] = {
                "average": (lambda n: multicomm.allreduce_async(torch.tensor([mine]), name=n, **on), [total / count]),
                "large": (
                    lambda n: multicomm.allreduce_async(torch.full((9000,), mine), name=n, op=multicomm.Sum, **on),
                    torch.full((9000,), total),
                ),
                "min": (
                    lambda n: multicomm.allreduce_async(torch.tensor(mine), name=n, op=multicomm.Min, **on),
                    torch.tensor(active[0] + 1.0 if group.kind != "unsorted" else min(active) + 1.0),
                ),
                "factors": (
                    lambda n: multicomm.allreduce_async(
                        torch.tensor([mine]), name=n, prescale_factor=2.0, postscale_factor=3.0, **on
                    ),
                    [6 * total / count],
                ),
                "group": (
                    lambda n: multicomm.grouped_allreduce_async([torch.tensor([mine])], name=n, **on),
                    [total / count],
                ),
                "share": (lambda n: multicomm.reducescatter_async(share, name=n, **on), [[total / count] * 2]),
                "root": (
                    lambda n: multicomm.broadcast_async(torch.tensor([mine]), active[-1], name=n, **on),
                    [active[-1] + 1.0],
                ),
                "rows": (
                    lambda n: multicomm.allgather_async(torch.full((2,), mine), name=n, **on),
                    [rank + 1.0 for rank in active for _ in range(2)],
                ),
            }
            for turn in range(2):  # with names that are new, and known
                handles = {}
                for place in shuffled(me, len(calls), turn):
                    name = list(calls)[place]
                    handles[name] = calls[name][0](name)
                    if place == 3:
                        data = torch.tensor([mine])
                        dist.all_reduce(data, group=group.handle)
                        same(data, [total], f"{what}: unnamed")
                for name, handle in handles.items():
                    got = multicomm.synchronize(handle)
                    got, want = got[0] if isinstance(got, list) else got, calls[name][1]
                    same(got, want, f"{what}: {name}", close=True)
            mean = multicomm.allreduce(torch.tensor([mine]), compression=multicomm.Compression.fp16, **on)
            rounded = torch.tensor([total / count]).half().float()
            same(mean, rounded, f"{what}: in half precision")
            multicomm.barrier(**on)

        for order in rotations(group):
            take_turns(me, group, order, work)


Start = Callable[[str | None], multicomm.Handle]


def one_of_many(group: Group, rank: int, number: int, active: Ranks) -> tuple[Start, torch.Tensor | None]:
    """Some operation, which all ranks choose alike, and what it gives on this rank; None: an error."""
    mine, total = float(rank + number), float(sum(member + number for member in active))
    on: dict[str, Any] = {"group": group.handle}
    rows = torch.full((rank % 3, 2), mine)
    shares = torch.full((group.size, 2), mine)
    gathered = torch.cat([torch.full((member % 3, 2), float(member + number)) for member in active])
    dealt = torch.tensor([float(member + number) for member in group.ranks])
    choices: list[tuple[Start, torch.Tensor | None]] = [
        (
            lambda n: multicomm.allreduce_async(torch.tensor([mine]), op=multicomm.Sum, name=n, **on),
            torch.tensor([total]),
        ),
        (
            lambda n: multicomm.allreduce_async(torch.full((6000,), mine), op=multicomm.Sum, name=n, **on),
            torch.full((6000,), total),
        ),
        (
            lambda n: multicomm.allreduce_async(torch.full((3,), mine), name=n, **on),
            torch.full((3,), total / len(active)),
        ),
        (lambda n: multicomm.allgather_async(rows, name=n, **on), gathered),
        (
            lambda n: multicomm.reducescatter_async(shares, name=n, op=multicomm.Sum, **on),
            torch.full((1, 2), total),
        ),
        (
            lambda n: multicomm.alltoall_async(torch.full((group.size,), mine), name=n, **on),
            dealt if active == group.ranks else None,
        ),
    ]
    return choices[number % len(choices)]


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@on_ranks(1, 2, 3, 4)
def test_everything_at_once(me: Rank, named: bool) -> None:
    """Each rank issues operations and joins, several times over, and waits for nothing in between."""
    for group in me.joined("world", "pair", "twin_b"):
        counts = [{rank: me.random.randrange(15) for rank in range(me.world)} for _ in range(5)]
        under_way, joins = [], []
        for section, count in enumerate(counts):
            mine = count[me.rank]
            for number in shuffled(me, mine, section) if named else range(mine):
                active = tuple(rank for rank in group.ranks if count[rank] > number)
                start, want = one_of_many(group, me.rank, number, active)
                name = None
                if named:  # half of them are new in each section
                    name = f"gradient {number}" if number % 2 else f"gradient {number} of {section}"
                what = f"operation {number} of section {section} on {group.kind}, by {active}"
                under_way.append((start(name), want, what))
            joins.append(multicomm.join_async(group.handle))
        for handle, want, what in under_way:
            wait = lambda h=handle: multicomm.synchronize(h)  # noqa: E731
            if want is None:
                raises(wait, what, dist.DistBackendError, "has joined")
            else:
                got = wait()
                same(got[0] if isinstance(got, tuple) else got, want, what, close=True)
        for section, handle in enumerate(joins):
            last = multicomm.synchronize(handle)
            me.store.set(f"{group.kind} {section} {me.rank}", str(last))
            said = {int(me.store.get(f"{group.kind} {section} {rank}")) for rank in group.ranks}
            assert len(said) == 1 and last in group.ranks, f"the last one of section {section} is said to be {said}"
        check_as_before(me, group, group.kind)


# --- what has no meaning without those that have joined ---


@dataclass(frozen=True)
class Meaningless:
    """A call that an active rank makes while `joined` have joined, and what it must leave alone."""

    issue: Callable[[], object]
    tensors: Sequence[torch.Tensor] = ()


MARK = 5.0


def marked(*shape: int) -> torch.Tensor:
    return torch.full(shape, MARK)


def from_joined_root(group: Group, joined: Ranks) -> Meaningless:
    data = marked(3)
    return Meaningless(lambda: dist.broadcast(data, joined[0], group.handle), [data])


def from_joined_root_by_name(group: Group, joined: Ranks) -> Meaningless:
    data = marked(5000)
    return Meaningless(lambda: multicomm.broadcast_(data, joined[0], name="root", group=group.handle), [data])


def to_joined_root(group: Group, joined: Ranks) -> Meaningless:
    data = marked(3)
    return Meaningless(lambda: dist.reduce(data, joined[0], group=group.handle), [data])


def scatter_by_joined_root(group: Group, joined: Ranks) -> Meaningless:
    data = marked(3)
    return Meaningless(lambda: dist.scatter(data, None, joined[0], group.handle), [data])


def all_gather(group: Group, joined: Ranks) -> Meaningless:
    outputs = [marked(3) for _ in group.ranks]
    return Meaningless(lambda: dist.all_gather(outputs, torch.ones(3), group.handle), outputs)


def all_gather_large(group: Group, joined: Ranks) -> Meaningless:
    output = marked(5000 * group.size)
    return Meaningless(lambda: dist.all_gather_into_tensor(output, torch.ones(5000), group.handle), [output])


def gather(group: Group, joined: Ranks) -> Meaningless:
    root = next(rank for rank in group.ranks if rank not in joined)
    outputs = [marked(3) for _ in group.ranks] if group.ranks[group.own] == root else None
    return Meaningless(lambda: dist.gather(torch.ones(3), outputs, root, group.handle), outputs or ())


def all_to_all(group: Group, joined: Ranks) -> Meaningless:
    output = marked(group.size)
    return Meaningless(lambda: dist.all_to_all_single(output, torch.ones(group.size), group=group.handle), [output])


def alltoall(group: Group, joined: Ranks) -> Meaningless:
    return Meaningless(lambda: multicomm.alltoall(torch.ones(group.size), [1] * group.size, group=group.handle))


def alltoall_by_name(group: Group, joined: Ranks) -> Meaningless:
    return Meaningless(lambda: multicomm.alltoall(torch.ones(group.size), name="exchange", group=group.handle))


def uneven_shares(group: Group, joined: Ranks) -> Meaningless:
    return Meaningless(lambda: multicomm.reducescatter(torch.ones(group.size + 1), group=group.handle))


def uneven_pieces(group: Group, joined: Ranks) -> Meaningless:
    pieces = [torch.ones(place + 1) for place in range(group.size)]
    output = marked(group.own + 1)
    return Meaningless(lambda: dist.reduce_scatter(output, pieces, group=group.handle), [output])


def adasum_by_name(group: Group, joined: Ranks) -> Meaningless:
    data = marked(3)
    return Meaningless(lambda: multicomm.allreduce_(data, name="ada", op=multicomm.Adasum, group=group.handle), [data])


MEANINGLESS = (
    from_joined_root,
    from_joined_root_by_name,
    to_joined_root,
    scatter_by_joined_root,
    all_gather,
    all_gather_large,
    gather,
    all_to_all,
    alltoall,
    alltoall_by_name,
    uneven_shares,
    uneven_pieces,
    adasum_by_name,
)


@pytest.mark.parametrize("what", MEANINGLESS, ids=lambda what: what.__name__)
@on_ranks(2, 3, 4)
def test_what_needs_every_rank_is_an_error(me: Rank, what: Callable[[Group, Ranks], Meaningless]) -> None:
    for group in me.joined("world", "unsorted"):

        def work(active: Ranks, place: str, group: Group = group) -> None:
            joined = tuple(rank for rank in group.ranks if rank not in active)
            for _ in range(2 if joined else 0):
                call = what(group, joined)
                text = raises(call.issue, f"{place}: {what.__name__}", dist.DistBackendError, "can be used further")
                start = f"multicomm: rank {me.rank}: group '{group.handle.group_name}' (ranks {list(group.ranks)})"
                assert text.startswith(start), text
                who = re.search(r"^  ranks? ([-0-9, ]+): has joined", text, re.MULTILINE)
                assert who and numbers(who[1]) == sorted(joined), f"{joined} have joined:\n{text}"
                for tensor in call.tensors:
                    same(tensor, torch.full_like(tensor, MARK), f"{place}: a tensor of {what.__name__}")
                for size in (3, 5000):
                    data = torch.full((size,), me.rank + 1.0)
                    dist.all_reduce(data, group=group.handle)
                    same(data, torch.full((size,), float(sum(active) + len(active))), f"{place}: what comes after it")
            rows = multicomm.allgather(torch.tensor([me.rank]), name="rows", group=group.handle)
            same(rows, list(active), f"{place}: by name")

        for order in rotations(group):
            take_turns(me, group, order, work)


def numbers(text: str) -> list[int]:
    """Of "0, 2-4"."""
    found: list[int] = []
    for part in text.split(", "):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@on_ranks(2)
def test_adasum_after_a_join(me: Rank) -> None:
    """Ranks count their unnamed adaptive sums alike again, however many one of them has missed."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    if me.rank == 1:
        for _ in range(2):
            call = lambda: multicomm.allreduce(torch.ones(3), op=multicomm.Adasum, group=group)  # noqa: E731
            raises(call, "Adasum", dist.DistBackendError, "rank 0: has joined")
    multicomm.join(group)
    same(multicomm.allreduce(torch.ones(3), op=multicomm.Adasum, group=group), [1.0] * 3, "of equal vectors")
    dist.destroy_process_group(group)


# --- beside other groups, threads, messages ---


@on_ranks(2, 3, 4)
def test_several_groups_at_once(me: Rank) -> None:
    """Rank 0 joins all its groups; the others go on with each of theirs, in orders of their own."""
    groups = list(me.joined())
    if me.rank == 0:
        handles = {group.kind: multicomm.join_async(group.handle) for group in groups}
        for rank in range(1, me.world):
            me.await_signal(f"{rank} is done")
        early = [kind for kind, handle in handles.items() if multicomm.poll(handle)]
        assert not early, f"the join is over before the others' on {early}"
        me.signal("0 has looked")
    else:
        under_way = []
        for group in groups[me.rank % len(groups) :] + groups[: me.rank % len(groups)]:
            others = tuple(rank for rank in group.ranks if rank != 0)
            cases = [Case(group, shape=(size,), reduce_op="AVG") for size in (3, 5000)]
            under_way += [all_reduce(case, others) for case in cases]
        for call in under_way:
            call.finish()
        me.signal(f"{me.rank} is done")
        me.await_signal("0 has looked")
        handles = {group.kind: multicomm.join_async(group.handle) for group in reversed(groups)}
    for group in groups:
        last = multicomm.synchronize(handles[group.kind])
        assert last in group.ranks and last != 0, f"{last} is said to be the last of {group.kind}"
        assert multicomm.poll(handles[group.kind]) and multicomm.synchronize(handles[group.kind]) == last
        check_as_before(me, group, group.kind)


@on_ranks(2, 3, 4)
def test_a_joined_rank_uses_another_group(me: Rank) -> None:
    """From a second thread, while the first one waits in join(); and it exchanges messages on the joined group."""
    ended, other, lasts = me.groups["twin_a"], me.groups["twin_b"], []
    if me.rank == 0:
        thread = threading.Thread(target=lambda: lasts.append(multicomm.join(ended.handle)))
        thread.start()
    for number in range(30):
        call = all_reduce(Case(other, shape=(3 if number % 2 else 5000,), salt=number), other.ranks)
        if me.rank != 0:
            all_reduce(Case(ended, shape=(5,), reduce_op="AVG", salt=number), ended.ranks[1:]).finish()
        call.finish()
    for size in (3, 5000):
        if me.rank == 0:
            dist.send(torch.full((size,), 7.0), 1, ended.handle)
            answer = torch.empty(size)
            dist.recv(answer, 1, ended.handle)
            same(answer, torch.full((size,), 8.0), "the answer")
        elif me.rank == 1:
            question = torch.empty(size)
            dist.recv(question, 0, ended.handle)
            same(question, torch.full((size,), 7.0), "the question")
            dist.send(question + 1, 0, ended.handle)
    if me.rank != 0:
        lasts.append(multicomm.join(ended.handle))
    else:
        thread.join(30)
        assert not thread.is_alive(), "join() does not return though all have joined"
    assert lasts[0] in ended.ranks[1:], lasts
    check_as_before(me, ended, "joined in a thread")


@on_ranks(3)
def test_allgather_object(me: Rank) -> None:
    """Joined ranks add no object."""
    group = me.groups["twin_b"]

    def work(active: Ranks, what: str) -> None:
        got = multicomm.allgather_object({"rank": me.rank}, group=group.handle)
        assert got == [{"rank": rank} for rank in active], f"{what}: {got}"

    for order in rotations(group):
        take_turns(me, group, order, work)


@on_ranks(2, 3, 4)
def test_broadcast_objects_and_parameters(me: Rank) -> None:
    group = me.groups["world"]

    def work(active: Ranks, what: str) -> None:
        root = active[-1]
        assert multicomm.broadcast_object([me.rank] * 50, root) == [root] * 50, what
        model = nn.Linear(30, 40)
        with torch.no_grad():
            model.weight.fill_(me.rank)
        multicomm.broadcast_parameters(model.state_dict(), root)
        same(model.weight, torch.full((40, 30), float(root)), what)

    for order in rotations(group):
        take_turns(me, group, order, work)


# --- training ---


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 2)).double()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    return model(data).pow(2).mean()


def trained_alone(ranks: Ranks, batches: dict[int, int]) -> list[list[torch.Tensor]]:
    """The parameters after each step of one process, which goes over the ranks that have a batch left."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states = []
    for step in range(max(batches.values())):
        optimizer.zero_grad()
        torch.stack([loss(model, rank, step) for rank in ranks if batches[rank] > step]).mean().backward()
        optimizer.step()
        states.append([parameter.detach().clone() for parameter in model.parameters()])
    return states


def check_parameters(model: nn.Module, want: list[torch.Tensor], what: str) -> None:
    for number, (got, expected) in enumerate(zip(model.parameters(), want, strict=True)):
        torch.testing.assert_close(got.detach(), expected, msg=lambda text, n=number: f"{what}, parameter {n}: {text}")


def average_hook(group, bucket):  # noqa: ANN001, ANN201 - DDP takes no annotations as strings
    """DDP's own reduction divides by the group's size, joined ranks included."""
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def of_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(
        model, process_group=group.handle, broadcast_buffers=False, bucket_cap_mb=0.002
    )  # several buckets
    wrapped.register_comm_hook(group.handle, average_hook)
    return wrapped, optimizer


def of_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> tuple[nn.Module, torch.optim.Optimizer]:
    names = model.named_parameters()
    return model, multicomm.DistributedOptimizer(optimizer, names, group=group.handle, gradient_predivide_factor=2.0)


@pytest.mark.parametrize("wrap", [of_ddp, of_optimizer], ids=["ddp", "optimizer"])
@on_ranks(1, 2, 3, 4)
def test_training_with_uneven_data(me: Rank, wrap: Callable[..., tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """The ranks have 1, 3, 5, ... batches, one of them none; the first of the group, from which DDP sends its buckets'
    order, has the most. Whoever joined last gives the others its parameters.
    """
    for group in me.joined("world", "unsorted", "twin_a"):
        batches = {rank: 2 * (group.size - place) - 1 for place, rank in enumerate(group.ranks)}
        if group.kind == "twin_a" and group.size > 1:
            batches[group.ranks[-1]] = 0
        want, model = trained_alone(group.ranks, batches), network()
        trained, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), group)
        for step in range(batches[me.rank]):
            optimizer.zero_grad()
            loss(trained, me.rank, step).backward()
            optimizer.step()
            check_parameters(model, want[step], f"{group.kind}, step {step}")
        last = multicomm.join(group.handle)
        assert last == group.ranks[0], f"{last} is said to be the last of {batches}"
        multicomm.broadcast_parameters(model.state_dict(), last, group=group.handle)
        check_parameters(model, want[-1], f"{group.kind}, in the end")


# --- ends that are no good ---


@on_ranks(2)
def test_wrong_arguments(me: Rank) -> None:
    for function in (multicomm.join, multicomm.join_async):
        for arguments, kind, text in (
            ((dist.group.WORLD, 0), ValueError, "both given"),
            (("world",), TypeError, "not str"),
            ((dist.GroupMember.NON_GROUP_MEMBER,), ValueError, f"rank {me.rank} is not a member"),
            ((7,), ValueError, r"multicomm\.init"),
        ):
            raises(lambda f=function, a=arguments: f(*a), f"join{arguments}", kind, text)
    check_sum()


@on_ranks(4)
def test_a_time_out_names_who_has_not_joined(me: Rank) -> None:
    """It counts from the last operation of the others."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    dist.barrier(group)
    if me.rank < 2:
        text = raises(lambda: multicomm.join(group), "a join that nobody follows", dist.DistBackendError)
        # Whichever gives up first tells the other.
        for pattern in ("time-out of .*join", "ranks 2, 3 have not", "rank 3 has submitted", "make a new one"):
            assert re.search(pattern, text), f"the error does not say /{pattern}/:\n{text}"
        me.signal(f"{me.rank} was told")
    else:
        for _ in range(6):
            time.sleep(0.5)  # what is tested is time: twice the time-out in all
            data = torch.tensor([float(me.rank)])
            dist.all_reduce(data, dist.ReduceOp.AVG, group)
            same(data, [2.5], "while others have joined")
        for rank in (0, 1):
            me.await_signal(f"{rank} was told")
    dist.destroy_process_group(group)


@on_ranks(3)
def test_a_group_that_is_destroyed_meanwhile(me: Rank) -> None:
    # By a rank that still had data.
    group = dist.new_group()
    dist.barrier(group)
    if me.rank == 2:
        me.await_signal("0 waits")
        me.await_signal("1 waits")
    else:
        handle = multicomm.join_async(group)
        me.signal(f"{me.rank} waits")
        begin = time.monotonic()
        gone = "rank 2 has destroyed this group"
        raises(lambda: multicomm.synchronize(handle), "a join with one that leaves", dist.DistBackendError, gone)
        raises(lambda: multicomm.join(group), "again", dist.DistBackendError, gone)
        assert time.monotonic() - begin < 5, "late"
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [3, 100_000])
@on_ranks(3)
def test_a_group_that_is_destroyed_by_a_joined_rank(me: Rank, size: int) -> None:
    """What the others have begun by then may still have a result; they are told soon after."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    dist.barrier(group)
    if me.rank == 2:
        handle = multicomm.join_async(group)
        me.signal("2 has joined")
        me.await_signal("0 has worked")
        me.await_signal("1 has worked")
        dist.destroy_process_group(group)
        raises(lambda: multicomm.synchronize(handle), "its join", dist.DistBackendError, "destroyed or aborted")
        me.signal("2 has left")
        return
    me.await_signal("2 has joined")
    all_reduce(Case(Group("new", (0, 1, 2), group, me.rank), reduce_op="AVG"), (0, 1)).finish()
    me.signal(f"{me.rank} has worked")
    me.await_signal("2 has left")
    begin = time.monotonic()
    text = ""
    for _ in range(2):  # the first one may find that rank 2 had agreed to it before it left
        data = torch.full((size,), float(me.rank))
        try:
            dist.all_reduce(data, dist.ReduceOp.AVG, group)
            same(data, torch.full((size,), 0.5), "after a joined rank has left")
        except dist.DistBackendError as error:
            text = str(error)
    assert "rank 2 has destroyed this group" in text, text
    raises(
        lambda: multicomm.join(group), "a join with one that has left", dist.DistBackendError, "rank 2 has destroyed"
    )
    assert time.monotonic() - begin < 5, f"told after {time.monotonic() - begin:.1f} s"
    dist.destroy_process_group(group)


def one_is_killed() -> None:
    dist.init_process_group("multicomm")
    rank, store = dist.get_rank(), side()
    it_joins, they_join, others = dist.new_group(), dist.new_group(), dist.new_group([0, 1])
    for group in (it_joins, they_join):
        check_sum(group)
    if rank == 2:
        multicomm.join_async(it_joins)
        store.wait(["0 waits", "1 waits"])
        happens()
        os.kill(os.getpid(), signal.SIGKILL)
    for size in (3, 100_000):
        mean = torch.full((size,), float(rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG, it_joins)
        same(mean, torch.full((size,), 0.5), "after rank 2 has joined")
    handle = multicomm.join_async(they_join)
    store.set(f"{rank} waits", "1")
    killed = "the process of rank 2 has ended"
    raises(lambda: multicomm.synchronize(handle), "a join that the dead would follow", dist.DistBackendError, killed)
    with contextlib.suppress(dist.DistBackendError):  # rank 2 may have agreed to it while it lived
        mean = torch.full((3,), float(rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG, it_joins)
        same(mean, [0.5] * 3, "agreed to by the dead")
    sum_with_dead = lambda: dist.all_reduce(torch.ones(100_000), group=it_joins)  # noqa: E731
    raises(sum_with_dead, "with a dead rank that has joined", dist.DistBackendError, killed)
    raises(lambda: multicomm.join(it_joins), "a join with the dead", dist.DistBackendError, killed)
    store.set(f"{rank} was told", "1")
    store.wait(["0 was told", "1 was told"])
    check_sum(others)
    assert multicomm.join(others) in (0, 1)
    say(f"rank {rank} was told")


def test_whoever_waits_in_join_is_told_of_a_death(tmp_path: Path) -> None:
    ranks = launch_ranks(one_is_killed, 3, tmp_path)
    ranks.check({0: 0, 1: 0, 2: -signal.SIGKILL}, dict.fromkeys(range(3), 5.0))
    ranks.job.says(" was told", 2)
