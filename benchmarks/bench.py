"""multicomm beside Gloo and bare MPI: the same work, in the same processes, in one run.

    python benchmarks/bench.py [--ranks 2] [--quick] [--only NAME] [--json FILE] [--plot FILE.png] [--check]

Starts the ranks itself. Repetitions of the contenders are interleaved, in rotating order, each after a barrier; a time
is the slowest rank's, and a figure is the median over repetitions. Figures of two runs cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import TARGETS, plot, print_table, summarise

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_JSON = ROOT / "build" / "bench" / "results.json"
TIME_LIMIT = 900


def run_ranks(args: argparse.Namespace) -> dict[str, Any] | None:
    """Launches the ranks by torchrun and reads rank 0's results; None if they failed."""
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.unlink(missing_ok=True)  # nobody shall take an earlier run's times for this one's
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += [str(Path(__file__).with_name("workloads.py")), "--out", str(args.json)]
    command += ["--quick"] if args.quick else []
    command += ["--only", args.only] if args.only else []
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as ranks:
        try:
            code = ranks.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            print(f"bench: the ranks have not finished within {TIME_LIMIT} s", file=sys.stderr)
            ranks.terminate()  # torchrun then ends its ranks; killed, it would leave them
            return None
    if code != 0 or not args.json.exists():
        print(f"bench: the ranks failed with code {code}; what they said is above", file=sys.stderr)
        return None
    results: dict[str, Any] = json.loads(args.json.read_text())
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, under a minute")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one workload")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="raw times of all repetitions")
    parser.add_argument("--plot", type=Path, help="a picture of the ratios (needs matplotlib)")
    parser.add_argument("--check", action="store_true", help="fail when a wanted ratio is missed or not measured")
    args = parser.parse_args()
    results = run_ranks(args)
    if results is None:
        return 2
    rows = summarise(results)
    print_table(rows, results)
    print(f"raw times: {args.json}")
    if args.plot and plot(rows, args.plot):
        print(f"plot: {args.plot}")
    return 1 if args.check and not all(row["met"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
