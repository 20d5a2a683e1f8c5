"""mpi4py communicators as process groups of torch."""

from __future__ import annotations

import itertools
import operator
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, SupportsIndex

import torch.distributed as dist

from multicomm._backend import _backend_of
from multicomm._exchange import agree, digest
from multicomm._meeting import meet
from multicomm._mpi import Members, imported_mpi, is_installed, members_of, start_torch, started_mpi

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


@dataclass
class _Entry:
    """A communicator that this rank has passed."""

    comm: MPI.Intracomm
    members: Members
    name: str  # the same on all members, also where they count their communicators differently
    group: dist.ProcessGroup
    lock: threading.Lock = field(default_factory=threading.Lock)
    duplicate: MPI.Intracomm | None = None  # guarded by lock
    tries: int = 0  # guarded by lock: how often comm_of was called in vain


@dataclass
class _Passed:
    """What this rank has passed to init() and add_comm() in the life of one default group.

    Changed by one thread at a time, as torch's own table of groups.
    """

    world: dist.ProcessGroup  # the default group
    life: int
    timeout: timedelta
    entries: list[_Entry | str]  # a text: there is no group at this index, and why
    added: Counter[Members] = field(default_factory=Counter)


_passed: _Passed | None = None
_attempts = (
    itertools.count()
)  # of init(), which is collective: the same on all ranks. torch's store may outlive its groups


def init(comms: Sequence[MPI.Intracomm] | None = None, *, timeout: timedelta | None = None) -> None:
    """Makes a process group of each of these mpi4py communicators, in the communicator's own rank order.

    Every rank of MPI's world calls it once, with the communicators that it is a member of; the lists of different ranks
    may differ in length and order. A communicator is known by its members and their order: of several that are equal
    in this, the first of one rank belongs to the first of the others. The communicators stay the caller's; multicomm
    communicates on duplicates of its own. ``torch.distributed`` is initialised with multicomm unless it is: under
    mpirun or ``srun --mpi=pmix`` from MPI, else from what torchrun sets.

    Args:
        comms: intra-communicators of any kind: the world, splits, in any rank order, overlapping, several equal ones,
            cartesian ones and graphs. ``MPI.COMM_NULL`` is skipped and keeps its index. None stands for the world; only
            that needs no mpi4py, and without it there is no communicator to name by its index.
        timeout: of the groups, and of the wait for the other ranks; by default that of torch's default group.

    Raises:
        TypeError: ``comms`` is not a list, or holds something that is not an mpi4py communicator.
        ValueError: the ranks' lists do not fit together (on all ranks, with a table of who passed what); a
            communicator that cannot be a group; init() was called before; ``torch.distributed`` is initialised with
            another backend or has another world than MPI.
        ImportError: mpi4py is missing.
        torch.distributed.DistBackendError: a rank has not called init() within the time-out.
    """
    global _passed
    if _live() is not None:
        raise ValueError(
            "multicomm.init() was called before in this process: add further communicators by multicomm.add_comm(), or "
            "call torch.distributed.destroy_process_group() first"
        )
    if comms is None and not is_installed():  # whoever has no communicators needs none
        if not dist.is_initialized():
            start_torch(timeout)
        return
    mpi = started_mpi(timeout)
    wrong: TypeError | ValueError | None = None
    members: list[Members | None] = []
    try:
        chosen = _listed(mpi, comms)
        members = [members_of(mpi, comm, f"comms[{index}]") for index, comm in enumerate(chosen)]
    except (TypeError, ValueError) as error:  # is told to the others, who wait for this rank
        wrong = error
    default = _default_group()
    patience = timeout or _timeout_of(default)
    life = next(_attempts)
    rank, size = dist.get_rank(), dist.get_world_size()
    meet("multicomm.init()", f"init/{life}", range(size), rank, patience)
    numbers = agree(mpi.COMM_WORLD, members, wrong)
    entries: list[_Entry | str] = ["was MPI.COMM_NULL, which this rank is not a member of"] * len(members)
    # In one order on all ranks, though the groups' creation does not need it: errors and tables then read alike.
    for number, index in sorted((number, index) for index, number in enumerate(numbers) if number is not None):
        entries[index] = _entry(chosen[index], members[index] or (), f"comm{number}", patience)
    _passed = _Passed(default, life, patience, entries)


def group(index: SupportsIndex) -> dist.ProcessGroup:
    """The process group of a communicator, for ``group=`` of any ``torch.distributed`` call, for DDP and so on.

    Args:
        index: place of the communicator in what this rank passed to init(), or what add_comm() returned.

    Raises:
        ValueError: there is no group at this index, or init() was not called.
        TypeError: ``index`` is not an integer.
    """
    return _at(_required(), index).group


def group_of_comm(comm: MPI.Comm) -> dist.ProcessGroup:
    """The process group of a communicator that was passed to init() or add_comm().

    Raises:
        TypeError: it is no communicator.
        ValueError: it was not passed, or init() was not called.
    """
    rank = dist.get_rank()
    if not isinstance(comm, imported_mpi().Comm):
        raise TypeError(
            f"rank {rank}: group must be a process group, an mpi4py communicator or the index of one, not "
            f"{type(comm).__name__}"
        )
    found = next((entry for entry in _required().entries if isinstance(entry, _Entry) and entry.comm == comm), None)
    if found is None:
        raise ValueError(
            f"rank {rank}: there is no group of this communicator: pass it to multicomm.init(comms=[...]) or "
            "multicomm.add_comm() first"
        )
    return found.group


def comm_of(group: dist.ProcessGroup | SupportsIndex) -> MPI.Intracomm:
    """An mpi4py communicator of a group's members, for calls of the user's own while the group communicates.

    The first call is collective over the members: a duplicate of the communicator that was passed is made, with its
    topology (where that has been freed in the meantime, a plain one of the same members). Later calls return the same
    one. multicomm never uses it. It lives until the user frees it, also when the group is removed.

    Args:
        group: a process group that init() or add_comm() has made, or its index.

    Raises:
        ValueError: it is no such group, or init() was not called.
        TypeError: ``group`` is neither a process group nor an integer.
        torch.distributed.DistBackendError: a member has not called comm_of() within the group's time-out.
    """
    passed = _required()
    if isinstance(group, dist.ProcessGroup):
        found = next((entry for entry in passed.entries if isinstance(entry, _Entry) and entry.group is group), None)
        if found is None:
            raise ValueError(
                f"rank {dist.get_rank()}: group is not one that multicomm made of a communicator, or was removed: pass "
                "what multicomm.group() returns, or an index"
            )
    else:
        found = _at(passed, group)
    with found.lock:
        if found.duplicate is None:
            key = f"comm_of/{passed.life}/{found.name}/{found.tries}"
            found.tries += 1
            meet(f"multicomm.comm_of({found.name})", key, found.members, dist.get_rank(), _timeout_of(found.group))
            found.duplicate = _duplicate(found)
        return found.duplicate


def world() -> MPI.Intracomm:
    """MPI's world as an mpi4py communicator, also under torchrun, where multicomm makes it.

    Initialises ``torch.distributed`` with multicomm unless it is, as init() does, and waits until MPI is up: for that
    every rank must come to it, or to a first multicomm group of its own. Under torchrun call this before
    anything imports ``mpi4py.MPI``, and split communicators for init() from what it returns.

    Raises:
        ValueError: ``torch.distributed`` is initialised with another backend or has another world than MPI.
        ImportError: mpi4py is missing.
        RuntimeError: MPI could not be started, or mpi4py was built for another MPI library than multicomm.
    """
    comm: MPI.Intracomm = started_mpi(None).COMM_WORLD
    return comm


def add_comm(comm: MPI.Intracomm) -> int:
    """Makes a process group of one more communicator. Called by its members, each once; the others do nothing.

    Returns at once, as ``torch.distributed.new_group`` does: the group's first operation waits for the other members,
    and its time-out names those that did not call add_comm().

    Args:
        comm: an intra-communicator, as for init().

    Returns:
        its index in this rank's list, for group(), comm_of() and remove_comm(). An index is never used again.

    Raises:
        TypeError: ``comm`` is not an mpi4py communicator.
        ValueError: ``comm`` cannot be a group, or init() was not called.
    """
    passed = _required()
    members = members_of(imported_mpi(), comm, "comm")
    if members is None:
        raise ValueError(
            f"rank {dist.get_rank()}: comm is MPI.COMM_NULL: this rank is not a member, or the communicator was "
            "freed; only members call multicomm.add_comm()"
        )
    name = f"comm-{digest(members).hex()[:8]}.{passed.added[members]}"
    passed.entries.append(_entry(comm, members, name, passed.timeout))
    passed.added[members] += 1
    return len(passed.entries) - 1


def remove_comm(index: SupportsIndex) -> None:
    """Ends the process group of a communicator. Called by its members.

    Waits a moment (2 s) for pending work, as ``torch.distributed.destroy_process_group`` does. The communicator, and
    the one that comm_of() returned, stay the user's.

    Args:
        index: as for group().

    Raises:
        ValueError: there is no group at this index, or init() was not called.
        TypeError: ``index`` is not an integer.
    """
    passed = _required()
    entry = _at(passed, index)
    passed.entries[operator.index(index)] = "was removed"
    if entry.group in dist.distributed_c10d._world.pg_map:  # else the user has destroyed it himself
        dist.destroy_process_group(entry.group)


def _live() -> _Passed | None:
    """What was passed, unless torch's world has been destroyed since."""
    global _passed
    if _passed is not None and _passed.world is not dist.group.WORLD:
        _passed = None
    return _passed


def _required() -> _Passed:
    passed = _live()
    if passed is None:
        raise ValueError("there are no communicators: call multicomm.init(comms=[...]) first, on every rank")
    return passed


def _at(passed: _Passed, index: SupportsIndex) -> _Entry:
    rank = dist.get_rank()
    try:
        place = operator.index(index)
    except TypeError:
        raise TypeError(f"rank {rank}: the index of a communicator is an integer, not {type(index).__name__}") from None
    if not 0 <= place < len(passed.entries):
        have = f"0 to {len(passed.entries) - 1}" if passed.entries else "none"
        raise ValueError(f"rank {rank}: index {place} is out of range: this rank's communicators are {have}")
    entry = passed.entries[place]
    if isinstance(entry, str):
        raise ValueError(f"rank {rank}: the communicator at index {place} {entry}: there is no group")
    return entry


def _default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend = _backend_of(group)
    assert backend is not None
    return backend.options._timeout


def _listed(mpi: ModuleType, comms: Sequence[MPI.Intracomm] | None) -> list[MPI.Intracomm]:
    if comms is None:
        return [mpi.COMM_WORLD]
    if isinstance(comms, (list, tuple)):
        return list(comms)
    hint = ": pass [comm]" if isinstance(comms, mpi.Comm) else ""
    raise TypeError(
        f"rank {dist.get_rank()}: comms must be a list of mpi4py communicators, not {type(comms).__name__}{hint}"
    )


def _entry(comm: MPI.Intracomm, members: Members, name: str, timeout: timedelta) -> _Entry:
    """The communicator with its process group, registered with torch.

    As torch.distributed.new_group, which has no way to give a name: its own names count the groups that this rank has
    made, so that members would disagree on them, and then on those of all groups to come.
    """
    torch_world = dist.distributed_c10d._world
    default = _default_group()
    made, _ = dist.distributed_c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        list(members),
        dist.Backend("multicomm"),
        torch_world.pg_map[default][1],
        name,
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=name,
    )
    torch_world.pg_group_ranks[made] = {member: place for place, member in enumerate(members)}
    return _Entry(comm, members, name, made)


def _duplicate(entry: _Entry) -> MPI.Intracomm:
    mpi = imported_mpi()
    if entry.comm != mpi.COMM_NULL:
        return entry.comm.Dup()
    everybody = mpi.COMM_WORLD.Get_group()
    chosen = everybody.Incl(entry.members)
    made: MPI.Intracomm = mpi.COMM_WORLD.Create_group(chosen)
    everybody.Free()
    chosen.Free()
    return made


__all__ = ["add_comm", "comm_of", "group", "init", "remove_comm", "world"]
