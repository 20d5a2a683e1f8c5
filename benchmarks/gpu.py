"""multicomm on GPUs beside torch's nccl backend and Gloo: the same work, in the same processes, in one run.

    python benchmarks/gpu.py [--json FILE] [--only one|shared2|shared4|several] [--budget SECONDS] [--no-build]

Repetitions of the contenders are interleaved, in rotating order, each after a barrier and with an idle device; a time
is the slowest rank's, a figure the median over repetitions, a ratio that of medians with the quartiles of the ratios
within each repetition. Figures of two runs cannot be compared. `launched` is host time until all wait() have come back,
`done` until the device has finished as well. Rows that cannot run here are listed with the reason.

With GPU_DOUBLE=1 everything runs, small, on a simulated device: the script is tried, the figures mean NOTHING.
So far only that has been done: this has never run on real hardware.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "benchmarks")]

from jobs import Job  # noqa: E402
from offline_build import SITE, CannotBuild, build  # noqa: E402
from report import Ratio  # noqa: E402
from run import Run, device_count, doubles, environment  # noqa: E402

NOTHING = "!!! A SIMULATED DEVICE: these figures mean NOTHING. They only show that the script runs. !!!"
DEFAULT_JSON = ROOT / "build" / "bench" / "gpu.json"
RIVALS = ("nccl", "nccl, coalesced", "gloo")


def all_jobs(devices: int) -> tuple[list[Job], dict[str, str]]:
    """The jobs that can run with so many devices, and why others cannot."""
    jobs = [
        Job("one", 1, ("one",), 120, environment={"MULTICOMM_CUDA": "nccl"}),
        Job("shared2", 2, ("shared",), 120, environment={"MULTICOMM_CUDA": "staged"}),
        Job("shared4", 4, ("shared",), 150, environment={"MULTICOMM_CUDA": "staged"}),
    ]
    if devices < 2:
        return jobs, {"several": f"a device for each rank needs two devices or more; there is {devices}"}
    ranks = min(devices, 2 if doubles() else 8)
    jobs.append(Job("several", ranks, ("several",), 240, own=True, environment={"MULTICOMM_CUDA": "nccl"}))
    return jobs, {}


def run(job: Job, folder: Path, limit: float) -> tuple[dict[str, Any], str]:
    """What rank 0 has measured, and what went wrong, if anything did."""
    script = Path(__file__).with_name("gpu_ranks.py")
    done = Run(job, folder, environment(), min(job.limit, limit), script)
    file = folder / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if done.code == 0:
        return results, ""
    log = (folder / "log").read_text(errors="replace").splitlines()
    print("\n".join(f"    | {line[:200]}" for line in log[-30:]), file=sys.stderr)
    how = "did not end in time" if done.code is None else f"ended with {done.code}"
    return results, f"the job {how}; see {folder / 'log'}"


def print_rows(job: Job, results: dict[str, Any]) -> None:
    widths = (44, 12, 28, 12, 12, 20)

    def line(*cells: object) -> None:
        print("".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())

    where = "a device each" if job.own else "sharing one device"
    print(f"\n{job.name}: {job.ranks} rank{'s' if job.ranks > 1 else ''}, {where if job.ranks > 1 else 'one device'}")
    line("work", "time until", "beside", "multicomm", "other", "x as fast (spread)")
    for row in results.get("rows", []):
        for until in ("launched", "done"):
            times = {who: [t[until] for t in all_of_them] for who, all_of_them in row["times"].items()}
            ours = times["multicomm"]
            for who in [r for r in RIVALS if r in times] or ["-"]:
                other = times.get(who)
                shown = f"{statistics.median(other) * 1e6:.1f}" if other else "-"
                ratio = Ratio.of(other, ours) or "-"
                beside = f"{who} (stand-in)" if doubles() else who
                line(row["title"], until, beside, f"{statistics.median(ours) * 1e6:.1f}", shown, ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="raw times of all repetitions")
    parser.add_argument("--only", choices=("one", "shared2", "shared4", "several"))
    parser.add_argument("--budget", type=float, default=450, help="seconds for everything, the build included")
    parser.add_argument("--no-build", action="store_true", help=f"take what {SITE} has")
    args = parser.parse_args()
    begin = time.monotonic()
    devices = device_count()
    if devices == 0:
        print("multicomm: bench-gpu: there is no GPU here that torch sees, so nothing has been measured.")
        return 1
    if not args.no_build:
        try:
            print(build())
        except CannotBuild as reason:
            print(f"multicomm: bench-gpu: {reason}")
            return 1
    if doubles():
        print(NOTHING)
    jobs, cannot = all_jobs(devices)
    everything: dict[str, Any] = {"double": doubles() is not None, "devices": devices, "jobs": {}}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    folder = args.json.parent / f"gpu-{int(time.time())}"
    for job in jobs:
        if args.only not in (None, job.name):
            continue
        left = args.budget - (time.monotonic() - begin) - 15
        if left < 20:
            cannot[job.name] = "no time was left of the budget"
            continue
        results, wrong = run(job, folder / job.name, left)
        if wrong:
            cannot[job.name] = wrong
        everything["jobs"][job.name] = results
        if results:
            everything.setdefault("environment", results.get("environment"))
            print_rows(job, results)
            cannot |= {f"{job.name}: {what}": why for what, why in results.get("cannot", {}).items()}
    everything["cannot"] = cannot
    args.json.write_text(json.dumps(everything, indent=1))
    print("\nTimes in microseconds: medians over repetitions, of the slowest rank; in brackets the quartiles of the")
    print("ratios within each repetition. Above 1: multicomm is faster.")
    for key, value in (everything.get("environment") or {}).items():
        print(f"{key}: {value}")
    for what, why in cannot.items():
        print(f"NOT MEASURED: {what}: {why}")
    print(f"raw times: {args.json}")
    if doubles():
        print(NOTHING)
    return 0 if everything["jobs"] and not any("the job" in why for why in cannot.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
