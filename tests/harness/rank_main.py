"""The process of one rank: joins the world, then runs the bodies that pytest sends until told to end."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from harness.messages import Outcome, Task
from harness.planes import DEVICE
from harness.rank import Rank

_GROUP_TIMEOUT = timedelta(seconds=40)  # below a test's limit: the backend's own words come first
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """A rank that hangs in a body would outlive a killed pytest."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _join_world(backend: str) -> Rank:
    if backend == "multicomm":
        importlib.import_module("multicomm")
    name = backend if DEVICE.type == "cpu" else f"cpu:{backend},{DEVICE.type}:{backend}"
    dist.init_process_group(name, timeout=_GROUP_TIMEOUT)
    assert dist.get_backend() == name, f"the default group is on {dist.get_backend()}"
    rank, world = dist.get_rank(), dist.get_world_size()
    side = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    me = Rank(rank, world, backend, dist.PrefixStore("side", side))
    me.make_groups()
    return me


def _attempt(action) -> Outcome:  # noqa: ANN001 - any callable
    try:
        action()
    except BaseException:  # also SystemExit: the rank itself goes on
        return Outcome(traceback.format_exc())
    return Outcome()


def _run(me: Rank, side: dist.Store, task: Task) -> Outcome:
    def body() -> None:
        me.begin(task.number, task.seed, side)
        test = getattr(importlib.import_module(task.module), task.function)
        with DEVICE:  # where tensors are made unless told
            test.body(me, **task.arguments)

    return _attempt(body)


def main(descriptor: int, backend: str, stacks: str) -> None:
    _die_with_parent()
    # torch 2.13 has new names for all_gather_into_tensor and reduce_scatter_tensor; older ones lack them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with open(stacks, "w") as stack_file, Connection(descriptor) as pytest_side:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        torch.set_num_threads(1)
        joined: list[Rank] = []
        start = _attempt(lambda: joined.append(_join_world(backend)))
        pytest_side.send(start)
        if not start.ok:
            return
        me = joined[0]
        side = me.store
        while (task := pytest_side.recv()) is not None:
            pytest_side.send(_run(me, side, task))
        me.groups.clear()
        pytest_side.send(_attempt(dist.destroy_process_group))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
