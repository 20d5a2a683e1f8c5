"""`torch.sim`: what torch and its users ask of a device's module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Device = torch.device | str | int | None
Stream = torch.Stream
Event = torch.Event


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def _is_in_bad_fork() -> bool:
    return False  # load() puts the library's answer here


def _lazy_init() -> None: ...


def init() -> None: ...


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return torch._C._accelerator_hooks_device_count()


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


def synchronize(device: Device = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(_device_type()))


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


def _device_type() -> Any:
    return torch._C._autograd.DeviceType.PrivateUse1


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes the stream the current one, and its device, for a while."""
    if stream is None:
        yield
        return
    with stream:
        yield


@contextmanager
def device(device: Device) -> Iterator[None]:
    """Makes the device the current one for a while."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


# Random operations run on the CPU and draw from its generator, which torch seeds by itself.
def manual_seed(seed: int) -> None: ...


def manual_seed_all(seed: int) -> None: ...


def get_rng_state(device: Device = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def empty_cache() -> None: ...
