"""Pins which tensors are taken, and how: sparse, conjugated, parameters, thousands at a time; and that what torch or
arithmetic cannot do is refused at the call with the error that torch's users know.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same, unless_gloo
from torch.distributed.distributed_c10d import _coalescing_manager


def sparse(rank: int, dtype: torch.dtype, dense: tuple[int, ...] = (), seed: int = 0) -> torch.Tensor:
    """Of shape (5, 4, *dense), with repeated entries; none at all on some ranks."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    count = 0 if (rank + seed) % 3 == 2 else 6 + 3 * rank
    indices = torch.stack([torch.randint(5, (count,), generator=generator) for _ in range(2)]) % torch.tensor(
        [[5], [4]]
    )
    values = torch.randint(-4, 5, (count, *dense), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 4, *dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@on_ranks(1, 2, 3, 4)
def test_sparse_sums(me: Rank, dtype: torch.dtype) -> None:
    if me.backend == "gloo" and dtype == torch.bfloat16:
        return  # Gloo has no sparse half precision
    for group in me.joined("world", "pair", "unsorted"):
        for seed, dense in enumerate(((), (3,), (2, 3))):
            want = sum(sparse(rank, dtype, dense, seed).to_dense().double() for rank in group.ranks)
            assert isinstance(want, torch.Tensor)
            data = sparse(me.rank, dtype, dense, seed)
            dist.all_reduce(data, group=group.handle)
            same(data.to_dense(), want.to(dtype), f"sparse all_reduce on {group.kind}")
            assert data.is_coalesced() or data.coalesce()._nnz() == data._nnz()


@needs_multicomm("has neither averages nor an order between the two")
@on_ranks(2, 3)
def test_sparse_operations_keep_their_order(me: Rank) -> None:
    data, dense = sparse(0, torch.float32), torch.ones(1000)
    want = data.to_dense() * me.world
    works = [
        dist.all_reduce(data, async_op=True),
        dist.all_reduce(dense, async_op=True),
        dist.all_reduce(data, op=dist.ReduceOp.AVG, async_op=True),  # of equal tensors: no change
        dist.all_reduce(dense, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    same(data.to_dense(), want, "the same sparse tensor twice")
    same(dense, torch.full((1000,), float(me.world**2)), "dense sums between them")
    text = raises(lambda: dist.all_reduce(data if me.rank else dense), "sparse against dense", RuntimeError)
    assert "sparse Float [5, 4]" in text and "all_reduce(SUM) of Float [1000]" in text, text
    raises(lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX), "a sparse maximum", ValueError)
    shape = (5, 4) if me.rank else (4, 5)
    other = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), shape)
    text = raises(lambda: dist.all_reduce(other), "sparse tensors of two shapes", RuntimeError)
    assert "[5, 4]" in text and "[4, 5]" in text, text
    dist.all_reduce(data)
    same(data.to_dense(), want * me.world, "after the errors")


@on_ranks(2)
def test_lazily_conjugated_and_negated_inputs(me: Rank) -> None:
    source = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    data = source.conj() if me.rank == 0 else torch.zeros_like(source)
    dist.group.WORLD.broadcast(data, 0).wait()  # torch's own functions refuse conjugates
    same(torch.view_as_real(data.resolve_conj()), [[1.0, -3.0], [2.0, -4.0]], "broadcast of a conjugate")
    # As inputs only: for outputs torch's dispatcher hands every backend a copy that it writes back too early.
    pieces = [torch.empty(2) for _ in range(2)]
    negated = source.conj().imag
    assert negated.is_neg()
    dist.all_gather(pieces, negated)
    same(pieces[1], [-3.0, -4.0], "all_gather of a negated tensor")


@on_ranks(2)
def test_tensors_that_require_grad(me: Rank) -> None:
    parameter = torch.nn.Parameter(torch.full((3,), me.rank + 1.0))
    dist.all_reduce(parameter)  # torch lets this pass, and so do we
    same(parameter.detach(), [3.0] * 3, "all_reduce of a parameter")
    pieces = [torch.empty(3) for _ in range(2)]
    dist.all_gather(pieces, parameter)
    same(pieces[1 - me.rank], [3.0] * 3, "all_gather from a parameter")
    assert not pieces[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
@unless_gloo("has no such dtypes")
@on_ranks(2)
def test_dtypes_without_arithmetic_in_torch(me: Rank, dtype: torch.dtype) -> None:
    bits = torch.arange(1, 17, dtype=torch.uint8).view(dtype)
    data = bits.clone() if me.rank == 1 else torch.zeros(16, dtype=torch.uint8).view(dtype)
    dist.broadcast(data, 1)
    same(data.view(torch.uint8), bits.view(torch.uint8), f"broadcast of {dtype}")
    if dtype.is_floating_point:
        text = raises(lambda: dist.all_reduce(data), f"sum of {dtype}", ValueError)
        assert "SUM has no meaning for" in text, text
    else:
        dist.all_reduce(data)
        values = bits.view(torch.int16 if dtype == torch.uint16 else torch.int64)
        same(data.view(values.dtype), values * 2, f"sum of {dtype}")
    other = torch.float8_e4m3fnuz if dtype.is_floating_point else torch.int16
    text = raises(
        lambda: dist.broadcast(torch.zeros(16 // dtype.itemsize, dtype=dtype if me.rank else other), 0),
        "two dtypes",
        RuntimeError,
    )
    assert "disagree" in text, text


@on_ranks(2, 3, limit=90)
def test_ten_thousand_tensors_in_one_call(me: Rank) -> None:
    data = [torch.full((1 + k % 7,), float(k + me.rank)) for k in range(10_000)]
    with _coalescing_manager() as manager:
        for tensor in data:
            dist.all_reduce(tensor)
    del manager
    offset = sum(range(me.world))
    for k, tensor in enumerate(data):
        assert (tensor == k * me.world + offset).all(), f"tensor {k}: {tensor}"


@needs_multicomm("coalesces collectives of one kind only")
@on_ranks(2, 3)
def test_a_mixture_in_one_coalesced_call(me: Rank) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    neighbour, before = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for size in (3, 5000):
        summed, copied = torch.full((size,), 1.0), torch.full((size,), float(me.rank))
        sent = [torch.full((size,), 10.0 * me.rank + tag) for tag in (1, 2)]
        received = [torch.zeros(size) for _ in sent]
        gathered = torch.zeros(me.world * size)
        backend._start_coalescing()
        dist.all_reduce(summed)
        dist.isend(sent[0], neighbour, tag=1)
        dist.irecv(received[1], before, tag=2)  # tags, not the order, say which belongs to which
        dist.broadcast(copied, 0)
        dist.irecv(received[0], before, tag=1)
        dist.isend(sent[1], neighbour, tag=2)
        dist.all_gather_into_tensor(gathered, torch.full((size,), float(me.rank)))
        work = backend._end_coalescing()
        work.wait()
        same(summed, [float(me.world)] * size, "all_reduce")
        same(copied, [0.0] * size, "broadcast")
        same(received[0], [10.0 * before + 1] * size, "tag 1")
        same(received[1], [10.0 * before + 2] * size, "tag 2")
        same(gathered.view(me.world, size)[:, 0], [float(rank) for rank in range(me.world)], "all_gather_into_tensor")
