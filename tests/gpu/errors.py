"""What goes wrong ends in time, says who, and leaves the rest usable.

Never run on real hardware so far: only with GPU_DOUBLE=1.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from rank import Here, SkipCheck, fails

SOON = 15.0  # seconds


def works(here: Here, group: object = None, size: int | None = None) -> None:
    data = here.full(100, 1)
    dist.all_reduce(data, group=group)
    assert data.tolist() == [float(size or here.size)] * 100, data[:3]


def mismatch(here: Here) -> None:
    """Sizes, operations and dtypes that differ: an error on all ranks, tensors untouched, the next operation works."""
    if here.size < 2:
        raise SkipCheck("one rank")
    odd = here.rank == here.size - 1
    for turn in range(3):
        data = here.full(11 if odd and turn == 0 else 10, 4, torch.float64 if odd and turn == 1 else torch.float32)

        def call(data: torch.Tensor = data, turn: int = turn) -> None:
            if odd and turn == 2:
                dist.broadcast(data, 0)
            else:
                dist.all_reduce(data)

        text = fails(call, "DistBackendError", "the ranks disagree", f"rank {here.size - 1}: ", within=SOON)
        assert "\n  rank" in text, text
        assert data.tolist() == [4.0] * data.numel(), "a refused operation has changed its tensor"
        works(here)


def mismatch_in_flight(here: Here) -> None:
    """One bad operation among good ones, all asynchronous: only it fails."""
    if here.size < 2:
        raise SkipCheck("one rank")
    tensors = [here.full(10 + (i == 5 and here.rank == 0), 1) for i in range(10)]
    pending = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (work, tensor) in enumerate(zip(pending, tensors, strict=True)):
        if i == 5:
            fails(work.wait, "the ranks disagree", within=SOON)
        else:
            work.wait()
            assert tensor.tolist() == [float(here.size)] * 10, f"operation {i}"


def abort_with_work_pending(here: Here) -> None:
    """What waits for a peer ends by abort(), on both sides; a new group works."""
    if here.size < 2:
        raise SkipCheck("one rank")
    group = here.new_group()
    works(here, group)
    if here.rank == 0:
        work = dist.all_reduce(here.full(10, 1), group=group, async_op=True)
        timer = threading.Timer(0.5, here.backend(group).abort)
        timer.start()
        fails(work.wait, "abort", within=SOON)
        timer.join()
    else:
        time.sleep(1)

        def call() -> None:  # the first may be on the device before the news is here
            for _ in range(2):
                dist.all_reduce(here.full(10, 1), group=group)
                here.synchronize()

        fails(call, "multicomm", within=SOON)
    works(here, here.new_group())
    works(here)


def abort_on_the_device(here: Here) -> str:
    """What is behind a busy stream when abort() comes: nothing hangs, the device is free soon, a new group works."""
    group = here.new_group()
    works(here, group)
    here.synchronize()
    stream, count = here.stream(), here.scaled(1 << 20, 1000)
    begin = time.monotonic()
    with here.on(stream):
        here.hold(2000)
        pending = [dist.all_reduce(here.full(count, 1), group=group, async_op=True) for _ in range(5)]
    time.sleep(0.2)
    here.backend(group).abort()
    ended = 0
    for work in pending:
        try:
            work.wait()
        except dist.DistBackendError:
            ended += 1
    here.synchronize()
    took = time.monotonic() - begin
    assert took < SOON, f"the device was free after {took:.1f} s"
    works(here)
    works(here, here.new_group())
    return f"{ended} of {len(pending)} ended with an error, the device was free after {took:.1f} s"


def timeout(here: Here) -> None:
    """An operation that one rank never submits ends by the group's time-out, and says who did not come."""
    if here.size < 2:
        raise SkipCheck("one rank")
    from datetime import timedelta

    group = here.new_group(timeout=timedelta(seconds=2))
    works(here, group)
    if here.rank != here.size - 1:
        fails(lambda: dist.all_reduce(here.full(10, 1), group=group), f"rank {here.size - 1}", within=SOON)
    else:
        time.sleep(3)
    works(here)


def killed(here: Here) -> str:
    """Rank 1 is killed while the others wait for it: each of them has an error with its name. The job's last check."""
    return dies(here, busy=False)


def killed_on_the_device(here: Here) -> str:
    """Rank 1 is killed when the collective is on the others' devices, which must be free again."""
    return dies(here, busy=True)


def dies(here: Here, busy: bool) -> str:
    if here.size < 2:
        raise SkipCheck("one rank")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once it sees one dead
    works(here)
    dist.barrier()
    if here.rank == 1:
        if busy:
            here.hold(20_000)
            dist.all_reduce(here.full(1000, 1), async_op=True)  # agreed, but this device does not come to it
            time.sleep(1)
        else:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()

    def wait() -> None:
        work = dist.all_reduce(here.full(1000, 1), async_op=True)
        work.wait()
        if busy:  # launched: the device waits for the dead
            here.synchronize()
            dist.all_reduce(here.full(1000, 1))

    text = fails(wait, "rank 1", within=SOON)
    here.synchronize()
    freed = time.monotonic() - begin
    assert freed < SOON, f"the device was free after {freed:.1f} s"
    assert (here.full(10, 2) * 2).tolist() == [4.0] * 10, "the device computes no more"
    return f"after {freed:.1f} s: {text.splitlines()[0][:160]}"


def leaves_quietly(here: Here) -> None:
    """The last check of a job that ends without destroy_process_group(), with works that nobody waited for."""
    here.leftover = [dist.all_reduce(here.full(1000, 1), async_op=True) for _ in range(20)]  # type: ignore[attr-defined]
    group = here.new_group()
    works(here, group)
