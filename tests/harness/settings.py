"""What the environment decides: the backend under test; and the environment that ranks and jobs get."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
_FOR_RANKS = "TEST_BACKEND"  # multicomm refuses MULTICOMM_* names that it does not know
BACKEND = os.environ.get("MULTICOMM_TEST_BACKEND", os.environ.get(_FOR_RANKS, "multicomm"))
SEED = os.environ.get("MULTICOMM_TEST_SEED")

# Left over from a launcher around pytest itself, these would tell a rank that it belongs to another job.
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE")


def needs_multicomm(reason: str) -> pytest.MarkDecorator:
    """Skips a test whose promise only multicomm makes."""
    return pytest.mark.skipif(BACKEND != "multicomm", reason=f"{BACKEND}: {reason}")


def unless_gloo(reason: str) -> pytest.MarkDecorator:
    """Skips, on Gloo, a test of something that Gloo lacks."""
    return pytest.mark.skipif(BACKEND == "gloo", reason=f"Gloo: {reason}")


def seed_of(test_name: str) -> int:
    """The seed of a test: fixed by its name, or MULTICOMM_TEST_SEED for all tests."""
    return int(SEED) if SEED is not None else zlib.crc32(test_name.encode()) % 1_000_000


def clean_environment() -> dict[str, str]:
    """This process's environment without a launcher's variables."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES)
        and not name.startswith("MULTICOMM_TEST_")
        and name not in _LAUNCHER_NAMES
    }
    environment[_FOR_RANKS] = BACKEND
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), environment.get("PYTHONPATH", "")]))
    return environment
