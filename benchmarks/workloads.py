"""The rank side of bench.py: runs each workload with each contender in turn and writes the times."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import multicomm  # noqa: F401  (registers the backend)
import torch
import torch.distributed as dist

Contender = Callable[[], None]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes of ResNet-50's 161 parameters (He et al., "Deep residual learning", 2016), in order of use."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, inp, kernel in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, inp, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


class Bench:
    """Times contenders in turn and checks what they computed."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.gloo = dist.new_group(backend="gloo")
        self.twin = dist.new_group(backend="multicomm")
        self.gloo_twin = dist.new_group(backend="gloo")
        self.size = dist.get_world_size()
        dist.barrier()  # MPI is up from here on
        dist.barrier(group=self.twin)
        self.mpi = self.find_mpi()
        self.times: dict[str, dict[str, list[float]]] = {}

    @staticmethod
    def find_mpi():  # noqa: ANN205 - mpi4py is optional
        """mpi4py on the MPI that multicomm has started, or None."""
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except ImportError:
            return None
        return MPI

    def run(
        self, name: str, contenders: dict[str, Contender], tensors: list[torch.Tensor], repetitions: int, inner: int = 1
    ) -> None:
        """Times each contender on tensors of ones, `inner` all_reduces on each, and checks the sums."""
        repetitions = max(3, repetitions // 3) if self.quick else repetitions
        times: dict[str, list[float]] = {who: [] for who in contenders}
        for repetition in range(repetitions + 1):
            for who, work in contenders.items():
                for tensor in tensors:  # a sum of sums must not overflow over the repetitions
                    tensor.fill_(1.0)
                dist.barrier()
                start = time.perf_counter()
                work()
                took = (time.perf_counter() - start) / inner
                for tensor in tensors:
                    if not torch.equal(tensor, torch.full_like(tensor, float(self.size**inner))):
                        raise AssertionError(f"{name}, {who}: wrong result {tensor.flatten()[:4]}")
                if repetition > 0:  # the first one warms up
                    times[who].append(took)
        self.times[name] = times

    def sync_1k(self) -> None:
        x = torch.ones(256)
        inner = 50

        def work(group: dist.ProcessGroup | None) -> None:
            for _ in range(inner):
                dist.all_reduce(x, group=group)

        contenders: dict[str, Contender] = {"multicomm": lambda: work(None), "gloo": lambda: work(self.gloo)}
        if self.mpi:
            mpi, array = self.mpi, x.numpy()
            contenders["mpi"] = lambda: [mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array) for _ in range(inner)] and None
        self.run("sync_1k", contenders, [x], 9, inner)

    def storm_of(self, tensors: list[torch.Tensor], groups: list[dist.ProcessGroup | None]) -> None:
        count = len(groups)
        works = [dist.all_reduce(t, group=groups[i % count], async_op=True) for i, t in enumerate(tensors)]
        for work in works:
            work.wait()

    def mpi_storm(self, tensors: list[torch.Tensor]) -> Contender:
        mpi = self.mpi
        arrays = [t.numpy() for t in tensors]

        def work() -> None:
            requests = [mpi.COMM_WORLD.Iallreduce(mpi.IN_PLACE, array) for array in arrays]
            mpi.Request.Waitall(requests)

        return work

    def many(self, name: str, tensors: list[torch.Tensor], twins: bool, repetitions: int) -> None:
        ours = [None, self.twin] if twins else [None]
        theirs = [self.gloo, self.gloo_twin] if twins else [self.gloo]
        contenders: dict[str, Contender] = {
            "multicomm": lambda: self.storm_of(tensors, ours),
            "gloo": lambda: self.storm_of(tensors, theirs),
        }
        if self.mpi:
            contenders["mpi"] = self.mpi_storm(tensors)
        self.run(name, contenders, tensors, repetitions)

    def storm(self) -> None:
        self.many("storm", [torch.ones(256) for _ in range(1000)], twins=False, repetitions=9)

    def storm_two_groups(self) -> None:
        self.many("storm_two_groups", [torch.ones(256) for _ in range(1000)], twins=True, repetitions=9)

    def resnet50(self) -> None:
        shapes = resnet50_shapes()
        tensors = [torch.ones(shape) for shape in shapes]
        total = sum(t.numel() for t in tensors)
        assert (len(shapes), total) == (161, 25_557_032), (len(shapes), total)
        self.many("resnet50", tensors, twins=False, repetitions=9)

    def big(self) -> None:
        x = torch.ones(64 * 2**20 // 4)
        contenders: dict[str, Contender] = {
            "multicomm": lambda: dist.all_reduce(x),
            "gloo": lambda: dist.all_reduce(x, group=self.gloo),
        }
        if self.mpi:
            mpi, array = self.mpi, x.numpy()
            contenders["mpi"] = lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)
        self.run("big", contenders, [x], 12)

    def idle(self) -> None:
        """Share of a core that this process uses while it does nothing."""
        dist.barrier()
        time.sleep(0.5)  # the grace after the last operation is not idle time
        seconds = 2.0 if self.quick else 5.0
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        share = torch.tensor([(time.process_time() - cpu) / (time.perf_counter() - wall)])
        dist.all_reduce(share, dist.ReduceOp.MAX)
        self.times["idle"] = {"multicomm": [share.item()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("multicomm")
    bench = Bench(args.quick)
    for name in ("sync_1k", "storm", "storm_two_groups", "resnet50", "big", "idle"):
        if args.only in (None, name):
            getattr(bench, name)()
    if dist.get_rank() == 0:
        results = {
            "ranks": bench.size,
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "mpi_missing": bench.mpi is None,
            "times": bench.times,
        }
        args.out.write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
