"""Pins the result of every collective against plain computation: each dtype, reduce op, layout and size, on
every kind of group, called synchronously and asynchronously, on 1 to 4 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
import torch
from harness import Rank, on_ranks, unless_gloo
from harness.calls import OPERATIONS, REDUCING, check_all, start
from harness.case import LAYOUTS, Case

WHOLE_DTYPES = [torch.int8, torch.int32, torch.int64, torch.uint8]
FLOAT_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.int16, torch.bool, torch.complex64]
MOVED_DTYPES = [torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn]
MOVING = [operation for operation in OPERATIONS if operation not in REDUCING]
REDUCE_OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
SHAPES = [(0,), (1,), (7,), (3, 5)]


def gloo_lacks(operation: str, what: object) -> str | None:
    """Why Gloo cannot do `operation` with a dtype or layout."""
    if operation == "all_to_all_uneven":
        return "its list form of all_to_all takes equal sizes only"
    if what is torch.int16:
        return "has no 16-bit integers"
    if what is torch.complex64 and operation in ("gather", "scatter", "send_recv"):
        return "has no complex numbers here"
    if what in ("strided", "column") and "gather" not in operation:
        return "takes gaps in memory for data"
    if what == "transposed" and operation in ("all_to_all_single", "all_to_all_single_uneven", "send_recv"):
        return "takes contiguous tensors only here"
    return None


def combinations(operations: Iterable[str], choices: Iterable[object]) -> list[object]:
    """Every operation with every choice; what Gloo lacks is marked."""

    def combination(operation: str, choice: object) -> object:
        reason = gloo_lacks(operation, choice)
        marks = [unless_gloo(reason)] if reason else []
        return pytest.param(operation, choice, marks=marks, id=f"{operation}-{choice}")

    return [combination(operation, choice) for operation, choice in product(operations, choices)]


@pytest.mark.parametrize(("operation", "dtype"), combinations(OPERATIONS, DTYPES))
@on_ranks(1, 2, 3, 4)
def test_every_dtype(me: Rank, operation: str, dtype: torch.dtype) -> None:
    for group in me.joined("world", "single", "pair", "unsorted", "twin"):
        check_all(operation, [Case(group, dtype, shape, salt=salt) for salt, shape in enumerate(SHAPES)])


@pytest.mark.parametrize(("operation", "dtype"), combinations(MOVING, MOVED_DTYPES))
@unless_gloo("moves fewer dtypes")
@on_ranks(3)
def test_dtypes_that_are_only_moved(me: Rank, operation: str, dtype: torch.dtype) -> None:
    check_all(operation, [Case(me.groups["world"], dtype, shape) for shape in SHAPES])


@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
@pytest.mark.parametrize("operation", REDUCING)
@on_ranks(1, 2, 3, 4)
def test_every_reduce_op(me: Rank, operation: str, reduce_op: str) -> None:
    dtypes = FLOAT_DTYPES if reduce_op == "AVG" else [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.bool]
    for group in me.joined("world", "pair", "unsorted"):
        for shape in [(7,), (40, 50)]:
            check_all(operation, [Case(group, dtype, shape, reduce_op=reduce_op) for dtype in dtypes])


@pytest.mark.parametrize(("operation", "dtype"), combinations(REDUCING, WHOLE_DTYPES))
@unless_gloo("has no AVG of integers")
@on_ranks(3)
def test_avg_of_integers_is_rounded_down(me: Rank, operation: str, dtype: torch.dtype) -> None:
    check_all(operation, [Case(me.groups["world"], dtype, shape, reduce_op="AVG") for shape in SHAPES])


@pytest.mark.parametrize(("operation", "size"), combinations(OPERATIONS, [1000, 300_000]))
@on_ranks(2, 4)
def test_sizes(me: Rank, operation: str, size: int) -> None:
    for group in me.joined("world", "pair"):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            check_all(operation, [Case(group, dtype, (size,))])


@pytest.mark.parametrize(("operation", "layout"), combinations(OPERATIONS, LAYOUTS[1:]))
@on_ranks(2, 3)
def test_layouts(me: Rank, operation: str, layout: str) -> None:
    for group in me.joined("world", "unsorted"):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            shapes = [(6,), (3, 5), (2, 3, 4), (30, 40)]
            check_all(operation, [Case(group, dtype, shape, layout) for shape in shapes])


@pytest.mark.parametrize(("operation", "burst"), combinations(OPERATIONS, [3]))
@on_ranks(2, 3, 4)
def test_all_groups_at_once(me: Rank, operation: str, burst: int) -> None:
    """Nothing is waited for until all groups have several calls under way; then in random order."""
    case = Case(me.groups["world"], asynchronous=True)
    calls = [
        start(operation, replace(case, group=group, dtype=dtype, shape=shape, salt=salt))
        for salt in range(burst)
        for group in me.joined()
        for dtype, shape in [(torch.float32, (7,)), (torch.int64, (2, 600)), (torch.bfloat16, (1,))]
    ]
    me.random.shuffle(calls)
    for call in calls:
        call.finish()
