"""``python -m multicomm``: tools for the command line."""

from __future__ import annotations

import argparse
import sys

from multicomm import _inspect


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m multicomm", description="Tools for multicomm jobs.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect",
        help="print what every rank of a live job is doing",
        description="Prints what every rank of a live job is doing, also of those on other nodes. Run it as the job's "
        "user on a node of the job; in a container, inside it.",
    )
    inspect.add_argument(
        "pid",
        metavar="PID",
        nargs="?",
        type=int,
        help="process of a rank on this node, or of its launcher; not needed where this user has one job here",
    )
    inspect.add_argument("--stacks", action="store_true", help="with the Python stack of each rank's main thread")
    arguments = parser.parse_args()
    try:
        print(_inspect.picture(arguments.pid, stacks=arguments.stacks), end="")
    except _inspect.InspectError as error:
        print(f"multicomm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
