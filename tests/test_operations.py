"""Pins the result of every collective against plain computation: each dtype, reduce op, layout and size, on every
kind of group, called synchronously and asynchronously, on 1 to 4 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from harness import Rank, on_ranks, unless_gloo
from harness.calls import LAYOUTS, OPERATIONS, REDUCING, Case, check_all, start

NEEDS_INT16 = unless_gloo("has no 16-bit integers")
GLOO_TAKES_DENSE = ("all_to_all_single", "all_to_all_single_uneven", "send_recv")
NEEDS_DENSE = unless_gloo("takes contiguous tensors only here")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    pytest.param(torch.int16, marks=NEEDS_INT16),
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
MOVED_DTYPES = [torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn]
MOVING = [operation for operation in OPERATIONS if operation not in REDUCING]
REDUCE_OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
SHAPES = [(0,), (1,), (7,), (3, 5)]

every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def layouts() -> Iterator[object]:
    """Operation and layout, with what Gloo lacks marked."""
    for operation in OPERATIONS:
        for layout in LAYOUTS[1:]:
            dense = layout != "offset" and operation in GLOO_TAKES_DENSE
            yield pytest.param(operation, layout, marks=[NEEDS_DENSE] if dense else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_operation
@on_ranks(1, 2, 3, 4)
def test_every_dtype(me: Rank, operation: str, dtype: torch.dtype) -> None:
    for group in me.joined("world", "single", "pair", "unsorted", "twin"):
        check_all(operation, [Case(group, dtype, shape, salt=salt) for salt, shape in enumerate(SHAPES)])


@pytest.mark.parametrize("dtype", MOVED_DTYPES, ids=str)
@pytest.mark.parametrize("operation", MOVING)
@unless_gloo("moves fewer dtypes")
@on_ranks(3)
def test_dtypes_that_are_only_moved(me: Rank, operation: str, dtype: torch.dtype) -> None:
    check_all(operation, [Case(me.groups["world"], dtype, shape) for shape in SHAPES])


@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
@pytest.mark.parametrize("operation", REDUCING)
@on_ranks(1, 2, 3, 4)
def test_every_reduce_op(me: Rank, operation: str, reduce_op: str) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    if reduce_op != "AVG":
        dtypes += [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool]
    for group in me.joined("world", "pair", "unsorted"):
        for shape in [(7,), (40, 50)]:
            check_all(operation, [Case(group, dtype, shape, reduce_op=reduce_op) for dtype in dtypes])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("operation", REDUCING)
@unless_gloo("has no AVG of integers")
@on_ranks(3)
def test_avg_of_integers_is_rounded_down(me: Rank, operation: str, dtype: torch.dtype) -> None:
    check_all(operation, [Case(me.groups["world"], dtype, shape, reduce_op="AVG") for shape in SHAPES])


@pytest.mark.parametrize("size", [1000, 300_000])
@every_operation
@on_ranks(2, 4)
def test_sizes(me: Rank, operation: str, size: int) -> None:
    for group in me.joined("world", "pair"):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            check_all(operation, [Case(group, dtype, (size,))])


@pytest.mark.parametrize(("operation", "layout"), [*layouts()])
@on_ranks(2, 3)
def test_layouts(me: Rank, operation: str, layout: str) -> None:
    for group in me.joined("world", "unsorted"):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            shapes = [(6,), (3, 5), (2, 3, 4), (30, 40)]
            check_all(operation, [Case(group, dtype, shape, layout) for shape in shapes])


@every_operation
@on_ranks(2, 3, 4)
def test_all_groups_at_once(me: Rank, operation: str) -> None:
    """Nothing is waited for until all groups have several calls under way; then in random order."""
    case = Case(me.groups["world"], asynchronous=True)
    calls = [
        start(operation, replace(case, group=group, dtype=dtype, shape=shape, salt=salt))
        for salt in range(3)
        for group in me.joined()
        for dtype, shape in [(torch.float32, (7,)), (torch.int64, (2, 600)), (torch.bfloat16, (1,))]
    ]
    me.random.shuffle(calls)
    for call in calls:
        call.finish()
