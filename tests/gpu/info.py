"""What is being tested: versions and devices. Never run on real hardware so far: only with GPU_DOUBLE=1."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import multicomm
import torch
import torch.distributed as dist
from rank import Here

NCCL_NAMES = ("libnccl.so", "libnccl_double.so")


def loaded(name: str) -> str:
    """The file of a library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and os.path.basename(path).startswith(name):
            return path
    return ""


def everything(here: Here) -> str:
    data = here.full(10, 3)
    dist.all_reduce(data)
    assert data.tolist() == [3.0 * here.size] * 10
    found = next((path for path in map(loaded, NCCL_NAMES) if path), "")
    assert found, "no NCCL is loaded after an all_reduce"
    version = ctypes.c_int()
    ctypes.CDLL(found).ncclGetVersion(ctypes.byref(version))
    number = version.value
    device = here.kind if here.double else torch.cuda.get_device_name(here.device)
    driver = Path("/proc/driver/nvidia/version")
    return "\n".join(
        [
            f"multicomm {multicomm.__version__} in {Path(multicomm.__file__).parent}",
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, {here.count} x {device}",
            f"driver: {driver.read_text().splitlines()[0] if driver.exists() else 'unknown'}",
            f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100} in {found}",
            f"MPI in {loaded('libmpi.so')}",
        ]
    )
