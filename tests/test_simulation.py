"""The engine with simulated ranks: its rules one by one, and random programs. `make test` builds the programs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent.parent / "build"
SEEDS = 2000
ENOUGH_SEEDS = 1000  # within which a planted fault must be found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAMS / command[0]
    assert program.exists(), f"{program} is missing: run the tests by `make test`, or `make {program}` first"
    return subprocess.run([str(program), *command[1:]], capture_output=True, text=True, timeout=600, check=False)


def test_engine_rules() -> None:
    """Each rule of the engine holds; the program prints a line per rule."""
    done = run("sim/engine_test")
    assert done.returncode == 0, done.stdout + done.stderr


def test_random_programs() -> None:
    """Random programs, with and without trouble, end as they should, under the sanitizers."""
    done = run("sim/simulate", "1", str(SEEDS))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


def test_a_seed_replays_exactly() -> None:
    schedules = [run("sim/simulate", "77", "1", "--trace").stdout.rsplit(";", 1)[0] for _ in range(2)]
    assert schedules[0] == schedules[1]
    assert "submits" in schedules[0]


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        # A deadlock ends in errors where some rank has destroyed its groups meanwhile.
        ("no-second-phase", r"on a device\): (never completes|.*destroyed)"),
        ("proposals-repeat", r"(on a device\): (never completes|.*destroyed)|a device was given one message as)"),
        ("no-validation", "members launched different batches"),
        ("plans-from-local-state", "members launched different batches"),
        ("starts-out-of-order", "members launched different batches"),
        ("launch-waits", "never completes"),
        ("nobody-drives", "nobody drives"),
    ],
)
def test_simulation_finds(fault: str, found: str) -> None:
    """A fault planted in the engine is found, with the seed that shows it and a schedule to read."""
    done = run("fast/simulate", "1", str(ENOUGH_SEEDS), "--fault", fault)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.match(rf"seed \d+: .*{found}", last)
    assert "submits" in done.stdout


def test_threads_of_the_engine() -> None:
    """Callers, coordinator and completion threads of several ranks, under the thread sanitizer."""
    done = run("tsan/threads_test")
    assert done.returncode == 0, done.stdout + done.stderr
