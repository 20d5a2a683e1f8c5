"""Nothing grows. Never run on real hardware so far: only with GPU_DOUBLE=1, which keeps no account of its memory."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
from rank import Here

ITERATIONS = 1000


def iterate(here: Here, times: int) -> None:
    for i in range(times):
        small = [here.full(100 + j, 1) for j in range(10)]
        pending = [dist.all_reduce(t, async_op=True) for t in small]
        big = here.full(here.scaled(200_000, 5_000), 1)
        dist.broadcast(big, 0)
        output = torch.empty(1000 * here.size, device=here.device)
        future = dist.all_gather_into_tensor(output, here.full(1000, i), async_op=True).get_future()
        future.then(lambda done: done.value())
        column = here.full(1000, 1).view(10, 100)[:, 3]
        dist.all_reduce(column)
        for work in pending:
            work.wait()
        future.wait()
    here.synchronize()
    gc.collect()


def used(here: Here) -> tuple[int, int, int]:
    """Bytes: in tensors, kept by torch for them, and of the whole device by whomever."""
    if here.double:
        return 0, 0, 0
    torch.cuda.synchronize()
    time.sleep(0.3)  # what the device is done with is freed by another thread, a little later
    free, whole = torch.cuda.mem_get_info(here.device)
    return torch.cuda.memory_allocated(here.device), torch.cuda.memory_reserved(here.device), whole - free


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def stays(here: Here) -> str:
    iterate(here, here.scaled(200, 50))
    before, host = used(here), resident()
    iterate(here, here.scaled(ITERATIONS, 200))
    after, host_after = used(here), resident()
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown[0] <= 0, f"{grown[0]} bytes more in tensors after {ITERATIONS} iterations"
    assert grown[1] <= 4 << 20, f"torch keeps {grown[1]} bytes more"
    # Other processes may share the device; a leak of NCCL's or CUDA's own would be far larger over so many iterations.
    assert grown[2] <= 64 << 20, f"{grown[2]} bytes more of the device are used"
    assert host_after - host < 64 << 20, f"{host_after - host} bytes more of the host's memory"
    where = "no account of device memory" if here.double else f"device {grown}"
    return f"grown by: {where}, host {(host_after - host) >> 10} KiB"


def groups_come_and_go(here: Here) -> str:
    """A communicator for each group that is used; its memory comes back."""

    def some(times: int) -> None:
        for _ in range(times):
            group = here.new_group()
            data = here.full(1000, 1)
            dist.all_reduce(data, group=group)
            assert data[0].item() == here.size
            dist.destroy_process_group(group)
        here.synchronize()

    some(3)
    before = used(here)[2]
    some(here.scaled(10, 4))
    time.sleep(1)  # they are freed on threads of their own
    grown = used(here)[2] - before
    assert grown <= 256 << 20, f"{grown} bytes more of the device are used after 10 groups"
    return "no account of device memory" if here.double else f"grown by {grown >> 20} MiB"
