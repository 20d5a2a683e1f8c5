"""Pins what a matrix of results does not show: roots by global and by group rank, memory shared by input and
output, rounding of half precision, equal bits on all ranks, objects, coalescing, what a barrier means.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, on_ranks, raises, same, unless_gloo
from harness.case import Case, reduced, values
from harness.planes import DEVICE
from torch.distributed.distributed_c10d import _coalescing_manager


def everyone(group: Group, make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """What each member of `group` brings."""
    return [make(rank) for rank in group.ranks]


@on_ranks(2, 3, 4)
def test_roots_by_global_and_by_group_rank(me: Rank) -> None:
    for group in me.joined("pair", "unsorted", "twin"):
        last = group.size - 1
        root, own = group.ranks[last], torch.tensor([float(me.rank)])
        for source, destination in (
            ({"src": root}, {"dst": root}),
            ({"group_src": last}, {"group_dst": last}),
        ):
            what = f"{group.kind} {source}"
            data = own.clone()
            dist.broadcast(data, group=group.handle, **source)
            same(data, [float(root)], f"broadcast {what}")
            data = own.clone()
            dist.reduce(data, group=group.handle, **destination)
            if me.rank == root:
                same(data, [float(sum(group.ranks))], f"reduce {what}")
            pieces = [torch.empty(1) for _ in group.ranks] if me.rank == root else None
            dist.gather(own, pieces, group=group.handle, **destination)
            if pieces:
                same(torch.cat(pieces), [float(rank) for rank in group.ranks], f"gather {what}")
            pieces = [torch.tensor([10.0 * rank]) for rank in group.ranks] if me.rank == root else None
            dist.scatter(data, pieces, group=group.handle, **source)
            same(data, [10.0 * me.rank], f"scatter {what}")


@on_ranks(3, 4)
def test_non_members_are_left_alone(me: Rank) -> None:
    for group in me.groups.values():
        if group.own >= 0:
            continue
        data = torch.full((3,), 5.0)
        assert dist.get_rank(group.handle) == -1
        assert dist.all_reduce(data, group=group.handle, async_op=True) is None
        same(data, [5.0] * 3, f"tensor of a non-member of {group.kind}")


@unless_gloo("leaves partial results on the other ranks")
@on_ranks(2, 3, 4)
def test_reduce_leaves_the_other_ranks_alone(me: Rank) -> None:
    for group in me.joined("world", "unsorted"):
        for size in (1, 4, 300, 60_000):
            data = torch.arange(float(size)) + me.rank
            before = data.clone()
            dist.reduce(data, group.ranks[0], group=group.handle)
            if me.rank != group.ranks[0]:
                same(data, before, f"{size} elements of a rank that is not the destination")


@pytest.mark.parametrize("size", [3, 1000, 100_000])
@on_ranks(2, 3, 4)
def test_output_and_input_share_memory(me: Rank, size: int) -> None:
    for group in me.joined("world", "unsorted"):
        rows = everyone(group, lambda rank: torch.arange(float(size)) + 1000 * rank)
        gathered = torch.full((group.size, size), -1.0)
        gathered[group.own] = rows[group.own]
        dist.all_gather_into_tensor(gathered, gathered[group.own : group.own + 1], group=group.handle)
        same(gathered, torch.stack(rows), "all_gather_into_tensor from a slice of the output")

        data = torch.arange(float(size * group.size)).view(group.size, size) + me.rank
        want = torch.stack(everyone(group, lambda rank, d=data: d - me.rank + rank)).sum(0)[group.own]
        dist.reduce_scatter_tensor(data[group.own : group.own + 1], data, group=group.handle)
        same(data[group.own], want, "reduce_scatter_tensor into a slice of the input")

        pieces = [torch.full((size,), float(rank if rank == me.rank else -1)) for rank in group.ranks]
        dist.all_gather(pieces, pieces[group.own], group=group.handle)
        same(torch.stack(pieces)[:, 0], [float(rank) for rank in group.ranks], "all_gather from an output")

        pieces = [torch.full((size,), 10.0 * rank) for rank in group.ranks]
        root = group.ranks[-1]
        sent = pieces if me.rank == root else None
        dist.scatter(pieces[group.own], sent, root, group=group.handle)
        same(pieces[group.own], torch.full((size,), 10.0 * me.rank), "scatter into an input")


@unless_gloo("overwrites one half before the other is sent")
@on_ranks(2, 3)
def test_all_to_all_single_in_place(me: Rank) -> None:
    data = torch.arange(float(me.world)) + 10 * me.rank
    dist.all_to_all_single(data, data)
    same(data, [10.0 * rank + me.rank for rank in range(me.world)], "all_to_all_single(x, x)")


@on_ranks(2)
def test_expanded_inputs_are_read(me: Rank) -> None:
    spread = torch.tensor([float(me.rank + 1)]).expand(4)  # as autograd hands over the gradient of sum()
    pieces = [torch.empty(4) for _ in range(2)]
    dist.all_gather(pieces, spread)
    same(torch.stack(pieces), [[1.0] * 4, [2.0] * 4], "all_gather")
    output = torch.empty(2)
    dist.reduce_scatter_tensor(output, spread.contiguous())
    same(output, [3.0, 3.0], "reduce_scatter_tensor of a copy")


@unless_gloo("writes past an expanded element")
@on_ranks(2)
def test_expanded_tensors_never_harm_their_neighbours(me: Rank) -> None:
    spread = torch.tensor([float(me.rank + 1)]).expand(4)
    output = torch.empty(2)
    dist.reduce_scatter_tensor(output, spread)
    same(output, [3.0, 3.0], "reduce_scatter_tensor")
    base = torch.tensor([10.0, float(me.rank + 1), 30.0, 40.0])
    whole, spread = torch.arange(3.0), base[1:2].expand(3)
    root = 1 - me.rank
    for what, call in {
        "all_reduce": lambda: dist.all_reduce(spread),
        "all_gather": lambda: dist.all_gather([spread, spread], whole),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(base[1:2].expand(6), whole),
        "reduce_scatter": lambda: dist.reduce_scatter(spread, [whole, whole]),
        "all_to_all": lambda: dist.all_to_all([spread, spread], [whole, whole]),
        "broadcast": lambda: dist.broadcast(spread, root),
        "recv": lambda: dist.recv(spread, root),
    }.items():
        text = raises(call, f"{what} into an expanded tensor", ValueError)
        assert "share memory" in text, f"{what}: {text}"
    same(base, [10.0, me.rank + 1.0, 30.0, 40.0], "the memory of the refused calls")
    dist.all_reduce(base)  # nothing was sent, and nothing is left that later operations would wait for
    same(base, [20.0, 3.0, 60.0, 80.0], "all_reduce of the whole")


@pytest.mark.parametrize("size", [9, 100_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_ranks(2)
def test_half_precision_is_rounded_once(me: Rank, dtype: torch.dtype, size: int) -> None:
    top = torch.finfo(dtype).max
    first = [top, top, -top, 6e-8, 6.1e-5, torch.inf, torch.nan, 0.0, 1.0]
    edges = torch.tensor([first, [top, 16, -32, 6e-8, 0, 1, 1, -0.0, 5e-4]])
    noise = (torch.rand(2, size, generator=torch.Generator().manual_seed(me.seed)) * 2 - 1) * top
    both = torch.cat([edges, noise], 1).to(dtype)
    data = both[me.rank].clone()
    dist.all_reduce(data)
    same(data, both.float().sum(0).to(dtype), f"sum of two {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(3, 4)
def test_all_ranks_get_the_same_bits(me: Rank, dtype: torch.dtype) -> None:
    for size in (5, 200, 5000, 300_000):
        noise = torch.randn(me.world, size, generator=torch.Generator().manual_seed(me.seed)).to(dtype)
        data = noise[me.rank].clone()
        dist.all_reduce(data)
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(data.double(), noise.double().sum(0), rtol=tolerance, atol=tolerance)
        copies = [torch.empty(size, dtype=dtype) for _ in range(me.world)]
        dist.all_gather(copies, data)
        for rank, copy in enumerate(copies):
            same(copy.view(torch.uint8), data.view(torch.uint8), f"{size} sums on rank {rank} and here")


@pytest.mark.parametrize("reduce_op", ["BAND", "BOR", "BXOR"])
@on_ranks(2, 3)
def test_bitwise_reductions(me: Rank, reduce_op: str) -> None:
    op = getattr(dist.ReduceOp, reduce_op)
    join = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[reduce_op]
    for dtype in (torch.uint8, torch.int32, torch.int64):
        rows = [torch.tensor([0b1100, 0b1010, 0x7F, 1], dtype=dtype) >> rank for rank in range(me.world)]
        want = rows[0]
        for row in rows[1:]:
            want = join(want, row)
        data = rows[me.rank].clone()
        dist.all_reduce(data, op=op)
        same(data, want, f"{reduce_op} of {dtype}")
    raises(lambda: dist.all_reduce(torch.ones(4), op=op), f"{reduce_op} of floats")


@on_ranks(2)
def test_scalars(me: Rank) -> None:
    data = torch.tensor(float(me.rank + 1))
    dist.all_reduce(data)
    same(data, torch.tensor(3.0), "all_reduce of a tensor without dimensions")
    dist.broadcast(data.fill_(float(me.rank)), 1)
    same(data, torch.tensor(1.0), "broadcast of a tensor without dimensions")


@on_ranks(2)
def test_tensors_of_inference_mode_and_parameters(me: Rank) -> None:
    with torch.inference_mode():
        data = torch.full((3,), float(me.rank + 1))
        strided = torch.full((3, 2), float(me.rank + 1))[:, 0] if me.backend == "multicomm" else data.clone()
        for tensor in (data, strided):
            dist.all_reduce(tensor, async_op=True).wait()
            same(tensor, [3.0] * 3, "all_reduce of an inference tensor")
        pieces = [torch.empty(3) for _ in range(2)]
        dist.all_gather(pieces, data)
        same(pieces[1 - me.rank], data, "all_gather of inference tensors")
    parameter = torch.nn.Parameter(torch.full((3,), float(me.rank + 1)))
    with torch.no_grad():
        dist.all_reduce(parameter)
    same(parameter, [3.0] * 3, "all_reduce of a parameter")


@on_ranks(2, 3, 4)
def test_coalescing(me: Rank) -> None:
    sizes = (3, 1, 1000, 20_000)
    for group in me.joined("world", "unsorted"):
        cases = [Case(group, shape=(size,), salt=size) for size in sizes]
        rows = [[values(case, rank).to(DEVICE) for rank in group.ranks] for case in cases]
        for asynchronous in (False, True):
            data = [row[group.own].clone() for row in rows]
            gathered = [torch.empty(size * group.size) for size in sizes]
            shares = [torch.empty(size) for size in sizes]
            whole = [torch.cat([row[group.own]] * group.size) for row in rows]
            with _coalescing_manager(group.handle, async_ops=asynchronous) as sums:
                for tensor in data:
                    dist.all_reduce(tensor, group=group.handle)
            with _coalescing_manager(group.handle, async_ops=asynchronous) as gathers:
                for output, row in zip(gathered, rows, strict=True):
                    dist.all_gather_into_tensor(output, row[group.own], group=group.handle)
            with _coalescing_manager(group.handle, async_ops=asynchronous) as scatters:
                for output, tensor in zip(shares, whole, strict=True):
                    dist.reduce_scatter_tensor(output, tensor, group=group.handle)
            if asynchronous:
                for manager in (scatters, sums, gathers):
                    manager.wait()
            for k, case in enumerate(cases):
                same(data[k], reduced(case, rows[k]), f"coalesced all_reduce of {sizes[k]}")
                same(gathered[k], torch.cat(rows[k]), f"coalesced all_gather_into_tensor of {sizes[k]}")
                same(shares[k], reduced(case, rows[k]), f"coalesced reduce_scatter_tensor of {sizes[k]}")


@on_ranks(1, 2, 3, 4)
def test_objects(me: Rank) -> None:
    for group in me.joined("world", "unsorted", "single"):
        mine = {"rank": me.rank, "text": "x" * (1 + 5000 * me.rank)}
        all_of_them = [{"rank": rank, "text": "x" * (1 + 5000 * rank)} for rank in group.ranks]
        root = group.ranks[-1]
        gathered: list[object] = [None] * group.size
        dist.all_gather_object(gathered, mine, group=group.handle)
        assert gathered == all_of_them, f"all_gather_object on {group.kind}"
        sent: list[object] = [mine, me.rank, None]
        dist.broadcast_object_list(sent, root, group=group.handle)
        assert sent == [all_of_them[-1], root, None], f"broadcast_object_list on {group.kind}: {sent[1]}"
        received: list[object] = [None]
        dist.scatter_object_list(received, all_of_them if me.rank == root else None, root, group=group.handle)
        assert received == [mine], f"scatter_object_list on {group.kind}"
        collected: list[object] | None = [None] * group.size if me.rank == root else None
        dist.gather_object(mine, collected, root, group=group.handle)
        assert me.rank != root or collected == all_of_them, f"gather_object on {group.kind}"


@on_ranks(2, 3, 4)
def test_a_barrier_waits_for_the_last_member(me: Rank) -> None:
    late, others = me.world - 1, range(me.world - 1)
    if me.rank == late:
        for rank in others:
            me.await_signal(f"{rank} is in the barrier")
        me.signal("the last one comes")
        dist.barrier()
        return
    work = dist.barrier(async_op=True)
    assert not work.is_completed(), "the barrier is over before the last rank came"
    me.signal(f"{me.rank} is in the barrier")
    work.wait()
    assert me.store.check(["the last one comes"]), "the barrier was left before the last rank came"


@on_ranks(3, 4)
def test_a_barrier_needs_its_members_only(me: Rank) -> None:
    pair = me.groups["pair"]
    if pair.own >= 0:
        dist.barrier(group=pair.handle)
        me.signal(f"{me.rank} is through")
    for rank in pair.ranks:
        me.await_signal(f"{rank} is through")
    dist.barrier()


@on_ranks(2, 3, 4)
def test_sums_of_small_integers_wrap(me: Rank) -> None:
    """In every operation and at every size; Open MPI's own sum saturates where the processor can."""
    for dtype in (torch.int8, torch.uint8, torch.int16):
        large = torch.iinfo(dtype).max - 27
        for size in (3, 5000):
            expected = torch.full((size,), large, dtype=dtype)
            for _ in range(me.world - 1):
                expected = expected + large
            summed = torch.full((size,), large, dtype=dtype)
            dist.all_reduce(summed)
            reduced = torch.full((size,), large, dtype=dtype)
            dist.reduce(reduced, 0)
            part = torch.zeros(size, dtype=dtype)
            dist.reduce_scatter_tensor(part, torch.full((size * me.world,), large, dtype=dtype))
            results = [summed, part] + ([reduced] if me.rank == 0 else [])
            assert all(torch.equal(result, expected) for result in results), (dtype, size)
