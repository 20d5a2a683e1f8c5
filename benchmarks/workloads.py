"""The rank side of bench.py, which starts it: runs each workload with each contender in turn and writes the times."""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import multicomm
import torch
import torch.distributed as dist
from torch import Tensor

Work = Callable[[], object]
GRACE = 0.005  # longer than multicomm's coordinator goes on polling after its last operation


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes of ResNet-50's 161 parameters (He et al., 2016), in the order of the forward pass."""
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


class Data:
    """Tensors whose sum over the ranks is known and differs by tensor and by place, so that mixed-up results show.

    The values are small whole numbers: every sum is exact in float32, in any order of addition.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> None:
        self.tensors = [torch.empty(shape) for shape in shapes]
        self.factor, self.sum_of_factors = rank + 1, size * (size + 1) // 2
        self.pattern = (
            torch.arange(max((t.numel() for t in self.tensors), default=0) + len(shapes)).remainder_(1009).float()
        )

    def expected(self, index: int, factor: int) -> Tensor:
        tensor = self.tensors[index]
        return (self.pattern[index : index + tensor.numel()] * factor).view(tensor.shape)

    def fill(self) -> None:
        for index, tensor in enumerate(self.tensors):
            tensor.copy_(self.expected(index, self.factor))

    def check(self, what: str) -> None:
        for index, tensor in enumerate(self.tensors):
            if not torch.equal(tensor, self.expected(index, self.sum_of_factors)):
                raise AssertionError(f"{what}: tensor {index} is wrong: {tensor.flatten()[:4].tolist()} ...")


def busy_seconds() -> float | None:
    """Seconds that the machine's cores have worked since it started, for whomever; None where that cannot be read."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Bench:
    """Times contenders in turn and checks what they computed."""

    BOTH = ("multicomm", "gloo")

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ours = [dist.group.WORLD, dist.new_group(backend="multicomm")]
        self.gloo = [dist.new_group(backend="gloo") for _ in range(2)]
        for group in (*self.ours, *self.gloo):  # everything is connected, and MPI is up, from here on
            dist.barrier(group=group)
        self.mpi, self.mpi_missing = self.find_mpi()
        self.times: dict[str, dict[str, list[float]]] = {}
        self.others: dict[str, float | None] = {}

    def find_mpi(self) -> tuple[Any, str]:
        """mpi4py on the MPI that multicomm has started, or None and the reason."""
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            return None, f"mpi4py cannot be imported ({error})"
        if not MPI.Is_initialized():
            return None, "mpi4py uses another MPI library than multicomm"
        if MPI.COMM_WORLD.Get_size() != self.size:
            return None, "mpi4py sees another world than multicomm"
        return MPI, ""

    def start_line(self, who: str) -> None:
        """Ranks leave together, by the contender's own barrier, when nobody else's threads are polling any more."""
        dist.barrier()
        time.sleep(GRACE)
        if who.startswith("mpi"):
            self.mpi.COMM_WORLD.Barrier()
        else:
            dist.barrier(group=self.gloo[0] if who == "gloo" else None)

    def run(
        self,
        name: str,
        contenders: dict[str, Work],
        data: Data,
        repetitions: int,
        inner: int = 1,
        after: Work | None = None,
    ) -> None:
        """Repetitions of all contenders in turn; a time is the slowest rank's, divided by `inner`."""
        repetitions = max(5, repetitions // 3) if self.quick else repetitions
        names = list(contenders)
        times: dict[str, list[float]] = {who: [] for who in names}
        busy, cpu, wall = busy_seconds(), time.process_time(), time.perf_counter()
        for repetition in range(repetitions + 1):
            turn = repetition % len(names)  # nobody always follows the same one
            for who in names[turn:] + names[:turn]:
                data.fill()
                self.start_line(who)
                start = time.perf_counter()
                contenders[who]()
                took = (time.perf_counter() - start) / inner
                data.check(f"{name}, {who}")
                if after is not None:
                    after()
                if repetition > 0:  # the first one warms up
                    times[who].append(took)
        wall = time.perf_counter() - wall
        own = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
        dist.all_reduce(own)
        after = busy_seconds()
        cores = os.cpu_count() or 1
        self.others[name] = (
            None if busy is None or after is None else max(0.0, after - busy - own.item()) / (wall * cores)
        )
        slowest = torch.tensor([times[who] for who in names], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.times[name] = dict(zip(names, slowest.tolist(), strict=True))

    def data(self, shapes: Sequence[tuple[int, ...]]) -> Data:
        return Data(shapes, self.rank, self.size)

    def one_by_one(self, name: str, shapes: Sequence[tuple[int, ...]], repetitions: int) -> None:
        """Synchronous calls, one after the other; a time is that of one call."""
        data = self.data(shapes)
        contenders: dict[str, Work] = {
            "multicomm": lambda: [dist.all_reduce(t) for t in data.tensors],
            "gloo": lambda: [dist.all_reduce(t, group=self.gloo[0]) for t in data.tensors],
        }
        if self.mpi:
            world, in_place = self.mpi.COMM_WORLD, self.mpi.IN_PLACE
            arrays = [t.numpy() for t in data.tensors]
            contenders["mpi"] = lambda: [world.Allreduce(in_place, array) for array in arrays]
            if len(shapes) == 1:
                contenders["mpi_nonblocking"] = lambda: world.Iallreduce(in_place, arrays[0]).Wait()
        self.run(name, contenders, data, repetitions, inner=len(shapes))

    def all_at_once(self, name: str, shapes: Sequence[tuple[int, ...]], groups: int, repetitions: int) -> None:
        """Asynchronous calls, dealt out over the groups in turn, then a wait for all; a time is that of the whole."""
        data = self.data(shapes)

        def storm(of: list[dist.ProcessGroup]) -> None:
            works = [dist.all_reduce(t, group=of[i % groups], async_op=True) for i, t in enumerate(data.tensors)]
            for work in works:
                work.wait()

        contenders: dict[str, Work] = {"multicomm": lambda: storm(self.ours), "gloo": lambda: storm(self.gloo)}
        duplicates = [self.mpi.COMM_WORLD.Dup() for _ in range(groups)] if self.mpi else []
        if self.mpi:
            mpi, arrays = self.mpi, [t.numpy() for t in data.tensors]
            contenders["mpi"] = lambda: mpi.Request.Waitall(
                [duplicates[i % groups].Iallreduce(mpi.IN_PLACE, array) for i, array in enumerate(arrays)]
            )
            # Open MPI's nonblocking all-reduce is much slower than its blocking one on large tensors: both are shown.
            contenders["mpi_blocking"] = lambda: [
                duplicates[i % groups].Allreduce(mpi.IN_PLACE, array) for i, array in enumerate(arrays)
            ]
        self.run(name, contenders, data, repetitions)
        for duplicate in duplicates:
            duplicate.Free()

    def sync_1k(self) -> None:
        self.one_by_one("sync_1k", [(256,)] * 200, 21)

    def storm(self) -> None:
        self.all_at_once("storm", [(256,)] * 1000, 1, 21)

    def storm_two_groups(self) -> None:
        self.all_at_once("storm_two_groups", [(256,)] * 1000, 2, 21)

    def verbs(self) -> None:
        """The package's own calls beside torch.distributed's, on the same group; and bare MPI's."""
        data = self.data([(256,)] * 1000)

        def by_verb() -> None:
            for handle in [multicomm.allreduce_async_(tensor, op=multicomm.Sum) for tensor in data.tensors]:
                multicomm.synchronize(handle)

        def by_c10d() -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in data.tensors]:
                work.wait()

        contenders: dict[str, Work] = {
            "multicomm": by_verb,
            "c10d": by_c10d,
            "grouped": lambda: multicomm.grouped_allreduce_(data.tensors, op=multicomm.Sum),
        }
        if self.mpi:
            mpi, world, arrays = self.mpi, self.mpi.COMM_WORLD, [t.numpy() for t in data.tensors]
            contenders["mpi"] = lambda: mpi.Request.Waitall([world.Iallreduce(mpi.IN_PLACE, a) for a in arrays])
        self.run("verbs", contenders, data, 41)

    def resnet50(self) -> None:
        shapes = resnet50_shapes()
        total = sum(torch.Size(shape).numel() for shape in shapes)
        if (len(shapes), total) != (161, 25_557_032):
            raise AssertionError(f"not ResNet-50: {len(shapes)} tensors, {total} elements")
        self.all_at_once("resnet50", shapes, 1, 21)

    def big(self) -> None:
        self.one_by_one("big", [(64 * 2**20 // 4,)], 21)

    def new_group_used(self) -> None:
        """A group of all ranks and the first operation on it; destroyed after the clock has stopped."""
        data = self.data([(16,)])
        handles: list[dist.ProcessGroup] = []

        def make(backend: str) -> None:
            handles.append(dist.new_group(backend=backend))
            dist.all_reduce(data.tensors[0], group=handles[0])

        def destroy() -> None:
            dist.destroy_process_group(handles.pop())

        self.run("new_group_used", {who: functools.partial(make, who) for who in self.BOTH}, data, 31, after=destroy)

    def new_group_alone(self) -> None:
        """A group of all ranks, destroyed without having been used."""

        def make(backend: str) -> None:
            dist.destroy_process_group(dist.new_group(backend=backend))

        nothing = Data([], self.rank, self.size)
        self.run("new_group_alone", {who: functools.partial(make, who) for who in self.BOTH}, nothing, 31)

    def idle(self) -> None:
        """Share of a core that the busier of the processes uses while its program does nothing."""
        dist.barrier()
        time.sleep(0.5)  # the grace after the last operation is not idle time
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(2.0 if self.quick else 5.0)
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
    for name in (
        "sync_1k",
        "storm",
        "storm_two_groups",
        "verbs",
        "resnet50",
        "big",
        "new_group_used",
        "new_group_alone",
        "idle",
    ):
        if args.only in (None, name):
            getattr(bench, name)()
    if dist.get_rank() == 0:
        results = {
            "ranks": bench.size,
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "mpi_missing": bench.mpi_missing,
            "others": bench.others,
            "times": bench.times,
        }
        args.out.write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
