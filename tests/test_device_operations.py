"""Pins the result of every collective on tensors of devices: each dtype, reduce op, layout and size, on every kind of
group, one after another, at once and coalesced, through NCCL and through the host, on 1 to 4 ranks.

The devices are simulated and NCCL is a double (tests/device). What such tests cannot show: NCCL's own protocols,
algorithms, bugs and performance; the numerics of its reductions beyond exact sums; whether CUDA takes what a simulated
stream takes (launch errors, memory of another context, peer access, the visibility of writes, copies that are not
asynchronous after all); waiting for room in a device's queue; real hangs and aborts; links, topology and networks.
"""

from __future__ import annotations

import functools

import pytest
import test_operations
import torch
import torch.distributed as dist
from harness import Group, Rank, needs_multicomm, on_ranks, raises
from harness.calls import OPERATIONS, REDUCING, check_all
from harness.case import LAYOUTS, Case
from harness.decorate import again_on_ranks
from test_operations import FLOAT_DTYPES, MOVED_DTYPES, WHOLE_DTYPES

pytestmark = needs_multicomm("has no devices")

PLANES = ("nccl", "staged", "chunked")
on_devices = functools.partial(on_ranks, planes=PLANES)

COMPLEX_DTYPES = [torch.complex64, torch.complex128]
UNSIGNED_DTYPES = [torch.uint16, torch.uint32, torch.uint64]
SUMMED_DTYPES = [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.int16, torch.bool, *COMPLEX_DTYPES, *UNSIGNED_DTYPES]
FLOAT8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
FEW_DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool]

# Which dtypes a reduce op makes sense for.
REDUCTIONS: dict[str, list[torch.dtype]] = {
    "SUM": SUMMED_DTYPES,
    "AVG": [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.int16, *COMPLEX_DTYPES],
    "PRODUCT": [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.int16, torch.bool, *COMPLEX_DTYPES, *UNSIGNED_DTYPES],
    "MIN": [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.int16, torch.bool, *UNSIGNED_DTYPES],
    "MAX": [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.int16, torch.bool, *UNSIGNED_DTYPES],
    "BAND": [*WHOLE_DTYPES, torch.int16, torch.bool],
    "BOR": [*WHOLE_DTYPES, torch.int16, torch.bool],
    "BXOR": [*WHOLE_DTYPES, torch.int16, torch.bool],
    "PREMUL_SUM": [*FLOAT_DTYPES, *WHOLE_DTYPES, torch.int16, *COMPLEX_DTYPES],
}
SENSELESS: dict[str, list[torch.dtype]] = {
    "SUM": FLOAT8_DTYPES,
    "AVG": [torch.bool],
    "MIN": COMPLEX_DTYPES,
    "MAX": COMPLEX_DTYPES,
    "BAND": [*FLOAT_DTYPES, *COMPLEX_DTYPES],
    "PREMUL_SUM": [torch.bool],
}


def dtypes_of(operation: str) -> list[torch.dtype]:
    return SUMMED_DTYPES if operation in REDUCING else [*SUMMED_DTYPES, *MOVED_DTYPES, *FLOAT8_DTYPES]


def mixture(group: Group, dtypes: list[torch.dtype]) -> list[Case]:
    """Each dtype with one shape, and each shape with some dtypes."""
    shapes = [(7,), (0,), (3, 5), (1,), (2, 3, 4)]
    return [Case(group, dtype, shapes[k % len(shapes)], salt=k) for k, dtype in enumerate(dtypes)]


@pytest.mark.parametrize("operation", OPERATIONS)
@on_devices(1, 2, 3, 4)
def test_every_dtype(me: Rank, operation: str) -> None:
    check_all(operation, mixture(me.groups["world"], dtypes_of(operation)))
    for group in me.joined("pair", "unsorted"):
        check_all(operation, mixture(group, FEW_DTYPES))


@pytest.mark.parametrize("operation", REDUCING)
@on_ranks(1, 2, 3, 4, planes=("nccl", "chunked"))
def test_every_reduce_op(me: Rank, operation: str) -> None:
    for reduce_op, dtypes in REDUCTIONS.items():
        for group in me.joined("world", "unsorted"):
            some = dtypes if group.kind == "world" else dtypes[::3]
            if (operation, reduce_op) == ("all_reduce", "PRODUCT"):
                some = [dtype for dtype in some if not dtype.is_complex]  # torch refuses them
            check_all(operation, [Case(group, dtype, (7, 3), reduce_op=reduce_op) for dtype in some])


@on_devices(2)
def test_reductions_without_a_meaning(me: Rank) -> None:
    for reduce_op, dtypes in SENSELESS.items():
        op = dist._make_nccl_premul_sum(2.0) if reduce_op == "PREMUL_SUM" else getattr(dist.ReduceOp, reduce_op)
        for dtype in dtypes:
            data = torch.zeros(4, dtype=dtype)
            raises(
                lambda d=data, o=op: dist.all_reduce(d, o),
                f"{reduce_op} of {dtype}",
                ValueError,
                "no meaning for|complex",
            )


@pytest.mark.parametrize("operation", OPERATIONS)
@on_ranks(2, 3, planes=("nccl", "chunked"))
def test_layouts(me: Rank, operation: str) -> None:
    for group in me.joined("world", "unsorted"):
        for layout in LAYOUTS[1:]:
            cases = [
                (torch.float32, (6,)),
                (torch.bfloat16, (3, 5)),
                (torch.uint8, (2, 3, 4)),
                (torch.float32, (20, 9)),
            ]
            check_all(operation, [Case(group, dtype, shape, layout) for dtype, shape in cases])


@pytest.mark.parametrize("operation", OPERATIONS)
@on_ranks(2, 4, planes=("nccl", "staged"))
def test_sizes(me: Rank, operation: str) -> None:
    for group in me.joined("world", "pair"):
        check_all(operation, [Case(group, dtype, (1000,)) for dtype in (torch.float32, torch.uint8)])
    check_all(operation, [Case(me.groups["world"], shape=(100_003,), salt=1)])


test_all_groups_at_once = again_on_ranks(test_operations.test_all_groups_at_once, 3, planes=PLANES)


@pytest.mark.parametrize("operation", OPERATIONS)
@on_ranks(2, 3, planes=("nccl_late", "chunked_late"))
def test_late_streams(me: Rank, operation: str) -> None:
    """Each task of a stream waits a moment of random length: what an event does not order comes in the wrong order."""
    for group in me.joined("world", "unsorted"):
        check_all(operation, mixture(group, FEW_DTYPES[:2]))
        check_all(operation, [Case(group, torch.float32, (3, 5), "column"), Case(group, torch.float32, (40,))])
