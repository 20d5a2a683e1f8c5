"""multicomm beside Gloo and bare MPI: the same work, in the same processes, in one run.

    python benchmarks/bench.py [--ranks 2] [--quick] [--only NAME] [--json FILE] [--plot FILE.png] [--check]

Starts the ranks itself. Repetitions of the contenders are interleaved, each after a barrier; a time is rank 0's from
that barrier to the end of its own work, and a figure is the median over repetitions. Figures of two runs cannot be
compared: the machine is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_JSON = ROOT / "build" / "bench" / "results.json"


@dataclass(frozen=True)
class Target:
    """What a workload should reach: times as fast as Gloo, and at most so many times bare MPI's time."""

    title: str
    gloo: float | None = None
    mpi: float | None = None


TARGETS = {
    "sync_1k": Target("synchronous all_reduce 1 KiB", gloo=8),
    "storm": Target("1000 x 1 KiB async, wait all", gloo=40),
    "storm_two_groups": Target("the same, alternating over two groups", gloo=15),
    "resnet50": Target("ResNet-50's 161 gradients, one all_reduce each", gloo=3, mpi=1.3),
    "big": Target("all_reduce 64 MiB", mpi=1.0),
    "idle": Target("idle after init (share of a core)"),
}
IDLE_LIMIT = 0.01


def run_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Launches the ranks by torchrun and reads rank 0's results."""
    args.json.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += [str(Path(__file__).with_name("workloads.py")), "--out", str(args.json)]
    command += ["--quick"] if args.quick else []
    command += ["--only", args.only] if args.only else []
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1200)
    results: dict[str, Any] = json.loads(args.json.read_text())
    return results


def milliseconds(times: list[float] | None) -> float | None:
    return statistics.median(times) * 1e3 if times else None


def show(value: float | None, pattern: str) -> str:
    return pattern.format(value) if value is not None else "-"


def summarise(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per workload: medians in ms, ratios, and whether the target is met."""
    rows = []
    for name, target in TARGETS.items():
        if name not in results["times"]:
            continue
        times = results["times"][name]
        if name == "idle":
            share = max(times["multicomm"])
            rows.append({"name": name, "title": target.title, "share": share, "met": share < IDLE_LIMIT})
            continue
        ours, gloo, mpi = (milliseconds(times.get(who)) for who in ("multicomm", "gloo", "mpi"))
        assert ours is not None
        row = {"name": name, "title": target.title, "multicomm": ours, "gloo": gloo, "mpi": mpi}
        row["faster_than_gloo"] = gloo / ours if gloo else None
        row["share_of_mpi"] = ours / mpi if mpi else None
        row["met"] = (target.gloo is None or (gloo is not None and gloo / ours >= target.gloo)) and (
            target.mpi is None or mpi is None or ours / mpi <= target.mpi
        )
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]], results: dict[str, Any]) -> None:
    print(f"\n{results['ranks']} ranks on {results['cores']} cores, torch {results['torch']}; medians, ms")
    heads = ("multicomm", "Gloo", "x Gloo", "MPI", "of MPI", "wanted", "")
    print(f"{'work':<50}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        target = TARGETS[row["name"]]
        verdict = "met" if row["met"] else "MISSED"
        if row["name"] == "idle":
            print(f"{row['title']:<50}{row['share']:>11.2%}{'':>44}{'< 1 %':>11}{verdict:>11}")
            continue
        wanted = ", ".join(
            ([f">={target.gloo:g}x"] if target.gloo else []) + ([f"<={target.mpi:g} MPI"] if target.mpi else [])
        )
        cells = (
            show(row["multicomm"], "{:.3f}"),
            show(row["gloo"], "{:.3f}"),
            show(row["faster_than_gloo"], "{:.1f}"),
            show(row["mpi"], "{:.3f}"),
            show(row["share_of_mpi"], "{:.2f}"),
        )
        print(f"{row['title']:<50}" + "".join(f"{cell:>11}" for cell in cells) + f"{wanted:>14} {verdict:>7}")
    if results.get("mpi_missing"):
        print("no MPI column: mpi4py is not installed")


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Bars: how many times as fast as Gloo and as bare MPI, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["name"] != "idle"][::-1]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for shift, (key, label, colour) in enumerate(
        (("mpi", "bare MPI (mpi4py)", "#c98a1b"), ("gloo", "Gloo", "#2f6f9f"))
    ):
        ratios = [row[key] / row["multicomm"] if row[key] else 0.0 for row in rows]
        bars = axes.barh(
            [y + 0.2 - 0.4 * (1 - shift) for y in range(len(rows))], ratios, 0.38, label=label, color=colour
        )
        axes.bar_label(bars, [f"{ratio:.1f}" if ratio else "" for ratio in ratios], padding=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows])
    axes.set_xlabel("times as fast as ... (right of the line: multicomm is faster)")
    axes.legend(loc="lower right", reverse=True)
    figure.savefig(file, dpi=130)
    print(f"plot: {file}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, under a minute")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one workload")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="raw times of all repetitions")
    parser.add_argument("--plot", type=Path, help="a picture of the ratios (needs matplotlib)")
    parser.add_argument("--check", action="store_true", help="fail when a wanted ratio is missed")
    args = parser.parse_args()
    results = run_ranks(args)
    rows = summarise(results)
    print_table(rows, results)
    print(f"raw times: {args.json}")
    if args.plot:
        plot(rows, args.plot)
    return 1 if args.check and not all(row["met"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
