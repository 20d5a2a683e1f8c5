"""Training with torch's own wrappers equals training in one process.

Never run on real hardware so far: only with GPU_DOUBLE=1.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from rank import Here, SkipCheck
from torch.nn.parallel import DistributedDataParallel

STEPS = 2
BATCH = 6


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 5),
    ).double()


def batches(ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One for each step, of all ranks together."""
    torch.manual_seed(1)
    return [
        (torch.randn(BATCH * ranks, 20, dtype=torch.float64), torch.randint(5, (BATCH * ranks,))) for _ in range(STEPS)
    ]


def train(model: torch.nn.Module, device: torch.device, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in data:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()


def compare(model: torch.nn.Module, right: torch.nn.Module, what: str) -> None:
    for (name, parameter), wanted in zip(model.named_parameters(), right.parameters(), strict=True):
        value = parameter.detach()
        value = (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
        error = (value - wanted.detach().cpu()).abs().max().item()
        assert error < 1e-9, f"{what}: parameter {name} differs by {error}"


def share(data: list[tuple[torch.Tensor, torch.Tensor]], rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    own = slice(BATCH * rank, BATCH * rank + BATCH)
    return [(inputs[own], labels[own]) for inputs, labels in data]


def ddp(here: Here) -> None:
    """Small buckets, so that several are in flight; against one process on the whole batch, on the same device."""
    right = make_model().to(here.device)
    train(right, here.device, batches(here.size))
    model = DistributedDataParallel(make_model().to(here.device), bucket_cap_mb=0.01)
    train(model, here.device, share(batches(here.size), here.rank))
    compare(model.module, right, "DDP")


def halves(here: Here) -> tuple[object, int, int]:
    """The half of the ranks that this one is in: a group of its own."""
    if here.size < 2:
        raise SkipCheck("one rank")
    middle = here.size // 2
    parts = [list(range(middle)), list(range(middle, here.size))]
    groups = [here.new_group(part) for part in parts]
    which = 0 if here.rank < middle else 1
    return groups[which], parts[which].index(here.rank), len(parts[which])


def ddp_on_halves(here: Here) -> None:
    """A model for each half of the ranks, both training at once."""
    group, own, size = halves(here)
    right = make_model().to(here.device)
    train(right, here.device, batches(size))
    model = DistributedDataParallel(make_model().to(here.device), process_group=group, bucket_cap_mb=0.01)
    train(model, here.device, share(batches(size), own))
    compare(model.module, right, "DDP on half of the ranks")


def fsdp_on_halves(here: Here) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise SkipCheck("this torch has no fully_shard") from None
    if here.double:
        raise SkipCheck("the double has no stream priorities and no allocator that FSDP asks for")
    group, own, size = halves(here)
    right = make_model().to(here.device)
    train(right, here.device, batches(size))
    model = copy.deepcopy(make_model()).to(here.device)
    mesh = DeviceMesh.from_group(group, here.kind)
    for layer in model:
        if sum(parameter.numel() for parameter in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, here.device, share(batches(size), own))
    compare(model, right, "FSDP on half of the ranks")
    dist.barrier()
