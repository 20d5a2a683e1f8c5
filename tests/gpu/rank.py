"""The rank side of run.py, which starts it by torchrun: runs checks in turn, writes what came of them.

    torchrun ... tests/gpu/rank.py --out FOLDER --limit SECONDS [--own] [--leave] MODULE.CHECK ...

A check is a function of `Here`; it raises when something is wrong, and may return a text to be shown. The ranks tell
each other over torch's store how a check ended: after a failure all of them stop, and run.py starts the rest anew.
Standard library and torch alone: pytest may not be there. Never run on real hardware so far: only with GPU_DOUBLE=1.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.modules.setdefault("rank", sys.modules[__name__])  # the checks import from here: from this very module

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

DOUBLE = os.environ.get("GPU_DOUBLE", "0") not in ("", "0")
if DOUBLE:
    from device import simulated

    simulated.load()

import multicomm  # noqa: E402

KIND = "sim" if DOUBLE else "cuda"
SPEC = "cpu:multicomm,sim:multicomm" if DOUBLE else "multicomm"
OPERATION_LIMIT = timedelta(seconds=30)  # an operation that a failed check left alone ends by this


class SkipCheck(Exception):
    """With the reason."""


class Here:
    """This rank, and what the device and its double have in common."""

    double = DOUBLE
    kind = KIND
    spec = SPEC

    def __init__(self, own: bool, out: Path) -> None:
        self.own = own
        self.out = out
        self.api: Any = getattr(torch, KIND)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.count: int = self.api.device_count()
        self.device = torch.device(KIND, int(os.environ["LOCAL_RANK"]) if own else 0)
        self.mode = os.environ.get("MULTICOMM_CUDA", "auto")
        self.store: Any = None
        self.api.set_device(self.device)

    def join(self) -> None:
        dist.init_process_group(SPEC, timeout=OPERATION_LIMIT)
        self.store = dist.distributed_c10d._get_default_store()

    def scaled(self, real: int, double: int) -> int:
        """A size for the device, and a smaller one for its double."""
        return double if DOUBLE else real

    def full(self, count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=self.device)

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        return dist.new_group(ranks, backend=SPEC, **options)

    def stream(self) -> Any:
        return torch.Stream(device=self.device) if DOUBLE else torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> Any:
        return self.api.stream(stream)

    def synchronize(self) -> None:
        self.api.synchronize(self.device)

    def hold(self, milliseconds: float) -> None:
        """Keeps the current stream busy for about as long."""
        if not DOUBLE:
            torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles, at 1.5 GHz; chips are faster by up to a half
            return
        gate = simulated.block(self.api.current_stream())
        timer = threading.Timer(milliseconds / 1000, gate.open)
        timer.daemon = True
        timer.start()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records a graph of what the current thread enqueues; the double only says so of its stream."""
        if DOUBLE:
            with simulated.capturing():
                yield
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield

    def stats(self) -> dict[str, int]:
        """Of the default group."""
        world, counted = dist.group.WORLD, multicomm.stats()
        return dict(counted[world.group_desc if world.group_desc in counted else world.group_name])

    def backend(self, group: Any = None) -> Any:
        return (group or dist.group.WORLD)._get_backend(self.device)


def fails(call: Callable[[], object], *texts: str, within: float = 20.0) -> str:
    """Runs what must raise an error that has all the texts, in time; returns the error's text."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        took, text = time.monotonic() - begin, f"{type(error).__name__}: {error}"
        missing = [wanted for wanted in texts if wanted not in text]
        if missing:
            raise AssertionError(f"the error does not say {missing}: {text}") from error
        if took > within:
            raise AssertionError(f"the error came after {took:.1f} s, not {within:g}: {text}") from error
        return text
    raise AssertionError(f"no error, though one was to say {texts}")


class Results:
    """Lines of JSON, each there as soon as it is written: the process may die at any time."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")

    def add(self, **entry: object) -> None:
        self._file.write(json.dumps({"at": time.time(), **entry}) + "\n")
        self._file.flush()


def run_one(here: Here, results: Results, name: str) -> bool:
    module, _, function = name.rpartition(".")
    results.add(begin=name)
    begin = time.monotonic()
    outcome, text = "PASS", ""
    try:
        text = getattr(importlib.import_module(module), function)(here) or ""
        here.synchronize()
    except SkipCheck as reason:
        outcome, text = "SKIP", str(reason)
    except BaseException as error:
        outcome, text = "FAIL", f"{type(error).__name__}: {error}"
        print(f"rank {here.rank}: {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    results.add(check=name, outcome=outcome, seconds=round(time.monotonic() - begin, 2), text=text)
    if outcome == "FAIL":
        here.store.set(f"gpu checks/failed/{name}", "yes")
    return outcome != "FAIL"


def all_passed(here: Here, name: str, passed: bool) -> bool:
    """Whether all ranks have passed a check; each waits for the others."""
    arrived = here.store.add(f"gpu checks/{name}/{'passed' if passed else 'failed'}", 1)
    while passed and arrived < here.size:
        if here.store.add(f"gpu checks/{name}/failed", 0) > 0:
            return False
        time.sleep(0.01)
        arrived = here.store.add(f"gpu checks/{name}/passed", 0)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--own", action="store_true", help="a device for each rank; else all share one")
    parser.add_argument("--leave", action="store_true", help="end without destroy_process_group()")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(max(5.0, args.limit - 4), exit=True)
    torch.set_num_threads(1)
    results = Results(args.out / f"rank{os.environ['RANK']}.jsonl")
    here = Here(args.own, args.out)
    here.join()
    for name in args.checks:
        passed = run_one(here, results, name)
        if name != args.checks[-1]:  # after the last one, which may kill ranks, nobody is waited for
            passed = all_passed(here, name, passed)
        if not passed:
            results.add(stopped=name)
            sys.stderr.flush()
            os._exit(1)  # what a failed check left pending shall hold up nothing
    results.add(end=True)
    if not args.leave:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
