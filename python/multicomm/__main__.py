"""``python -m multicomm``: tools for the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from multicomm import _inspect, _merge, _trace, _trace_picture

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def _add_inspect(commands: Commands) -> None:
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
    inspect.set_defaults(run=_inspect_job)


def _inspect_job(arguments: argparse.Namespace) -> None:
    print(_inspect.picture(arguments.pid, stacks=arguments.stacks), end="")


def _add_timeline(commands: Commands) -> None:
    timeline = commands.add_parser(
        "timeline",
        help="put the timelines of a job's ranks together",
        description="Puts the timelines that the ranks of a job have written (MULTICOMM_TIMELINE, "
        "multicomm.start_timeline) together in one time: as a trace for ui.perfetto.dev and chrome://tracing, or as a "
        "page to look at in any browser.",
    )
    timeline.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="a rank's file, or a folder with those of several"
    )
    timeline.add_argument("-o", "--output", metavar="JSON", type=Path, help="the trace of all ranks")
    timeline.add_argument("--html", metavar="HTML", type=Path, help="the page")
    timeline.set_defaults(run=_merge_timelines)


def _merge_timelines(arguments: argparse.Namespace) -> None:
    if arguments.output is None and arguments.html is None:
        raise _trace.TraceError("timeline: say what to write: -o merged.json, --html page.html, or both")
    merged = _merge.merge(arguments.files)
    for line in merged.describe_clocks():
        print(line)
    if arguments.output is not None:
        merged.write(arguments.output)
    if arguments.html is not None:
        arguments.html.write_text(_trace_picture.page(merged))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m multicomm", description="Tools for multicomm jobs.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_timeline(commands)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (_inspect.InspectError, _trace.TraceError, OSError) as error:
        print(f"multicomm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
