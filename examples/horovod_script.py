"""A training script as Horovod's users write it; only the import is another one.

    mpirun -n 4 python examples/horovod_script.py
    torchrun --standalone --nproc-per-node 4 examples/horovod_script.py

Learns which points lie inside a ring. Every rank sees its own points; the model is the same on all.
"""

from __future__ import annotations

import argparse

import multicomm as hvd
import torch
from torch import nn

BATCH = 64
BATCHES = 40


def points(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of a square, and whether each lies inside the ring."""
    where = torch.rand(count, 2, generator=generator) * 4 - 2
    distance = where.norm(dim=1)
    return where, ((distance > 0.7) & (distance < 1.6)).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--fp16", action="store_true", help="send gradients in half precision")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # each rank would begin with another model

    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16 else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    own = torch.Generator().manual_seed(1000 + hvd.rank())
    for epoch in range(args.epochs):
        for _ in range(BATCHES):
            where, inside = points(BATCH, own)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(where), inside)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.3f}")

    where, inside = points(2000, own)
    accuracy = hvd.allreduce((model(where).argmax(1) == inside).float().mean(), name="accuracy")
    norms = hvd.allgather_object(sum(p.norm().item() for p in model.parameters()))
    if any(abs(norm - norms[0]) > 1e-3 * norms[0] for norm in norms):
        raise SystemExit(f"the ranks have different models: {norms}")
    if hvd.rank() == 0:
        print(f"accuracy {accuracy.item():.2f} on {hvd.size()} ranks, {hvd.local_size()} of them on this node")
    hvd.shutdown()


if __name__ == "__main__":
    main()
