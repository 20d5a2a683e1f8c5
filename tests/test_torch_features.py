"""Pins parts of torch that are built on collectives: their gradients, functional and compiled collectives, device
meshes with DTensors, distributed checkpoints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional as differentiable
from harness import Group, Rank, on_ranks, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def gradient(me: Rank, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of a loss that weighs the result by this rank's number + 1."""
    leaf = (torch.arange(1.0, 1.0 + me.world) * (me.rank + 1)).requires_grad_()
    (function(leaf) * (me.rank + 1)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@on_ranks(2, 3)
def test_gradients_of_collectives(me: Rank) -> None:
    world = me.groups["world"]
    total = float(sum(rank + 1 for rank in world.ranks))
    own = [1.0 * rank + 1 for rank in world.ranks]
    same(gradient(me, differentiable.all_reduce), [total] * me.world, "all_reduce")
    same(gradient(me, lambda x: torch.stack(list(differentiable.all_gather(x)))), [total] * me.world, "all_gather")
    same(
        gradient(me, lambda x: differentiable.broadcast(x, 1)),
        [total if me.rank == 1 else 0.0] * me.world,
        "broadcast",
    )
    same(
        gradient(me, lambda x: differentiable.all_to_all_single(torch.empty(me.world), x)),
        own,
        "all_to_all_single",
    )
    same(
        gradient(me, lambda x: differentiable.reduce_scatter(torch.empty(1), list(x.chunk(me.world)))),
        own,
        "reduce_scatter",
    )


def shared_by(group: Group) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def compute(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed = functional.all_reduce(x * 2, "sum", group.handle)
        gathered = functional.all_gather_tensor(x, gather_dim=1, group=group.handle)
        stacked = torch.cat([x + k for k in range(group.size)])
        scattered = functional.reduce_scatter_tensor(stacked, "sum", scatter_dim=0, group=group.handle)
        return summed + 1, gathered * 1, scattered * 1

    return compute


@on_ranks(3, 4)
def test_functional_and_compiled_collectives(me: Rank) -> None:
    for group in me.joined("pair", "unsorted"):
        compute = shared_by(group)
        x, total = torch.full((2, 3), float(me.rank)), float(sum(group.ranks))
        for how, function in (
            ("eager", compute),
            ("compiled", torch.compile(compute, backend="aot_eager", fullgraph=True)),
        ):
            summed, gathered, scattered = function(x)
            what = f"{how} on {group.kind}"
            same(summed, torch.full((2, 3), 2 * total + 1), f"{what}: all_reduce")
            same(gathered, torch.cat([torch.full((2, 3), float(r)) for r in group.ranks], 1), f"{what}: gather")
            same(scattered, torch.full((2, 3), total + group.own * group.size), f"{what}: reduce_scatter")


@on_ranks(4)
def test_tensors_on_a_mesh(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert dist.get_backend(mesh.get_group("rows")) == me.backend
    full = torch.arange(48.0).view(6, 8)
    placements = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0))]
    for source in placements:
        tensor = distribute_tensor(full, mesh, source)
        same(tensor.full_tensor(), full, f"{source}")
        for target in placements:
            moved = tensor.redistribute(placements=target)
            same(moved.full_tensor(), full, f"{source} to {target}")
    partial = DTensor.from_local(torch.full((4, 4), float(me.rank)), mesh, [Replicate(), Partial()])
    shard = partial.redistribute(placements=[Replicate(), Shard(0)]).to_local()
    same(shard, torch.full((2, 4), float(me.rank // 2 * 4 + 1)), "a partial sum, scattered over the columns")
    left = distribute_tensor(full, mesh, [Shard(0), Replicate()])
    right = distribute_tensor(full.t().contiguous(), mesh, [Replicate(), Shard(1)])
    same((left @ right).full_tensor(), full @ full.t(), "a product of shards")
    flat = mesh["rows", "columns"]._flatten("all")
    data = torch.ones(1)
    dist.all_reduce(data, group=flat.get_group())
    same(data, [4.0], "a sum over the flattened mesh")


@on_ranks(4)
def test_checkpoints_of_a_subgroup(me: Rank) -> None:
    """Its first rank is not the world's; the other ranks take no part."""
    pair = me.groups["pair"]
    paths = [tempfile.mkdtemp() if me.rank == 2 else None]
    dist.broadcast_object_list(paths, 2)
    folder = Path(str(paths[0]))
    if pair.own >= 0:
        state = {f"own {me.rank}": torch.full((5,), float(me.rank)), "shared": torch.arange(4.0)}
        checkpoint.save(state, checkpoint_id=folder / "pair", process_group=pair.handle)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        checkpoint.load(loaded, checkpoint_id=folder / "pair", process_group=pair.handle)
        for name, tensor in state.items():
            same(loaded[name], tensor, name)
    dist.barrier()
    state = {f"own {me.rank}": torch.full((3,), float(me.rank))}
    saving = checkpoint.async_save(state, checkpoint_id=folder / "world", process_group=me.groups["twin_a"].handle)
    for _ in range(20):  # training goes on meanwhile, in another group
        data = torch.ones(100)
        dist.all_reduce(data)
        same(data, torch.full((100,), 4.0), "a sum beside the saving thread")
    saving.result()
    loaded = {f"own {me.rank}": torch.zeros(3)}
    checkpoint.load(loaded, checkpoint_id=folder / "world")
    same(loaded[f"own {me.rank}"], torch.full((3,), float(me.rank)), "saved in the background")
