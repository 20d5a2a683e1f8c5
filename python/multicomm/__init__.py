"""multicomm: a torch.distributed backend for many overlapping process groups.

Importing the package registers the backend::

    import torch.distributed as dist, multicomm
    dist.init_process_group("multicomm")
    rows = dist.new_group([0, 1], backend="multicomm")

or, from mpi4py communicators, ``multicomm.init(comms=[comm, subcomm])``.
"""

from __future__ import annotations

from multicomm import _stack as _stack  # here, since a thread that reads stacks should import nothing
from multicomm._adasum_hook import adasum_hook
from multicomm._backend import _register, launched_by_mpi, start, stats
from multicomm._broadcast import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from multicomm._communicators import add_comm, comm_of, group, init, remove_comm, world
from multicomm._compression import Compression, Compressor
from multicomm._groups import (
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from multicomm._join import join, join_async
from multicomm._optimizer import DistributedOptimizer
from multicomm._redistribution import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from multicomm._reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from multicomm._timeline import start_timeline, stop_timeline
from multicomm._verbs import (
    Handle,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)

__version__ = "0.1.0"
__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "adasum_hook",
    "add_comm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "comm_of",
    "cross_rank",
    "cross_size",
    "group",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "join_async",
    "launched_by_mpi",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_comm",
    "shutdown",
    "size",
    "start",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "world",
]

_register()
