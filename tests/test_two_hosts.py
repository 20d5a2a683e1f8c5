"""Pins that jobs run over several hosts: network namespaces, each with a torchrun of its own. Within a host data goes
through shared memory, between them through MPI.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, needs_multicomm
from harness.calls import OPERATIONS, check_all
from harness.case import Case
from harness.jobs import launch
from harness.rank import Rank
from harness.two_hosts import why_not
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    needs_multicomm("picks an address of this machine's only host name"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SHAPES = ((0,), (7,), (3, 5), (300,), (60_000,))


def join() -> Rank:
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
    side = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    me = Rank(dist.get_rank(), dist.get_world_size(), BACKEND, dist.PrefixStore("side", side))
    me.make_groups()
    return me


def every_operation() -> None:
    me = join()
    for operation in OPERATIONS:
        for group in me.joined():  # inside one host, across both, in and out of rank order
            check_all(operation, [Case(group, dtype, shape) for dtype in DTYPES for shape in SHAPES])
    for group in me.joined("world", "unsorted"):
        data = [torch.full((256,), float(k)) for k in range(300)]
        for work in [dist.all_reduce(tensor, group=group.handle, async_op=True) for tensor in data]:
            work.wait()
        assert all((tensor == k * group.size).all() for k, tensor in enumerate(data)), f"300 sums on {group.kind}"
    if me.rank == 0:
        print("every operation")
    me.groups.clear()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_operation(tmp_path: Path, hosts: list[list[str]], ranks: int) -> None:
    launch(every_operation, ranks, tmp_path, hosts=hosts).check().says("every operation", 1)


def test_every_operation_in_chunks(tmp_path: Path, hosts: list[list[str]]) -> None:
    # As for counts over 2^31, which MPI's int cannot say: chunks that divide no size evenly.
    chunks = {"MULTICOMM_CHUNK_ELEMENTS": "4999"}
    launch(every_operation, 1, tmp_path, hosts=hosts, environment=chunks).check().says("every operation", 1)


def train() -> None:
    me = join()
    across = dist.new_group([0, 2]), dist.new_group([1, 3])  # one rank of each host
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 1))
    parallel = DistributedDataParallel(model, process_group=across[me.rank % 2])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    torch.manual_seed(me.rank)
    inputs = torch.randn(64, 8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    weights: list[object] = [None] * me.world
    dist.all_gather_object(weights, [p.tolist() for p in model.parameters()])
    assert weights[me.rank] == weights[(me.rank + 2) % 4], "weights differ within a data-parallel group"
    assert weights[me.rank] != weights[me.rank ^ 1], "weights of two groups are the same"
    print("trained")
    me.groups.clear()
    dist.destroy_process_group()


def test_training(tmp_path: Path, hosts: list[list[str]]) -> None:
    launch(train, 2, tmp_path, hosts=hosts).check().says("trained", 4)


def one_rank_is_killed() -> None:
    me = join()
    dist.barrier()
    if me.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(100_000))


def test_a_killed_rank_ends_the_job(tmp_path: Path, hosts: list[list[str]]) -> None:
    job = launch(one_rank_is_killed, 2, tmp_path, hosts=hosts, limit=90).check(ok=False)
    job.says("SIGKILL")
