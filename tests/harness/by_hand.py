"""Jobs whose ranks are not under torchrun, which ends all of them as soon as one is gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.jobs import Job, launch, say
from harness.two_hosts import HOST_ADDRESSES

_BODY, _WORLD, _HOSTS = "TEST_BODY", "TEST_WORLD", "TEST_HOSTS"
_PORT = 29513  # where several hosts have to know it
_LIMIT = 50.0
_STORE_LIMIT = timedelta(seconds=30)
WAYS_TO_CRASH = ("terminate called", "core dumped", "Segmentation fault", "Fatal Python error")


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a job have ended: exit codes (minus the signal's number), and how long after `happens()`."""

    job: Job
    codes: dict[int, int]
    seconds: dict[int, float]

    def check(self, codes: dict[int, int], within: dict[int, float]) -> None:
        """Fails the test unless the ranks ended with these codes, in these times where given, and none by a crash."""
        late = {rank: self.seconds[rank] for rank, limit in within.items() if self.seconds.get(rank, limit) > limit}
        crashed = [way for way in WAYS_TO_CRASH if way in self.job.output]
        if self.codes != codes or late or crashed:
            text = f"exit codes {self.codes}, expected {codes}; too late: {late}; crashed: {crashed}"
            pytest.fail(f"{text}\n{self.job.output[-6000:]}", pytrace=False)


def launch_ranks(
    body: Callable[[], None],
    world: int,
    folder: Path,
    *,
    hosts: list[list[str]] | None = None,
    environment: dict[str, str] | None = None,
) -> Ranks:
    """Runs `body` on `world` ranks, on as many hosts (see two_hosts), in order and equally many on each.

    Ranks that were stopped are killed when all others of their host have ended.
    """
    count = len(hosts) if hosts else 1
    variables = {_BODY: f"{body.__module__}:{body.__name__}", _WORLD: str(world), _HOSTS: str(count)}
    job = launch(_hand_out, None, folder, hosts=hosts, environment=variables | (environment or {})).check()
    found = re.findall(r"^rank (\d+) ended with (-?\d+) (\S+) s after it$", job.output, re.MULTILINE)
    codes = {int(rank): int(code) for rank, code, _ in found}
    return Ranks(job, codes, {int(rank): float(seconds) for rank, _, seconds in found})


def happens() -> None:
    """From here on the time to the ranks' end counts. The clock is the machine's: the same for all processes."""
    side().set("happened", str(time.monotonic()))


def side() -> dist.Store:
    """A store for the ranks of a body to talk apart from the backend."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("side", dist.TCPStore(address, port, is_master=False, timeout=_STORE_LIMIT))


def ended(rank: int) -> str:
    """The key in `side()` under which a rank's end is announced, with its time."""
    return f"rank {rank} has ended"


def _hand_out() -> None:
    """The process that starts the ranks of one host and watches them end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ranks
    world, hosts = int(os.environ[_WORLD]), int(os.environ[_HOSTS])
    host = 1 if hosts > 1 and socket.gethostname().endswith("b") else 0
    mine = range(host * world // hosts, (host + 1) * world // hosts)
    address, port = (HOST_ADDRESSES[0], _PORT) if hosts > 1 else ("127.0.0.1", 0)
    store = dist.TCPStore(address, port, is_master=host == 0, wait_for_workers=False, timeout=_STORE_LIMIT)
    seen = dist.PrefixStore("side", store)
    environment = os.environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(len(mine)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the launcher hosts the store
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    call = [sys.executable, "-m", "harness.by_hand", str(_LIMIT)]
    running = {rank: subprocess.Popen(call, env=environment | {"RANK": str(rank)}) for rank in mine}
    while running:
        for rank, process in list(running.items()):
            if process.poll() is None:
                continue
            now = time.monotonic()
            happened = float(seen.get("happened")) if seen.check(["happened"]) else now
            say(f"rank {rank} ended with {process.returncode} {now - happened:.1f} s after it")
            seen.set(ended(rank), str(now))
            del running[rank]
        if all(_is_stopped(process.pid) for process in running.values()):
            for process in running.values():
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    seen.add("hosts done", 1)
    while host == 0 and seen.add("hosts done", 0) < hosts:  # they need the store
        time.sleep(0.02)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    from harness.job_main import main

    module, function = os.environ[_BODY].split(":")
    main(module, function, float(sys.argv[1]))
