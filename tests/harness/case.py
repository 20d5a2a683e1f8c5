"""One call of a collective: where, of what and how; its memory; what every rank brings; and what is right."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.checks import same
from harness.planes import DEVICE
from harness.rank import Group

_CANARY = 77
FACTOR = 2.0  # of PREMUL_SUM


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
            same(buffer.gaps, torch.full_like(buffer.gaps, _CANARY, device="cpu"), f"{self.what}: gaps of {part}")


# Layout: the dimensions that the memory has in addition, and the place of the tensor in it.
_PLACES = {"strided": ((2,), (..., 0)), "column": ((3,), (..., 1)), "transposed": ((), (...,))}
LAYOUTS = ("contiguous", "offset", *_PLACES)


def buffer_of(values: torch.Tensor, layout: str) -> Buffer:
    """`values` in memory of the pool's device, laid out as asked for."""
    shape, dtype = tuple(values.shape), values.dtype
    if layout in ("contiguous", "offset") or values.dim() == 0:
        margin = 3 if layout == "offset" else 0
        base = _canaries(values.numel() + 2 * margin, dtype=dtype)
        tensor = base[margin : margin + values.numel()].view(shape)
        tensor.copy_(values)
        edges = base.as_strided((2, margin), (values.numel() + margin, 1))  # before and after the slice
        return Buffer(tensor, edges)
    extra, place = _PLACES[layout]
    order = shape[::-1] if layout == "transposed" else shape
    base = _canaries(*order, *extra, dtype=dtype)
    tensor = base[place]
    if layout == "transposed":
        tensor = tensor.permute(*reversed(range(tensor.dim())))
    tensor.copy_(values)
    return Buffer(tensor, base[..., -1] if extra else base.flatten()[:0])


def _canaries(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, _CANARY, device="cpu").to(dtype).to(DEVICE)


def values(case: Case, rank: int, part: int = 0, rows: int | None = None) -> torch.Tensor:
    """What `rank` brings to a call; small whole numbers, so that every dtype adds them exactly."""
    shape = case.shape if rows is None else (rows, *case.shape[1:])
    count = math.prod(shape)
    index = torch.arange(count, device="cpu") * 7 + rank * 5 + part * 11 + case.salt * 3 + 1
    if case.dtype == torch.bool:
        return (index % 5 % 2).bool().view(shape)
    index = index % 3 + 1 if case.reduce_op == "PRODUCT" else index % (14 if case.reduce_op == "PREMUL_SUM" else 29)
    return index.to(case.dtype).view(shape)


def blank(case: Case, rows: int | None = None) -> torch.Tensor:
    """What an output holds before."""
    shape = case.shape if rows is None else (rows, *case.shape[1:])
    return torch.full(shape, _CANARY - 1, device="cpu").to(case.dtype)


_BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def reduced(case: Case, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The plain computation of `case.reduce_op`."""
    stacked = torch.stack(inputs)
    if case.dtype == torch.bool:
        if case.reduce_op == "BXOR":
            return stacked.sum(0) % 2 == 1
        return stacked.any(0) if case.reduce_op in ("SUM", "MAX", "BOR") else stacked.all(0)
    whole = not (case.dtype.is_floating_point or case.dtype.is_complex)
    wide = stacked.to(torch.int64 if whole else torch.complex128 if case.dtype.is_complex else torch.float64)
    if case.reduce_op == "AVG":
        return (wide.sum(0) // len(inputs) if whole else wide.mean(0)).to(case.dtype)
    if case.reduce_op in _BITS:
        return functools.reduce(_BITS[case.reduce_op], inputs)
    if case.reduce_op == "PREMUL_SUM":
        return (wide.sum(0) * int(FACTOR)).to(case.dtype)
    functions: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
        "SUM": torch.sum,
        "PRODUCT": torch.prod,
        "MIN": torch.amin,
        "MAX": torch.amax,
    }
    return functions[case.reduce_op](wide, 0).to(case.dtype)
