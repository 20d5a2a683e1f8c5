"""Puts the ranks' timelines together: one time, states as slices, who came last to a round."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from multicomm._clocks import Clock, align
from multicomm._lanes import arrange
from multicomm._trace import Event, RankTrace, read_all


@dataclass
class Merged:
    """All ranks in one time, which begins at 0, in microseconds."""

    traces: list[RankTrace]
    clocks: dict[str, Clock]
    end: float = 0.0
    events: list[Event] = field(default_factory=list)  # in Chrome's format

    def describe_clocks(self) -> list[str]:
        lines = []
        for name, clock in self.clocks.items():
            if clock.parent is None:
                continue
            ranks = ", ".join(str(trace.rank) for trace in self.traces if trace.clock == name)
            ahead = clock.knots[0].ahead + 0.0
            how = (
                f"within {clock.error:.0f} us, by {clock.rounds} common rounds"
                if clock.error is not None
                else "by the hosts' wall clocks only, which may be far off: no round in common with the others"
            )
            lines.append(f"clock of ranks {ranks}: {ahead / 1e6:+.6f} s from that of rank {self.traces[0].rank}, {how}")
        return lines

    def write(self, path: Path) -> None:
        whole = {
            "displayTimeUnit": "ms",
            "otherData": {"clocks": self.describe_clocks()},
            "traceEvents": self.events,
        }
        path.write_text(json.dumps(whole, separators=(",", ":")))


def merge(paths: list[Path]) -> Merged:
    traces = read_all(paths)
    merged = Merged(traces, align(traces))
    for trace in traces:
        _to_one_time(trace, merged.clocks[trace.clock])
        _add_endless(trace)
        arrange(trace)
    times = [event["ts"] for trace in traces for event in trace.events if "ts" in event]
    begin = min(times, default=0.0)
    for trace in traces:
        for event in trace.events:
            if "ts" in event:
                event["ts"] = round(event["ts"] - begin, 3)
                merged.end = max(merged.end, event["ts"] + event.get("dur", 0.0))
    _name_the_last(traces)
    for trace in traces:
        for event in trace.events:
            merged.events.append(event)
            merged.events += _states(event)
    return merged


def _to_one_time(trace: RankTrace, clock: Clock) -> None:
    for event in trace.events:
        if "ts" not in event:
            continue
        start = clock.time(event["ts"])
        if "dur" in event:
            event["dur"] = round(max(clock.time(event["ts"] + event["dur"]) - start, 0.0), 3)
        if event.get("cat") == "waiting":
            event["args"]["submitted_us"] = clock.time(event["args"]["submitted_us"])
        event["ts"] = start


def _add_endless(trace: RankTrace) -> None:
    """Operations that were waiting when the process was killed: only that they wait was written."""

    def key(event: Event) -> tuple[int, bool, int]:
        return event["args"]["number"], "peer" in event["args"], event["args"]["sequence"]

    over = {key(event) for event in trace.of("operation")}
    end = max((event["ts"] + event.get("dur", 0.0) for event in trace.events if "ts" in event), default=0.0)
    for event in trace.of("waiting"):
        begin = event["args"].pop("submitted_us")
        if key(event) in over:
            continue
        args = {**event["args"], "unfinished": True}
        name = event["name"].removeprefix("waits for long: ")
        states = dict(args.get("states", {}))
        if states:  # the last of them went on
            last = list(states)[-1]
            states[last] = round(states[last] + end - event["ts"], 3)
            args["states"] = states
        trace.events += [
            {
                "ph": "X",
                "cat": "operation",
                "name": name,
                "pid": trace.rank,
                "tid": 0,
                "ts": begin,
                "dur": round(max(end - begin, 0.0), 3),
                "args": args,
            },
        ]


def _name_the_last(traces: list[RankTrace]) -> None:
    """A round waits for the rank that starts it last."""
    starts: dict[tuple[str, int], list[tuple[float, int]]] = {}
    rounds = [(trace.rank, trace.rounds()) for trace in traces]
    for rank, named in rounds:
        for name, event in named.items():
            starts.setdefault(name, []).append((event["ts"], rank))
    for _, named in rounds:
        for name, event in named.items():
            came = sorted(starts[name])
            if len(came) > 1:
                event["args"]["last_rank"] = came[-1][1]
                event["args"]["first_to_last_us"] = round(came[-1][0] - came[0][0], 3)


def _states(event: Event) -> list[Event]:
    """The states of an operation or a batch as slices inside its own."""
    slices: list[Event] = []
    if event["ph"] != "X" or "states" not in event.get("args", {}):
        return slices
    at, end = event["ts"], event["ts"] + event["dur"]
    for name, time in event["args"]["states"].items():
        until = min(at + time, end)
        common = {"ph": "X", "cat": "state", "pid": event["pid"], "tid": event["tid"]}
        slices.append({**common, "name": name, "ts": round(at, 3), "dur": round(until - at, 3)})
        at = until
    return slices
