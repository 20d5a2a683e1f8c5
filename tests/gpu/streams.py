"""Streams, futures and the allocator: results are used on the device without the host waiting for it.

Never run on real hardware so far: only with GPU_DOUBLE=1.
"""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from rank import Here


def total(here: Here) -> int:
    return here.size * (here.size + 1) // 2


def expect(tensor: torch.Tensor, value: float, what: str) -> None:
    found = tensor.cpu()
    if not bool((found == value).all()):
        wrong = int((found != value).sum())
        raise AssertionError(f"{what}: {wrong} of {found.numel()} elements are not {value}: {found[:4].tolist()} ...")


def producer_and_consumer(here: Here) -> None:
    """Filled late in one stream, waited for in another, used there by a kernel."""
    count = here.scaled(1 << 20, 1 << 12)
    for turn in range(5):
        producer, consumer = here.stream(), here.stream()
        data = torch.zeros(count, device=here.device)
        result = torch.zeros(count, device=here.device)
        here.synchronize()
        with here.on(producer):
            here.hold(30)
            data.fill_(here.rank + 1 + turn)
            work = dist.all_reduce(data, async_op=True)
        with here.on(consumer):
            work.wait()
            torch.mul(data, 2, out=result)
        consumer.synchronize()
        expect(result, 2 * (total(here) + turn * here.size), "what the consumer computed")
        expect(data, total(here) + turn * here.size, "the sum itself")


def submitted_before_it_is_written(here: Here) -> str:
    """wait() returns while the device is still busy with what came before (not where the host takes part)."""
    data = here.full(1000, here.rank + 1)
    dist.all_reduce(data.clone())
    here.synchronize()
    begin = time.monotonic()
    here.hold(400)
    work = dist.all_reduce(data, async_op=True)
    work.wait()
    data.mul_(3)
    took = time.monotonic() - begin
    expect(data, 3 * total(here), "a sum behind a busy stream")
    if here.mode == "nccl":
        assert took < 0.25, f"wait() took {took:.3f} s: it has waited for the device"
    return f"wait() came back after {took * 1e3:.1f} ms of about 400"


def pipelines(here: Here) -> None:
    """Several streams, each with a chain of computation and communication; no host synchronisation in between."""
    streams = [here.stream() for _ in range(4)]
    chains = [here.full(5000, here.rank + 1 + i) for i in range(4)]
    here.synchronize()
    for _ in range(here.scaled(20, 5)):
        for stream, data in zip(streams, chains, strict=True):
            with here.on(stream):
                dist.all_reduce(data, async_op=True).wait()
                data.div_(here.size)
    here.synchronize()
    for i, data in enumerate(chains):
        found, right = data.cpu().double(), total(here) / here.size + i
        assert bool(((found - right).abs() < 1e-4).all()), f"chain {i}: {found[:3].tolist()}, not {right}"


def dropped_at_once(here: Here) -> None:
    """Nobody keeps the inputs, and their memory is asked for again at once."""
    count = here.scaled(100_000, 2_000)
    outputs = []
    for turn in range(here.scaled(100, 20)):
        output = torch.empty(count * here.size, device=here.device)
        data = here.full(count, here.rank + turn)
        work = dist.all_gather_into_tensor(output, data, async_op=True)
        del data
        garbage = here.full(count, -1)
        outputs.append((turn, output, work if turn % 2 else None))
        if turn % 2 == 0:
            del work  # nor the work
        del garbage
    dist.barrier()
    dist.all_reduce(torch.ones(1, device=here.device))  # everything before it on the communication stream is done then
    here.synchronize()
    for turn, output, work in outputs:
        if work is not None:
            work.wait()
        for r, piece in enumerate(output.split(count)):
            expect(piece, r + turn, f"piece {r} of turn {turn}")


def dropped_results(here: Here) -> None:
    """Neither the tensor nor the work is kept; what comes after is right."""
    for _ in range(here.scaled(200, 30)):
        dist.all_reduce(here.full(here.scaled(50_000, 1_000), 1), async_op=True)
        here.full(here.scaled(50_000, 1_000), -7)
    data = here.full(1000, here.rank + 1)
    dist.all_reduce(data)
    expect(data, total(here), "the sum after them")


def busy_allocator(here: Here) -> str:
    """Memory comes and goes while communication is in flight; all values are looked at."""
    chance = random.Random(1)  # the same on all ranks
    looked_at = 0
    for turn in range(here.scaled(40, 4)):
        pending = []
        for number in range(20):
            count = chance.randrange(1, here.scaled(1 << 20, 1 << 12))
            data = here.full(count, here.rank + 1 + number)
            work = dist.all_reduce(data, async_op=True)
            kept = [here.full(chance.randrange(1, here.scaled(1 << 20, 1 << 12)), -turn) for _ in range(5)]
            chance.shuffle(kept)
            del kept[chance.randrange(5) :]
            pending.append((number, data, work, kept))
        chance.shuffle(pending)
        for number, data, work, kept in pending:
            work.wait()
            expect(data, total(here) + number * here.size, f"turn {turn}, sum {number}")
            for tensor in kept:
                expect(tensor, -turn, f"turn {turn}: memory of someone else")
            looked_at += 1
        if not here.double and turn % 10 == 9:
            torch.cuda.empty_cache()
    return f"{looked_at} sums"


def futures(here: Here) -> None:
    """get_future(): what is chained to it runs behind the communication, on the device."""
    chained = []
    for turn in range(10):
        data = here.full(here.scaled(100_000, 1_000), here.rank + 1)
        here.hold(5)
        future = dist.all_reduce(data, async_op=True).get_future()
        chained.append((turn, future.then(lambda done, turn=turn: done.value()[0] * 2 + turn)))
    for turn, future in chained:
        result = future.wait()
        plus = result + 1  # on the current stream, without the host having waited
        expect(plus, 2 * total(here) + turn + 1, f"chained to future {turn}")
    late = dist.all_reduce(here.full(10, 1), async_op=True)
    late.wait()
    here.synchronize()
    expect(late.get_future().wait()[0], here.size, "a future asked for after the end")


def high_level_hooks(here: Here) -> None:
    """torch's own users of futures: DDP's half-precision hook on a tiny model."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False).to(here.device))
    model.register_comm_hook(None, fp16_compress_hook)
    model(torch.full((3, 4), float(here.rank), device=here.device)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    right = 3 * (here.size - 1) / 2
    expect(gradient, right, "the mean of the gradients")
