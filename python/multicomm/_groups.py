"""Which group a verb is for, and this process's place among the ranks and nodes."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, Union

import torch.distributed as dist

from multicomm import _C
from multicomm._backend import _backend_of
from multicomm._communicators import group as group_at
from multicomm._communicators import group_of_comm
from multicomm._mpi import await_start

if TYPE_CHECKING:
    from mpi4py import MPI

GroupLike: TypeAlias = Union[dist.ProcessGroup, "MPI.Comm", SupportsIndex, None]
CommunicatorId: TypeAlias = SupportsIndex | None

# Changed by whichever thread uses a group first; a lost update only costs another look.
_backends: dict[Any, _C.ProcessGroupMulticomm] = {}
_torch_world = dist.distributed_c10d._world


def backend_for(group: GroupLike, communicator_id: CommunicatorId) -> _C.ProcessGroupMulticomm:
    """Our part of the group that a verb's `group` and `communicator_id` name; the world's where both are None.

    Raises:
        ValueError: both are given, this rank is not a member, it is no multicomm group, or nothing is initialised.
        TypeError: ``group`` is neither a process group nor a communicator nor an integer.
    """
    if communicator_id is None:
        if group is None:
            group = _torch_world.default_pg
        if isinstance(group, dist.ProcessGroup):
            found = _backends.get(group)
            return found if found is not None else _remember(group)
    return _remember(_named(group, communicator_id))


def _named(group: GroupLike, communicator_id: CommunicatorId) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "multicomm is not initialised: call multicomm.init() or "
            "torch.distributed.init_process_group('multicomm') first"
        )
    rank = dist.get_rank()
    if communicator_id is not None:
        if group is not None:
            raise ValueError(f"rank {rank}: group and communicator_id are both given: pass one of them")
        return group_at(communicator_id)
    if group is dist.GroupMember.NON_GROUP_MEMBER or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {rank} is not a member of this group: only its members call an operation on it")
    try:
        return group_at(operator.index(group))  # type: ignore[arg-type]
    except TypeError:
        return group_of_comm(group)  # type: ignore[arg-type]


def _remember(group: dist.ProcessGroup) -> _C.ProcessGroupMulticomm:
    backend = _backend_of(group)
    if backend is None:
        raise ValueError(
            f"rank {dist.get_rank()}: group {group.group_name!r} is not a multicomm group: make it with "
            "torch.distributed.new_group(ranks, backend='multicomm')"
        )
    for destroyed in [known for known in _backends if known not in _torch_world.pg_map]:
        del _backends[destroyed]
    _backends[group] = backend
    return backend


def _place(group: GroupLike, communicator_id: CommunicatorId) -> tuple[int, int]:
    """This process's rank in the group, and the group's size."""
    ranks = backend_for(group, communicator_id)._global_ranks
    return ranks.index(backend_for(None, None)._global_ranks[dist.get_rank()]), len(ranks)


def is_initialized() -> bool:
    """Whether the verbs can be used: ``torch.distributed`` is initialised, with multicomm for its default group."""
    return dist.is_initialized() and _backend_of(dist.group.WORLD) is not None


def shutdown() -> None:
    """Destroys all process groups, as ``torch.distributed.destroy_process_group()``; nothing if there are none."""
    _backends.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank(group: GroupLike = None, communicator_id: CommunicatorId = None) -> int:
    """This process's rank, in the world or in the group."""
    return _place(group, communicator_id)[0]


def size(group: GroupLike = None, communicator_id: CommunicatorId = None) -> int:
    """Number of ranks, of the world or of the group."""
    return _place(group, communicator_id)[1]


def _nodes() -> tuple[list[int], int]:
    """The node of every rank of the world, and this rank."""
    backend = backend_for(None, None)
    await_start(backend)
    return _C.nodes(), backend._world_rank


def local_rank() -> int:
    """This process's number among those of its node, by rank; waits until MPI is up."""
    nodes, rank = _nodes()
    return nodes[:rank].count(nodes[rank])


def local_size() -> int:
    """Number of ranks on this node."""
    nodes, rank = _nodes()
    return nodes.count(nodes[rank])


def _peers_across() -> tuple[list[int], int]:
    """The ranks with this one's local rank, one per node that has it; and this rank."""
    nodes, rank = _nodes()
    own = nodes[:rank].count(nodes[rank])
    return [other for other, node in enumerate(nodes) if nodes[:other].count(node) == own], rank


def cross_rank() -> int:
    """The number of this process's node, among the nodes that have a rank with this local rank."""
    peers, rank = _peers_across()
    return peers.index(rank)


def cross_size() -> int:
    """Number of nodes that have a rank with this local rank."""
    return len(_peers_across()[0])


__all__ = [
    "cross_rank",
    "cross_size",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
