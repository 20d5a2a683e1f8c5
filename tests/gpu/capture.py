"""CUDA graphs: collectives inside are refused, others' computation beside communication is not disturbed.

Never run on real hardware so far: only with GPU_DOUBLE=1, whose streams only say that they are recorded, and run.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from rank import Here, fails


def beside_communication(here: Here) -> str:
    """One thread records and replays computation while another communicates on another group."""
    group = here.new_group()
    tensors = [here.full(10_000, 1) for _ in range(8)]
    dist.all_reduce(tensors[0], group=group)  # connected before the recording
    tensors[0].fill_(1)
    x = here.full(1000, 2)
    warm = here.stream()
    with here.on(warm):
        (x * 3 + 1).sum()
    here.synchronize()
    stop, failure, rounds = threading.Event(), [], [0]

    def communicate() -> None:
        try:
            here.api.set_device(here.device)
            with here.on(here.stream()):
                while not stop.is_set() or rounds[0] < 3:
                    pending = [dist.all_reduce(t, dist.ReduceOp.MAX, group=group, async_op=True) for t in tensors]
                    for work in pending:
                        work.wait()
                    rounds[0] += 1
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=communicate, daemon=True)
    # Ranks may make different numbers of rounds: rank by rank alone, each with a group of one, is what this needs.
    if here.size > 1:
        raise AssertionError("for one rank")
    thread.start()
    try:
        for turn in range(here.scaled(30, 5)):
            y = torch.empty_like(x)
            if here.double:
                with here.recording():
                    torch.add(x * 3, turn, out=y)
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    torch.add(x * 3, turn, out=y)
                graph.replay()
            found = y.cpu()
            assert bool((found == 6 + turn).all()), f"replay {turn}: {found[:3].tolist()}"
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive(), "the communicating thread hangs"
    if failure:
        raise failure[0]
    here.synchronize()
    for tensor in tensors:
        assert bool((tensor.cpu() == 1).all())
    return f"{rounds[0]} rounds of communication meanwhile"


def refused(here: Here) -> None:
    """A collective inside a recording raises the error that says what to do; afterwards it works again."""
    data = here.full(100, 1)
    dist.all_reduce(data)
    here.synchronize()

    def record() -> None:
        with here.recording():
            dist.all_reduce(data)

    fails(record, "NotImplementedError", "inside the recording of a CUDA graph is not supported")
    data = here.full(100, 2)
    dist.all_reduce(data)
    assert data.tolist() == [2.0 * here.size] * 100


def wait_refused(here: Here) -> None:
    data = here.full(100, 1)
    work = dist.all_reduce(data, async_op=True)

    def record() -> None:
        with here.recording():
            work.wait()

    fails(record, "wait()", "inside the recording of a CUDA graph is not supported")
    work.wait()
    assert data.tolist() == [float(here.size)] * 100
