"""Every collective as a call that knows its right result.

`start(name, case)` issues the call on this rank; `finish()` waits for it and compares. The same calls serve
the matrix of operations, the tests of asynchronous bursts and the random programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from harness.case import FACTOR, Buffer, Call, Case, Expected, blank, buffer_of, reduced, values
from harness.planes import DEVICE
from harness.settings import BACKEND


def _start(case: Case, name: str, issue: Callable[[], dist.Work | None], expected: list[Expected]) -> Call:
    work = issue()
    assert (work is not None) == case.asynchronous, f"{name} {case} returned {work}"
    return Call(f"{name} {case}", [work] if work is not None else [], expected, close=case.reduce_op == "AVG")


def _reduce_op(case: Case) -> dist.ReduceOp:
    if case.reduce_op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, case.reduce_op)


def _everywhere(case: Case, part: int = 0) -> list[torch.Tensor]:
    return [values(case, rank, part) for rank in case.group.ranks]


def _own(case: Case) -> int:
    return case.group.ranks[case.group.own]


def _tensors(buffers: list[Buffer]) -> list[torch.Tensor]:
    return [buffer.tensor for buffer in buffers]


def all_reduce(case: Case) -> Call:
    data = buffer_of(values(case, _own(case)), case.layout)
    return _start(
        case,
        "all_reduce",
        lambda: dist.all_reduce(data.tensor, _reduce_op(case), case.group.handle, case.asynchronous),
        [("result", data, reduced(case, _everywhere(case)))],
    )


def broadcast(case: Case) -> Call:
    data = buffer_of(values(case, _own(case)), case.layout)
    return _start(
        case,
        "broadcast",
        lambda: dist.broadcast(data.tensor, case.root, case.group.handle, case.asynchronous),
        [("result", data, values(case, case.root))],
    )


def reduce(case: Case) -> Call:
    """Checks the destination only; what becomes of the others' tensors has a test of its own."""
    data = buffer_of(values(case, _own(case)), case.layout)
    return _start(
        case,
        "reduce",
        lambda: dist.reduce(data.tensor, case.root, _reduce_op(case), case.group.handle, case.asynchronous),
        [("result", data, reduced(case, _everywhere(case)))] if case.is_root else [],
    )


def all_gather(case: Case) -> Call:
    data = buffer_of(values(case, _own(case)), case.layout)
    outputs = [buffer_of(blank(case), case.layout) for _ in case.group.ranks]
    return _start(
        case,
        "all_gather",
        lambda: dist.all_gather(_tensors(outputs), data.tensor, case.group.handle, case.asynchronous),
        [("input", data, values(case, _own(case)))]
        + [(f"from rank {r}", o, values(case, r)) for r, o in zip(case.group.ranks, outputs, strict=True)],
    )


def all_gather_into_tensor(case: Case) -> Call:
    data = buffer_of(values(case, _own(case)), case.layout)
    output = buffer_of(blank(case, case.shape[0] * case.group.size), case.layout)
    return _start(
        case,
        "all_gather_into_tensor",
        lambda: dist.all_gather_into_tensor(output.tensor, data.tensor, case.group.handle, case.asynchronous),
        [("input", data, values(case, _own(case))), ("output", output, torch.cat(_everywhere(case)))],
    )


def reduce_scatter(case: Case) -> Call:
    inputs = [buffer_of(values(case, _own(case), part), case.layout) for part in range(case.group.size)]
    output = buffer_of(blank(case), case.layout)
    return _start(
        case,
        "reduce_scatter",
        lambda: dist.reduce_scatter(
            output.tensor, _tensors(inputs), _reduce_op(case), case.group.handle, case.asynchronous
        ),
        [("output", output, reduced(case, _everywhere(case, case.group.own)))],
    )


def reduce_scatter_tensor(case: Case) -> Call:
    parts = [values(case, _own(case), part) for part in range(case.group.size)]
    data = buffer_of(torch.cat(parts), case.layout)
    output = buffer_of(blank(case), case.layout)
    return _start(
        case,
        "reduce_scatter_tensor",
        lambda: dist.reduce_scatter_tensor(
            output.tensor, data.tensor, _reduce_op(case), case.group.handle, case.asynchronous
        ),
        [
            ("input", data, torch.cat(parts)),
            ("output", output, reduced(case, _everywhere(case, case.group.own))),
        ],
    )


def _exchanged(case: Case, uneven: bool) -> tuple[list[int], list[int]]:
    """Rows that this rank sends to, and gets from, each member; uneven ones differ per pair, some are 0."""

    def rows(sender: int, receiver: int) -> int:
        more = (2 * sender + 3 * receiver + case.salt) % 5 - 3 if uneven else 0
        return max(0, case.shape[0] + more)

    members, own = range(case.group.size), case.group.own
    return [rows(own, to) for to in members], [rows(by, own) for by in members]


def all_to_all(case: Case, *, uneven: bool = False) -> Call:
    own, members, ranks = case.group.own, range(case.group.size), case.group.ranks
    sent, received = _exchanged(case, uneven)
    inputs = [buffer_of(values(case, ranks[own], to, sent[to]), case.layout) for to in members]
    outputs = [buffer_of(blank(case, received[by]), case.layout) for by in members]
    return _start(
        case,
        f"all_to_all{' uneven' if uneven else ''}",
        lambda: dist.all_to_all(_tensors(outputs), _tensors(inputs), case.group.handle, case.asynchronous),
        [(f"from rank {rank}", outputs[by], values(case, rank, own, received[by])) for by, rank in enumerate(ranks)],
    )


def all_to_all_single(case: Case, *, uneven: bool = False) -> Call:
    own, members, ranks = case.group.own, range(case.group.size), case.group.ranks
    sent, received = _exchanged(case, uneven)
    data = buffer_of(torch.cat([values(case, _own(case), to, sent[to]) for to in members]), case.layout)
    output = buffer_of(blank(case, sum(received)), case.layout)
    splits = (received, sent) if uneven else (None, None)
    return _start(
        case,
        f"all_to_all_single{' uneven' if uneven else ''}",
        lambda: dist.all_to_all_single(output.tensor, data.tensor, *splits, case.group.handle, case.asynchronous),
        [("output", output, torch.cat([values(case, ranks[by], own, received[by]) for by in members]))],
    )


def gather(case: Case) -> Call:
    data = buffer_of(values(case, _own(case)), case.layout)
    outputs = [buffer_of(blank(case), case.layout) for _ in case.group.ranks] if case.is_root else []
    lists = _tensors(outputs) if case.is_root else None
    return _start(
        case,
        "gather",
        lambda: dist.gather(data.tensor, lists, case.root, case.group.handle, case.asynchronous),
        [("input", data, values(case, _own(case)))]
        + [(f"from rank {r}", o, values(case, r)) for r, o in zip(case.group.ranks, outputs, strict=False)],
    )


def scatter(case: Case) -> Call:
    output = buffer_of(blank(case), case.layout)
    inputs = [buffer_of(values(case, case.root, part), case.layout) for part in range(case.group.size)]
    lists = _tensors(inputs) if case.is_root else None
    return _start(
        case,
        "scatter",
        lambda: dist.scatter(output.tensor, lists, case.root, case.group.handle, case.asynchronous),
        [("output", output, values(case, case.root, case.group.own))],
    )


def ring(case: Case) -> Call:
    """A message to the next rank of the group, and one from the one before."""
    if case.group.size == 1:
        return Call("ring", [], [])
    data = buffer_of(values(case, _own(case)), case.layout)
    output = buffer_of(blank(case), case.layout)
    works = [dist.isend(data.tensor, case.group.neighbour(1), case.group.handle, tag=case.salt)]
    receive = dist.irecv if case.asynchronous else dist.recv
    work = receive(output.tensor, case.group.neighbour(-1), case.group.handle, tag=case.salt)
    if case.asynchronous:
        works.append(work)
    return Call(f"ring {case}", works, [("message", output, values(case, case.group.neighbour(-1)))])


OPERATIONS: dict[str, Callable[[Case], Call]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all": all_to_all,
    "all_to_all_uneven": functools.partial(all_to_all, uneven=True),
    "all_to_all_single": all_to_all_single,
    "all_to_all_single_uneven": functools.partial(all_to_all_single, uneven=True),
    "gather": gather,
    "scatter": scatter,
    "send_recv": ring,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def start(operation: str, case: Case) -> Call:
    """Issues the operation; in synchronous mode it is over when this returns."""
    return OPERATIONS[operation](case)


def check_all(operation: str, cases: list[Case]) -> None:
    """Runs the cases one after another, then all at once, then all of a group in one coalesced call."""
    for case in cases:
        start(operation, case).finish()
    for call in [start(operation, replace(case, asynchronous=True)) for case in cases]:
        call.finish()
    if BACKEND == "gloo":
        return  # it coalesces a few operations only
    for group in {id(case.group): case.group for case in cases}.values():
        backend = group.handle._get_backend(DEVICE)
        backend._start_coalescing()
        calls = [start(operation, replace(case, asynchronous=False)) for case in cases if case.group is group]
        backend._end_coalescing().wait()
        for call in calls:
            call.verify()
