"""What scale.py shows: tables and a plot of runs by (scheme, size)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Results = dict[tuple[str, int], dict[str, Any]]

TITLES = {
    "engine": "multicomm",
    "tree": "multicomm, Open MPI's tree",
    "central": "one central coordinator (model)",
    "lockstep": "lockstep, 1 ms cycle (model)",
    "lockstep0": "lockstep, no pause (model)",
}


def microseconds(ns: float) -> str:
    us = ns / 1e3
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def one_way(result: dict[str, Any], kind: str) -> float:
    """A message between two ranks of such a group, in ns: half of a ping-pong."""
    where = "inside" if kind == "tensor" else "between"
    return float(result["send_ns"] + result[f"latency_{where}_ns"] + result["receive_ns"])


def times(result: dict[str, Any], kind: str, what: dict[str, Any]) -> str:
    if what["count"] == 0:
        return "-"
    unit = one_way(result, kind)
    values = (what["median_ns"], what["p99_ns"])
    return f"{' / '.join(microseconds(v) for v in values)} ({' / '.join(f'{v / unit:.1f}' for v in values)})"


def engine_by_size(results: Results, sizes: list[int]) -> str:
    rows = []
    for size in sizes:
        r = results["engine", size]
        sent = r["messages"] / r["ranks"] / r["steps"]
        rows.append(
            [
                f"{size:,}",
                f"{r['traffic_world']['messages_per_round']:g}",
                f"{sent:.0f}",
                f"{r['idle_messages']:g}",
                f"{r['state_most'] / 1024:.1f}",
                f"{r['state_peak'] / 1024:.1f}",
                f"{r['member_lists'] / 1024:.1f}",
                f"{r['process_megabytes']:,.0f}",
                f"{r['seconds']:.0f}",
            ]
        )
    head = ["ranks", "messages per rank and world round", "per rank and step", "when idle", "state per rank, KiB"]
    head += ["its peak, KiB", "lists of members, KiB", "simulation, MiB", "simulation, s"]
    return table(head, rows)


def engine_by_group(results: Results, sizes: list[int]) -> str:
    rows = []
    for size in sizes:
        r = results["engine", size]
        for kind in ("world", "data", "expert", "pipeline", "tensor"):
            g, traffic = r[kind], r[f"traffic_{kind}"]
            rows.append(
                [
                    f"{size:,}",
                    f"{kind}, {g['size']:,}",
                    f"{g['agreement']['count']:,}",
                    f"{traffic['messages_per_round']:g}",
                    times(r, kind, g["agreement"]),
                    times(r, kind, traffic["second_phase"]),
                    times(r, kind, g["device_launch"]),
                ]
            )
    head = ["ranks", "group, members", "operations", "messages per rank and round", "first phase", "second phase"]
    return table([*head, "device operation, until launched"], rows)


def schemes_by_size(results: Results, sizes: list[int]) -> str:
    rows = []
    for size in sizes:
        for scheme, title in TITLES.items():
            r = results[scheme, size]
            ranks, steps = r["ranks"], r["steps"]
            pause = "0" if r["idle_messages"] == 0 else f"{r['idle_messages_per_rank_and_second']:,.0f}"
            every = r["all_agreement"]
            rows.append(
                [
                    f"{size:,}",
                    title,
                    microseconds(r["world"]["agreement"]["median_ns"]),
                    f"{microseconds(every['median_ns'])} / {microseconds(every['p99_ns'])}",
                    f"{r['messages'] / ranks / steps:,.0f}",
                    f"{r['busiest_messages'] / steps:,.0f}",
                    pause,
                    f"{r['time_per_step_us'] / 1e3:,.2f}",
                ]
            )
    head = ["ranks", "scheme", "world operation agreed, µs", "any operation, µs", "messages sent per rank and step"]
    head += ["handled by the busiest rank", "sent per rank and second when idle", "a step takes, ms"]
    return table(head, rows)


def tables(results: Results, sizes: list[int]) -> str:
    r = results["engine", sizes[0]]
    return "\n".join(
        [
            f"The engine: {r['operations_per_step']} operations per rank and step, in 5 groups per rank.\n",
            engine_by_size(results, sizes),
            "From the last member's submission (second phase: start) until the last member knows; median / "
            "p99 in µs, in brackets in one-way messages.\n",
            engine_by_group(results, sizes),
            "Beside other ways to agree; any operation: median / p99.\n",
            schemes_by_size(results, sizes),
        ]
    )


def plot(results: Results, sizes: list[int], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    colours = dict(zip(TITLES, ("#1b6ca8", "#74b3dd", "#c0392b", "#8a6d1d", "#e0a526"), strict=True))
    styles = {"engine": "o-", "tree": "s--", "central": "^-", "lockstep": "v-", "lockstep0": "D--"}
    figure, panels = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    latency, load, state = panels
    for scheme, title in TITLES.items():
        runs = [results[scheme, size] for size in sizes]
        line = {"color": colours[scheme], "markersize": 5}
        latency.plot(
            sizes, [r["world"]["agreement"]["median_ns"] / 1e3 for r in runs], styles[scheme], label=title, **line
        )
        load.plot(sizes, [r["busiest_messages"] / r["steps"] for r in runs], styles[scheme], **line)
    latency.set_title("an operation of all ranks:\nlast submission until all know, µs", fontsize=11)
    load.set_title("messages that the busiest rank\nhandles in one training step", fontsize=11)
    runs = [results["engine", size] for size in sizes]
    state.plot(sizes, [r["state_most"] / 1024 for r in runs], "o-", color=colours["engine"], label="engine, 5 groups")
    lists = [r["member_lists"] / 1024 for r in runs]
    state.plot(sizes, lists, "x:", color="#555555", label="lists of the groups' members")
    state.set_title("state per rank of multicomm,\nKiB (measured)", fontsize=11)
    state.legend(frameon=False, fontsize=9)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlabel("ranks")
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*latency.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(file, dpi=110)
