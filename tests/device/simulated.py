"""Loads the simulated accelerator of simulated_device.cpp, and what a test does to its streams."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from device import torch_sim

LIBRARY = Path(os.environ.get("SIM_LIBRARY", Path(__file__).parents[2] / "build/device/libsimulated_device.so"))
POISON = 0xFB  # each byte of memory that is free or was never written


@functools.cache
def load() -> ctypes.CDLL:
    """Once per process: torch's spare device type becomes "sim", its module `torch.sim`. More calls do nothing."""
    assert LIBRARY.exists(), f"{LIBRARY} is missing: run the tests by `make test`, or `make {LIBRARY}` first"
    torch.ops.load_library(str(LIBRARY))
    library = ctypes.CDLL(str(LIBRARY))  # calls leave the interpreter's lock
    library.sim_block.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.sim_block.restype = ctypes.c_void_p
    library.sim_open.argtypes = [ctypes.c_void_p]
    library.sim_open.restype = None
    library.sim_set_capturing.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_bool]
    library.sim_set_capturing.restype = None
    library.sim_in_bad_fork.restype = ctypes.c_bool
    library.sim_stop.restype = None
    torch.utils.rename_privateuse1_backend("sim")
    torch_sim._is_in_bad_fork = library.sim_in_bad_fork
    torch._register_device_module("sim", torch_sim)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_stop)
    return library


def _stop() -> None:
    load().sim_stop()
    # Autograd's threads drop the last graph after backward() has returned; torch aborts if the interpreter ends first.
    time.sleep(0.05)


class Gate:
    """Holds up a stream until `open()`; as a context, until its end."""

    def __init__(self, stream: torch.Stream) -> None:
        self._gate: int | None = load().sim_block(stream.device_index, stream.stream_id)

    def open(self) -> None:
        """Lets the stream go on. More calls do nothing."""
        gate, self._gate = self._gate, None
        if gate is not None:
            load().sim_open(gate)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


def block(stream: torch.Stream | None = None) -> Gate:
    """Enqueues a task that ends when the gate opens; on the current stream unless told."""
    return Gate(stream or torch_sim.current_stream())


@contextmanager
def capturing(stream: torch.Stream | None = None) -> Iterator[None]:
    """Says of the stream that it is being captured (`is_capturing`); its tasks run all the same."""
    stream = stream or torch_sim.current_stream()
    load().sim_set_capturing(stream.device_index, stream.stream_id, True)
    try:
        yield
    finally:
        load().sim_set_capturing(stream.device_index, stream.stream_id, False)
