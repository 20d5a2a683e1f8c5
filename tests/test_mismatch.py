"""Pins what happens when ranks do not ask for the same: one error on every member, which says rank by rank what was
asked for; no tensor touched; this group, the operations around and all other groups go on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, needs_multicomm, on_ranks, raises, same

pytestmark = needs_multicomm("ranks that disagree hang or exchange garbage")

MARK = 5.0


def marked(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, MARK).to(dtype)


@dataclass
class Request:
    """What one rank asks for: an asynchronous call, and the tensors that a failure must leave alone."""

    issue: Callable[[], dist.Work]
    tensors: list[torch.Tensor]


def all_reduce(group: Group, *shape: int, dtype: torch.dtype = torch.float32, op: str = "SUM") -> Request:
    data = marked(*shape, dtype=dtype)
    reduce_op = getattr(dist.ReduceOp, op)
    return Request(lambda: dist.all_reduce(data, reduce_op, group.handle, async_op=True), [data])


def broadcast(group: Group, size: int, root: int, dtype: torch.dtype = torch.float32) -> Request:
    data = marked(size, dtype=dtype)
    return Request(lambda: dist.broadcast(data, group=group.handle, group_src=root, async_op=True), [data])


def reduce(group: Group, size: int, root: int, op: str = "SUM") -> Request:
    data, reduce_op = marked(size), getattr(dist.ReduceOp, op)
    return Request(lambda: dist.reduce(data, op=reduce_op, group=group.handle, group_dst=root, async_op=True), [data])


def all_gather(group: Group, size: int, dtype: torch.dtype = torch.float32) -> Request:
    data, output = marked(size, dtype=dtype), marked(size * group.size, dtype=dtype)
    return Request(lambda: dist.all_gather_into_tensor(output, data, group.handle, async_op=True), [data, output])


def reduce_scatter(group: Group, size: int, op: str = "SUM") -> Request:
    data, output, reduce_op = marked(size * group.size), marked(size), getattr(dist.ReduceOp, op)
    return Request(
        lambda: dist.reduce_scatter_tensor(output, data, reduce_op, group.handle, async_op=True), [data, output]
    )


def all_to_all(group: Group, rows: int, *, one_more: bool = False) -> Request:
    """`one_more`: sends the first member a row more than it expects, without a word to it."""
    sent = [rows + 1 if one_more and peer == 0 else rows for peer in range(group.size)]
    received = [rows] * group.size
    data, output = marked(sum(sent), 2), marked(sum(received), 2)
    return Request(
        lambda: dist.all_to_all_single(output, data, received, sent, group.handle, async_op=True), [data, output]
    )


def gather(group: Group, size: int, root: int) -> Request:
    data = marked(size)
    pieces = [marked(size) for _ in group.ranks] if group.own == root else []
    return Request(
        lambda: dist.gather(data, pieces or None, group=group.handle, group_dst=root, async_op=True), [data, *pieces]
    )


def scatter(group: Group, size: int, root: int) -> Request:
    output = marked(size)
    pieces = [marked(size) for _ in group.ranks] if group.own == root else []
    return Request(
        lambda: dist.scatter(output, pieces or None, group=group.handle, group_src=root, async_op=True),
        [output, *pieces],
    )


def barrier(group: Group) -> Request:
    return Request(lambda: dist.barrier(group.handle, async_op=True), [])


# What the last member asks for, what the others ask for, and words of each that the error has to show.
Pair = tuple[Callable[[Group], Request], Callable[[Group], Request], str, str]
PAIRS: dict[str, Pair] = {
    "operation": (lambda g: all_reduce(g, 8), lambda g: all_gather(g, 8), "all_reduce", "all_gather"),
    "barrier": (barrier, lambda g: all_reduce(g, 1), "barrier", "all_reduce"),
    "size": (lambda g: all_reduce(g, 8), lambda g: all_reduce(g, 6), r"\[8\]", r"\[6\]"),
    "shape": (lambda g: all_reduce(g, 2, 6), lambda g: all_reduce(g, 3, 4), r"\[2, 6\]", r"\[3, 4\]"),
    "large size": (lambda g: all_reduce(g, 80_000), lambda g: all_reduce(g, 80_001), "80000", "80001"),
    "dtype": (
        lambda g: all_reduce(g, 8),
        lambda g: all_reduce(g, 8, dtype=torch.int32),
        "(?i)float",
        "(?i)int",
    ),
    "dtype of equal size": (
        lambda g: broadcast(g, 8, 0, torch.float16),
        lambda g: broadcast(g, 8, 0, torch.bfloat16),
        "(?i)half|float16",
        "(?i)bfloat16",
    ),
    "reduce op": (lambda g: all_reduce(g, 8), lambda g: all_reduce(g, 8, op="MAX"), "SUM", "MAX"),
    "reduce op of reduce": (lambda g: reduce(g, 8, 0), lambda g: reduce(g, 8, 0, "MIN"), "SUM", "MIN"),
    "reduce op of reduce_scatter": (
        lambda g: reduce_scatter(g, 8),
        lambda g: reduce_scatter(g, 8, "AVG"),
        "SUM",
        "AVG",
    ),
    "source": (lambda g: broadcast(g, 8, 0), lambda g: broadcast(g, 8, 1), "from rank", "from rank"),
    "destination": (lambda g: reduce(g, 8, 0), lambda g: reduce(g, 8, 1), "to rank", "to rank"),
    "destination of gather": (lambda g: gather(g, 8, 0), lambda g: gather(g, 8, 1), "to rank", "to rank"),
    "size of gather": (lambda g: gather(g, 8, 0), lambda g: gather(g, 9, 0), "8", "9"),
    "source of scatter": (lambda g: scatter(g, 8, 0), lambda g: scatter(g, 8, 1), "from rank", "from rank"),
    "size of scatter": (lambda g: scatter(g, 8, 0), lambda g: scatter(g, 9, 0), "8", "9"),
    "size of all_gather": (lambda g: all_gather(g, 8), lambda g: all_gather(g, 9), "8", "9"),
    "size of reduce_scatter": (lambda g: reduce_scatter(g, 8), lambda g: reduce_scatter(g, 9), "8", "9"),
    "rows of all_to_all": (lambda g: all_to_all(g, 3, one_more=True), lambda g: all_to_all(g, 3), "8", "6"),
    "rows of a large all_to_all": (
        lambda g: all_to_all(g, 3000, one_more=True),
        lambda g: all_to_all(g, 3000),
        "6002",
        "6000",
    ),
}


def request_of(case: str, group: Group) -> Request:
    odd, common, _, _ = PAIRS[case]
    return (odd if group.own == group.size - 1 else common)(group)


def check_refused(case: str, group: Group, work: dist.Work, tensors: list[torch.Tensor]) -> str:
    """The work fails with an error that names the group's ranks and both requests; no tensor has changed."""
    text = raises(work.wait, f"{case} on {group.kind}", dist.DistBackendError, *PAIRS[case][2:])
    members = ", ".join(str(rank) for rank in group.ranks)
    assert f"[{members}]" in text, f"the error does not name the members [{members}]:\n{text}"
    lines = [line for line in text.splitlines() if re.match(r"\s*ranks? \d", line)]
    assert len(lines) == 2, f"one line for each request is missing:\n{text}"
    odd = [line for line in lines if re.match(rf"\s*rank {group.ranks[-1]}:", line)]
    assert odd, f"no line for rank {group.ranks[-1]}, which asked for something else:\n{text}"
    for tensor in tensors:
        same(tensor, torch.full_like(tensor, MARK), f"a tensor after {case}")
    return text


def check_sum(group: Group, me: Rank, size: int = 5) -> None:
    data = torch.full((size,), float(me.rank))
    dist.all_reduce(data, group=group.handle)
    same(data, torch.full((size,), float(sum(group.ranks))), f"all_reduce on {group.kind} afterwards")


@pytest.mark.parametrize("case", PAIRS)
@on_ranks(2, 3, 4)
def test_every_member_is_told(me: Rank, case: str) -> None:
    for group in me.joined("world", "unsorted"):
        request = request_of(case, group)
        work = request.issue()
        check_refused(case, group, work, request.tensors)
        assert work.is_completed()
        assert not work.is_success()
        raises(work.wait, "a second wait", dist.DistBackendError)
        check_sum(group, me)
        check_sum(group, me, 50_000)


@on_ranks(2, 3)
def test_each_rank_asks_for_something_else(me: Rank) -> None:
    group = me.groups["world"]
    size = 10 + me.rank
    texts = [raises(lambda: dist.all_reduce(marked(size)), "sizes", dist.DistBackendError)]
    for rank in group.ranks:
        line = rf"rank {rank}: .*\[{10 + rank}\]"
        assert re.search(line, texts[0]), f"no line like /{line}/:\n{texts[0]}"
    check_sum(group, me)


@pytest.mark.parametrize("case", ["operation", "large size", "reduce op", "rows of all_to_all"])
@pytest.mark.parametrize("size", [3, 20_000])
@on_ranks(2, 3)
def test_only_the_operation_that_disagrees_fails(me: Rank, case: str, size: int) -> None:
    group = me.groups["world"]
    sums = [torch.full((size,), float(me.rank + k)) for k in range(30)]
    works = []
    refused: list[tuple[dist.Work, Request]] = []
    for k, data in enumerate(sums):
        works.append(dist.all_reduce(data, async_op=True))
        if k in (9, 10, 20):
            request = request_of(case, group)
            refused.append((request.issue(), request))
    for work, request in reversed(refused):
        check_refused(case, group, work, request.tensors)
    for k, (work, data) in enumerate(zip(works, sums, strict=True)):
        work.wait()
        same(data, torch.full((size,), float(sum(group.ranks) + k * group.size)), f"sum {k}")


@on_ranks(3, 4)
def test_other_groups_are_not_affected(me: Rank) -> None:
    disagreeing = me.groups["twin_a"]
    request = request_of("size", disagreeing)
    work = request.issue()
    sums = []
    for group in me.joined("world", "twin_b", "ring", "pair"):
        data = torch.full((7,), float(me.rank))
        sums.append((group, data, dist.all_reduce(data, group=group.handle, async_op=True)))
    for group, data, other in sums:
        other.wait()
        same(data, torch.full((7,), float(sum(group.ranks))), f"sum on {group.kind}")
    check_refused("size", disagreeing, work, request.tensors)


@on_ranks(2)
def test_the_future_fails_too(me: Rank) -> None:
    work = request_of("size", me.groups["world"]).issue()
    raises(lambda: work.get_future().wait(), "future", RuntimeError, "rank")
    chained = work.get_future().then(lambda future: future.value())
    raises(chained.wait, "chained future", RuntimeError)
    check_sum(me.groups["world"], me)


@on_ranks(2)
def test_sequence_numbers_tell_the_operations_apart(me: Rank) -> None:
    group = me.groups["twin_b"]
    numbers = []
    for _ in range(2):
        text = raises(
            lambda: request_of("size", group).issue().wait(), "sizes", dist.DistBackendError, r"collective \d+"
        )
        numbers.append(int(re.search(r"collective (\d+)", text).group(1)))  # type: ignore[union-attr]
        check_sum(group, me)
    assert numbers[1] == numbers[0] + 2, f"collectives {numbers}, with one in between"


def wrong_calls(me: Rank) -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    """Call, exception, and words of its text, by what is wrong with it."""
    world, pair = me.world, me.groups["pair"].handle
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    sparse = torch.eye(3).to_sparse()
    return {
        "a list that is too short": (lambda: dist.all_gather([marked(2)], marked(2)), ValueError, "has 1 tensors"),
        "lists of the wrong length": (
            lambda: dist.reduce_scatter(marked(2), [marked(2)] * 2),
            ValueError,
            "has 2 tensors, the group has 3 ranks",
        ),
        "a place of another size": (
            lambda: dist.all_gather([marked(3)] * world, marked(2)),
            ValueError,
            "has 2 elements, its place in the output list 3",
        ),
        "an output of the wrong size": (
            lambda: dist.all_gather_into_tensor(marked(5), marked(2)),
            ValueError,
            "5 elements, 3 inputs of 2",
        ),
        "an input of the wrong size": (
            lambda: dist.reduce_scatter_tensor(marked(2), marked(5)),
            ValueError,
            "the input has 5 elements",
        ),
        "an output of another dtype": (
            lambda: dist.all_gather_into_tensor(marked(2 * world, dtype=torch.float64), marked(2)),
            TypeError,
            "input is Float, output is Double",
        ),
        "a list of two dtypes": (
            lambda: dist.all_to_all([marked(2)] * 3, [marked(2), marked(2), marked(2, dtype=torch.int32)]),
            ValueError,
            "different dtypes",
        ),
        "rows that do not divide": (
            lambda: dist.all_to_all_single(marked(4), marked(4)),
            ValueError,
            "is 4, not divisible by the 3 ranks",
        ),
        "input splits": (
            lambda: dist.all_to_all_single(marked(3), marked(3), [1, 1, 1], [1, 1, 2]),
            ValueError,
            "input splits add up to 4, dimension 0 is 3",
        ),
        "output splits": (
            lambda: dist.all_to_all_single(marked(3), marked(3), [1, 0, 1], [1, 1, 1]),
            ValueError,
            "output splits add up to 2",
        ),
        "the number of splits": (
            lambda: dist.all_to_all_single(marked(3), marked(3), [3], [3]),
            ValueError,
            "1 (input|output) splits for 3 ranks",
        ),
        "a negative split": (
            lambda: dist.all_to_all_single(marked(3), marked(3), [4, -1, 0], [4, -1, 0]),
            ValueError,
            "negative (input|output) split -1",
        ),
        "MAX of complex numbers": (
            lambda: dist.all_reduce(marked(2, dtype=torch.complex64), dist.ReduceOp.MAX),
            ValueError,
            "complex",
        ),
        "AVG of bool": (
            lambda: dist.all_reduce(marked(2, dtype=torch.bool), dist.ReduceOp.AVG),
            ValueError,
            "AVG has no meaning for Bool",
        ),
        "bits of floats": (
            lambda: dist.reduce_scatter_tensor(marked(1), marked(3), dist.ReduceOp.BXOR),
            ValueError,
            "BXOR has no meaning for Float",
        ),
        "a device without data": (
            lambda: backend.allreduce([torch.ones(2, device="meta")]),
            NotImplementedError,
            "tensors on meta",
        ),
        "a sparse tensor to be moved": (
            lambda: backend.broadcast([sparse]),
            NotImplementedError,
            "convert it with to_dense",
        ),
        "two tensors": (lambda: backend.allreduce([marked(2), marked(2)]), ValueError, "one tensor per call, not 2"),
        "no tensor": (lambda: backend.broadcast([]), ValueError, "one tensor per call, not 0"),
        "a source that is no rank": (lambda: dist.broadcast(marked(2), group_src=3), ValueError, "rank 3 is not in"),
        "a destination that is no rank": (lambda: dist.reduce(marked(2), group_dst=-1), ValueError, "rank -1 is not"),
        "a peer that is no rank": (lambda: backend.send([marked(2)], 7, 0), ValueError, "rank 7 is not in"),
        "a negative tag": (lambda: dist.send(marked(2), 0, tag=-3), ValueError, "tag -3 is negative"),
        "a tag for recv": (lambda: dist.recv(marked(2), 0, tag=-3), ValueError, "tag -3 is negative"),
        "a result on top of itself": (
            lambda: dist.all_reduce(torch.ones(1).expand(3)),
            ValueError,
            "share memory",
        ),
        "gather lists everywhere": (
            lambda: dist.group.WORLD.gather([[marked(2)] * 3], [marked(2)], _root(dist.GatherOptions(), 0)),
            ValueError,
            "only the destination rank has an output list",
        ),
        "a source outside the group": (lambda: dist.broadcast(marked(2), 0, pair), ValueError, "is not part of"),
        "a group rank outside the group": (
            lambda: dist.broadcast(marked(2), group=pair, group_src=2),
            ValueError,
            "rank 2 is not in the group of 2 ranks",
        ),
        "a scatter list that does not fit": (
            lambda: dist.scatter(marked(2), [marked(2), marked(3), marked(2)], 1),
            ValueError,
            "an input has 3 elements, the output 2",
        ),
    }


def _root(options: dist.GatherOptions, root: int) -> dist.GatherOptions:
    options.rootRank = root
    return options


@on_ranks(3)
def test_wrong_arguments_raise_at_the_call(me: Rank) -> None:
    """On one rank alone: what a rank can see by itself never reaches the others. A right call follows each."""
    calls, faults = wrong_calls(me), []
    for what, (call, kind, words) in calls.items():
        if me.rank == 1:
            try:
                text = raises(call, what, kind, words)
                if "multicomm" in text:
                    assert re.search(r"multicomm: rank 1: group '.*' \(ranks \[(0, )?1, 2\]\): \w+", text), text
            except Exception as fault:
                faults.append(f"{what}: {fault!r}")
        check_sum(me.groups["world"], me)
        if me.groups["pair"].own >= 0:
            check_sum(me.groups["pair"], me)
    assert not faults, "\n".join(faults)
