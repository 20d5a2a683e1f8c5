"""What agreement costs at 64 to 16,384 ranks: the engine itself and two models of other ways, in virtual time.

    python benchmarks/scale.py [--sizes 64,256] [--docs docs]

Runs build/scale/scale once per size and scheme (`make scale` builds it), writes the tables into docs/scale.md and the
plot beside it, keeps all figures in build/scale/results.json, and fails when the engine costs more than is claimed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scale_report import TITLES, plot, tables

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build" / "scale" / "scale"
SIZES = {64: 100, 256: 60, 1024: 50, 4096: 25, 16384: 16}  # steps of each: as many as a few minutes allow
KINDS = ("world", "tensor", "pipeline", "data", "expert")
MARKS = ("<!-- begin: written by make scale -->", "<!-- end -->")
STATE_SPREAD = 0.02  # by which the state per rank may differ between sizes
OPTIONS = {
    "engine": ["--scheme", "engine"],
    "tree": ["--scheme", "engine", "--tree"],
    "relaxed": ["--scheme", "engine", "--relaxed"],
    "central": ["--scheme", "central"],
    "lockstep": ["--scheme", "lockstep"],
    "lockstep0": ["--scheme", "lockstep", "--cycle-us", "0"],
}

Result = dict[str, Any]


def run(ranks: int, steps: int, scheme: str) -> Result:
    command = [str(PROGRAM), "--ranks", str(ranks), "--steps", str(steps), *OPTIONS[scheme]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    result: Result = json.loads(done.stdout)
    return result


def all_reduce_messages(n: int) -> float:
    """Messages that a member sends, on average, in an all-reduce of n by recursive doubling."""
    power = 1 << (n.bit_length() - 1)
    return (power * (power.bit_length() - 1) + 2 * (n - power)) / n


def unit_of_time(result: Result, kind: str) -> float:
    """What agreement is measured by: the network's latency; in a node, where the CPU costs more, a whole message."""
    if kind == "tensor":
        return float(result["send_ns"] + result["latency_inside_ns"] + result["receive_ns"])
    return float(result["latency_between_ns"])


def broken_claims(result: Result, smallest: Result) -> list[str]:
    """What docs/scale.md claims of the engine and this run does not show. `smallest`: the run of the fewest ranks."""
    broken: list[str] = []

    def claim(holds: bool, text: str) -> None:
        if not holds:
            broken.append(f"{result['ranks']} ranks: {text}")

    claim(result["idle_messages"] == 0, f"{result['idle_messages']} messages while nothing is submitted")
    for kind in KINDS:
        n = result[kind]["size"]
        if n == 1:
            continue
        traffic = result[f"traffic_{kind}"]
        sent = traffic["messages_per_round"]
        claim(
            traffic["most_sent"] <= math.ceil(math.log2(n)) + 1, f"{kind}: a rank sends {traffic['most_sent']} a round"
        )
        if kind != "expert":  # whose last group may be smaller
            claim(math.isclose(sent, all_reduce_messages(n)), f"{kind}: {sent} messages per rank and round")
        limit = 3 * math.log2(n) * unit_of_time(result, kind)
        for phase, times in (("first", result[kind]["agreement"]), ("second", traffic["second_phase"])):
            claim(times["p99_ns"] < limit, f"{kind}: {phase} phase takes {times['p99_ns']} ns, not {limit:.0f}")
    for key in ("state_least", "state_most", "state_peak"):
        change = abs(result[key] / smallest[key] - 1)
        claim(change <= STATE_SPREAD, f"{key} is {result[key]}, {change:.1%} from that of {smallest['ranks']} ranks")
    claim(result["disagreement_told"] == "all", "a disagreement is not told to all members")
    kept = result["state_after_disagreement"] / result["state_most"] - 1
    claim(kept <= STATE_SPREAD, f"{kept:.1%} more state is kept after a disagreement")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    jobs = [(size, SIZES.get(size, 20), scheme) for size in sorted(sizes, reverse=True) for scheme in TITLES]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda job: run(*job), jobs))
    results = {(scheme, size): result for (size, _, scheme), result in zip(jobs, done, strict=True)}
    (ROOT / "build" / "scale" / "results.json").write_text(json.dumps(done, indent=1))

    sizes.sort()
    text = tables(results, sizes)
    print(text)
    page = args.docs / "scale.md"
    before, rest = page.read_text().split(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{rest.split(MARKS[1], 1)[1]}")
    plot(results, sizes, args.docs / "scale.png")

    smallest = results["engine", sizes[0]]
    broken = [line for size in sizes for line in broken_claims(results["engine", size], smallest)]
    for line in broken:
        print(f"not as claimed: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
