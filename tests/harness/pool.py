"""The ranks of one world size: started once, reused; started anew after a failure."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.messages import Outcome, Task
from harness.planes import Plane
from harness.settings import BACKEND, clean_environment

START_LIMIT = 60.0
END_LIMIT = 30.0
_GRACE = 3.0  # for the peers of a rank that has failed: they may fail for the same reason, or be left waiting
_LOG_TAIL = 3000


class _Process:
    """One rank seen from pytest."""

    def __init__(self, rank: int, environment: dict[str, str], folder: Path) -> None:
        self.rank = rank
        self.stacks = folder / f"rank{rank}.stacks"
        self.log = folder / f"rank{rank}.log"
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "harness.rank_main", str(theirs.fileno()), BACKEND, str(self.stacks)]
        with theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def position(self) -> str:
        """Where it stands: every thread's Python stack, or how it ended."""
        if self.process.poll() is not None:
            return f"ended with {self.describe_end()}"
        seen = self.stacks.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while self.stacks.stat().st_size == seen and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)  # the dump is several writes
        text = self.stacks.read_text()[seen:].strip()
        return text or "does not answer (stopped, or not yet started)"

    def describe_end(self) -> str:
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_TAIL:].strip()


class RankPool:
    """Runs test bodies on the ranks of one world size."""

    def __init__(self, world: int, folder: Path, plane: Plane | None = None) -> None:
        """`plane`: what the ranks move tensors of devices by; None for tensors on the CPU."""
        self.world = world
        self._plane = plane
        self._folder = folder
        self._ranks: list[_Process] = []
        self._store: dist.TCPStore | None = None
        self._tasks = 0
        self._ending = False

    def run(self, module: str, function: str, arguments: dict[str, Any], seed: int, limit: float) -> None:
        """Runs `module.function.body` on every rank; fails the test unless all succeed within `limit` s."""
        if not self._ranks:
            self._start()
        self._tasks += 1
        task = Task(module, function, arguments, self._tasks, seed)
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # a dead rank shows as the end of its pipe
                rank.connection.send(task)
        self._collect(f"{function} on {self.world} ranks (seed {seed})", limit)

    def processes(self) -> list[int]:
        """The ranks' process ids."""
        return [rank.process.pid for rank in self._ranks]

    def begin_to_end(self) -> None:
        """Tells the ranks to end; close() sees that they do. More calls do nothing."""
        ranks = [] if self._ending else self._ranks
        self._ending = True
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)

    def close(self) -> None:
        """Ends the ranks; fails if one does not end cleanly."""
        if not self._ranks:
            return
        self.begin_to_end()
        self._collect("destroy_process_group at the end of the module", END_LIMIT)
        deadline = time.monotonic() + END_LIMIT
        problems = []
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                problems.append(f"rank {rank.rank} does not exit:\n{rank.position()}\n{rank.log_tail()}")
                continue
            if rank.process.returncode != 0:
                problems.append(f"rank {rank.rank} ended with {rank.describe_end()}:\n{rank.log_tail()}")
        self.kill()
        if problems:
            pytest.fail("\n".join(problems), pytrace=False)

    def kill(self) -> None:
        """Ends the ranks at once; the next run starts new ones."""
        for rank in self._ranks:
            rank.connection.close()
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
        self._ranks = []
        self._store = None
        self._ending = False

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = clean_environment() | {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the launcher hosts the store
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self._ranks = [
            _Process(rank, environment | (self._plane.variables(rank) if self._plane else {}), self._folder)
            for rank in range(self.world)
        ]
        self._collect(f"start of {self.world} ranks", START_LIMIT)

    def _collect(self, what: str, limit: float) -> None:
        """Waits for one outcome of every rank; on anything but success kills the pool and fails the test."""
        deadline = time.monotonic() + limit
        waiting = {rank.connection: rank for rank in self._ranks}
        reports: dict[int, str] = {}
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), remaining):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcome = _receive(connection)
                if outcome is None:
                    reports[rank.rank] = f"died: {rank.describe_end()}"
                elif not outcome.ok:
                    reports[rank.rank] = outcome.traceback or ""
            if reports:
                deadline = min(deadline, time.monotonic() + _GRACE)
        if not waiting and not reports:
            return
        reason = "failed" if reports else f"exceeded the limit of {limit:g} s"
        for rank in waiting.values():
            reports[rank.rank] = f"still running; it stands at:\n{rank.position()}"
        text = "\n".join(f"--- rank {number}: {reports[number].strip()}" for number in sorted(reports))
        logs = "\n".join(f"--- output of rank {r.rank}:\n{r.log_tail()}" for r in self._ranks if r.log_tail())
        self.kill()
        pytest.fail(f"{what} {reason}\n{text}\n{logs}".rstrip(), pytrace=False)


def _receive(connection: Connection) -> Outcome | None:
    try:
        outcome = connection.recv()
    except (EOFError, OSError):
        return None
    assert isinstance(outcome, Outcome)
    return outcome
