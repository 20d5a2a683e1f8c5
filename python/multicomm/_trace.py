"""Reads what csrc/timeline has written: one file per rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_VERSION = 1
_NUMBERS = (int, float)


class TraceError(Exception):
    """A file is not what it should be, and the text says why."""


@dataclass(frozen=True)
class Group:
    """A process group as one rank knows it."""

    label: str
    identity: str  # equal on its members, unlike its number; empty: its communicator was never made
    ranks: str


@dataclass
class RankTrace:
    """One rank's file. Times are in microseconds, of that rank's own steady clock until they are aligned."""

    path: Path
    rank: int
    world_size: int
    place: str
    clock: str  # ranks with an equal one share it
    wall_us: float
    steady_us: float  # the same moment
    events: list[Event]
    groups: dict[int, Group] = field(default_factory=dict)

    def of(self, category: str) -> list[Event]:
        return [event for event in self.events if event.get("cat") == category]

    def rounds(self) -> dict[tuple[str, int], Event]:
        """Rounds by what they are called on all members."""
        named = {}
        for event in self.of("round"):
            group = self.groups.get(event["args"]["number"])
            if group is not None and group.identity:
                named[group.identity, event["args"]["round"]] = event
        return named


def files_in(paths: list[Path]) -> list[Path]:
    """The files that are meant: a folder stands for the ranks' files in it."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("rank*.json"))
            if not inside:
                raise TraceError(f"{path}: has no rank*.json in it")
            found += inside
        else:
            found.append(path)
    return found


def read_all(paths: list[Path]) -> list[RankTrace]:
    """The traces of one job, by rank."""
    traces: dict[int, RankTrace] = {}
    for path in files_in(paths):
        trace = read(path)
        if trace.rank in traces:
            raise TraceError(f"{path} and {traces[trace.rank].path} are both of rank {trace.rank}")
        traces[trace.rank] = trace
    sizes = {trace.world_size for trace in traces.values()}
    if len(sizes) > 1:
        raise TraceError(f"the files are of jobs of different sizes: {', '.join(map(str, sorted(sizes)))} ranks")
    return [traces[rank] for rank in sorted(traces)]


def read(path: Path) -> RankTrace:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from error
    if isinstance(content, dict) and "traceEvents" in content:
        raise TraceError(f"{path}: no rank's own file: a merged one, or another program's")
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        raise TraceError(f"{path}: no timeline of multicomm: not an array of events")
    first = content[0]
    about = first.get("args")
    if first.get("name") != "multicomm" or not isinstance(about, dict):
        raise TraceError(f"{path}: no timeline of multicomm: it does not begin with who wrote it")
    if about.get("version") != _VERSION:
        raise TraceError(f"{path}: version {about.get('version')}; this multicomm reads version {_VERSION}")
    try:
        trace = RankTrace(
            path,
            int(about["rank"]),
            int(about["world_size"]),
            str(about["place"]),
            str(about["clock"]),
            float(about["wall_us"]),
            float(about["steady_us"]),
            content,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: who wrote it is not told as it should be: {error!r}") from error
    for number, event in enumerate(content):
        wrong = _wrong(event)
        if wrong:
            raise TraceError(f"{path}: event {number} {wrong}")
        if event["ph"] == "M" and event["name"] == "group":
            args = event["args"]
            trace.groups[args["number"]] = Group(args["group"], args["identity"], args["ranks"])
        elif event["ph"] == "X" and event["args"]["number"] not in trace.groups:
            raise TraceError(f"{path}: event {number} is of a group that is not introduced")
    return trace


_NEEDED: dict[str, dict[str, Any]] = {
    "group": {"number": int, "group": str, "identity": str, "ranks": str},
    "round": {"number": int, "group": str, "round": int},
    "batch": {"number": int, "group": str, "batch": int},
    "operation": {"number": int, "group": str, "sequence": int},
    "waiting": {"number": int, "group": str, "sequence": int, "submitted_us": _NUMBERS},
}


def _wrong(event: Any) -> str:
    """What is wrong with the event; empty where nothing is."""
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str) or not isinstance(event.get("name"), str):
        return "has no phase or no name"
    if event["ph"] != "M" and not isinstance(event.get("ts"), _NUMBERS):
        return "has no time"
    if event["ph"] == "X" and event.get("cat") not in ("round", "batch", "operation"):
        return "is of an unknown category"
    if event["ph"] == "X" and not (isinstance(event.get("dur"), _NUMBERS) and event["dur"] >= 0):
        return "has no duration, or a negative one"
    kind = event["name"] if event["ph"] == "M" else event.get("cat")
    args = event.get("args", {})
    for name, kinds in _NEEDED.get(str(kind), {}).items():
        if not isinstance(args, dict) or not isinstance(args.get(name), kinds):
            return f"({kind}) has no {name}"
    states = args.get("states", {}) if isinstance(args, dict) else {}
    if not isinstance(states, dict) or not all(isinstance(time, _NUMBERS) and time >= 0 for time in states.values()):
        return "has states that are not times"
    return ""
