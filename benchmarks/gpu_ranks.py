"""The rank side of gpu.py, which starts it. Never run on real hardware so far: only with GPU_DOUBLE=1."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from info import everything as versions  # noqa: E402
from rank import Here  # noqa: E402
from torch import Tensor  # noqa: E402

Work = Callable[[], object]
KIB, MIB = 1024, 1024 * 1024
GRACE = 0.003  # nobody polls any more


class Bench:
    def __init__(self, here: Here) -> None:
        self.here = here
        self.rows: list[dict[str, Any]] = []
        self.cannot: dict[str, str] = {}
        self.ours = [dist.group.WORLD, here.new_group()]
        self.nccl = self.rival("nccl", 2)
        self.gloo = self.rival("gloo", 1)
        for group in self.ours:
            dist.all_reduce(here.full(4, 1), group=group)

    def rival(self, backend: str, count: int) -> list[Any]:
        """Groups of another backend that can move the device's tensors; none and the reason otherwise."""
        here, reason, groups = self.here, "", []
        if here.double:
            reason = "it does not know the simulated device; multicomm itself stands in for it, to try this script"
            groups = [here.new_group() for _ in range(count)]
        elif backend == "nccl" and not dist.is_nccl_available():
            reason = "this torch has none"
        elif backend == "nccl" and here.size > 1 and not here.own:
            reason = "NCCL refuses ranks that share a device"
        else:
            try:
                groups = [dist.new_group(backend=backend) for _ in range(count)]
                for group in groups:
                    dist.all_reduce(here.full(4, 1), group=group)
                here.synchronize()
            except Exception as error:
                groups, reason = [], f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
        if reason:
            self.cannot[f"beside {backend}"] = reason
        return groups

    def tensors(self, sizes: list[int]) -> list[Tensor]:
        """Of float32; sizes in elements."""
        return [torch.zeros(size, device=self.here.device) for size in sizes]

    def row(
        self, title: str, data: list[Tensor], contenders: dict[str, Work | None], repetitions: int, inner: int = 1
    ) -> None:
        """Times of `inner` calls each; what they leave in `data` must be the same for all contenders."""
        here = self.here
        names = [who for who, work in contenders.items() if work is not None]
        repetitions = here.scaled(repetitions, 5)
        times: dict[str, list[tuple[float, float]]] = {who: [] for who in names}
        right: float | None = None
        for repetition in range(repetitions + 2):
            turn = repetition % len(names)
            for who in names[turn:] + names[:turn]:
                work = contenders[who]
                assert work is not None
                for i, tensor in enumerate(data):
                    tensor.fill_(here.rank + 1 + i % 7 if inner == 1 else 0)
                here.synchronize()
                dist.barrier()
                time.sleep(GRACE)
                dist.barrier()
                start = time.perf_counter()
                for _ in range(inner):
                    work()
                launched = time.perf_counter()
                here.synchronize()
                done = time.perf_counter()
                found = sum(float(t[0]) + float(t[-1]) for t in data[:3] + data[-3:] if t.numel())
                right = found if right is None else right
                if found != right:
                    raise AssertionError(f"{title}: {who} has {found}, the others {right}")
                if repetition > 1:  # the first ones warm up
                    times[who].append(((launched - start) / inner, (done - start) / inner))
        slowest = torch.tensor([times[who] for who in names], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        shown = {
            who: [{"launched": a, "done": b} for a, b in pairs]
            for who, pairs in zip(names, slowest.tolist(), strict=True)
        }
        self.rows.append({"title": title, "times": shown})

    def among(self, groups: list[Any], work: Callable[[list[Any]], object]) -> Work | None:
        return functools.partial(work, groups) if groups else None

    def all_reduce(self, size: int, repetitions: int, inner: int = 1) -> None:
        data = self.tensors([size // 4])

        def work(groups: list[Any]) -> None:
            dist.all_reduce(data[0], group=groups[0], async_op=True).wait()

        contenders = {who: self.among(groups, work) for who, groups in self.contenders().items()}
        self.row(f"all_reduce {text(size)}", data, contenders, repetitions, inner)

    def broadcast(self, size: int, repetitions: int) -> None:
        data = self.tensors([size // 4])

        def work(groups: list[Any]) -> None:
            dist.broadcast(data[0], 0, group=groups[0], async_op=True).wait()

        contenders = {who: self.among(groups, work) for who, groups in self.contenders().items()}
        self.row(f"broadcast {text(size)}", data, contenders, repetitions)

    def contenders(self) -> dict[str, list[Any]]:
        """Gloo only where nccl cannot serve: it would be slower still than what is there."""
        return {"multicomm": self.ours, "nccl": self.nccl} | ({} if self.nccl else {"gloo": self.gloo})

    def many(self, title: str, sizes: list[int], repetitions: int, groups_used: int = 1) -> None:
        """Asynchronous calls dealt out over the groups, then a wait for all."""
        data = self.tensors(sizes)

        def one_by_one(groups: list[Any]) -> None:
            works = [
                dist.all_reduce(tensor, group=groups[i % groups_used], async_op=True) for i, tensor in enumerate(data)
            ]
            for work in works:
                work.wait()

        def coalesced(groups: list[Any]) -> None:
            with dist._coalescing_manager(group=groups[0], device=self.here.device, async_ops=True) as block:
                for tensor in data:
                    dist.all_reduce(tensor, group=groups[0])
            block.wait()

        contenders = {who: self.among(groups, one_by_one) for who, groups in self.contenders().items()}
        if groups_used == 1:
            contenders["nccl, coalesced"] = self.among(self.nccl, coalesced)
        self.row(title, data, contenders, repetitions)

    def all_to_all(self, size: int, repetitions: int) -> None:
        each = max(1, size // 4 // self.here.size)
        given, data = self.tensors([each * self.here.size])[0].fill_(1), self.tensors([each * self.here.size])

        def work(groups: list[Any]) -> None:
            dist.all_to_all_single(data[0], given, group=groups[0], async_op=True).wait()

        contenders = {who: self.among(groups, work) for who, groups in self.contenders().items() if who != "gloo"}
        self.row(f"all_to_all {text(size)}", data, contenders, repetitions)

    # --- jobs ---
    def one(self) -> None:
        for size in (KIB, MIB):
            self.all_reduce(size, 30, inner=100)
        for count in (100, self.here.scaled(1000, 200)):
            self.many(f"{count} x 1 KiB async, wait all", [256] * count, 21)

    def shared(self) -> None:
        sizes = [(KIB, 51), (MIB, 31), (64 * MIB, 9)] if not self.here.double else [(KIB, 5), (64 * KIB, 5)]
        for size, repetitions in sizes:
            self.all_reduce(size, repetitions)
            self.broadcast(size, repetitions)

    def several(self) -> None:
        from workloads import resnet50_shapes

        double = self.here.double
        for power in (10, 12) if double else range(10, 29, 2):
            self.all_reduce(1 << power, 41 if power < 24 else 15)
        count = self.here.scaled(1000, 100)
        self.many(f"{count} x 1 KiB async, wait all", [256] * count, 21)
        self.many(f"{count} x 1 KiB, alternating over two groups", [256] * count, 21, groups_used=2)
        shapes = [torch.Size(shape).numel() for shape in resnet50_shapes()]
        self.many("ResNet-50's 161 gradients", [size // 64 + 1 for size in shapes] if double else shapes, 21)
        for size in (KIB,) if double else (KIB, MIB, 64 * MIB):
            self.all_to_all(size, 21)


def text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--own", action="store_true")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(max(5.0, args.limit - 4), exit=True)
    torch.set_num_threads(1)
    here = Here(args.own, args.out)
    here.join()
    bench = Bench(here)
    setup = {"setup": "; ".join(versions(here).splitlines()[1:])} if here.mode == "nccl" else {}
    try:
        getattr(bench, args.job)()
    finally:  # what was measured before a failure counts
        if here.rank == 0:
            results = {"rows": bench.rows, "cannot": bench.cannot, "environment": setup, "cores": os.cpu_count()}
            (args.out / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
