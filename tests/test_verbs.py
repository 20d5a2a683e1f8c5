"""Pins the results of the package's own verbs against plain computation: every verb, dtype, dimension and way of
calling, on every kind of group, on 1 to 4 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, same
from harness.case import LAYOUTS, Case, buffer_of, reduced, values
from harness.planes import DEVICE

pytestmark = needs_multicomm("has the verbs")

FLOAT_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.bool, torch.complex64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5,), (4, 3), (2, 3, 4), (3, 0), (2, 0, 3), (300, 7)]
OPS = {"SUM": multicomm.Sum, "AVG": multicomm.Average, "MIN": multicomm.Min, "MAX": multicomm.Max}
OPS |= {"PRODUCT": multicomm.Product}
WAYS = ("sync", "async", "in_place", "async_in_place", "grouped", "grouped_in_place", "grouped_async")
KINDS = ("world", "single", "pair", "unsorted", "twin")


@dataclass
class Expected:
    """A call under way, and what is to come of it."""

    what: str
    result: Callable[[], Any]
    want: list[torch.Tensor]
    inputs: list[tuple[torch.Tensor, torch.Tensor]]  # with what they must still be, None where they take the result
    close: bool = False

    def finish(self) -> None:
        got = self.result()
        got = list(got) if isinstance(got, (list, tuple)) else [got]
        assert len(got) == len(self.want), f"{self.what}: {len(got)} results"
        for index, (one, want) in enumerate(zip(got, self.want, strict=True)):
            same(one, want, f"{self.what}, result {index}", close=self.close)
        for given, before in self.inputs:
            same(given, before, f"{self.what}, the input", close=self.close)


def global_rank(case: Case) -> int:
    return case.group.ranks[case.group.own]


def tensor_of(case: Case, content: torch.Tensor) -> torch.Tensor:
    return buffer_of(content, case.layout).tensor if content.dim() else content.clone().to(DEVICE)


def call(
    verb: str, way: str, case: Case, inputs: list[torch.Tensor], want: list[torch.Tensor], *args: Any, **named: Any
) -> Expected:
    """Issues the verb in one of the ways; grouped, with all inputs at once, else with the first."""
    function = verb
    if way.startswith("grouped"):
        function = f"grouped_{verb}"
    if "async" in way:
        function += "_async"
    in_place = way.endswith("in_place")
    if in_place:
        function += "_"
    if not way.startswith("grouped"):
        inputs, want = inputs[:1], want[:1]
    given = [tensor_of(case, one) for one in inputs]
    argument = given if way.startswith("grouped") else given[0]
    outcome = getattr(multicomm, function)(argument, *args, group=case.group.handle, **named)
    left = list(zip(given, want if in_place else inputs, strict=True))
    result = (lambda: multicomm.synchronize(outcome)) if "async" in way else (lambda: outcome)
    return Expected(f"{function} {case}", result, want, left, close=case.reduce_op == "AVG")


def each(case: Case) -> list[Case]:
    """Three calls of different data, for one grouped call."""
    return [replace(case, salt=case.salt + number) for number in range(3)]


def allreduce(way: str, case: Case) -> Expected:
    inputs = [values(one, global_rank(case)) for one in each(case)]
    want = [reduced(one, [values(one, rank) for rank in case.group.ranks]) for one in each(case)]
    return call("allreduce", way, case, inputs, want, op=OPS[case.reduce_op])


def broadcast(way: str, case: Case) -> Expected:
    return call("broadcast", way, case, [values(case, global_rank(case))], [values(case, case.root)], case.root)


def allgather(way: str, case: Case) -> Expected:
    """Rank r brings r rows more than rank 0; of scalars, one row."""

    def piece(one: Case, rank: int) -> torch.Tensor:
        if not case.shape:
            return values(one, rank)
        return values(replace(one, shape=(case.shape[0] + rank, *case.shape[1:])), rank)

    inputs = [piece(one, global_rank(case)) for one in each(case)]
    want = [torch.cat([torch.atleast_1d(piece(one, rank)) for rank in case.group.ranks]) for one in each(case)]
    return call("allgather", way, case, inputs, want)


def reducescatter(way: str, case: Case) -> Expected:
    """Also with rows that do not come out even."""
    inputs = [values(one, global_rank(case)) for one in each(case)]
    sums = [reduced(one, [values(one, rank) for rank in case.group.ranks]) for one in each(case)]
    want = [whole.tensor_split(case.group.size)[case.group.own] for whole in sums]
    return call("reducescatter", way, case, inputs, want, op=OPS[case.reduce_op])


def rows_between(case: Case, sender: int, receiver: int) -> int:
    return (2 * sender + 3 * receiver + case.salt) % 4


def alltoall(way: str, case: Case) -> Expected:
    members, own, ranks = range(case.group.size), case.group.own, case.group.ranks
    sent = [rows_between(case, own, to) for to in members]
    received = [rows_between(case, by, own) for by in members]

    def part(sender: int, receiver: int) -> torch.Tensor:
        return values(case, ranks[sender], receiver, rows_between(case, sender, receiver))

    data = torch.cat([part(own, to) for to in members])
    want = torch.cat([part(by, own) for by in members])
    expected = call("alltoall", way, case, [data], [want], splits=torch.tensor(sent))
    expected.want.append(torch.tensor(received))
    return expected


VERBS: dict[str, tuple[Callable[[str, Case], Expected], tuple[str, ...]]] = {
    "allreduce": (allreduce, WAYS),
    "broadcast": (broadcast, WAYS[:4]),
    "allgather": (allgather, ("sync", "async", "grouped", "grouped_async")),
    "reducescatter": (reducescatter, ("sync", "async", "grouped", "grouped_async")),
    "alltoall": (alltoall, ("sync", "async")),
}
REDUCING = ("allreduce", "reducescatter")


def shapes_of(verb: str) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if shape or verb not in ("reducescatter", "alltoall")]


def check(verb: str, cases: list[Case]) -> None:
    """Every way one after another, then all asynchronous ones of all cases at once."""
    start, ways = VERBS[verb]
    for case in cases:
        for way in ways:
            start(way, case).finish()
    for expected in [start(way, case) for case in cases for way in ways if "async" in way]:
        expected.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("verb", VERBS)
@on_ranks(1, 2, 3, 4)
def test_every_dtype(me: Rank, verb: str, dtype: torch.dtype) -> None:
    for group in me.joined(*KINDS):
        shapes = shapes_of(verb)[:6] if group.kind == "world" else [(5,)]
        check(verb, [Case(group, dtype, shape, salt=salt) for salt, shape in enumerate(shapes)])


@pytest.mark.parametrize("verb", VERBS)
@on_ranks(2, 3)
def test_every_shape_and_layout(me: Rank, verb: str) -> None:
    for group in me.joined("world", "unsorted"):
        for layout in LAYOUTS if group.kind == "world" else LAYOUTS[:1]:
            shapes = [shape for shape in shapes_of(verb) if layout == "contiguous" or shape]
            check(verb, [Case(group, torch.float32, shape, layout, salt=salt) for salt, shape in enumerate(shapes)])


@pytest.mark.parametrize("verb", REDUCING)
@on_ranks(2, 3)
def test_every_reduce_op(me: Rank, verb: str) -> None:
    for group in me.joined("world", "unsorted"):
        for reduce_op in OPS:
            dtypes = FLOAT_DTYPES if reduce_op == "AVG" else [*FLOAT_DTYPES, *WHOLE_DTYPES]
            check(verb, [Case(group, dtype, (5,), reduce_op=reduce_op) for dtype in dtypes])


@on_ranks(2, 4)
def test_average_is_the_default_and_average_its_older_form(me: Rank) -> None:
    data, mean = torch.tensor([float(2 * me.rank)]), float(me.world - 1)
    same(multicomm.allreduce(data), [mean], "allreduce")
    same(multicomm.allreduce(data, average=True), [mean], "average=True")
    same(multicomm.allreduce(data, average=False), [mean * me.world], "average=False")
    same(multicomm.allreduce(torch.tensor([2 * me.rank + 1])), [me.world], "of integers")
    same(multicomm.reducescatter(data.expand(me.world)), [mean], "reducescatter")


@on_ranks(2, 3)
def test_factors(me: Rank) -> None:
    total = 3 * sum((rank + 1) * (2 + 2 * rank) for rank in range(me.world))
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.complex64):
        for layout in ("contiguous", "transposed"):
            data = torch.full((2, 3), me.rank + 1).to(dtype)
            data = data if layout == "contiguous" else data.t()
            factors = {"prescale_factor": 2.0 + 2 * me.rank, "postscale_factor": 3.0, "op": multicomm.Sum}
            want = torch.full(data.shape, total).to(dtype)
            before = data.clone()
            same(multicomm.allreduce(data, **factors), want, f"allreduce of {dtype}")
            same(data, before, "the input")
            same(
                multicomm.reducescatter(data, **factors),
                want.tensor_split(me.world)[me.rank],
                f"reducescatter of {dtype}",
            )
            assert multicomm.allreduce_(data, **factors) is data
            same(data, want, f"allreduce_ of {dtype}")
    large = torch.full((100_000,), 4.0 + 2 * me.rank)
    mean = torch.full((100_000,), 2.0 * (me.world + 3))
    same(multicomm.allreduce(large, prescale_factor=0.5, postscale_factor=4.0), mean, "large")


@on_ranks(3)
def test_results_in_place_are_the_tensors_themselves(me: Rank) -> None:
    one, two = torch.ones(2), torch.ones(3)
    assert multicomm.allreduce_(one) is one
    assert multicomm.broadcast_(one, 1) is one
    results = multicomm.grouped_allreduce_([one, two], op=multicomm.Sum)
    assert results[0] is one and results[1] is two
    handle = multicomm.allreduce_async_(one)
    assert multicomm.synchronize(handle) is one and multicomm.synchronize(handle) is one


@on_ranks(2, 3)
def test_poll(me: Rank) -> None:
    if me.rank == 0:
        handle = multicomm.allreduce_async(torch.ones(4), op=multicomm.Sum)
        assert not multicomm.poll(handle), "done without its peers"
        me.signal("polled")
        while not multicomm.poll(handle):
            pass
    else:
        me.await_signal("polled")
        handle = multicomm.allreduce_async(torch.ones(4), op=multicomm.Sum)
    same(multicomm.synchronize(handle), [float(me.world)] * 4, "after poll()")


@on_ranks(2, 3, 4)
def test_barrier(me: Rank) -> None:
    for group in me.joined("world", "pair", "twin"):
        key = f"{group.kind}/came"
        me.store.add(key, 1)
        multicomm.barrier(group=group.handle)
        assert me.store.add(key, 0) == group.size, f"barrier of {group.kind}"
        multicomm.barrier(group=group.handle)


@on_ranks(2, 3, 4)
def test_splits_in_every_form(me: Rank) -> None:
    data = torch.arange(2 * me.world)
    for splits in ([2] * me.world, torch.full((me.world,), 2, dtype=torch.int16)):
        output, received = multicomm.alltoall(data, splits)
        want = torch.int16 if isinstance(splits, torch.Tensor) else torch.int32
        same(received, torch.full((me.world,), 2, dtype=want), "received splits")
        same(output, torch.tensor([2 * me.rank, 2 * me.rank + 1]).repeat(me.world), "output")
    same(multicomm.alltoall(data), output, "without splits")
    # Parts that are equal on each rank, but not among the ranks.
    got = multicomm.alltoall(torch.full((me.world * me.rank,), me.rank))
    same(got, torch.cat([torch.full((rank,), rank) for rank in range(me.world)]), "as many rows as the sender has")


@on_ranks(3, 4)
def test_groups_do_not_mix(me: Rank) -> None:
    """The groups' calls are under way at once, started in another order on each rank."""
    groups = [group for group in me.joined() if group.kind not in ("single",)]
    order = groups[me.rank % len(groups) :] + groups[: me.rank % len(groups)]
    handles = {}
    for number in range(5):
        for group in order:
            factor = 1 + list(me.groups).index(group.kind)
            data = torch.full((number + 1,), float(factor * 2**me.rank))
            rows = torch.full((me.rank + 1,), factor)
            name = f"{group.kind}/{number}"
            handles[name, "sum"] = multicomm.allreduce_async(data, op=multicomm.Sum, group=group.handle)
            handles[name, "rows"] = multicomm.allgather_async(rows, group=group.handle)
            splits = [1] * group.size
            handles[name, "dealt"] = multicomm.alltoall_async(torch.arange(group.size), splits, group=group.handle)
    for group in groups:
        factor = 1 + list(me.groups).index(group.kind)
        for number in range(5):
            name = f"{group.kind}/{number}"
            total = float(factor * sum(2**rank for rank in group.ranks))
            same(multicomm.synchronize(handles[name, "sum"]), [total] * (number + 1), name)
            rows = sum(rank + 1 for rank in group.ranks)
            same(multicomm.synchronize(handles[name, "rows"]), torch.full((rows,), factor), name)
            output, received = multicomm.synchronize(handles[name, "dealt"])
            same(output, [group.own] * group.size, name)
            same(received, [1] * group.size, name)


@on_ranks(2)
def test_sparse_tensors(me: Rank) -> None:
    data = torch.sparse_coo_tensor([[me.rank, 2]], [1.0, 4.0], (4,))
    same(multicomm.allreduce(data).to_dense(), [0.5, 0.5, 4.0, 0.0], "allreduce")
    same(data.to_dense()[2:], [4.0, 0.0], "the input")
    multicomm.allreduce_(data, op=multicomm.Sum)
    same(data.to_dense(), [1.0, 1.0, 8.0, 0.0], "allreduce_")


@on_ranks(2, 3)
def test_compression(me: Rank) -> None:
    exact = torch.tensor([1.0 + 2**-9, 3.0])
    for compression, first in ((multicomm.Compression.fp16, 1.0 + 2**-9), (multicomm.Compression.bf16, 1.0)):
        got = multicomm.allreduce(exact, compression=compression)
        same(got, [first, 3.0], f"allreduce by {compression.__name__}")
        got = multicomm.grouped_allreduce([exact, torch.tensor([7])], compression=compression)
        same(got[0], [first, 3.0], f"grouped by {compression.__name__}")
        same(got[1], torch.tensor([7]), "integers, which are left alone")
        got = multicomm.reducescatter(exact.repeat(me.world), compression=compression)
        same(got, [first, 3.0], f"reducescatter by {compression.__name__}")
    same(multicomm.allreduce(exact), exact, "without compression")


@on_ranks(2, 3)
def test_a_grouped_call_is_one_unit(me: Rank) -> None:
    """The engine gets its members together, so that one round covers them."""

    def rounds() -> int:
        own = dist.get_process_group_ranks(me.groups["twin_a"].handle)
        (name,) = [n for n in multicomm.stats() if n == me.groups["twin_a"].handle.group_name]
        assert multicomm.stats()[name]["ranks"] == own
        return multicomm.stats()[name]["rounds"]

    group = me.groups["twin_a"].handle
    multicomm.barrier(group=group)
    before = rounds()
    for _ in range(20):
        results = multicomm.grouped_allreduce([torch.tensor(float(n)) for n in range(20)], group=group)
        same(torch.stack(results), torch.arange(20.0), "results")
    assert rounds() - before == 20
