"""Pins training: DistributedDataParallel, sharded models and optimizers over the world and over subgroups give the
gradients and parameters of the same computation in one process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, on_ranks, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

KINDS = ("world", "pair", "unsorted")
LOOSE = {"rtol": 0.02, "atol": 2e-3}  # for hooks that send half precision
TIGHT = {"rtol": 1e-4, "atol": 1e-6}


def network(width: int = 40) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return model(batch(rank, step)).pow(2).mean()


def reference(ranks: tuple[int, ...], steps: int, make: Callable[..., torch.optim.Optimizer]) -> nn.Module:
    """The model trained in one process on the batches of all `ranks`."""
    model = network()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        (torch.stack([loss(model, rank, step) for rank in ranks]).mean()).backward()
        optimizer.step()
    return model


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check_parameters(model: nn.Module, want: nn.Module, what: str, **tolerance: float) -> None:
    pairs = zip(model.named_parameters(), want.parameters(), strict=True)
    for (name, got), expected in pairs:
        torch.testing.assert_close(got, expected, msg=lambda text, n=name: f"{what}, {n}: {text}", **tolerance)


def check_gradients(model: nn.Module, group: Group, what: str, **tolerance: float) -> None:
    want = network()
    torch.stack([loss(want, rank) for rank in group.ranks]).mean().backward()
    for (name, got), expected in zip(model.named_parameters(), want.parameters(), strict=True):
        assert got.grad is not None, f"{what}: {name} has no gradient"
        torch.testing.assert_close(
            got.grad, expected.grad, msg=lambda text, n=name: f"{what}, {n}: {text}", **tolerance
        )


def bf16_hook(group, bucket):  # noqa: ANN001, ANN201 - DDP takes no annotations as strings
    """As torch's own bf16_compress_hook, which asks for NCCL by name."""
    buffer = bucket.buffer()
    share = (buffer / group.size()).to(torch.bfloat16)
    summed = dist.all_reduce(share, group=group, async_op=True).get_future()
    return summed.then(lambda future: buffer.copy_(future.value()[0]))


HOOKS = {
    "none": (None, TIGHT),
    "allreduce": (default_hooks.allreduce_hook, TIGHT),
    "bf16": (bf16_hook, LOOSE),
    "fp16": (default_hooks.fp16_compress_hook, LOOSE),
}


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(1, 2, 3, 4)
def test_gradients(me: Rank, hook: str) -> None:
    for group in me.joined(*KINDS):
        # A small bucket: several reductions are under way while the backward pass goes on.
        model = DistributedDataParallel(network(), process_group=group.handle, bucket_cap_mb=0.002)
        function, tolerance = HOOKS[hook]
        if function is not None:
            model.register_comm_hook(group.handle, function)
        loss(model, me.rank).backward()
        check_gradients(model.module, group, f"{hook} hook on {group.kind}", **tolerance)


@on_ranks(2, 4)
def test_training(me: Rank) -> None:
    for group in me.joined(*KINDS):
        model = DistributedDataParallel(network(), process_group=group.handle)
        optimizer = sgd(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            loss(model, me.rank, step).backward()
            optimizer.step()
        check_parameters(model.module, reference(group.ranks, 4, sgd), f"on {group.kind}", **TIGHT)


@on_ranks(2)
def test_accumulated_gradients(me: Rank) -> None:
    model, want = DistributedDataParallel(network()), network()
    with model.no_sync():
        loss(model, me.rank, 0).backward()
    loss(model, me.rank, 1).backward()
    (sum(loss(want, rank, step) for rank in range(2) for step in range(2)) / 2).backward()
    for got, expected in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, **TIGHT)


class TwoBranches(nn.Module):
    """Uses one of two branches, so that ranks differ in which parameters have gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        self.unused = nn.Linear(3, 3)

    def forward(self, data: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](data).sum()


@on_ranks(2, 4)
def test_ranks_that_use_different_parameters(me: Rank) -> None:
    for group in me.joined("pair", "world"):
        model = DistributedDataParallel(TwoBranches(), process_group=group.handle, find_unused_parameters=True)
        for step in range(3):
            model.zero_grad()
            model(torch.full((2, 3), float(me.rank + 1)), (me.rank + step) % 2).backward()
            for k, branch in enumerate(model.module.branches):
                users = [rank for rank in group.ranks if (rank + step) % 2 == k]
                want = torch.full((3, 3), sum(2.0 * (rank + 1) for rank in users) / group.size)
                assert branch.weight.grad is not None
                same(branch.weight.grad, want, f"step {step}, branch {k} on {group.kind}", close=True)


@on_ranks(2, 3)
def test_ranks_with_fewer_batches_join(me: Rank) -> None:
    torch.manual_seed(me.seed)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), broadcast_buffers=True
    )
    optimizer = sgd(model.parameters())
    steps = 2 + 3 * me.rank
    with model.join():
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).pow(2).mean().backward()
            optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = [torch.empty_like(flat) for _ in range(me.world)]
    dist.all_gather(everywhere, flat)
    for rank, other in enumerate(everywhere):
        same(other, flat, f"parameters of rank {rank} and of this one")


@on_ranks(2)
def test_power_sgd(me: Rank) -> None:
    """Its hook chains futures of collectives that it starts in callbacks."""
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = sgd(model.parameters())
    first = loss(model, me.rank).item()
    for _ in range(6):
        optimizer.zero_grad()
        loss(model, me.rank).backward()
        optimizer.step()
    assert loss(model, me.rank).item() < first
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = [torch.empty_like(flat) for _ in range(me.world)]
    dist.all_gather(everywhere, flat)
    same(everywhere[1 - me.rank], flat, "the other rank's parameters")


@on_ranks(2, 3)
def test_optimizer_state_in_shards(me: Rank) -> None:
    for group in me.joined("world", "unsorted"):
        model = DistributedDataParallel(network(), process_group=group.handle)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, process_group=group.handle, lr=0.05
        )
        for step in range(3):
            optimizer.zero_grad()
            loss(model, me.rank, step).backward()
            optimizer.step()
        want = reference(group.ranks, 3, lambda parameters: torch.optim.Adam(parameters, lr=0.05))
        check_parameters(model.module, want, f"on {group.kind}", rtol=1e-3, atol=1e-4)


@on_ranks(2, 3)
def test_model_in_shards(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (me.world,))
    assert dist.get_backend(mesh.get_group()) == me.backend
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss(model, me.rank, step).backward()
        optimizer.step()
    want = reference(tuple(range(me.world)), 3, sgd)
    for (name, got), expected in zip(model.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected.detach(), msg=lambda t, n=name: f"{n}: {t}", **TIGHT)


@on_ranks(4)
def test_two_models_on_overlapping_groups_train_side_by_side(me: Rank) -> None:
    """Rows and columns of a 2 x 2 mesh, backward passes interleaved, each rank beginning with another model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    members = {"rows": (me.rank % 2, me.rank % 2 + 2), "columns": (me.rank // 2 * 2, me.rank // 2 * 2 + 1)}
    models = {
        name: DistributedDataParallel(network(), process_group=mesh.get_group(name), bucket_cap_mb=0.002)
        for name in members
    }
    losses = [loss(model, me.rank) for model in models.values()]
    # One graph, so that autograd runs the two backward passes through each other.
    sum(losses if me.rank in (0, 3) else reversed(losses)).backward()
    for name, ranks in members.items():
        group = Group(name, ranks, mesh.get_group(name), ranks.index(me.rank))
        check_gradients(models[name].module, group, f"model on {name}", **TIGHT)
