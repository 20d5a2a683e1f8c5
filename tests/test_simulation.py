"""The engine with simulated ranks: its rules one by one, and random programs. `make test` builds the programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROGRAMS = Path(__file__).parent.parent / "build"
SEEDS = 2000


def run(*command: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAMS / command[0]
    assert program.exists(), f"{program} is missing: run the tests by `make test`, or `make {program}` first"
    return subprocess.run([str(program), *command[1:]], capture_output=True, text=True, timeout=300, check=False)


def test_engine_rules() -> None:
    """Each rule of the engine holds; the program prints a line per rule."""
    done = run("sim/engine_test")
    assert done.returncode == 0, done.stdout + done.stderr


def test_random_programs() -> None:
    """Programs that are legal per group complete with the right results, under the sanitizers."""
    done = run("sim/simulate", "1", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_simulation_finds_uneven_plans() -> None:
    """Ranks that plan from different settings are found out, so that the test above can fail."""
    done = run("sim/simulate", "1", "200", "--uneven-fusion")
    assert done.returncode != 0
    assert "launched different batches" in done.stdout


def test_threads_of_the_engine() -> None:
    """Callers, coordinator and completion threads of several ranks, under the thread sanitizer."""
    done = run("tsan/threads_test")
    assert done.returncode == 0, done.stdout + done.stderr
