"""Two hosts on one machine: network namespaces with a cable between them, each with a host name of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

HOST_ADDRESSES = ("10.79.0.1", "10.79.0.2")


def why_not() -> str | None:
    """Why this machine cannot have them."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"no `{tool}` (iproute2, util-linux)"
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Command prefixes that run a program on the one and on the other host."""
    names = [f"mcb{os.getpid()}{side}" for side in "ab"]
    ends = [f"mv{os.getpid()}{side}" for side in "ab"]
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, HOST_ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
        # Each program replaces the one before it, so the process that was started is the rank itself.
        host = 'hostname "$0"; exec "$@"'
        yield [["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", host, name] for name in names]
    finally:
        for name in made:
            _ip("netns", "del", name)
