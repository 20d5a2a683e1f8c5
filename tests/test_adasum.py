"""Pins the adaptive sum against a reference in float64, on groups of every size, as operation, as DDP's hook and in the
optimizer.
"""

from __future__ import annotations

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = needs_multicomm("has Adasum")

GROUPS = ("world", "single", "pair", "unsorted", "twin_a")
# Rounding of the result, in the dtype's own steps.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def pair_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By the definition, on whole vectors."""
    both, own_a, own_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = a * (1 - both / (2 * own_a)) if own_a > 0 else a
    right = b * (1 - both / (2 * own_b)) if own_b > 0 else b
    return left + right


def reference(vectors: list[torch.Tensor]) -> torch.Tensor:
    level = [vector.double() for vector in vectors]
    while len(level) > 1:
        after = [pair_sum(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = after + ([level[-1]] if len(level) % 2 else [])
    return level[0]


def vector(rank: int, salt: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 977 + salt)
    common = torch.randn(shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)
    own = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (common + own * (0.2 + rank)).to(dtype)  # neither parallel nor orthogonal


def check(got: torch.Tensor, vectors: list[torch.Tensor], what: str) -> None:
    want = reference(vectors)
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    off = (got.double() - want).abs().max().item() if want.numel() else 0.0
    assert off <= CLOSE[got.dtype] * scale, f"{what}: off by {off}, values up to {scale}"


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@on_ranks(1, 2, 3, 4)
def test_reference(me: Rank, dtype: torch.dtype) -> None:
    for group in me.joined(*GROUPS):
        for salt, shape in enumerate([(), (1,), (0,), (2, 3), (1000,), (3, 5, 7)]):
            vectors = [vector(rank, salt, shape, dtype) for rank in group.ranks]
            got = multicomm.allreduce(vectors[group.own], op=multicomm.Adasum, group=group.handle)
            assert got.dtype == dtype and got.shape == shape
            check(got, vectors, f"{shape} on {group.kind}")
            everywhere = multicomm.allgather(got.reshape(1, -1), group=group.handle)
            assert all(torch.equal(row, everywhere[0]) for row in everywhere), "members have the same bits"


@on_ranks(2, 3, 4)
def test_special_vectors(me: Rank) -> None:
    alike = torch.arange(1.0, 9.0)
    same(multicomm.allreduce(alike, op=multicomm.Adasum), alike, "parallel vectors: their mean", close=True)
    apart = torch.zeros(me.world * 2)
    apart[me.rank * 2] = 3.0
    same(
        multicomm.allreduce(apart, op=multicomm.Adasum), [3.0, 0.0] * me.world, "orthogonal ones: their sum", close=True
    )
    zero = torch.zeros(5)
    same(multicomm.allreduce(zero, op=multicomm.Adasum), zero, "zeros")
    one = torch.ones(5) if me.rank == 0 else torch.zeros(5)
    same(multicomm.allreduce(one, op=multicomm.Adasum), [1.0] * 5, "one that is not zero", close=True)
    large = torch.full((64,), 3e4 * (1 + me.rank % 2), dtype=torch.float16)  # whose squares overflow
    got = multicomm.allreduce(large, op=multicomm.Adasum)
    assert torch.isfinite(got).all()


@on_ranks(2, 3)
def test_each_tensor_of_a_call_by_itself(me: Rank) -> None:
    shapes = [(7,), (3, 4), (1,), (50,)]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float32]
    vectors = [
        [vector(rank, 50 + n, shape, dtype) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
        for rank in range(me.world)
    ]
    mine = vectors[me.rank]
    handle = multicomm.grouped_allreduce_async_(mine_copy := [t.clone() for t in mine], op=multicomm.Adasum)
    results = multicomm.synchronize(handle)
    for n, (got, left) in enumerate(zip(results, mine_copy, strict=True)):
        assert got is left, "in place"
        check(got, [of_rank[n] for of_rank in vectors], f"tensor {n}")
    scaled = multicomm.allreduce(mine[0], op=multicomm.Adasum, prescale_factor=0.5, postscale_factor=4.0)
    check(scaled / 2, [of_rank[0] for of_rank in vectors], "scaled")


@on_ranks(2, 3, 4)
def test_many_at_once(me: Rank) -> None:
    """In flight together, waited for in an order of each rank's own, with others in between."""
    handles = {}
    for number in range(20):
        mine = vector(me.rank, 100 + number, (30 + number,), torch.float32)
        handles[number] = multicomm.allreduce_async(mine, op=multicomm.Adasum)
        same(multicomm.allreduce(torch.ones(2), op=multicomm.Sum), [float(me.world)] * 2, "in between")
    for number in sorted(handles, key=lambda n: hash((n * 7919, me.rank))):
        vectors = [vector(rank, 100 + number, (30 + number,), torch.float32) for rank in range(me.world)]
        check(multicomm.synchronize(handles[number]), vectors, f"number {number}")


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def gradients(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(6, 5, generator=generator, dtype=torch.float64)).pow(2).mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def trained(ranks: tuple[int, ...], steps: int) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        by_rank = [gradients(model, rank, step) for rank in ranks]
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = reference([one[number] for one in by_rank])
        optimizer.step()
    return model


@on_ranks(2, 3)
def test_optimizer(me: Rank) -> None:
    for group in me.joined("world", "pair"):
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = multicomm.DistributedOptimizer(
            sgd, model.named_parameters(), op=multicomm.Adasum, group=group.handle
        )
        for step in range(3):
            gradients_of_step(model, optimizer, me.rank, step)
        for got, want in zip(model.parameters(), trained(group.ranks, 3).parameters(), strict=True):
            same(got.detach(), want.detach(), f"on {group.kind}", close=True)


def gradients_of_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(6, 5, generator=generator, dtype=torch.float64)).pow(2).mean().backward()
    optimizer.step()


@on_ranks(2, 3)
def test_hook_of_ddp(me: Rank) -> None:
    for group in me.joined("world", "pair"):
        model = DistributedDataParallel(network(), process_group=group.handle, bucket_cap_mb=0.0003)
        model.register_comm_hook(group.handle, multicomm.adasum_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            gradients_of_step(model, optimizer, me.rank, step)
        for got, want in zip(model.parameters(), trained(group.ranks, 3).parameters(), strict=True):
            same(got.detach(), want.detach(), f"on {group.kind}", close=True)


@on_ranks(2)
def test_errors_and_then_the_next(me: Rank) -> None:
    shape = (4,) if me.rank else (5,)
    raises(
        lambda: multicomm.allreduce(torch.ones(shape), op=multicomm.Adasum),
        "other shapes",
        dist.DistBackendError,
        "disagree",
    )
    raises(lambda: multicomm.allreduce(torch.arange(3), op=multicomm.Adasum), "integers", ValueError, "floating-point")
    same(multicomm.allreduce(torch.ones(3), op=multicomm.Adasum), [1.0] * 3, "afterwards", close=True)
