"""What a timeline costs: 1000 asynchronous all_reduces of 1 KiB at a time, with and without one, in the same processes.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/timeline.py [ROUNDS]

Windows with and without are interleaved, in alternating order. Times are medians over all repetitions; the ratio is the
median over pairs of neighbouring windows, which other work on the machine disturbs alike.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import multicomm
import torch
import torch.distributed as dist

OPERATIONS = 1000
REPETITIONS = 10  # per window


def storm(tensors: list[torch.Tensor]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    dist.init_process_group("multicomm")
    windows = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    tensors = [torch.ones(256) for _ in range(OPERATIONS)]
    times: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, float] = {False: 0.0, True: 0.0}
    ratios = []
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(20):
            storm(tensors)
        for number in range(windows):
            medians = {}
            for timed in (False, True) if number % 2 else (True, False):
                path = multicomm.start_timeline(folder) if timed else Path(folder)
                used = time.process_time()
                window = [storm(tensors) for _ in range(REPETITIONS)]
                processor[timed] += time.process_time() - used
                multicomm.stop_timeline()
                size = path.stat().st_size if timed else size
                times[timed] += window
                medians[timed] = statistics.median(window)
                dist.barrier()
            ratios.append(medians[True] / medians[False])
    if dist.get_rank() == 0:
        off, on = statistics.median(times[False]), statistics.median(times[True])
        print(f"{OPERATIONS} all_reduces of 1 KiB on {dist.get_world_size()} ranks, medians of {len(times[True])}:")
        print(f"  without a timeline {off:.2f} ms, with one {on:.2f} ms: {on / off:.3f} times as long")
        print(f"  neighbouring windows: {statistics.median(ratios):.3f}; quartiles {quartiles(ratios)}")
        print(f"  processor time: {processor[True] / processor[False]:.3f} times as much")
        print(f"  {size / OPERATIONS / REPETITIONS:.0f} bytes per operation in the file")
    dist.destroy_process_group()


def quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f}, {high:.3f}"


if __name__ == "__main__":
    main()
