"""mpi4py beside multicomm: who starts MPI, and communicators as ranks of the world."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from multicomm import _C
from multicomm._backend import _backend_of, launched_by_mpi

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

_NOT_STARTED = _C.start_description()  # nothing can have started it before this
_POLL_SECONDS = 0.005

Members = tuple[int, ...]  # of a communicator: ranks of the world, in the communicator's rank order


def imported_mpi() -> ModuleType:
    """mpi4py.MPI, which is not to start or end MPI where multicomm does."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
        raise ImportError(
            f"MPI communicators need mpi4py, which cannot be imported: {error}. pip install mpi4py (the rest of "
            "multicomm works without it)"
        ) from error
    return MPI


def is_installed() -> bool:
    """Whether there is mpi4py, without importing it."""
    return importlib.util.find_spec("mpi4py") is not None


def started_mpi(timeout: timedelta | None) -> ModuleType:
    """mpi4py.MPI, when torch's world and MPI are up and agree."""
    if not is_installed():
        imported_mpi()  # raises, before anything is started
    if not dist.is_initialized():
        start_torch(timeout)
    default = _backend_of(dist.group.WORLD)
    if default is None:
        raise ValueError(
            f"torch.distributed is initialised with the backend {dist.get_backend()!r}: initialise it with "
            "'multicomm', or leave it to multicomm.init()"
        )
    await_start(default)
    mpi = imported_mpi()  # only now, with MPI up, it makes errors on MPI's world exceptions
    if not mpi.Is_initialized():
        raise RuntimeError(
            f"mpi4py uses another MPI library ({mpi.Get_library_version().split(',')[0]}) than multicomm: install both "
            "for the same one"
        )
    size = mpi.COMM_WORLD.Get_size()
    if default._global_ranks != list(range(size)):
        raise ValueError(
            f"torch's world has the ranks {default._global_ranks} of MPI's world of {size}: MPI communicators need "
            "torch's world to be MPI's"
        )
    return mpi


def start_torch(timeout: timedelta | None) -> None:
    """torch's world, from whoever has started this process."""
    mpi = sys.modules.get("mpi4py.MPI")
    own_world = mpi.COMM_WORLD.Get_size() if mpi is not None and mpi.Is_initialized() else 0
    if launched_by_mpi() or (own_world and not dist.is_torchelastic_launched()):
        dist.init_process_group("multicomm", init_method="mpi://", timeout=timeout)
        return
    if "RANK" not in os.environ:
        raise ValueError(
            "neither an MPI launcher nor torchrun has started this process: launch it with mpirun, srun --mpi=pmix or "
            "torchrun"
        )
    if own_world not in (0, int(os.environ.get("WORLD_SIZE", own_world))):
        raise ValueError(
            "MPI was initialised, by importing mpi4py.MPI, before multicomm could make MPI's world: under torchrun "
            "call multicomm.world() before anything imports mpi4py.MPI, or launch with mpirun"
        )
    dist.init_process_group("multicomm", timeout=timeout)


def await_start(default: _C.ProcessGroupMulticomm) -> None:
    """MPI starts in the background, with the default group."""
    while _C.start_description() == _NOT_STARTED:
        if default.get_error().name != "SUCCESS":
            dist.barrier()  # raises, and says why MPI did not start
            raise RuntimeError("MPI could not be started")
        time.sleep(_POLL_SECONDS)


def members_of(mpi: ModuleType, comm: MPI.Intracomm, argument: str) -> Members | None:
    """The communicator's members; None for MPI.COMM_NULL."""
    argument = f"rank {dist.get_rank()}: {argument}"
    if not isinstance(comm, mpi.Comm):
        raise TypeError(f"{argument} is not an mpi4py communicator but {type(comm).__name__}")
    if comm == mpi.COMM_NULL:
        return None
    if comm.Is_inter():
        raise ValueError(
            f"{argument} is an inter-communicator, whose two sides have no common rank order: pass an "
            "intra-communicator, such as comm.Merge()"
        )
    ours, everybody = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    ranks = mpi.Group.Translate_ranks(ours, list(range(ours.Get_size())), everybody)
    ours.Free()
    everybody.Free()
    if mpi.UNDEFINED in ranks:
        raise ValueError(f"{argument} has members outside MPI.COMM_WORLD (spawned ones?), which torch's world lacks")
    return tuple(ranks)
