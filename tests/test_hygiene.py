"""Pins that multicomm gets on with what else a process does: workers that are forked, children that use MPI by
themselves, many threads; and that what start-up opens is for the job's own user only. Each test is a whole job.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, needs_multicomm, same
from harness.checks import check_sum
from harness.jobs import launch, say
from harness.opened import Opened, descendants, opened_by
from harness.settings import TESTS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

OPERATIONS = 100_000  # in all, by THREADS threads of each rank
THREADS = 4
BURST = 50
SANITIZED = TESTS.parent / "build"

# --- children ---


def train_with_workers() -> None:
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(2)]
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1), process_group=groups[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(256.0).view(64, 4) / 256, torch.ones(64, 1))
    loaders = [
        DataLoader(data, batch_size=8, num_workers=2, persistent_workers=keep, multiprocessing_context="fork")
        for keep in (True, False)
    ]
    seen = 0
    for _ in range(2):
        for loader in loaders:
            before = torch.full((50_000,), float(rank))
            in_flight = dist.all_reduce(before, group=groups[1], async_op=True)  # while workers are forked
            for inputs, wanted in loader:
                optimizer.zero_grad()
                ((model(inputs) - wanted) ** 2).mean().backward()
                optimizer.step()
                check_sum(groups[1])
                seen += len(inputs)
            in_flight.wait()
            same(before, torch.full((50_000,), float(sum(range(world)))), "all_reduce across the fork")
    assert seen == 4 * len(data), seen
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everybodys = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everybodys, mine)
    for other in everybodys:
        same(other, mine, "the model of another rank")
    dist.barrier()
    dist.destroy_process_group()
    say("trained")


def test_training_with_forked_workers(tmp_path: Path) -> None:
    """New and persistent workers, forked while collectives are in flight."""
    launch(train_with_workers, 2, tmp_path, limit=90).check().says("trained", 2)


WORLD_OF_CHILD = """
import os
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert comm.allreduce(comm.rank + 1) == comm.size * (comm.size + 1) // 2
inherited = [name for name in os.environ if name.startswith("PMIX_")] if comm.size == 1 else []
print("world of", comm.size, inherited)
"""


def children_with_mpi() -> None:
    dist.init_process_group(BACKEND)
    check_sum(size=50_000)
    in_flight = dist.all_reduce(torch.ones(50_000), async_op=True)
    program = [sys.executable, "-c", WORLD_OF_CHILD]
    launcher = [str(Path(sys.prefix) / "bin" / "mpirun"), "--oversubscribe", "-n", "2"]
    if os.geteuid() == 0:
        launcher.insert(1, "--allow-run-as-root")
    # Without shared memory, of which Open MPI's singletons leave a segment behind.
    alone = os.environ | {"OMPI_MCA_btl": "self"}
    for command, environment, wanted in (
        (program, alone, "world of 1 []\n"),
        ([*launcher, *program], dict(os.environ), "world of 2 []\n" * 2),
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, wanted), f"{command}: {done}"
        check_sum(size=50_000)
    in_flight.wait()
    dist.barrier()
    dist.destroy_process_group()
    say("children had their own worlds")


@needs_multicomm("it has no MPI")
def test_children_that_use_mpi(tmp_path: Path) -> None:
    """They are no ranks of this job: a singleton is alone in its world, an mpirun starts one of its own."""
    launch(children_with_mpi, 2, tmp_path, limit=120).check().says("children had their own worlds", 2)


# --- threads ---


def many_threads() -> None:
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(THREADS)]
    failures: list[BaseException] = []
    rounds = OPERATIONS // THREADS // BURST

    def run(thread: int) -> None:
        try:
            for number in range(rounds):
                base = torch.arange(BURST * 4).view(BURST, 4) + thread * 1000 + number
                data = base * (rank + 1)
                works = [dist.all_reduce(row, group=groups[thread], async_op=True) for row in data]
                for work in works:
                    work.wait()
                same(data, base * (world * (world + 1) // 2), f"thread {thread}, burst {number}")
        except BaseException as error:  # shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    dist.barrier()
    dist.destroy_process_group()
    say(f"{rounds * BURST * THREADS} operations")


@pytest.mark.parametrize("ranks", [2, 4])
def test_threads_on_groups_of_their_own(tmp_path: Path, ranks: int) -> None:
    job = launch(many_threads, ranks, tmp_path, limit=170).check()
    job.says(f"{OPERATIONS} operations", ranks)
    print(f"{job.seconds:.1f} s")


def test_the_sanitizers_are_on() -> None:
    """A race on purpose is caught by the program that shows the engine's threads to have none."""
    program = SANITIZED / "tsan" / "threads_test"
    done = subprocess.run([program, "--race"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and "WARNING: ThreadSanitizer: data race" in done.stderr, done
    for name in ("simulate", "engine_test"):
        text = (SANITIZED / "sim" / name).read_bytes()
        assert b"__asan_report_load" in text and b"__ubsan_handle" in text, f"{name} was built without sanitizers"


# --- what start-up opens ---


def mode_of(path: str) -> int:
    status = os.stat(path)
    assert status.st_uid == os.geteuid(), f"{path} belongs to {status.st_uid}"
    return stat.S_IMODE(status.st_mode)


def check_own(opened: Opened) -> None:
    for host, port in opened.ports:
        assert host in ("127.0.0.1", "::1"), f"{host}:{port} can be reached from outside"
    for path in opened.memory:
        assert mode_of(path) & 0o077 == 0, f"{path} has mode {mode_of(path):o}"
    for name in opened.sockets:
        assert name.startswith("@multicomm-"), name


def look_around() -> None:
    dist.init_process_group(BACKEND)
    check_sum(size=50_000)
    if dist.get_rank() == 0:
        everything: dict[str, Opened] = {}
        for pid, command in descendants(os.getppid()).items():
            if pid != os.getppid():  # the launcher's own ports are torch's: it hosts the store
                everything[f"{pid} {command}"] = opened_by(pid)
        servers = [opened for command, opened in everything.items() if "multicomm-pmix-server" in command]
        assert len(servers) == 1 and len(everything) == 1 + dist.get_world_size(), everything
        for command, opened in everything.items():
            say(f"opened by {command}: {opened}")
            check_own(opened)
        (folder,) = Path(os.environ["TMPDIR"]).glob("multicomm-*")
        assert mode_of(str(folder)) == 0o700
        inside = [str(path) for path in folder.rglob("*")]
        for path in inside:
            assert mode_of(path) & 0o077 == 0, f"{path} has mode {mode_of(path):o}"
        tries = [f"folder={folder}", *(f"file={path}" for path in inside)]
        for opened in everything.values():
            tries += [f"port={port}" for _, port in opened.ports]
            tries += [f"abstract={name[1:]}" for name in opened.sockets]
            tries += [f"file={path}" for path in opened.memory + opened.anonymous]
        if os.geteuid() == 0:
            stranger = [sys.executable, str(TESTS / "harness" / "stranger.py"), *tries]
            done = subprocess.run(stranger, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stdout) == (0, ""), f"a stranger got hold of something: {done}"
            say(f"a stranger tried {len(tries)} ways")
    dist.barrier()
    check_sum(size=50_000)  # and did no harm
    check_sum(dist.new_group())
    dist.destroy_process_group()
    say("kept to itself")


@needs_multicomm("what Gloo opens is torch's business")
def test_what_start_up_opens_is_the_users_alone(tmp_path: Path) -> None:
    """Ports of this host only; sockets, memory and files that no other user can use. A stranger tries them all."""
    job = launch(look_around, 2, tmp_path, limit=90).check()
    print("\n".join(line for line in job.output.splitlines() if "opened by" in line or "stranger" in line))
    job.says("kept to itself", 2)
