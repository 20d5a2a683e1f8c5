"""Sets the clocks of several hosts against each other, by what their ranks have done together.

A round ends on a member only after every member has started it. So with ``o`` = clock B - clock A, each common round
says ``start of B - end of A <= o <= end of B - start of A``: a rigorous interval, whoever came last, which many rounds
narrow down to a few times the network's latency. Within it the median difference of the ends is taken.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from multicomm._trace import RankTrace

_FEW = 8  # rounds that are not split further


@dataclass(frozen=True)
class _Meeting:
    """A round as two clocks saw it."""

    start_a: float  # the latest on that clock
    end_a: float  # the earliest
    start_b: float
    end_b: float


@dataclass(frozen=True)
class _Knot:
    """At time `at` of clock B that is ahead by `ahead`, give or take `error`."""

    at: float
    ahead: float
    error: float


@dataclass(frozen=True)
class Clock:
    """How one clock is brought to the reference: minus an offset that changes linearly between knots."""

    name: str
    knots: tuple[_Knot, ...] = ()
    parent: Clock | None = None  # the clock that it leads to; None: it is the reference
    rounds: int = 0  # 0: by the wall clock only

    def time(self, at: float) -> float:
        """`at` in the reference's time."""
        if self.parent is None:
            return at
        return self.parent.time(at - self._ahead(at))

    @property
    def error(self) -> float | None:
        """Bound of the error in microseconds; None where nothing is known."""
        if self.parent is None:
            return 0.0
        above = self.parent.error
        return None if above is None or not self.rounds else above + max(knot.error for knot in self.knots)

    def _ahead(self, at: float) -> float:
        before, after = self.knots[0], self.knots[-1]
        if at <= before.at or len(self.knots) == 1:
            return before.ahead
        if at >= after.at:
            return after.ahead
        before, after = next(pair for pair in zip(self.knots, self.knots[1:], strict=False) if at <= pair[1].at)
        return before.ahead + (after.ahead - before.ahead) * (at - before.at) / (after.at - before.at)


def align(traces: list[RankTrace]) -> dict[str, Clock]:
    """Per clock how it is read; the reference is that of the lowest rank."""
    seen = _rounds_by_clock(traces)
    first = traces[0]
    clocks = {first.clock: Clock(first.clock)}
    while missing := [name for name in seen if name not in clocks]:
        best: tuple[float, Clock] | None = None
        for name in missing:
            for parent in clocks.values():
                meetings = _meetings(seen[parent.name], seen[name])
                if not meetings:
                    continue
                clock = Clock(name, tuple(_knots(meetings)), parent, len(meetings))
                error = clock.error
                if error is not None and (best is None or error < best[0]):
                    best = error, clock
        if best is None:
            break
        clocks[best[1].name] = best[1]
    for trace in traces:
        if trace.clock not in clocks:
            ahead = (trace.steady_us - first.steady_us) - (trace.wall_us - first.wall_us)
            knot = _Knot(trace.steady_us, ahead, 0.0)
            clocks[trace.clock] = Clock(trace.clock, (knot,), clocks[first.clock])
    return clocks


_Seen = dict[tuple[str, int], tuple[float, float]]  # per round its latest start and its earliest end


def _rounds_by_clock(traces: list[RankTrace]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    for trace in traces:
        of_clock = seen.setdefault(trace.clock, {})
        for name, event in trace.rounds().items():
            start, end = event["ts"], event["ts"] + event["dur"]
            if name in of_clock:
                start, end = max(start, of_clock[name][0]), min(end, of_clock[name][1])
            of_clock[name] = start, end
    return seen


def _meetings(a: _Seen, b: _Seen) -> list[_Meeting]:
    return sorted((_Meeting(*a[name], *b[name]) for name in a.keys() & b.keys()), key=lambda meeting: meeting.end_b)


def _knots(meetings: list[_Meeting]) -> list[_Knot]:
    lowest = max(meeting.start_b - meeting.end_a for meeting in meetings)
    highest = min(meeting.end_b - meeting.start_a for meeting in meetings)
    if lowest > highest and len(meetings) >= 2 * _FEW:  # the clocks have drifted apart: one offset does not fit all
        half = len(meetings) // 2
        return _knots(meetings[:half]) + _knots(meetings[half:])
    median = statistics.median(meeting.end_b - meeting.end_a for meeting in meetings)
    lowest, highest = min(lowest, highest), max(lowest, highest)
    ahead = min(max(median, lowest), highest)
    at = statistics.median(meeting.end_b for meeting in meetings)
    return [_Knot(at, ahead, max(ahead - lowest, highest - ahead))]
