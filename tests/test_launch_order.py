"""The launch order over real MPI control messages, with a device that runs strictly in launch order.

`make test` builds the program. The device is a double: what it cannot show are NCCL's own calls and real streams.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.settings import clean_environment

PROGRAM = Path(__file__).parent.parent / "build/mpi/order_test"
OPERATIONS = 10_000
DEADLOCK = 3  # the program's exit status


def run(seed: int, tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    assert PROGRAM.exists(), f"{PROGRAM} is missing: run the tests by `make test`, or `make {PROGRAM}` first"
    words = [str(Path(sys.prefix) / "bin" / "mpirun"), "--oversubscribe", "-n", "4", str(PROGRAM), str(OPERATIONS)]
    if os.geteuid() == 0:
        words.insert(1, "--allow-run-as-root")
    variables = clean_environment() | {"TMPDIR": str(tmp_path), "OMPI_MCA_osc": "^ucx"} | settings
    return subprocess.run([*words, str(seed)], capture_output=True, text=True, timeout=120, env=variables, check=False)


@pytest.mark.parametrize("seed", range(1, 6))
def test_opposite_orders_complete(seed: int, tmp_path: Path) -> None:
    """Two threads per rank, ten overlapping groups, even ranks forwards and odd ranks backwards."""
    done = run(seed, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(", 0 wrong") == 4


def test_without_the_order_it_hangs(tmp_path: Path) -> None:
    """So that the test above can fail."""
    done = run(1, tmp_path, MULTICOMM_ORDER="relaxed")
    assert done.returncode == DEADLOCK, done.stdout + done.stderr
    assert "a deadlock" in done.stdout
