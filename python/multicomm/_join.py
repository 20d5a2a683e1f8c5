"""Ranks that run out of data before the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from multicomm._groups import CommunicatorId, GroupLike, backend_for


class JoinHandle:
    """A join that is waiting for the other members, for poll() and synchronize()."""

    def __init__(self, work: dist.Work, ranks: Sequence[int]) -> None:
        self._work, self._ranks = work, ranks

    def poll(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> int:
        self._work.wait()
        last: int = self._work._source_rank()
        return self._ranks[last]


def join_async(group: GroupLike = None, communicator_id: CommunicatorId = None) -> JoinHandle:
    """join() that does not wait, for a rank that has run out of data on several groups at once."""
    backend = backend_for(group, communicator_id)
    return JoinHandle(backend._join(), backend._global_ranks)


def join(group: GroupLike = None, communicator_id: CommunicatorId = None) -> int:
    """Says that this rank has nothing more to bring to a group's operations, and waits until all members have said so.

    Meanwhile the rank takes part in whatever the others call on the group, with or without names, also by DDP:

    * reductions get what changes nothing: zeros for a sum, the identity of MIN, MAX, PRODUCT and of the bitwise
      operations; an average divides by the number of members that still bring data;
    * multicomm.allgather() of CPU tensors gets nothing from it; broadcasts, scatters and barriers go on without it.

    Of tensors on devices it takes part on the one that is current when it joins, or that the group has used before.

    What has no meaning then is an error on those who call it, and they can go on: broadcasts, scatters and reductions
    whose root has joined; all_gather, gather and all_to_all, which have a place for every rank; reduce_scatter of
    uneven pieces; averages of unsigned integers wider than 8 bits on devices; Adasum. Messages are not concerned. The
    rank itself can use other groups, from other threads or after join_async(). After the last one's join the group is
    as before.

    Args:
        group, communicator_id: as of allreduce(): a process group, a communicator, or its index; by default the world.

    Returns:
        the global rank of the member that joined last (by the hosts' clocks), the same on all.

    Raises:
        torch.distributed.DistBackendError: no member has called anything on the group for its time-out, or it failed.
    """
    return join_async(group, communicator_id).wait()


__all__ = ["JoinHandle", "join", "join_async"]
