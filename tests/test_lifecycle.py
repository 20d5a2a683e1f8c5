"""Pins how jobs start and end: again in one process, without destroying groups, with a rank that raises or is
killed, restarted, spawned, beside another backend; and that nothing is left behind. Each test is a whole job.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, needs_multicomm, raises, same, unless_gloo
from harness.checks import check_sum
from harness.jobs import launch, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

LONG_WAIT = timedelta(minutes=10)


def rank_and_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def three_lives() -> None:
    rank, world = rank_and_world()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for life in range(3):
        own = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group(BACKEND, store=own, rank=rank, world_size=world)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        group = dist.new_group([0, 1 + life % 2])
        check_sum()
        if dist.get_rank(group) >= 0:
            check_sum(group, 50_000)
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    raises(lambda: dist.all_reduce(torch.ones(1)), "a call after the last life")
    say("three lives")


def test_groups_are_destroyed_and_made_again(tmp_path: Path) -> None:
    launch(three_lives, 3, tmp_path).check().says("three lives", 3)


def environment_is_read_meanwhile() -> None:
    getenv = ctypes.CDLL(None).getenv  # a call without the interpreter's lock, as torch's own threads make
    started = threading.Event()

    def read() -> None:
        while not started.is_set():
            getenv(b"NOT_THERE")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    dist.init_process_group(BACKEND)
    check_sum()
    started.set()
    for reader in readers:
        reader.join()
    dist.destroy_process_group()


def test_the_environment_can_be_read_while_mpi_starts(tmp_path: Path) -> None:
    launch(environment_is_read_meanwhile, 2, tmp_path).check()


def exit_without_destroy() -> None:
    dist.init_process_group(BACKEND)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    cycle: dict[str, object] = {"group": groups[0]}
    cycle["cycle"] = cycle
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=groups[1])
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(5), group=groups[2], async_op=True).wait()
    dist.all_reduce(torch.ones(50_000), async_op=True)  # waited for by nobody
    check_sum()
    say("at the end")


def test_a_process_may_end_without_destroying_its_groups(tmp_path: Path) -> None:
    job = launch(exit_without_destroy, 2, tmp_path, limit=40).check()
    job.says("at the end", 2)
    assert "terminate called" not in job.output
    assert "Traceback" not in job.output, job.output


def one_rank_raises() -> None:
    dist.init_process_group(BACKEND, timeout=LONG_WAIT)
    dist.new_group([0, 1])
    check_sum()
    if dist.get_rank() == 1:
        raise ArithmeticError("planned failure")
    dist.all_reduce(torch.ones(4))


def one_rank_is_killed() -> None:
    dist.init_process_group(BACKEND, timeout=LONG_WAIT)
    group = dist.new_group([1, 2])
    check_sum()
    if dist.get_rank() > 0:
        check_sum(group, 100_000)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(100_000))


def test_a_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    job = launch(one_rank_raises, 2, tmp_path, limit=50).check(ok=False)
    job.says("ArithmeticError: planned failure")
    job.ends_within(40)


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    job = launch(one_rank_is_killed, 3, tmp_path, limit=50).check(ok=False)
    job.says("SIGKILL")
    job.ends_within(40)


def ends_badly_in_its_first_life(end: Callable[[], None]) -> None:
    dist.init_process_group(BACKEND, timeout=LONG_WAIT)
    group = dist.new_group([0, 1])
    check_sum(group)
    if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        end()
    for handle in (None, group):
        check_sum(handle, size=50_000)
    dist.barrier()
    dist.destroy_process_group()
    say(f"done in life {os.environ['TORCHELASTIC_RESTART_COUNT']}")


def dies_in_its_first_life() -> None:
    ends_badly_in_its_first_life(lambda: os.kill(os.getpid(), signal.SIGKILL))


def raises_in_its_first_life() -> None:
    def end() -> None:
        raise ArithmeticError("planned failure")

    ends_badly_in_its_first_life(end)


@unless_gloo("finds the addresses of the dead ranks in the store again")
@pytest.mark.parametrize("life", [dies_in_its_first_life, raises_in_its_first_life], ids=["killed", "raises"])
def test_a_job_that_is_restarted(tmp_path: Path, life: Callable[[], None]) -> None:
    job = launch(life, 2, tmp_path, "--max-restarts", "1").check()
    job.says("done in life 1", 2)


def spawned_rank(rank: int, world: int, file: str) -> None:
    dist.init_process_group(BACKEND, init_method=f"file://{file}", rank=rank, world_size=world)
    check_sum()
    check_sum(size=50_000)
    dist.barrier()
    dist.destroy_process_group()
    say("spawned")


def spawn_ranks() -> None:
    file = Path(tempfile.mkdtemp()) / "rendezvous"
    torch.multiprocessing.spawn(spawned_rank_with_backend, (3, str(file)), nprocs=3)


def spawned_rank_with_backend(rank: int, world: int, file: str) -> None:
    if BACKEND == "multicomm":
        import multicomm  # noqa: F401, PLC0415
    spawned_rank(rank, world, file)


def test_ranks_that_are_spawned_with_a_file(tmp_path: Path) -> None:
    launch(spawn_ranks, None, tmp_path).check().says("spawned", 3)


def beside_gloo() -> None:
    dist.init_process_group("gloo")
    subset = dist.new_group([0, 2], backend=BACKEND)
    if dist.get_rank() != 1:
        check_sum(subset)
        assert dist.get_backend(subset) == BACKEND
    everybody = dist.new_group(backend=BACKEND)
    check_sum(everybody, 50_000)
    check_sum()
    dist.barrier()
    dist.destroy_process_group()
    say("beside gloo")


def gloo_beside_it() -> None:
    dist.init_process_group(f"cpu:{BACKEND}")
    group = dist.new_group([0, 2], backend="gloo")
    check_sum()
    if dist.get_rank(group) >= 0:
        check_sum(group)
    dist.barrier()
    dist.destroy_process_group()
    say("gloo beside it")


def test_a_second_backend(tmp_path: Path) -> None:
    launch(beside_gloo, 3, tmp_path).check().says("beside gloo", 3)


def test_gloo_as_the_second_backend(tmp_path: Path) -> None:
    launch(gloo_beside_it, 3, tmp_path).check().says("gloo beside it", 3)


def uneven_numbers_of_local_groups() -> None:
    dist.init_process_group(BACKEND)
    rank, begin = dist.get_rank(), time.monotonic()
    if rank == 0:  # torch derives a group's name from how many groups this rank has made
        dist.new_group([0], use_local_synchronization=True)
    limit = timedelta(seconds=8)
    try:
        group = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True, timeout=limit)
        check_sum(group)
        outcome = "works"
    except RuntimeError as error:
        outcome = f"is refused: {error}"
    assert time.monotonic() - begin < 25, outcome
    say(f"a pair {outcome}")
    check_sum()


@needs_multicomm("hangs")
def test_local_groups_whose_names_differ_end_in_time(tmp_path: Path) -> None:
    """Works, or is an error soon; the pair whose names agree works in any case."""
    job = launch(uneven_numbers_of_local_groups, 4, tmp_path).check()
    job.says("a pair ", 4)
    assert job.output.count("a pair works") in (2, 4), job.output


def in_detail() -> None:
    dist.init_process_group(BACKEND)
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    group = dist.new_group([0, 1])
    for handle in (None, group):
        check_sum(handle)
        gathered = [torch.empty(2) for _ in range(2)]
        dist.all_gather(gathered, torch.full((2,), float(rank)), group=handle)
        same(torch.stack(gathered), [[0.0, 0.0], [1.0, 1.0]], "all_gather")
        share = torch.empty(1)
        dist.reduce_scatter_tensor(share, torch.arange(2.0), group=handle)
        same(share, [2.0 * rank], "reduce_scatter_tensor")
        data = torch.full((4,), float(rank))
        works = [dist.isend(data, peer, handle), dist.irecv(other := torch.empty(4), peer, handle)]
        for work in works:
            work.wait()
        same(other, [float(peer)] * 4, "message")
        objects: list[object] = [None, None]
        dist.all_gather_object(objects, rank, group=handle)
        assert objects == [0, 1]
        dist.all_reduce(data, group=handle, async_op=True).wait()
        dist.barrier(group=handle)
    raises(lambda: dist.all_reduce(torch.ones(2 + rank), group=group), "shapes that differ", RuntimeError)
    say("in detail")


def test_torch_debugging_in_detail(tmp_path: Path) -> None:
    """torch wraps the backend and checks every call by collectives of its own."""
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    launch(in_detail, 2, tmp_path, environment=environment).check().says("in detail", 2)


def child(queue: multiprocessing.Queue) -> None:
    if BACKEND == "multicomm":
        import multicomm  # noqa: F401, PLC0415
    queue.put(dist.is_initialized())


def with_children() -> None:
    dist.init_process_group(BACKEND)
    check_sum()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=40) is False, "a spawned child has the parent's process group"
    process.join(20)
    assert process.exitcode == 0, f"the spawned child ended with {process.exitcode}"
    loader = DataLoader(torch.arange(8.0), batch_size=4, num_workers=2, multiprocessing_context="fork")
    same(torch.cat(list(loader)), torch.arange(8.0), "batches of forked workers")
    check_sum(size=50_000)
    dist.barrier()
    dist.destroy_process_group()
    say("with children")


def test_children_of_a_rank(tmp_path: Path) -> None:
    """They inherit RANK and its like, import the package, and end, without harm to the parent."""
    launch(with_children, 2, tmp_path).check().says("with children", 2)


def after_a_fork() -> None:
    dist.init_process_group(BACKEND)
    check_sum()
    pid = os.fork()
    if pid == 0:
        refused = raises(lambda: dist.all_reduce(torch.ones(1)), "a call in a forked child", RuntimeError)
        say(f"refused: {refused.splitlines()[0]}")
        os._exit(0)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the forked child hangs"
        time.sleep(0.05)
    assert ended[1] == 0, f"the forked child ended with status {ended[1]}"
    check_sum()
    dist.barrier()
    dist.destroy_process_group()


@needs_multicomm("a forked child's call hangs")
def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    launch(after_a_fork, 2, tmp_path).check().says("refused: ", 2)


def settings_that_differ() -> None:
    os.environ["MULTICOMM_FUSION_BYTES"] = str(1_000_000 + int(os.environ["RANK"]))
    dist.init_process_group(BACKEND)
    text = raises(check_sum, "settings that differ", RuntimeError)
    assert "MULTICOMM_FUSION_BYTES" in text, text
    say("told so")
    sys.stdout.flush()


def any_rank() -> None:
    dist.init_process_group(BACKEND)
    check_sum()


@needs_multicomm("it has settings of its own")
def test_settings_that_differ_between_ranks(tmp_path: Path) -> None:
    launch(settings_that_differ, 2, tmp_path).check().says("told so", 2)


@needs_multicomm("it has settings of its own")
@pytest.mark.parametrize(
    ("name", "value"), [("MULTICOMM_FUSION_BYTE", "1"), ("MULTICOMM_FUSION_BYTES", "many")], ids=["name", "value"]
)
def test_settings_that_are_wrong(tmp_path: Path, name: str, value: str) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    job = launch(any_rank, None, tmp_path, environment=alone | {name: value}).check(ok=False)
    job.says(name)
    job.says("MULTICOMM_FUSION_BYTES")
