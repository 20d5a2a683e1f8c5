"""Pins what calls on devices promise about streams and memory: what comes before a call and after wait() is ordered by
events, no one waits for a device on the host, memory lives until the device is done; and what is launched as one.

Gates hold up streams of the simulated device, so nothing here depends on time. The limits: test_device_operations.py.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same
from harness.planes import DEVICE
from harness.simulated import kernels
from torch.distributed.distributed_c10d import _coalescing_manager

pytestmark = needs_multicomm("has no devices")

PLANES = ("nccl", "staged", "nccl_late", "chunked_late")


def filled(value: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), float(value))


def on_cpu(value: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), float(value), device="cpu")


def ranks_sum(me: Rank) -> int:
    return sum(range(me.world))


@pytest.mark.parametrize("size", [3, 200])
@on_ranks(2, 3, planes=PLANES)
def test_the_same_tensor_again_and_again(me: Rank, size: int) -> None:
    """Without a wait in between, mixed with what the stream does: as if each had been waited for."""
    data = filled(me.rank + 1, size)
    works = []
    want = on_cpu(me.rank + 1, size)
    for _ in range(4):
        works.append(dist.all_reduce(data, dist.ReduceOp.MAX, async_op=True))
        works.append(dist.all_reduce(data, async_op=True))
        want = on_cpu(me.world, size) if len(works) == 2 else want
        want = want * me.world
    works[-1].wait()
    same(data, want, "eight all_reduces of one tensor")
    for work in works:
        work.wait()
    gathered = filled(0, size * me.world)
    first = dist.all_gather_into_tensor(gathered, data, async_op=True)
    second = dist.all_reduce(gathered, async_op=True)
    third = dist.reduce_scatter_tensor(data, gathered, async_op=True)
    for work in (first, second, third):
        work.wait()
    same(data, want * me.world * me.world, "a chain through other tensors")


@on_ranks(2, 3, planes=PLANES)
def test_what_the_stream_did_before_comes_first(me: Rank) -> None:
    """A call does not wait on the host for a stream that is held up, and sees what the stream does in the end."""
    from device import simulated

    for size in (4, 300):
        data, sent, received = filled(0, size), filled(0, size), filled(0, size)
        torch.sim.synchronize()
        with simulated.block():
            data.fill_(me.rank)
            sent.fill_(10 + me.rank)
            works = [dist.all_reduce(data, async_op=True)]
            works.append(dist.isend(sent, (me.rank + 1) % me.world))
            works.append(dist.irecv(received, (me.rank - 1) % me.world))
            assert not any(work.is_completed() for work in works), "done before its tensors are there"
        for work in works:
            work.wait()
        same(data, on_cpu(ranks_sum(me), size), "all_reduce of what came late")
        same(received, on_cpu(10 + (me.rank - 1) % me.world, size), "message of what came late")


@on_ranks(2, planes=("nccl", "nccl_late"))
def test_wait_does_not_hold_up_the_host(me: Rank) -> None:
    """wait() makes the stream wait, not the host, even for peers whose streams are held up."""
    from device import simulated

    warm_up = filled(0)
    dist.all_reduce(warm_up)
    data, copy = filled(me.rank + 1), filled(0)
    torch.sim.synchronize()
    me.meet("ready")
    gate = simulated.block()
    dist.all_reduce(data)  # waits as well
    work = dist.all_reduce(data, async_op=True)
    work.wait()
    copy.copy_(data)
    assert not torch.sim.current_stream().query()
    me.meet("both hosts are past wait()")
    gate.open()
    same(copy, on_cpu(6), "what came after wait()")


@on_ranks(2, 3, planes=PLANES)
def test_side_streams(me: Rank) -> None:
    """A call follows the stream that is current then, and wait() holds up the stream that is current then."""
    from device import simulated

    mine, other = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    for size in (4, 300):
        data, copy, untouched = filled(0, size), filled(0, size), filled(0, size)
        torch.sim.synchronize()
        with mine, simulated.block():
            data.fill_(me.rank)
            work = dist.all_reduce(data, async_op=True)
            with torch.sim.stream(torch.sim.default_stream()):
                untouched.fill_(1)  # nobody holds up this stream
                same(untouched, on_cpu(1, size), "a tensor of the default stream")
        with other:
            work.wait()
            copy.copy_(data)
            same(copy, on_cpu(ranks_sum(me), size), "on the stream that has waited")
        with mine:
            work.wait()
            data.mul_(2)
            same(data, on_cpu(2 * ranks_sum(me), size), "on the stream of the call")


@on_ranks(2, 3, planes=PLANES)
def test_tensors_dropped_at_once(me: Rank) -> None:
    """The simulated device poisons what is freed, and gives it to the next tensor of the size."""
    group = me.groups["world"]
    for size in (4, 300):
        received = [filled(0, size) for _ in range(8)]
        outputs = [filled(0, size * me.world) for _ in range(8)]
        works = []
        for k in range(8):
            works.append(dist.isend(filled(10 * me.rank + k, size), group.neighbour(1), tag=k))
            works.append(dist.irecv(received[k], group.neighbour(-1), tag=k))
            works.append(dist.all_gather_into_tensor(outputs[k], filled(me.rank + k, size), async_op=True))
            dist.all_reduce(filled(1, size), async_op=True)  # nor is the work kept
            dist.all_reduce(filled(me.rank, 2 * size)[::2], async_op=True)
            gc.collect()
            filled(-1, size)  # takes the place of whatever was freed too early
        for work in works:
            work.wait()
        del works
        for k in range(8):
            same(received[k], on_cpu(10 * group.neighbour(-1) + k, size), f"message {k}")
            want = torch.cat([on_cpu(rank + k, size) for rank in range(me.world)])
            same(outputs[k], want, f"all_gather_into_tensor {k}")


@on_ranks(2, planes=PLANES)
def test_futures_follow_the_device(me: Rank) -> None:
    """What a future's callback does comes behind the operation, without a wait on the host."""
    for size in (4, 300):
        data = filled(me.rank + 1, size)
        work = dist.all_reduce(data, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        same(doubled.wait(), on_cpu(6, size), "a chained future")
        work.wait()
        same(data, on_cpu(3, size), "all_reduce")


@on_ranks(2, planes=("nccl", "staged"))
def test_refused_inside_a_capture(me: Rank) -> None:
    from device import simulated

    data = filled(1)
    work = dist.all_reduce(data, async_op=True)
    with simulated.capturing():
        raises(lambda: dist.all_reduce(filled(1)), "a collective", NotImplementedError, "recording of a CUDA graph")
        raises(lambda: dist.isend(filled(1), 1 - me.rank), "a message", NotImplementedError, "recording")
        raises(work.wait, "wait()", NotImplementedError, "recording")
        cpu = on_cpu(1)
        dist.all_reduce(cpu)  # is no part of the graph
    work.wait()
    same(data, on_cpu(2), "the work from before")
    same(cpu, on_cpu(2), "on the CPU")
    dist.all_reduce(data)
    same(data, on_cpu(4), "afterwards")


class Log:
    """What NCCL is asked for from here on: a line per kernel."""

    def __init__(self) -> None:
        torch.sim.synchronize()
        self._seen = len(kernels())

    def lines(self) -> list[str]:
        torch.sim.synchronize()
        return [line.split(": ", 1)[1] for line in kernels()[self._seen :]]


@on_ranks(2, 3, planes=("nccl",))
def test_small_ones_are_launched_as_few(me: Rank) -> None:
    """A round of the agreement takes some dozens of operations; what it takes is one call of NCCL."""
    dist.all_reduce(filled(1))
    for coalesced, most in ((True, 5), (False, 50)):
        log = Log()
        data = [filled(me.rank + k, 1 + k) for k in range(100)]
        if coalesced:
            with _coalescing_manager(async_ops=True) as manager:
                for tensor in data:
                    dist.all_reduce(tensor)
            manager.wait()
        else:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in data]:
                work.wait()
        for k, tensor in enumerate(data):
            same(tensor, on_cpu(ranks_sum(me) + k * me.world, 1 + k), f"sum {k}")
        lines = log.lines()
        assert len(lines) <= most, f"100 sums (coalesced: {coalesced}) are {len(lines)} kernels: {lines}"
        counts = [int(call.split()[-1]) for line in lines for call in line.split("; ")]
        assert sum(counts) == sum(range(1, 101)), f"not each element once: {lines}"


@on_ranks(2, planes=("nccl",))
def test_large_ones_go_as_they_are(me: Rank) -> None:
    """A call of their own, without copies around it; small ones beside them are still one, in the same kernel."""
    dist.all_reduce(filled(1))
    log = Log()
    large = [filled(me.rank, 200_000), filled(me.rank, 100_000)]
    small = [filled(me.rank, 10), filled(me.rank, 20)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in (large[0], small[0], large[1], small[1]):
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in (*large, *small):
        same(tensor, on_cpu(1, tensor.numel()), f"sum of {tensor.numel()}")
    lines = log.lines()
    assert len(lines) == 1, f"a coalesced block is one kernel, not {lines}"
    calls = sorted(int(call.removeprefix("allreduce float32 sum ")) for call in lines[0].split("; "))
    assert calls == [30, 100_000, 200_000], f"calls of {calls}"


@on_ranks(2, 3, planes=("nccl",))
def test_a_coalesced_block_is_one_kernel(me: Rank) -> None:
    backend = dist.group.WORLD._get_backend(DEVICE)
    dist.all_reduce(filled(1))
    log = Log()
    gathered, share = filled(0, 7 * me.world), filled(0, 7)
    backend._start_coalescing()
    dist.all_reduce(filled(1, 7))
    dist.all_reduce(filled(1, 9), dist.ReduceOp.MAX)
    dist.broadcast(filled(1, 7), 0)
    dist.all_gather_into_tensor(gathered, filled(1, 7))
    dist.reduce_scatter_tensor(share, filled(1, 7 * me.world))
    dist.all_to_all_single(filled(0, 2 * me.world), filled(1, 2 * me.world))
    backend._end_coalescing().wait()
    lines = log.lines()
    assert len(lines) == 1, f"not one kernel: {lines}"
    kinds = [call.split()[0] for call in lines[0].split("; ")]
    for kind in ("allreduce", "broadcast", "allgather", "reducescatter", "send", "recv"):
        assert kind in kinds, f"no {kind}: {lines}"
    assert kinds.count("allreduce") == 2 and kinds.count("send") == kinds.count("recv") == me.world, lines
    assert "broadcast uint8 - 28 root 0" in lines[0], lines


@on_ranks(2, planes=("nccl",))
def test_the_host_moves_what_nccl_lacks(me: Rank) -> None:
    dist.all_reduce(filled(1))
    log = Log()
    bits, short = torch.full((9,), 6 + me.rank), torch.full((9,), 3, dtype=torch.int16)
    works = [dist.all_reduce(bits, dist.ReduceOp.BAND, async_op=True), dist.all_reduce(short, async_op=True)]
    data = filled(me.rank)
    works.append(dist.all_reduce(data, async_op=True))
    for work in works:
        work.wait()
    same(bits, torch.full((9,), 6, device="cpu"), "BAND")
    same(short, torch.full((9,), 6, dtype=torch.int16, device="cpu"), "sum of int16")
    same(data, on_cpu(1), "sum of floats")
    assert log.lines() == ["allreduce float32 sum 5"], log.lines()
