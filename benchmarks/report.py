"""What bench.py shows of the raw times: medians, ratios and verdicts as a table and as a picture."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DISTURBED = 0.10  # share of the cores used by others above which spinning contenders, MPI first, measure them
IDLE_LIMIT = 0.01
OTHERS = {  # not judged
    "mpi_blocking": "by MPI_Allreduce, one by one",
    "mpi_nonblocking": "by MPI_Iallreduce",
    "c10d": "by torch.distributed.all_reduce",
    "grouped": "by one grouped call",
}


@dataclass(frozen=True)
class Target:
    """What a workload should reach: times as fast as Gloo, and at most so many times bare MPI's time."""

    title: str
    gloo: float | None = None
    mpi: float | None = None

    @property
    def wanted(self) -> str:
        parts = [f">= {self.gloo:g} x Gloo"] if self.gloo else []
        return ", ".join(parts + ([f"<= {self.mpi:g} of MPI"] if self.mpi else []))


TARGETS = {
    "sync_1k": Target("synchronous all_reduce 1 KiB", gloo=8),
    "storm": Target("1000 x 1 KiB async, wait all", gloo=40),
    "storm_two_groups": Target("the same, alternating over two groups", gloo=15),
    "verbs": Target("1000 x 1 KiB by multicomm.allreduce_async_", mpi=1.6),
    "resnet50": Target("ResNet-50's 161 gradients, async", gloo=3, mpi=1.3),
    "big": Target("all_reduce 64 MiB", mpi=1.0),
    "new_group_used": Target("new_group and one all_reduce", gloo=1),
    "new_group_alone": Target("new_group and destroy, unused", gloo=1),
    "idle": Target("idle after init (share of a core)"),
}


@dataclass(frozen=True)
class Ratio:
    """Ratio of two medians, with the quartiles of the ratios within each repetition as its spread."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(numerators: list[float] | None, denominators: list[float] | None) -> Ratio | None:
        if not numerators or not denominators:
            return None
        low, _, high = statistics.quantiles([a / b for a, b in zip(numerators, denominators, strict=True)], n=4)
        return Ratio(statistics.median(numerators) / statistics.median(denominators), low, high)

    def spans(self, target: float) -> bool:
        return self.low <= target <= self.high

    def __str__(self) -> str:
        digits = 1 if self.value >= 3 else 2
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def judge(target: Target, gloo: Ratio | None, mpi: Ratio | None) -> tuple[bool, str]:
    """Whether every wanted ratio was measured and reached, and the word for it; `~`: the spread allows the contrary."""
    pairs = ((target.gloo, gloo, 1), (target.mpi, mpi, -1))
    wanted = [(limit, ratio, sign) for limit, ratio, sign in pairs if limit is not None]
    measured = [(limit, ratio, sign) for limit, ratio, sign in wanted if ratio is not None]
    if any(sign * ratio.value < sign * limit for limit, ratio, sign in measured):
        word = "MISSED"
    elif len(measured) < len(wanted):
        return False, "not measured"
    else:
        word = "met"
    return word == "met", word + (" ~" if any(ratio.spans(limit) for limit, ratio, _ in measured) else "")


def summarise(results: dict[str, Any]) -> list[Row]:
    """One row per workload: medians in ms, ratios, and whether the target is met."""
    rows: list[Row] = []
    for name, target in TARGETS.items():
        times = results["times"].get(name)
        if times is None:
            continue
        row: Row = {"name": name, "target": target, "others": results["others"].get(name)}
        if name == "idle":
            row["share"] = times["multicomm"][0]
            row["met"] = row["share"] < IDLE_LIMIT
            row["verdict"] = "met" if row["met"] else "MISSED"
        else:
            row["ms"] = {who: statistics.median(values) * 1e3 for who, values in times.items()}
            row["gloo"] = Ratio.of(times.get("gloo"), times["multicomm"])
            row["mpi"] = Ratio.of(times["multicomm"], times.get("mpi"))
            row.update({who: Ratio.of(times["multicomm"], times.get(who)) for who in OTHERS})
            row["met"], row["verdict"] = judge(target, row["gloo"], row["mpi"])
        rows.append(row)
    return rows


def print_table(rows: list[Row], results: dict[str, Any]) -> None:
    def line(*cells: object) -> None:
        widths = (44, 11, 11, 20, 10, 18, 29, 14, 6)
        text = [f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)]
        print("".join(text).rstrip())

    def number(value: float | None, pattern: str) -> str:
        return "-" if value is None else pattern.format(value)

    print(f"\n{results['ranks']} ranks on {results['cores']} cores, torch {results['torch']}")
    line("work", "multicomm", "Gloo", "x Gloo", "MPI", "of MPI", "wanted", "met?", "others")
    for row in rows:
        if "share" in row:
            line(row["target"].title, f"{row['share']:.2%}", "", "", "", "", "< 1 %", row["verdict"], "")
            continue
        ms = row["ms"]
        cells = [number(ms.get(who), "{:.3f}") for who in ("multicomm", "gloo", "mpi")]
        others = number(row["others"], "{:.0%}")
        gloo, mpi = row["gloo"] or "-", row["mpi"] or "-"
        line(row["target"].title, cells[0], cells[1], gloo, cells[2], mpi, row["target"].wanted, row["verdict"], others)
        for who, title in OTHERS.items():
            if who in ms:
                line(f"  {title}", "", "", "", f"{ms[who]:.3f}", row[who], "", "", "")
    print(
        "\nTimes in ms: medians over repetitions, of the slowest rank. Ratios: of these medians; in brackets the"
        "\nquartiles of the ratios within each repetition. ~: the target lies between them."
        "\nOf 1000 calls, a ms is a microsecond per call."
        "\nOthers: the share of the cores that other programs used meanwhile."
    )
    if results["mpi_missing"]:
        print(f"No MPI column: {results['mpi_missing']}.")
    disturbed = [row["target"].title for row in rows if (row["others"] or 0) > DISTURBED]
    if disturbed:
        print(f"WARNING: other programs used more than {DISTURBED:.0%} of the cores during: {'; '.join(disturbed)}.")
        print("         These rows measure the others too. Run again on a quiet machine before believing them.")
    if results["ranks"] > results["cores"]:
        print("WARNING: more ranks than cores: contenders that spin while they wait keep the others from running.")


def plot(rows: list[Row], file: Path) -> bool:
    """Bars from 1: how many times as fast as Gloo and as bare MPI, with a mark at what is wanted."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FormatStrFormatter

    rows = [row for row in rows if "ms" in row][::-1]
    if not rows:
        print("no plot: no ratios in this run")
        return False
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    axes.set_xscale("log")
    extremes = [1.0]
    kinds = (("gloo", "as Gloo", "#2f6f9f", 0.2), ("mpi", "as bare MPI (mpi4py)", "#c98a1b", -0.2))
    for who, label, colour, shift in kinds:
        for y, row in enumerate(rows):
            ms, limit = row["ms"], getattr(row["target"], who)
            if who not in ms:
                continue
            speed = ms[who] / ms["multicomm"]
            axes.barh(y + shift, speed - 1, 0.36, left=1, color=colour)
            offset, side = (4, "left") if speed >= 1 else (-4, "right")
            axes.annotate(
                f"{speed:.2g}" if speed < 10 else f"{speed:.0f}",
                (speed, y + shift),
                (offset, 0),
                textcoords="offset points",
                ha=side,
                va="center",
            )
            extremes.append(speed)
            if limit:
                mark = limit if who == "gloo" else 1 / limit
                axes.plot([mark, mark], [y + shift - 0.2, y + shift + 0.2], color="black", linewidth=2.5)
                extremes.append(mark)
        axes.barh([0], [0], color=colour, label=label)
    axes.plot([], [], color="black", linewidth=2.5, label="wanted at least")
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xlim(min(extremes) / 2, max(extremes) * 2.5)
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_yticks(range(len(rows)), [row["target"].title for row in rows])
    axes.set_xlabel("multicomm is so many times as fast (left of 1: slower)")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(file, dpi=130)
    return True
