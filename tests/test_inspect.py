"""Pins that a live job can be looked at from outside: `python -m multicomm inspect` and the signal show what every rank
is doing, wherever it is. Most tests are whole jobs in which a thread looks on while the main threads wait.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
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
from harness import BACKEND, needs_multicomm, raises
from harness.checks import check_sum
from harness.jobs import launch, say
from harness.settings import clean_environment
from harness.two_hosts import why_not

pytestmark = needs_multicomm("shows nothing")
LIMIT = 40.0

if BACKEND == "multicomm":
    from multicomm import _inspect


def see(*patterns: str, pid: int | None = None, stacks: bool = False) -> str:
    """Looks until the picture matches all patterns; their order counts."""
    wanted = re.compile(".*".join(patterns), re.DOTALL)
    deadline = time.monotonic() + LIMIT
    while not wanted.search(text := _inspect.picture(pid or os.getpid(), stacks=stacks)):
        assert time.monotonic() < deadline, f"/{wanted.pattern}/ is not in:\n{text}"
    return text


def look_on(action: Callable[[], None]) -> threading.Thread:
    """Runs `action` beside the main thread, and then lets the ranks go on that wait for it."""
    side = store()

    def run() -> None:
        try:
            action()
            say("seen")
        finally:
            side.set("over", "1")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def store() -> dist.Store:
    return dist.PrefixStore("side", dist.distributed_c10d._get_default_store())


def in_python_only() -> None:
    side = store()
    deadline = time.monotonic() + LIMIT
    while not side.check(["over"]):
        assert time.monotonic() < deadline


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, as a user has it."""
    return subprocess.run(
        [sys.executable, "-m", "multicomm", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=clean_environment(),
        check=False,
    )


def everybody_elsewhere() -> None:
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([1, 2]) if world > 2 else None
    check_sum()
    if rank == 0:
        place = r"rank {}, host \S+, pid \d+\n"
        waits = [
            place.format(0) + r"  group '0' \(ranks \[0, .*\]\): 2 collectives submitted, 1 operation unfinished\n",
            r"    collective 1, all_reduce\(SUM\) of Float \[5\], for \d.* s: offered; ranks? .* submitted it\n",
            r"in everybody_elsewhere\n",
        ]
        if world == 1:
            waits = [place.format(0), "  waits for no operation of multicomm\n", "in in_python_only"]
        if world > 2:
            waits += [
                place.format(1) + r"  group '1' \(ranks \[1, 2\]\): 1 collective submitted, 1 operation unfinished\n",
                r"    collective 0, broadcast from rank 1 of Float \[2, 3\], for .* s: offered; rank 2 has not",
            ]
        if world > 1:
            waits += [place.format(world - 1), "  waits for no operation of multicomm\n", "in in_python_only"]

        def action() -> None:
            see(*waits, stacks=True)
            assert "main thread" not in see(*(wait for wait in waits if not wait.startswith("in "))), "not asked for"
            by_command = call("inspect", str(os.getppid()))  # the launcher's
            assert by_command.returncode == 0 and f"\nrank {world - 1}, " in by_command.stdout, by_command

        thread = look_on(action)
    if rank == 0 and world > 1:
        dist.all_reduce(torch.ones(5))
    elif rank == 1 and pair is not None:
        dist.broadcast(torch.ones(2, 3), 1, group=pair)
    else:
        in_python_only()
    if rank == 2:
        dist.broadcast(torch.ones(2, 3), 1, group=pair)
    if rank > 0:
        dist.all_reduce(torch.ones(5))
    else:
        thread.join()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_is_shown_with_what_it_waits_for(tmp_path: Path, ranks: int) -> None:
    launch(everybody_elsewhere, ranks, tmp_path).check().says("seen", 1)


def stopped_and_killed(rank: int, file: str) -> None:
    importlib.import_module(BACKEND)
    dist.init_process_group(BACKEND, init_method=f"file://{file}", rank=rank, world_size=4)
    three = dist.new_group([0, 1, 2], timeout=timedelta(seconds=LIMIT))
    for group in (None, three) if rank < 3 else (None,):  # a group is made by all its members
        dist.all_reduce(torch.ones(3), group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 2:
        in_python_only()
        dist.all_reduce(torch.ones(3), group=three)
    else:

        def action() -> None:
            text = see(
                r"rank 0, .*: offered; rank 2 has not submitted it; rank 1 does not answer\n",
                r"rank 1, host \S+, pid \d+\n  does not answer: it is stopped \(by a signal, or a debugger\)\n",
                r"rank 2, .*  waits for no operation",
                r"rank 3, host \S+, pid \d+\n  has died\n",
            )
            pids = {int(r): int(pid) for r, pid in re.findall(r"^rank (\d), .* pid (\d+)$", text, re.MULTILINE)}
            raises(
                lambda: _inspect.picture(pids[1], stacks=False),
                "asking the stopped rank",
                _inspect.InspectError,
                f"process {pids[1]}: does not answer: it is stopped",
                f"another one to ask: {pids[0]}: rank 0 of 4",
            )
            os.kill(pids[1], signal.SIGKILL)

        thread = look_on(action)
        raises(lambda: dist.all_reduce(torch.ones(3), group=three), "a sum with the dead", dist.DistBackendError)
        thread.join()


def by_hand(target: Callable[[int, str], None], ranks: int) -> None:
    """Not under torchrun, which ends a job as soon as a rank dies."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=target, args=(rank, f"{folder}/store")) for rank in range(ranks)]
        for process in processes:
            process.start()
        processes[0].join(LIMIT + 15)
        for process in processes:
            process.kill()
            process.join()


def some_do_not_answer() -> None:
    by_hand(stopped_and_killed, 4)


def test_the_stopped_and_the_dead_are_named(tmp_path: Path) -> None:
    launch(some_do_not_answer, None, tmp_path, limit=90).check().says("seen", 1)


def interpreter_is_held() -> None:
    dist.init_process_group(BACKEND)
    check_sum()
    pipe = Path(os.environ["TMPDIR"]) / "pipe"
    if dist.get_rank() == 0:
        os.mkfifo(pipe)
        ends = os.open(pipe, os.O_RDWR)

        def action() -> None:
            see("rank 1, .*\n  waits for no operation", "  main thread: no Python stack within 0.5 s: ", stacks=True)
            os.write(ends, b"x")
            see("rank 1, .*\n  main thread, most recent call first:", stacks=True)

        thread = look_on(action)
        dist.barrier()
        in_python_only()
        thread.join()
    else:
        dist.barrier()
        # A call that keeps the interpreter's lock.
        ctypes.PyDLL(None).read(os.open(pipe, os.O_RDWR), ctypes.create_string_buffer(1), 1)
        in_python_only()
    dist.destroy_process_group()


def test_native_code_that_holds_the_interpreter_is_told(tmp_path: Path) -> None:
    launch(interpreter_is_held, 2, tmp_path).check().says("seen", 1)


def asked_by_a_signal() -> None:
    dist.init_process_group(BACKEND)
    check_sum()
    printed = Path(os.environ["TMPDIR"]) / "stderr"
    if dist.get_rank() == 0:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
        dist.barrier()
        dist.all_reduce(torch.ones(5))
    else:
        dist.barrier()
        text = see(r"rank 0, .*all_reduce\(SUM\) of Float \[5\]")
        other = re.search(r"^rank 0, .* pid (\d+)$", text, re.MULTILINE)
        assert other
        os.kill(int(other.group(1)), signal.SIGUSR2)
        deadline = time.monotonic() + LIMIT
        while "in asked_by_a_signal" not in (text := printed.read_text()).partition("\nrank 1, ")[2]:
            assert time.monotonic() < deadline, text
        assert text.startswith("multicomm: what the 2 ranks of the job are doing, as told to rank 0\nrank 0, "), text
        assert "most recent call first:\n" in text.partition("\nrank 1, ")[0], text
        say("printed")
        dist.all_reduce(torch.ones(5))
    dist.destroy_process_group()


def test_a_signal_prints_the_picture(tmp_path: Path) -> None:
    job = launch(asked_by_a_signal, 2, tmp_path, environment={"MULTICOMM_INSPECT_SIGNAL": "USR2"}).check()
    job.says("printed", 1)


def handled_already() -> None:
    got = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    dist.init_process_group(BACKEND)
    check_sum()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert got == [signal.SIGUSR1]
    dist.destroy_process_group()


def test_a_signal_that_the_program_handles_is_left_to_it(tmp_path: Path) -> None:
    job = launch(handled_already, 1, tmp_path, environment={"MULTICOMM_INSPECT_SIGNAL": "SIGUSR1"}).check()
    job.says("MULTICOMM_INSPECT_SIGNAL: the program handles signal 10 itself", 1)


def test_a_signal_with_another_meaning_is_refused(tmp_path: Path) -> None:
    job = launch(handled_already, 1, tmp_path, environment={"MULTICOMM_INSPECT_SIGNAL": "KILL"}).check(ok=False)
    job.says("MULTICOMM_INSPECT_SIGNAL: 'KILL' is not 0 or one of HUP")


def forks() -> None:
    dist.init_process_group(BACKEND)
    check_sum()
    catches = 1 << (signal.SIGUSR2 - 1)

    def state() -> tuple[bool, bool]:
        """Whether this process handles the signal, and has the socket."""
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert caught
        sockets = [line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if f"-{owner}-" in line]
        mine = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return int(caught.group(1), 16) & catches != 0, any(f"socket:[{inode}]" in mine for inode in sockets)

    owner = os.getpid()
    assert state() == (True, True)
    child = os.fork()
    if child == 0:
        os._exit(0 if state() == (False, False) else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child has the parent's socket, or its signal"
    dist.destroy_process_group()


def test_a_forked_child_has_no_part_in_it(tmp_path: Path) -> None:
    launch(forks, 1, tmp_path, environment={"MULTICOMM_INSPECT_SIGNAL": "USR2"}).check()


def one_is_late() -> None:
    side = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    side = dist.PrefixStore("side", side)
    if os.environ["RANK"] == "1":
        side.wait(["over"], timedelta(seconds=LIMIT))
        dist.init_process_group(BACKEND)
    else:
        dist.init_process_group(BACKEND)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        see(
            "the 2 ranks .*as told to rank 0\nMPI is not up yet on this rank, so the others cannot be asked.*\n",
            r"rank 0, host \S+, pid \d+\n",
            r"    collective 0, all_reduce.*: the group's communicator does not exist yet",
            "in one_is_late",
            stacks=True,
        )
        say("seen")
        side.set("over", "1")
        work.wait()
        dist.destroy_process_group()
        return
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def test_a_rank_answers_for_itself_before_mpi_is_up(tmp_path: Path) -> None:
    launch(one_is_late, 2, tmp_path).check().says("seen", 1)


# Looks at a process until that has ended, from one that outlives it.
LOOKER = """
import sys
from multicomm import _inspect
told = False
while True:
    try:
        _inspect.picture(int(sys.argv[1]), stacks=True)
    except _inspect.InspectError:
        break
    if not told:
        print("seen", flush=True)
    told = True
"""


def asked_at_the_end() -> None:
    dist.init_process_group(BACKEND)
    check_sum()
    looker = subprocess.Popen([sys.executable, "-c", LOOKER, str(os.getpid())], stdout=subprocess.PIPE, text=True)
    assert looker.stdout
    assert looker.stdout.readline() == "seen\n"
    dist.destroy_process_group()


def test_the_end_of_the_interpreter_does_not_mind_being_watched(tmp_path: Path) -> None:
    job = launch(asked_at_the_end, 2, tmp_path).check()
    for trouble in ("terminate called", "Fatal Python error", "Traceback", "skipped"):
        assert trouble not in job.output, job.output


def alone(rank: int, file: str) -> None:
    importlib.import_module(BACKEND)
    dist.init_process_group(BACKEND, init_method=f"file://{file}{rank}", rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        in_other_job = dist.FileStore(f"{file}meet", 2)
        in_other_job.set("pid", str(os.getpid()))
        in_other_job.wait(["over"], timedelta(seconds=LIMIT))
        return
    other = dist.FileStore(f"{file}meet", 2)
    pid = int(other.get("pid"))
    both = (r"there are \d+ jobs of this user on this node", rf"\n  {os.getpid()}: rank 0 of 1", rf"\n  {pid}: rank 0")
    for start in (None, os.getppid()):
        raises(lambda s=start: _inspect.picture(s, stacks=False), "two jobs", _inspect.InspectError, *both)
    for one, another in ((pid, os.getpid()), (os.getpid(), pid)):
        text = _inspect.picture(one, stacks=False)
        assert f"pid {one}\n" in text and str(another) not in text, text
    say("seen")
    other.set("over", "1")


def two_jobs() -> None:
    by_hand(alone, 2)


def test_of_several_jobs_one_has_to_be_named(tmp_path: Path) -> None:
    launch(two_jobs, None, tmp_path, limit=90).check().says("seen", 1)


def test_errors_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid, text in (
        (str(ended.pid), f"there is no process {ended.pid} on this node"),
        (str(os.getpid()), f"process {os.getpid()} cannot be inspected: it has made no multicomm group yet"),
    ):
        found = call("inspect", pid)
        assert found.returncode == 1 and found.stderr.startswith(f"multicomm: {text}"), found
        assert not found.stdout and "Traceback" not in found.stderr, found
    monkeypatch.setattr(_inspect, "_listening", list)
    raises(
        lambda: _inspect.picture(None, stacks=False), "no job", _inspect.InspectError, "there is no job of this user"
    )


@pytest.mark.parametrize("arguments", [[], ["look"], ["inspect", "me"], ["inspect", "--all"]])
def test_wrong_arguments_print_the_usage(arguments: list[str]) -> None:
    found = call(*arguments)
    assert found.returncode == 2 and found.stderr.startswith("usage: python -m multicomm"), found


def one_on_each_host() -> None:
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
    check_sum()
    if dist.get_rank() == 0:
        thread = look_on(
            lambda: say(
                see(
                    r"\nrank 0, host mcb\d+a, .*; rank 1 has not submitted it\n",
                    r"\nrank 1, host mcb\d+b, .*\n  waits for no operation of multicomm\n",
                    "in in_python_only",
                    stacks=True,
                )
            )
        )
        dist.all_reduce(torch.ones(5))
        thread.join()
    else:
        in_python_only()
        dist.all_reduce(torch.ones(5))
    dist.destroy_process_group()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_on_other_hosts_are_shown(tmp_path: Path, hosts: list[list[str]]) -> None:
    launch(one_on_each_host, 1, tmp_path, hosts=hosts).check().says("seen", 1)
