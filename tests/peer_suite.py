"""torch's own distributed tests, which ship in its wheel, against the backend named by $BACKEND.

    BACKEND=multicomm WORLD_SIZE=3 python tests/peer_suite.py -v [-k name ...]

torch's module evaluates its skip decorators while it is imported, so the backend is registered, and added to the
features that the decorators ask for, before that.
"""
# ruff: noqa: E402

from __future__ import annotations

import importlib
import os
import tempfile

BACKEND = os.environ.setdefault("BACKEND", "multicomm")
os.environ.setdefault("WORLD_SIZE", "3")
FOLDER = os.environ.setdefault("TEMP_DIR", os.path.join(tempfile.gettempdir(), f"multicomm_peer_suite_{os.getpid()}"))
for name in ("barrier", "test_dir", "init_dir"):
    os.makedirs(os.path.join(FOLDER, name), exist_ok=True)

import torch.testing._internal.common_distributed as common

if BACKEND not in ("gloo", "mpi", "nccl", "ucc"):
    importlib.import_module(BACKEND)
    for feature in ("ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature].add(BACKEND)

from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestWithSpawnedRanks(TestDistBackend, DistributedTest._DistTestBase):
    """Each test starts its ranks anew."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


if __name__ == "__main__":
    run_tests()
