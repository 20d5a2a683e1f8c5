"""The simulated accelerator shows what it should of streams, events and memory. `make test` builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "device" / "checks.py"


@pytest.mark.parametrize("delay_us", [0, 300])
def test_simulated_device(delay_us: int) -> None:
    """In a process of its own: loading gives torch's spare device type its name for good."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)],
        env={**os.environ, "SIM_DELAY_US": str(delay_us)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
