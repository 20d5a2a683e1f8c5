"""Which slices go to which lane, so that none overlaps another one in its lane."""

from __future__ import annotations

import heapq

from multicomm._trace import Event, RankTrace

_CATEGORIES = ("round", "batch", "operation", "message")
_NAMES = ("rounds", "batches", "operations", "messages")
_MOST = 10_000  # of one kind, as far as their order is concerned


def assign(events: list[Event]) -> list[tuple[int, Event]]:
    """Each event with the lowest lane that is free, in the order of their beginning."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # until when
    assigned = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while busy and busy[0][0] <= event["ts"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (event["ts"] + event["dur"], lane))
        assigned.append((lane, event))
    return assigned


def arrange(trace: RankTrace) -> None:
    """Gives the trace's slices lanes per group and kind, and the lanes names.

    The rank itself has assigned lanes as operations ended, which takes more of them.
    """
    slices: dict[tuple[int, int], list[Event]] = {}
    for event in trace.events:
        if event["ph"] == "X":
            category = "message" if "peer" in event["args"] else event["cat"]
            slices.setdefault((event["args"]["number"], _CATEGORIES.index(category)), []).append(event)
    trace.events = [e for e in trace.events if e["name"] not in ("thread_name", "thread_sort_index")]
    tid = 0
    for (number, kind), events in sorted(slices.items()):
        first = tid + 1
        for lane, event in assign(events):
            event["tid"] = first + lane
            tid = max(tid, first + lane)
        group = trace.groups[number]
        for lane in range(first, tid + 1):
            name = f"{group.label} ({group.ranks}): {_NAMES[kind]}" + (f" {lane - first + 1}" if lane > first else "")
            place = (number * len(_NAMES) + kind) * _MOST + min(lane - first, _MOST - 1)
            for what, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": place})):
                trace.events.append({"ph": "M", "name": what, "pid": trace.rank, "tid": lane, "args": args})
