"""Every collective as a call that knows its right result, computed from what every rank is known to bring.

`start(name, case)` issues the call on this rank; `finish()` waits for it and compares. The same calls serve the
matrix of operations, the tests of asynchronous bursts and the random programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from harness.checks import same
from harness.rank import Group

_CANARY = 77


@dataclass(frozen=True)
class Case:
    """One call: where, of what, and how."""

    group: Group
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (7,)
    layout: str = "contiguous"
    reduce_op: str = "SUM"
    asynchronous: bool = False
    salt: int = 0
    """Makes the data and the root of one call differ from those of another."""

    @property
    def root(self) -> int:
        """Global rank."""
        return self.group.ranks[self.salt % self.group.size]

    @property
    def is_root(self) -> bool:
        return self.root == self.group.ranks[self.group.own]

    def __str__(self) -> str:
        how = "async" if self.asynchronous else "sync"
        what = f"{self.dtype} {list(self.shape)} {self.layout} {self.reduce_op}"
        return f"{what} on {self.group.kind} ({how}, salt {self.salt})"


@dataclass(frozen=True)
class Buffer:
    """A tensor inside a larger one whose other elements must not change."""

    tensor: torch.Tensor
    gaps: torch.Tensor


Expected = tuple[str, Buffer, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """A call under way."""

    what: str
    works: list[dist.Work]
    expected: list[Expected]
    close: bool = False

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        self.verify()

    def verify(self) -> None:
        for part, buffer, want in self.expected:
            same(buffer.tensor, want, f"{self.what}: {part}", close=self.close)
            same(buffer.gaps, torch.full_like(buffer.gaps, _CANARY), f"{self.what}: gaps of {part}")


# Layout: the dimensions that the memory has in addition, and the place of the tensor in it.
_PLACES = {"strided": ((2,), (..., 0)), "column": ((3,), (..., 1)), "transposed": ((), (...,))}
LAYOUTS = ("contiguous", "offset", *_PLACES)


def buffer_of(values: torch.Tensor, layout: str) -> Buffer:
    """`values` in memory laid out as asked for."""
    shape, dtype = tuple(values.shape), values.dtype
    if layout in ("contiguous", "offset") or values.dim() == 0:
        margin = 3 if layout == "offset" else 0
        base = torch.full((values.numel() + 2 * margin,), _CANARY).to(dtype)
        tensor = base[margin : margin + values.numel()].view(shape)
        tensor.copy_(values)
        edges = base.as_strided((2, margin), (values.numel() + margin, 1))  # before and after the slice
        return Buffer(tensor, edges)
    extra, place = _PLACES[layout]
    order = shape[::-1] if layout == "transposed" else shape
    base = torch.full((*order, *extra), _CANARY).to(dtype)
    tensor = base[place]
    if layout == "transposed":
        tensor = tensor.permute(*reversed(range(tensor.dim())))
    tensor.copy_(values)
    return Buffer(tensor, base[..., -1] if extra else base.flatten()[:0])


def values(case: Case, rank: int, part: int = 0, rows: int | None = None) -> torch.Tensor:
    """What `rank` brings to a call; small whole numbers, so that every dtype adds them exactly."""
    shape = case.shape if rows is None else (rows, *case.shape[1:])
    count = math.prod(shape)
    index = torch.arange(count) * 7 + rank * 5 + part * 11 + case.salt * 3 + 1
    if case.dtype == torch.bool:
        return (index % 5 % 2).bool().view(shape)
    index = index % 3 + 1 if case.reduce_op == "PRODUCT" else index % 29
    return index.to(case.dtype).view(shape)


def blank(case: Case, rows: int | None = None) -> torch.Tensor:
    """What an output holds before."""
    return torch.full(case.shape if rows is None else (rows, *case.shape[1:]), _CANARY - 1).to(case.dtype)


def reduced(case: Case, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The plain computation of `case.reduce_op`."""
    stacked = torch.stack(inputs)
    if case.dtype == torch.bool:
        return stacked.any(0) if case.reduce_op in ("SUM", "MAX") else stacked.all(0)
    whole = not (case.dtype.is_floating_point or case.dtype.is_complex)
    wide = stacked.to(torch.int64 if whole else torch.complex128 if case.dtype.is_complex else torch.float64)
    if case.reduce_op == "AVG":
        return (wide.sum(0) // len(inputs) if whole else wide.mean(0)).to(case.dtype)
    functions: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
        "SUM": torch.sum,
        "PRODUCT": torch.prod,
        "MIN": torch.amin,
        "MAX": torch.amax,
    }
    return functions[case.reduce_op](wide, 0).to(case.dtype)


def _start(
    case: Case, name: str, issue: Callable[[], dist.Work | None], expected: list[Expected]
) -> Call:
    work = issue()
    assert (work is not None) == case.asynchronous, f"{name} {case} returned {work}"
    return Call(f"{name} {case}", [work] if work is not None else [], expected, close=case.reduce_op == "AVG")


def _reduce_op(case: Case) -> dist.ReduceOp:
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


def _rows(case: Case, sender: int, receiver: int) -> int:
    """Rows from one group rank to another in the uneven exchanges; some are 0."""
    return max(0, case.shape[0] + (2 * sender + 3 * receiver + case.salt) % 5 - 3)


def all_to_all(case: Case) -> Call:
    own, members = case.group.own, range(case.group.size)
    inputs = [buffer_of(values(case, _own(case), to, _rows(case, own, to)), case.layout) for to in members]
    outputs = [buffer_of(blank(case, _rows(case, by, own)), case.layout) for by in members]
    return _start(
        case,
        "all_to_all",
        lambda: dist.all_to_all(
            _tensors(outputs), _tensors(inputs), case.group.handle, case.asynchronous
        ),
        [
            (f"from rank {rank}", outputs[by], values(case, rank, own, _rows(case, by, own)))
            for by, rank in enumerate(case.group.ranks)
        ],
    )


def all_to_all_single(case: Case, *, uneven: bool = False) -> Call:
    own, members, ranks = case.group.own, range(case.group.size), case.group.ranks
    rows = functools.partial(_rows, case) if uneven else lambda sender, receiver: case.shape[0]
    sent, received = [rows(own, to) for to in members], [rows(by, own) for by in members]
    data = buffer_of(torch.cat([values(case, _own(case), to, sent[to]) for to in members]), case.layout)
    output = buffer_of(blank(case, sum(received)), case.layout)
    splits = (received, sent) if uneven else (None, None)
    return _start(
        case,
        f"all_to_all_single{' uneven' if uneven else ''}",
        lambda: dist.all_to_all_single(
            output.tensor, data.tensor, *splits, case.group.handle, case.asynchronous
        ),
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
    """Runs the cases one after another, then all at once."""
    for case in cases:
        start(operation, case).finish()
    for call in [start(operation, replace(case, asynchronous=True)) for case in cases]:
        call.finish()
