"""Asks a live job what its ranks are doing: the other end of csrc/process_group/inspection.h."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

_NAME = re.compile(r"@(multicomm-(\d+)-(\d+)-(\d+))$")  # user, process, process namespace
_WHO_SECONDS = 3.0
_LOOK_SECONDS = 0.3
_PICTURE_SECONDS = 15.0  # a rank answers within about 5; others may ask it at the same time


class InspectError(Exception):
    """There is no picture, and the text says why."""


@dataclass(frozen=True)
class _Process:
    """A process of this node that listens; what it said of itself, where it answered."""

    pid: int
    user: int
    name: str
    rank: int = -1
    size: int = 0
    job: str = ""

    def __str__(self) -> str:
        if not self.size:
            return f"{self.pid}: {_silence(self.pid)}"
        return f"{self.pid}: rank {self.rank} of {self.size}" + (
            f", {command}" if (command := _command(self.pid)) else ""
        )


def picture(pid: int | None, *, stacks: bool) -> str:
    """The picture of the job that process `pid` of this node belongs to, or of this user's one job on this node."""
    mine = (process for process in _listening() if process.user == os.geteuid())
    process = _choose(mine) if pid is None else _find(pid)
    kind, _, text = _ask(process, "picture stacks" if stacks else "picture", _PICTURE_SECONDS).partition("\n")
    if kind == "ok":
        return text
    raise InspectError(f"process {process.pid}: {text.strip() or _silence(process.pid)}{_others(process)}")


def _listening() -> list[_Process]:
    """Processes of this node that listen, of this user; of everybody for root."""
    found = {}
    namespace = Path("/proc/self/ns/pid").stat().st_ino  # elsewhere, the same number is another process
    for line in Path("/proc/net/unix").read_text().splitlines():
        # Accepting sockets only: a connection has its listener's name, too.
        if (match := _NAME.search(line)) and int(line.split()[3], 16) & 0x10000:
            name, user, pid = match[1], int(match[2]), int(match[3])
            if os.geteuid() in (0, user) and int(match[4]) == namespace:
                found[name] = _Process(pid, user, name)
    return sorted(found.values(), key=lambda process: process.pid)


def _choose(processes: Iterable[_Process]) -> _Process:
    """One process of the only job among these."""
    known = [_introduce(process) for process in processes]
    # Before its MPI is up a rank knows no job; ranks of one launcher belong together.
    of_launcher = {_parent(process.pid): process.job for process in known if process.job not in ("", "0")}
    jobs: dict[str, list[_Process]] = {}
    for process in known:
        if process.size:
            launcher = _parent(process.pid)
            job = process.job if process.job != "0" else of_launcher.get(launcher, f"of launcher {launcher}")
            jobs.setdefault(job, []).append(process)
    if len(jobs) == 1:
        return min(next(iter(jobs.values())), key=lambda process: process.rank)
    everybody = "".join(f"\n  {process}" for process in known)
    if jobs:
        raise InspectError(f"there are {len(jobs)} jobs of this user on this node; name a process of one:{everybody}")
    if known:
        raise InspectError(
            f"no rank of this user on this node answers; if its job has other nodes, ask there:{everybody}"
        )
    raise InspectError(
        "there is no job of this user on this node: a process can be inspected from its first multicomm group to its "
        "end, in its own network namespace (its container)"
    )


def _find(pid: int) -> _Process:
    """The process, or one that it has launched."""
    listening = _listening()
    for process in listening:
        if process.pid == pid:
            return process
    launched = [process for process in listening if pid in _ancestors(process.pid)]
    if launched:
        return _choose(launched)
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        raise InspectError(f"there is no process {pid} on this node") from None
    if os.geteuid() not in (0, owner):
        raise InspectError(f"process {pid} belongs to another user (uid {owner}); only that user can inspect it")
    others = "".join(f"\n  {_introduce(process)}" for process in listening)
    raise InspectError(
        f"process {pid} cannot be inspected: it has made no multicomm group yet, is at its end, or has nothing to do "
        "with multicomm" + (f". These can:{others}" if others else "")
    )


def _introduce(process: _Process) -> _Process:
    kind, _, text = _ask(process, "who", _WHO_SECONDS).partition("\n")
    if kind != "ok":
        return process
    rank, size, job = text.split()
    return replace(process, rank=int(rank), size=int(size), job=job)


def _ask(process: _Process, request: str, seconds: float) -> str:
    """The answer, or nothing where there is none in time."""
    deadline = time.monotonic() + seconds
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(seconds)
            connection.connect(f"\0{process.name}")
            # The name is anybody's to take: what its owner says counts only where he is who he should be.
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (0, process.user):
                return ""
            connection.sendall(f"{request}\n".encode())
            while (left := deadline - time.monotonic()) > 0:
                connection.settimeout(min(left, _LOOK_SECONDS))
                try:
                    part = connection.recv(65536)
                except TimeoutError:
                    if _status(process.pid)[0] in ("T", "t"):  # nothing will come
                        return ""
                    continue
                if not part:
                    return answer.decode(errors="replace")
                answer += part
        except OSError:  # it has ended, or does not answer
            return ""
    return ""


def _silence(pid: int) -> str:
    """Why a process may not answer."""
    state, _ = _status(pid)
    if not state or state == "Z":
        return "has ended"
    if state in "Tt":
        return "does not answer: it is stopped (by a signal, or a debugger)"
    return "does not answer"


def _others(process: _Process) -> str:
    others = [other for other in _listening() if other.pid != process.pid]
    return "".join(f"\n  another one to ask: {other}" for other in map(_introduce, others) if other.size)


def _status(pid: int) -> tuple[str, int]:
    """State and parent of a process; no state where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def _parent(pid: int) -> int:
    return _status(pid)[1]


def _ancestors(pid: int) -> Iterable[int]:
    while (pid := _parent(pid)) > 1:
        yield pid


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    text = " ".join(word.decode(errors="replace") for word in words)
    return text if len(text) <= 100 else f"{text[:100]}..."
