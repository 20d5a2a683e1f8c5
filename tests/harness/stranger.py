"""Another user of the machine, who tries what start-up has opened. Run as a script by root; becomes `nobody`.

Arguments: what to try, and what on. Prints what it got hold of: nothing, if all is well.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import sys

PATIENCE = 5.0
GARBAGE = b"H\0\0\0\0\0\0\0" + b"\0" * 16 + b"\xff" * 200


def become_nobody() -> None:
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
    os.umask(0)


def try_file(path: str) -> None:
    for flags in (os.O_RDONLY, os.O_RDWR):
        with contextlib.suppress(OSError):
            os.close(os.open(path, flags))
            print(f"opened {path}")


def try_folder(path: str) -> None:
    with contextlib.suppress(OSError):
        print(f"listed {path}: {os.listdir(path)}")
    with contextlib.suppress(OSError):
        os.close(os.open(f"{path}/mine", os.O_WRONLY | os.O_CREAT, 0o600))
        print(f"made a file in {path}")


def try_socket(family: int, address: str | tuple[str, int]) -> None:
    """Whoever answers is a leak; a connection that is closed at once, or says nothing, is not."""
    with contextlib.suppress(OSError), socket.socket(family) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.connect(address)
        stranger.sendall(GARBAGE)
        if answer := stranger.recv(1000):
            print(f"{address!r} answered {answer!r}")


def main() -> None:
    become_nobody()
    for argument in sys.argv[1:]:
        kind, _, what = argument.partition("=")
        if kind == "file":
            try_file(what)
        elif kind == "folder":
            try_folder(what)
        elif kind == "abstract":
            try_socket(socket.AF_UNIX, "\0" + what)
        elif kind == "port":
            try_socket(socket.AF_INET, ("127.0.0.1", int(what)))
        else:
            sys.exit(f"what is {argument}?")


if __name__ == "__main__":
    main()
