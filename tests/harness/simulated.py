"""Jobs on the simulated device and the double of NCCL: the environment they need, and how their ranks begin."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from harness.settings import TESTS

_LIBRARIES = TESTS.parent / "build/device"
NCCL = _LIBRARIES / "libnccl_double.so"
DEVICE_MPI = _LIBRARIES / "libdevice_mpi.so"
SPEC = "cpu:multicomm,sim:multicomm"


def on_devices(**more: str) -> dict[str, str]:
    """Variables of a job whose tensors NCCL's double moves."""
    assert NCCL.exists(), f"{NCCL} is missing: run the tests by `make test`, or `make {NCCL}` first"
    return {"MULTICOMM_NCCL_LIBRARY": str(NCCL)} | more


def join(seconds: float = 30, *, shared: bool = False, spec: str = SPEC) -> tuple[int, torch.device]:
    """Makes the world; returns rank and device. `shared`: all ranks use one device, which NCCL refuses."""
    from device import simulated

    simulated.load()
    dist.init_process_group(spec, timeout=timedelta(seconds=seconds))
    device = torch.device("sim", 0 if shared else dist.get_rank())
    torch.get_device_module("sim").set_device(device)
    return dist.get_rank(), device


def group(ranks: list[int], seconds: float = 30) -> dist.ProcessGroup:
    return dist.new_group(ranks, backend=SPEC, timeout=timedelta(seconds=seconds))


@cache
def _double() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["MULTICOMM_NCCL_LIBRARY"])


def plan_failure(text: str) -> None:
    """What NCCL's double is to do wrong from here on, see nccl_double.h."""
    _double().nccl_double_fail(text.encode())


def kernels() -> list[str]:
    """What NCCL's double has launched in this process: a line per kernel."""
    library = _double()
    library.nccl_double_log.restype = ctypes.c_size_t
    size = library.nccl_double_log(None, ctypes.c_size_t(0))
    buffer = ctypes.create_string_buffer(size + 1)
    library.nccl_double_log(buffer, ctypes.c_size_t(size + 1))
    return buffer.value.decode().splitlines()
