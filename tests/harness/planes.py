"""Where a pool's tensors are: on the CPU, or on simulated devices beside a double of NCCL (tests/device)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from harness.settings import seed_of
from harness.simulated import NCCL

_DEVICE = "TEST_DEVICE"


@dataclass(frozen=True)
class Plane:
    """How multicomm comes to move tensors of devices: each rank has a device of its own, or all share one."""

    shared: bool
    environment: dict[str, str] = field(default_factory=dict)

    def variables(self, rank: int) -> dict[str, str]:
        """The environment of a rank."""
        device = {_DEVICE: f"sim:{0 if self.shared else rank}", "MULTICOMM_NCCL_LIBRARY": str(NCCL)}
        return device | self.environment


_LATE = {"SIM_DELAY_US": "300", "SIM_SEED": str(seed_of("late streams"))}
PLANES = {
    "nccl": Plane(shared=False),
    "staged": Plane(shared=True),  # which NCCL refuses
    "chunked": Plane(shared=True, environment={"MULTICOMM_STAGING_BYTES": "64"}),
    "nccl_late": Plane(shared=False, environment=_LATE),
    "chunked_late": Plane(shared=True, environment={"MULTICOMM_STAGING_BYTES": "64"} | _LATE),
    "nccl_only": Plane(shared=False, environment={"MULTICOMM_CUDA": "nccl"}),
    "staged_only": Plane(shared=False, environment={"MULTICOMM_CUDA": "staged"}),
}


def _load_device() -> torch.device:
    """In the process of a rank that has a device: makes it known to torch, and the current one."""
    name = os.environ.get(_DEVICE, "cpu")
    if name != "cpu":
        from device import simulated  # only where it has been built

        simulated.load()
        torch.sim.set_device(name)
    return torch.device(name)


DEVICE = _load_device()
"""In a rank's process: where its tensors are."""
