"""What processes have opened that others could reach: ports, local sockets, shared memory, files."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

_LISTEN = "0A"


@dataclass
class Opened:
    ports: list[tuple[str, int]] = field(default_factory=list)  # listening, or of datagrams
    sockets: list[str] = field(default_factory=list)  # local, by address; abstract ones with "@" in front
    memory: list[str] = field(default_factory=list)  # mapped files of /dev/shm
    anonymous: list[str] = field(default_factory=list)  # memory files, by their path in /proc


def descendants(root: int) -> dict[int, str]:
    """The running processes below `root`, and itself, with their commands."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: commands[pid] for pid in sorted(found) if pid in commands}


def opened_by(pid: int) -> Opened:
    proc, result = Path(f"/proc/{pid}"), Opened()
    inodes = set()
    for entry in (proc / "fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
        elif target.startswith("/memfd:"):
            result.anonymous.append(str(entry))
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in (proc / "net" / kind).read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and (words[3] == _LISTEN or kind.startswith("udp")):
                host, port = words[1].split(":")
                result.ports.append((_address(host), int(port, 16)))
    for line in (proc / "net" / "unix").read_text().splitlines()[1:]:
        words = line.split(None, 7)
        if len(words) > 7 and words[6] in inodes:
            result.sockets.append(words[7])
    for line in (proc / "maps").read_text().splitlines():
        path = line.split(None, 5)[5] if line.count(" ") > 4 and "/" in line else ""
        if path.startswith("/dev/shm/") and not path.endswith("(deleted)") and path not in result.memory:
            result.memory.append(path)
    return result


def _address(text: str) -> str:
    """/proc writes addresses as machine words."""
    words = [struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
