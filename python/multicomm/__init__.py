"""multicomm: a torch.distributed backend for many overlapping process groups.

Importing the package registers the backend::

    import torch.distributed as dist, multicomm
    dist.init_process_group("multicomm")
    rows = dist.new_group([0, 1], backend="multicomm")

or, from mpi4py communicators, ``multicomm.init(comms=[comm, subcomm])``.
"""

from __future__ import annotations

from multicomm import _stack as _stack  # here, since a thread that reads stacks should import nothing
from multicomm._backend import _register, launched_by_mpi, start, stats
from multicomm._communicators import add_comm, comm_of, group, init, remove_comm, world
from multicomm._timeline import start_timeline, stop_timeline

__version__ = "0.1.0"
__all__ = [
    "add_comm",
    "comm_of",
    "group",
    "init",
    "launched_by_mpi",
    "remove_comm",
    "start",
    "start_timeline",
    "stats",
    "stop_timeline",
    "world",
]

_register()
