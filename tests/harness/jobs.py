"""Launches whole jobs, for tests of how a job starts and ends; and looks for what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.settings import clean_environment
from harness.two_hosts import HOST_ADDRESSES

_SHARED_MEMORY = Path("/dev/shm")
_MARK = "TEST_JOB"
_TIDY_LIMIT = 8.0


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    returncode: int
    output: str
    seconds: float
    ended: float  # as time.monotonic() of any process says it

    def check(self, *, ok: bool = True) -> Job:
        """Fails the test unless the job ended as it should."""
        if (self.returncode == 0) != ok:
            pytest.fail(f"the job ended with {self.returncode}:\n{self.output[-6000:]}", pytrace=False)
        return self

    def ends_within(self, seconds: float) -> None:
        if self.seconds > seconds:
            text = f"the job ended after {self.seconds:.0f} s, not {seconds:g}:\n{self.output[-6000:]}"
            pytest.fail(text, pytrace=False)

    def says(self, text: str, times: int | None = None) -> None:
        found = self.output.count(text)
        if not found or (times is not None and found != times):
            wanted = f"{times} times" if times else "at all"
            pytest.fail(f"{text!r} is {found} times in the output, not {wanted}:\n{self.output[-6000:]}", pytrace=False)


def launch(
    body: Callable[[], None],
    ranks: int | None,
    folder: Path,
    *options: str,
    limit: float = 60.0,
    environment: dict[str, str] | None = None,
    hosts: list[list[str]] | None = None,
    mpirun: bool = False,
) -> Job:
    """Runs `body` on `ranks` ranks under torchrun or mpirun, or in one plain process where `ranks` is None.

    With `hosts` (see two_hosts) that many ranks run on each of them, under a torchrun of their own. The body is a
    function at the top level of a test module. Temporary files of the job go to `folder`.
    Fails the test if the job does not end in time, or leaves processes, shared memory or files behind.
    """
    mark = uuid.uuid4().hex
    temporary = folder / "tmp"
    temporary.mkdir()
    variables = clean_environment() | {_MARK: mark, "TMPDIR": str(temporary)} | (environment or {})
    call = ["harness.job_main", body.__module__, body.__name__, str(limit - 5)]
    python = [sys.executable]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *options] if ranks else []
    meet: list[list[str]] = [["--standalone"]]
    if mpirun:
        python, launcher = _mpirun(ranks or 1) + python, [*options]
    elif hosts is not None:
        nodes = ["--nnodes", str(len(hosts)), "--master-addr", HOST_ADDRESSES[0], "--master-port", "29512"]
        meet = [[*nodes, "--node-rank", str(number)] for number in range(len(hosts))]
    under_torchrun = ranks is not None and not mpirun
    places = [
        (prefix, meet[number] if under_torchrun else [])
        for number, prefix in enumerate([[]] if hosts is None else hosts)
    ]
    begin = time.monotonic()
    with (folder / "output").open("w+b") as output:
        processes = [
            subprocess.Popen(
                [*prefix, *python, *launcher, *place, "-m", *call],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for prefix, place in places
        ]
    sessions = {process.pid for process in processes}
    used: set[str] = set()
    while any(process.poll() is None for process in processes) and time.monotonic() - begin < limit:
        for pid in _processes(mark, sessions):
            used |= _mapped(pid)
        time.sleep(0.1)
    seconds = time.monotonic() - begin
    in_time = all(process.poll() is not None for process in processes)
    if not in_time:
        _kill(_processes(mark, sessions))
    codes = [process.wait() for process in processes]
    code = next((code for code in codes if code), 0)
    job = Job(code, (folder / "output").read_text(errors="replace"), seconds, begin + seconds)
    if not in_time:
        pytest.fail(f"the job did not end within {limit:g} s:\n{job.output[-6000:]}", pytrace=False)
    _check_nothing_is_left(mark, sessions, used, temporary, job.output)
    return job


def _mpirun(ranks: int) -> list[str]:
    words = [str(Path(sys.prefix) / "bin" / "mpirun"), "--oversubscribe", "-n", str(ranks)]
    return [*words, "--allow-run-as-root"] if os.geteuid() == 0 else words


def say(text: str) -> None:
    """One write, so that the lines of several ranks do not mix."""
    os.write(1, f"{text}\n".encode())


def _check_nothing_is_left(mark: str, sessions: set[int], used: set[str], temporary: Path, output: str) -> None:
    def leftovers() -> dict[str, list[object]]:
        found = {
            "processes": _processes(mark, sessions),
            "shared memory": sorted(name for name in used if (_SHARED_MEMORY / name).exists()),
            "files": sorted(str(path) for path in temporary.glob("*multicomm*")),
        }
        return {what: things for what, things in found.items() if things}

    deadline = time.monotonic() + _TIDY_LIMIT
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        commands = {pid: _command(pid) for pid in left.get("processes", [])}
        _kill(list(commands))
        pytest.fail(f"left behind: {left} {commands}\n{output[-3000:]}", pytrace=False)


def _processes(mark: str, sessions: set[int]) -> list[int]:
    """Processes of a job: of its sessions, or with its mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            marked = f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if fields[0] != "Z" and (marked or int(fields[3]) in sessions):
            found.append(int(entry.name))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "gone"


def _kill(processes: list[int]) -> None:
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _mapped(pid: int) -> set[str]:
    """Entries of shared memory that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    folder = f"{_SHARED_MEMORY}/"
    return {line.split(folder, 1)[1].split()[0].split("/")[0] for line in lines if folder in line}
