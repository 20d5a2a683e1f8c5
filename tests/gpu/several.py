"""A device for each rank: overlapping groups, rings, torch's nccl backend beside. Never run on real hardware so far."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank import Here, SkipCheck


def opposite_order(here: Here) -> str:
    """Two groups of the same ranks and rows that overlap, used in opposite order on neighbours: must come to an end.

    With the nccl backend this is a deadlock or undefined; multicomm launches in one order on all ranks.
    """
    if here.size < 2:
        raise SkipCheck("one rank")
    everyone = [here.new_group() for _ in range(2)]
    windows = [(ranks, here.new_group(ranks)) for r in range(here.size - 1) if (ranks := [r, r + 1])]
    turns = here.scaled(50, 10)
    count = here.scaled(1 << 18, 1 << 10)
    for turn in range(turns):
        mine: list[tuple[object, int, float]] = [(group, here.size, 1.0) for group in everyone]
        mine += [(group, 2, 1.0) for ranks, group in windows if here.rank in ranks]
        if here.rank % 2:
            mine.reverse()
        pending = []
        for group, size, value in mine:
            data = here.full(count, value + turn)
            pending.append((dist.all_reduce(data, group=group, async_op=True), data, size * (value + turn)))
        for work, data, right in pending:
            work.wait()
            data.sub_(right)
        worst = max(data.abs().max().item() for _, data, _ in pending)
        assert worst == 0, f"turn {turn}: a sum is off by {worst}"
    return f"{turns} turns, {2 + here.size - 1} groups"


def rings(here: Here) -> None:
    """Messages round the ring, both ways at once, behind computation."""
    if here.size < 2:
        raise SkipCheck("one rank")
    after, before = (here.rank + 1) % here.size, (here.rank - 1) % here.size
    count = here.scaled(1 << 20, 1 << 10)
    data = here.full(count, here.rank)
    for step in range(1, 2 * here.size + 1):
        output = torch.empty_like(data)
        ops = [dist.P2POp(dist.isend, data + 1, after), dist.P2POp(dist.irecv, output, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        data = output * 1
        right = (here.rank - step) % here.size + step
        assert bool((data == right).all()), f"step {step}: {data[:3].tolist()}, not {right}"


def equals_nccl(here: Here) -> str:
    """The nccl backend's results on the same random data."""
    if here.double:
        raise SkipCheck("the double has no nccl backend of torch's")
    if not dist.is_nccl_available():
        raise SkipCheck("this torch has no nccl backend")
    theirs = dist.new_group(backend="nccl")
    worst = 0.0
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-13)):
        for count in (1, 1000, 1 << 20, (1 << 22) + 7):
            torch.manual_seed(here.rank)
            data = torch.randn(count, device=here.device).to(dtype)
            a, b = data.clone(), data.clone()
            dist.all_reduce(a)
            torch.cuda.synchronize()
            dist.all_reduce(b, group=theirs)
            torch.cuda.synchronize()
            off = ((a - b).abs().double() / (1 + b.abs().double())).max().item()
            worst = max(worst, off / tolerance)
            assert off <= tolerance * here.size, f"all_reduce of {count} {dtype}: off by {off}"
            a, b = (torch.empty(count * here.size, dtype=dtype, device=here.device) for _ in range(2))
            dist.all_gather_into_tensor(a, data)
            torch.cuda.synchronize()
            dist.all_gather_into_tensor(b, data, group=theirs)
            torch.cuda.synchronize()
            assert torch.equal(a, b), f"all_gather of {count} {dtype}"
    dist.destroy_process_group(theirs)
    return f"worst difference {worst:.2g} of what rounding allows"
