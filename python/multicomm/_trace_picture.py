"""A picture of a merged timeline: a lane per rank and group, in one page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from multicomm._lanes import assign
from multicomm._merge import Merged
from multicomm._trace import Event, RankTrace
from multicomm._trace_page import SCRIPT, STYLE

_LEFT, _WIDTH, _TOP = 210, 1270, 26
_ROW, _THINNEST, _TALLEST = 15.0, 1.5, 180.0
_ROUNDS, _GAP, _HEADER = 5, 5, 24
_MOST_OPERATIONS = 5000
_LATE_US = 1000.0  # a round that waited longer than this for its last member stands out
_ERROR, _LATE = "#d62728", "#e8a200"
_COLOURS = {
    "all_reduce": "#2b6cb0",
    "broadcast": "#2f855a",
    "reduce": "#0f9b9b",
    "all_gather": "#dd6b20",
    "reduce_scatter": "#7b4bb3",
    "all_to_all": "#a8456b",
    "gather": "#8a8000",
    "scatter": "#4c9ad6",
    "all_gather of variable sizes": "#b7791f",
    "barrier": "#5a6472",
    "send": "#8d5524",
    "recv": "#c08a5a",
}
_OPACITY = {"queued": 0.16, "offered": 0.38, "posted": 0.6, "agreed": 0.6, "packing": 0.75}
_MEANING = (
    ("queued", 0.16, "queued: not offered to the others yet"),
    ("offered", 0.38, "offered: others have not submitted it"),
    ("agreed", 0.6, "agreed: waits for its turn"),
    ("moving", 1.0, "data moves"),
)


@dataclass(frozen=True)
class _Scale:
    span: float  # microseconds that the width stands for

    def x(self, at: float) -> float:
        return at / self.span * _WIDTH


def page(merged: Merged) -> str:
    drawing, height, shown, kinds = _draw(merged)
    count = sum(len(trace.of("operation")) for trace in merged.traces)
    notes = [f"{len(merged.traces)} ranks, {count} operations in {_time(merged.end)}.", *merged.describe_clocks()]
    if shown < count:
        notes.append(f"Shown are the {shown} operations that took longest.")
    notes += [f"Rank {trace.rank} lost {lost} events: its disk was too slow." for trace, lost in _lost(merged)]
    notes.append("Zoom: Ctrl and wheel, or w and s. Move: drag, or a and d. Everything: double-click.")
    view = f"0 0 {_LEFT + _WIDTH + 20} {height + 10:.0f}"
    data = f'data-left="{_LEFT}" data-width="{_WIDTH}" data-span="{_span(merged)}" data-bottom="{height:.0f}"'
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>multicomm timeline</title>',
            f"<style>{STYLE}</style></head><body><header><h1>What the ranks' operations did</h1>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            f'</header>{_legend(kinds)}<svg id="picture" xmlns="http://www.w3.org/2000/svg" viewBox="{view}" {data}>',
            *drawing,
            f'</svg><div id="tip"></div><script>{SCRIPT}</script></body></html>',
        ]
    )


def _span(merged: Merged) -> float:
    return max(merged.end, 1.0) * 1.005


def _lost(merged: Merged) -> Iterable[tuple[RankTrace, int]]:
    for trace in merged.traces:
        if lost := sum(event["args"]["events"] for event in trace.of("lost")):
            yield trace, lost


def _draw(merged: Merged) -> tuple[list[str], float, int, list[str]]:
    """The drawing, its height, how many operations are in it and of which kinds."""
    scale = _Scale(_span(merged))
    everything = sorted((event for trace in merged.traces for event in trace.of("operation")), key=lambda e: -e["dur"])
    chosen = {id(event) for event in everything[:_MOST_OPERATIONS]}
    kinds = sorted({event["name"] for event in everything}, key=list(_COLOURS).index)
    bars: list[str] = []
    fixed: list[str] = []
    labels: list[str] = []
    y = float(_TOP)
    for trace in merged.traces:
        fixed.append(f'<rect x="0" y="{y:.1f}" width="{_LEFT + _WIDTH + 20}" height="{_HEADER - 5}" fill="#e9edf2"/>')
        title = f"rank {trace.rank}, {trace.place}"
        fixed.append(f'<text x="8" y="{y + 14:.1f}" font-size="12" font-weight="bold">{escape(title)}</text>')
        y += _HEADER
        for number, group in sorted(trace.groups.items()):
            rounds = [event for event in trace.of("round") if event["args"]["number"] == number]
            mine = [e for e in trace.of("operation") if e["args"]["number"] == number and id(e) in chosen]
            if not rounds and not mine:
                continue
            top = y
            bars += [_round(event, scale, y) for event in rounds[:_MOST_OPERATIONS]]
            y += _ROUNDS + 2
            rows = _rows(mine)
            tall = max(_THINNEST, min(_ROW, _TALLEST / max(len(rows), 1)))
            for row in rows:
                for event in row:
                    bars.append(_bar(event, scale, y, tall))
                    if tall == _ROW:
                        labels.append(_label(event, scale, y))
                y += tall
            y = max(y, top + 28) + _GAP
            fixed.append(f'<line x1="8" x2="{_LEFT + _WIDTH}" y1="{y - 2:.1f}" y2="{y - 2:.1f}" stroke="#e2e2e2"/>')
            name = group.label if len(group.label) <= 30 else group.label[:29] + "…"
            fixed.append(f'<text x="16" y="{top + 11:.1f}" font-size="12">{escape(name)}</text>')
            fixed.append(f'<text x="16" y="{top + 24:.1f}" font-size="10" fill="#777">{escape(group.ranks)}</text>')
        y += _GAP
    clip = f'<clipPath id="inside"><rect x="{_LEFT}" y="0" width="{_WIDTH}" height="{y:.0f}"/></clipPath>'
    drawing = [
        clip,
        f'<g id="axis">{_axis(scale, y)}</g>',
        *fixed,
        f'<g clip-path="url(#inside)"><g id="plot" transform="translate({_LEFT} 0)">',
        *bars,
        '</g><g id="labels" font-size="10" fill="#111" '
        'stroke="#fff" stroke-opacity="0.6" stroke-width="2" paint-order="stroke" pointer-events="none">',
        *labels,
        "</g></g>",
    ]
    return drawing, y, sum(id(event) in chosen for event in everything), kinds


def _rows(events: list[Event]) -> list[list[Event]]:
    """Operations that overlap in time are in rows of their own."""
    rows: list[list[Event]] = []
    for lane, event in assign(events):
        if lane == len(rows):
            rows.append([])
        rows[lane].append(event)
    return rows


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.4f}" y="{y:.2f}" width="{max(width, 0.0):.4f}" height="{height:.2f}" {style}/>'


def _round(event: Event, scale: _Scale, y: float) -> str:
    args = event["args"]
    late = args.get("first_to_last_us", 0.0)
    fill = _LATE if late >= _LATE_US else "#9aa5b1"
    tip = [f"round {args['round']}: {args['offered']} offered, {args['agreed']} agreed", _time(event["dur"])]
    if "last_rank" in args:
        tip.append(f"rank {args['last_rank']} came last, {_time(late)} after the first")
    bar = _rect(scale.x(event["ts"]), y, max(scale.x(event["dur"]), 0.4), _ROUNDS, f'fill="{fill}"')
    return f"<g>{bar}{_title(tip)}</g>"


def _bar(event: Event, scale: _Scale, y: float, tall: float) -> str:
    args = event["args"]
    colour = _ERROR if "error" in args else _COLOURS.get(event["name"], "#444")
    height = tall * 0.88 if tall > 4 else tall
    at, end = event["ts"], event["ts"] + event["dur"]
    parts = []
    for state, time in args.get("states", {"moving": event["dur"]}).items():
        until = min(at + time, end)
        style = f'fill="{colour}" fill-opacity="{_OPACITY.get(state, 1.0)}"'
        parts.append(_rect(scale.x(at), y, scale.x(until - at), height, style))
        at = until
    # What is too short to be seen is to be seen all the same.
    if scale.x(event["dur"]) < 0.5:
        parts.append(_rect(scale.x(event["ts"]), y, 0.5, height, f'fill="{colour}"'))
    if args.get("unfinished"):
        style = f'fill="none" stroke="{_ERROR}" stroke-width="1.5" vector-effect="non-scaling-stroke"'
        parts.append(_rect(scale.x(event["ts"]), y, scale.x(event["dur"]), height, style))
    return f"<g>{''.join(parts)}{_title(_tip(event))}</g>"


def _tip(event: Event) -> list[str]:
    args = event["args"]
    what = event["name"] + (f"({args['op']})" if "op" in args else "")
    count = "message" if "peer" in args else "collective"
    lines = [f"{what} of {args['bytes']:,} bytes, {args['dtype']}"]
    if "name" in args:
        lines.insert(0, args["name"])
    lines.append(f"{count} {args['sequence']} of group {args['group']}")
    if "peer" in args:
        lines.append(f"with rank {args['peer']}, tag {args['tag']}")
    if args.get("inline"):
        lines.append(f"round {args['round']}, its data inside the round")
    elif "batch" in args:
        lines.append(f"round {args['round']}, batch {args['batch']} of {args['fused']} operations")
    lines.append(f"{_time(event['dur'])}: " + ", ".join(f"{s} {_time(t)}" for s, t in args.get("states", {}).items()))
    if args.get("unfinished"):
        lines.append("not over when the timeline ended")
    if "error" in args:
        lines.append(args["error"])
    return lines


def _title(lines: list[str]) -> str:
    return f"<title>{escape(chr(10).join(lines))}</title>"


def _label(event: Event, scale: _Scale, y: float) -> str:
    args = event["args"]
    text = args.get("name") or f"{event['name']} {args['sequence']}"
    start, end = scale.x(event["ts"]), scale.x(event["ts"] + event["dur"])
    shown = end - start > len(text) * 5.6 + 6
    style = "" if shown else "display:none"
    return (
        f'<text x="{_LEFT + start + 4:.1f}" y="{y + 10:.1f}" data-x="{start:.4f}" data-e="{end:.4f}" '
        f'data-n="{len(text)}" style="{style}">{escape(text)}</text>'
    )


def _axis(scale: _Scale, bottom: float) -> str:
    step = 10.0 ** math.floor(math.log10(scale.span / 10))
    for factor in (2, 2.5, 2):
        if scale.span / step > 14:
            step *= factor
    parts = []
    for number in range(int(scale.span / step) + 1):
        x = _LEFT + scale.x(number * step)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="22" y2="{bottom:.0f}" stroke="#ddd"/>')
        text = _time(number * step) if number else "0"
        parts.append(f'<text x="{x:.1f}" y="16" text-anchor="middle" font-size="11" fill="#555">{escape(text)}</text>')
    return "".join(parts)


def _legend(kinds: list[str]) -> str:
    """Colours of the kinds that occur, and what their shades mean."""
    x = 16.0
    parts = []
    entries = [(f'fill="{_COLOURS.get(kind, "#444")}"', kind) for kind in kinds]
    entries += [(f'fill="#2b6cb0" fill-opacity="{opacity}"', text) for _, opacity, text in _MEANING]
    entries += [(f'fill="{_ERROR}"', "failed"), (f'fill="none" stroke="{_ERROR}" stroke-width="1.5"', "not over")]
    entries += [('fill="#9aa5b1"', "round"), (f'fill="{_LATE}"', "round that waited over 1 ms for its last rank")]
    y = 4.0
    for style, text in entries:
        wide = 22 + 5.6 * len(text)
        if x + wide > _LEFT + _WIDTH:
            x, y = 16.0, y + 17
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="14" height="11" {style}/>')
        parts.append(f'<text x="{x + 18:.0f}" y="{y + 10:.0f}" font-size="11" fill="#333">{escape(text)}</text>')
        x += wide + 10
    view = f"0 0 {_LEFT + _WIDTH + 20} {y + 20:.0f}"
    return f'<svg id="legend" xmlns="http://www.w3.org/2000/svg" viewBox="{view}">{"".join(parts)}</svg>'


def _time(us: float) -> str:
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:.4g} {name}"
    return f"{us:.3g} us"
