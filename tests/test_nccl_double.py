"""The double of NCCL (tests/device/nccl_double.h) does what NCCL's interface says. `make test` builds it.

A test starts a process per rank, each of which runs one function of this file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

LIBRARY = Path(os.environ.get("NCCL_DOUBLE") or Path(__file__).parent.parent / "build/device/libnccl_double.so")
PATIENCE = 60.0  # seconds within which what shall end must end
HANG = 0.7  # seconds after which what has not ended is taken to hang

SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 2, 4, 5, 6, 7
SUM, PROD, MAX, MIN, AVG = range(5)
FLOAT16, FLOAT32, BFLOAT16 = 6, 7, 9
# numpy has no bfloat16: 16 bits of it
TYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.uint16]
SIZES = [*(np.dtype(t).itemsize for t in TYPES), 1, 1]  # and two of 8 bits that are only moved


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.nccl_double_log.restype = ctypes.c_size_t
    library.nccl_double_stream.restype = ctypes.c_void_p
    return library


class Rank:
    """One process, with a stream and ways to meet the others."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.nccl = load()
        self.stream = self.new_stream()
        self.other_stream = self.new_stream()
        self.meetings = 0
        self.used: list[np.ndarray] = []  # what kernels may still touch

    def new_stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.nccl.nccl_double_stream())

    def meet(self) -> None:
        """Returns when all ranks have called it as often."""
        self.meetings += 1
        (self.folder / f"meeting{self.meetings}-{self.rank}").touch()
        until(lambda: len(list(self.folder.glob(f"meeting{self.meetings}-*"))) == self.ranks)

    def unique_id(self, name: str) -> UniqueId:
        """The same id in all ranks; rank 0 makes it."""
        made = UniqueId()
        if self.rank == 0:
            assert self.nccl.ncclGetUniqueId(ctypes.byref(made)) == SUCCESS
            (self.folder / f"{name}.new").write_bytes(bytes(made))
            (self.folder / f"{name}.new").rename(self.folder / name)
        until((self.folder / name).exists)
        return UniqueId.from_buffer_copy((self.folder / name).read_bytes())

    def start(self, name: str, blocking: bool | None = None) -> tuple[int, ctypes.c_void_p]:
        """Begins to make a communicator of all ranks."""
        comm = ctypes.c_void_p()
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22807, int(blocking or False))
        at = None if blocking is None else ctypes.byref(config)
        unique = self.unique_id(name)
        return self.nccl.ncclCommInitRankConfig(ctypes.byref(comm), self.ranks, unique, self.rank, at), comm

    def make(self, name: str, blocking: bool | None = None) -> ctypes.c_void_p:
        result, comm = self.start(name, blocking)
        assert result == (IN_PROGRESS if blocking is False else SUCCESS)
        until(lambda: self.state(comm) != IN_PROGRESS)
        assert self.state(comm) == SUCCESS
        return comm

    def state(self, comm: ctypes.c_void_p) -> int:
        state = ctypes.c_int(-1)
        assert self.nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)) == SUCCESS
        return state.value

    def error(self, comm: ctypes.c_void_p | None = None) -> str:
        return self.nccl.ncclGetLastError(comm).decode()

    def log(self) -> list[str]:
        size = self.nccl.nccl_double_log(None, ctypes.c_size_t(0)) + 1
        text = ctypes.create_string_buffer(size)
        self.nccl.nccl_double_log(text, ctypes.c_size_t(size))
        return text.value.decode().splitlines()

    def counts(self) -> list[int]:
        counts = [ctypes.c_uint64() for _ in range(3)]
        self.nccl.nccl_double_counts(*map(ctypes.byref, counts))
        return [count.value for count in counts]

    def ends(self, stream: ctypes.c_void_p | None = None, seconds: float = PATIENCE) -> bool:
        """Whether the stream becomes idle."""
        return bool(self.nccl.nccl_double_stream_wait(stream or self.stream, ctypes.c_double(seconds)))

    def all_reduce(
        self, comm: ctypes.c_void_p, values: np.ndarray, dtype: int = FLOAT32, stream: ctypes.c_void_p | None = None
    ) -> int:
        """In place, a sum."""
        self.used.append(values)
        at, count = pointer(values), ctypes.c_size_t(values.size)
        return self.nccl.ncclAllReduce(at, at, count, dtype, SUM, comm, stream or self.stream)

    def send(self, comm: ctypes.c_void_p, values: np.ndarray, peer: int, dtype: int = FLOAT32) -> int:
        self.used.append(values)
        return self.nccl.ncclSend(pointer(values), ctypes.c_size_t(values.size), dtype, peer, comm, self.stream)

    def recv(self, comm: ctypes.c_void_p, values: np.ndarray, peer: int, dtype: int = FLOAT32) -> int:
        self.used.append(values)
        return self.nccl.ncclRecv(pointer(values), ctypes.c_size_t(values.size), dtype, peer, comm, self.stream)


def pointer(values: np.ndarray) -> ctypes.c_void_p:
    return values.ctypes.data_as(ctypes.c_void_p)


def ones(size: int = 4) -> np.ndarray:
    return np.ones(size, np.float32)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


def run(
    body: Callable[[Rank], None],
    ranks: int,
    folder: Path,
    environment: dict[str, str] | None = None,
    codes: dict[int, int] | None = None,
) -> list[str]:
    """What each rank's process printed; all must end with 0, or their number in `codes`."""
    assert LIBRARY.exists(), (
        f"{LIBRARY} is missing: run the tests by `make test`, or `make build/device/{LIBRARY.name}` first"
    )
    command = [sys.executable, __file__, body.__name__]
    outputs = [(folder / f"output{rank}").open("w+") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder)],
            env=os.environ | (environment or {}),
            stdout=outputs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        end = time.monotonic() + 2 * PATIENCE
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            if any(p.returncode not in (None, (codes or {}).get(rank, 0)) for rank, p in enumerate(processes)):
                break
            time.sleep(0.01)
    finally:
        running = [p.poll() is None for p in processes]
        for process in processes:
            process.kill()
            process.wait()
    texts = []
    for output in outputs:
        output.seek(0)
        texts.append(output.read())
        output.close()
    story = "\n".join(f"--- rank {rank}, {p.returncode}:\n{texts[rank]}" for rank, p in enumerate(processes))
    assert not any(running), story
    assert [p.returncode for p in processes] == [(codes or {}).get(rank, 0) for rank in range(ranks)], story
    return texts


# Values and what the operations make of them


def widen(values: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype == FLOAT16 else values


def narrow(values: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype(TYPES[dtype])


def values_of(rank: int, dtype: int, size: int) -> np.ndarray:
    random = np.random.default_rng(1000 * dtype + rank)
    if dtype >= len(TYPES):
        return random.integers(0, 256, size).astype(np.uint8)
    if dtype in (6, 7, 8, 9):
        return narrow(random.normal(size=size), dtype)
    return random.integers(0 if dtype % 2 else -9, 10, size).astype(TYPES[dtype])


def reduced(inputs: list[np.ndarray], op: int, dtype: int) -> np.ndarray:
    """By numpy, in the order of the ranks, halves in float; op AVG + 1: each times its rank + 2."""
    if op > AVG:
        inputs = [
            narrow(widen(x, dtype) * widen(narrow(np.array([r + 2]), dtype), dtype), dtype)
            for r, x in enumerate(inputs)
        ]
    total = widen(inputs[0], dtype)
    for other in inputs[1:]:
        by = {PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}.get(op, np.add)
        total = by(total, widen(other, dtype))
    if op == AVG:
        total = total / total.dtype.type(len(inputs)) if dtype >= FLOAT16 else np.trunc(total / len(inputs))
    return narrow(total, dtype)


def every_operation(rank: Rank) -> None:
    comm = rank.make("comm")
    for dtype in range(len(SIZES)):
        moves(rank, comm, dtype, 7)
        if dtype < len(TYPES):
            for op in range(AVG + 2):
                reductions(rank, comm, dtype, op, 7)
    for dtype in (0, 5, BFLOAT16):  # several steps, the last one short
        moves(rank, comm, dtype, 300_001)
        reductions(rank, comm, dtype, SUM, 300_001)
    assert rank.nccl.ncclCommDestroy(comm) == SUCCESS


def check(rank: Rank, got: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert rank.ends(), what
    np.testing.assert_array_equal(got, expected, err_msg=what)


def moves(rank: Rank, comm: ctypes.c_void_p, dtype: int, size: int) -> None:
    nccl, me, n, stream = rank.nccl, rank.rank, rank.ranks, rank.stream
    count = ctypes.c_size_t(size)
    own = values_of(me, dtype, size)
    wide = [values_of(r, dtype, size * n) for r in range(n)]  # a piece per rank
    everyone = np.concatenate([values_of(r, dtype, size) for r in range(n)])
    my_place = slice(me * size, (me + 1) * size)
    for in_place in (False, True):
        what = f"type {dtype}, {size} elements, in place {in_place}"

        room = np.zeros_like(everyone)
        room[my_place] = own
        sent = room[my_place] if in_place else own.copy()
        assert nccl.ncclAllGather(pointer(sent), pointer(room), count, dtype, comm, stream) == SUCCESS
        check(rank, room, everyone, f"all_gather {what}")

        for root in range(n):
            values = own.copy()
            out = values if in_place else np.zeros_like(own)
            assert nccl.ncclBroadcast(pointer(values), pointer(out), count, dtype, root, comm, stream) == SUCCESS
            check(rank, out, values_of(root, dtype, size), f"broadcast {what}")

            room = np.zeros_like(everyone)
            room[my_place] = own
            sent = room[my_place] if in_place and me == root else own.copy()
            to = pointer(room) if me == root else None
            assert nccl.ncclGather(pointer(sent), to, count, dtype, root, comm, stream) == SUCCESS
            assert rank.ends()
            if me == root:
                check(rank, room, everyone, f"gather {what}")

            pieces = wide[root].copy()
            out = pieces[my_place] if in_place and me == root else np.zeros_like(own)
            given = pointer(pieces) if me == root else None
            assert nccl.ncclScatter(given, pointer(out), count, dtype, root, comm, stream) == SUCCESS
            check(rank, out, wide[root][my_place], f"scatter {what}")

    pieces, room = wide[me].copy(), np.zeros_like(everyone)
    assert nccl.ncclAlltoAll(pointer(pieces), pointer(room), count, dtype, comm, stream) == SUCCESS
    check(rank, room, np.concatenate([wide[r][my_place] for r in range(n)]), f"all_to_all type {dtype}")
    assert nccl.ncclAlltoAll(pointer(room), pointer(room), count, dtype, comm, stream) == INVALID_ARGUMENT

    following, before = (me + 1) % n, (me - 1) % n
    out = np.zeros_like(own)
    nccl.ncclGroupStart()
    assert rank.send(comm, own, following, dtype) == SUCCESS
    assert rank.recv(comm, out, before, dtype) == SUCCESS
    assert nccl.ncclGroupEnd() == SUCCESS
    check(rank, out, values_of(before, dtype, size), f"ring type {dtype}")


def reductions(rank: Rank, comm: ctypes.c_void_p, dtype: int, op: int, size: int) -> None:
    nccl, me, n, stream = rank.nccl, rank.rank, rank.ranks, rank.stream
    count = ctypes.c_size_t(size)
    inputs = [values_of(r, dtype, size) for r in range(n)]
    wide = [values_of(r, dtype, size * n) for r in range(n)]
    my_place = slice(me * size, (me + 1) * size)
    used = ctypes.c_int(op)
    if op > AVG:
        scalar = narrow(np.array([me + 2]), dtype)
        assert nccl.ncclRedOpCreatePreMulSum(ctypes.byref(used), pointer(scalar), dtype, 1, comm) == SUCCESS
    for in_place in (False, True):
        what = f"type {dtype}, op {op}, {size} elements, in place {in_place}"
        values = inputs[me].copy()
        out = values if in_place else np.zeros_like(values)
        assert nccl.ncclAllReduce(pointer(values), pointer(out), count, dtype, used, comm, stream) == SUCCESS
        check(rank, out, reduced(inputs, op, dtype), f"all_reduce {what}")

        for root in range(n):
            values = inputs[me].copy()
            out = values if in_place else np.zeros_like(values)
            to = pointer(out) if me == root else None
            assert nccl.ncclReduce(pointer(values), to, count, dtype, used, root, comm, stream) == SUCCESS
            assert rank.ends()
            if me == root:
                check(rank, out, reduced(inputs, op, dtype), f"reduce {what}")

        pieces = wide[me].copy()
        out = pieces[my_place] if in_place else np.zeros_like(inputs[me])
        assert nccl.ncclReduceScatter(pointer(pieces), pointer(out), count, dtype, used, comm, stream) == SUCCESS
        check(rank, out, reduced([w[my_place] for w in wide], op, dtype), f"reduce_scatter {what}")
    if op > AVG:
        assert nccl.ncclRedOpDestroy(used, comm) == SUCCESS
        assert nccl.ncclRedOpDestroy(used, comm) == INVALID_ARGUMENT


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations(ranks: int, tmp_path: Path) -> None:
    run(every_operation, ranks, tmp_path)


# Groups


def groups(rank: Rank) -> None:
    nccl = rank.nccl
    a, b = rank.make("a"), rank.make("b")
    values = [ones() * (rank.rank + 1) for _ in range(5)]
    got = np.zeros(3, np.float32)
    nccl.ncclGroupStart()
    for which, x in zip((a, b, b, a) if rank.rank == 0 else (b, a, a, b), values, strict=False):
        assert rank.all_reduce(which, x) == SUCCESS
    nccl.ncclGroupStart()
    assert rank.send(b, ones(3), 1 - rank.rank) == SUCCESS
    assert rank.recv(b, got, 1 - rank.rank) == SUCCESS
    assert nccl.ncclGroupEnd() == SUCCESS
    assert rank.counts() == [0, 0, 2], "nothing is launched before the outer group's end"
    assert nccl.ncclGroupEnd() == SUCCESS
    assert rank.all_reduce(a, values[4]) == SUCCESS
    assert rank.ends()
    np.testing.assert_array_equal(np.stack(values), np.full((5, 4), 3))
    np.testing.assert_array_equal(got, 1)
    assert rank.counts() == [3, 7, 2]
    for line in rank.log():
        print("LOG", line.replace(f"peer {1 - rank.rank}", "peer"))

    nccl.ncclGroupStart()
    assert rank.all_reduce(a, ones()) == SUCCESS
    assert rank.all_reduce(b, ones(), dtype=99) == INVALID_ARGUMENT
    assert nccl.ncclGroupEnd() == INVALID_ARGUMENT
    assert "no such type" in rank.error()
    assert nccl.ncclGroupEnd() == INVALID_USAGE
    assert rank.all_reduce(a, np.zeros(0, np.float32)) == SUCCESS
    assert rank.counts()[0] == 3, "a group with an error, or of nothing, launches nothing"
    for comm in (a, b):
        assert nccl.ncclCommDestroy(comm) == SUCCESS
    assert nccl.ncclCommDestroy(a) == INVALID_ARGUMENT
    assert rank.counts() == [3, 7, 0]


def test_a_group_is_a_kernel_per_communicator(tmp_path: Path) -> None:
    logs = [[line for line in text.splitlines() if line.startswith("LOG")] for text in run(groups, 2, tmp_path)]
    assert logs[0] == logs[1], "the order of the communicators must be the same everywhere"
    calls = sorted(line.split(": ")[1] for line in logs[0])
    two = "allreduce float32 sum 4; allreduce float32 sum 4"
    assert calls == ["allreduce float32 sum 4", two, two + "; send float32 - 3 peer; recv float32 - 3 peer"]


def two_threads(rank: Rank) -> None:
    comm = rank.make("comm")
    rank.nccl.ncclGroupStart()
    assert rank.all_reduce(comm, ones()) == SUCCESS
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(rank.all_reduce(comm, ones())))
    thread.start()
    thread.join()
    assert results == [INVALID_USAGE]
    assert "another thread" in rank.error()
    assert rank.nccl.ncclGroupEnd() == SUCCESS
    assert rank.ends()
    thread = threading.Thread(target=lambda: results.append(rank.all_reduce(comm, ones())))
    thread.start()
    thread.join()
    assert results[1] == SUCCESS, "one after the other is well"
    assert rank.nccl.ncclCommDestroy(comm) == SUCCESS


def test_two_threads_at_once_are_refused(tmp_path: Path) -> None:
    run(two_threads, 1, tmp_path)


# Nonblocking communicators


def nonblocking(rank: Rank) -> None:
    nccl = rank.nccl
    if rank.rank == 0:
        result, comm = rank.start("comm", blocking=False)
        assert result == IN_PROGRESS
        time.sleep(0.2)
        assert rank.state(comm) == IN_PROGRESS, "the other rank has not come"
        assert rank.all_reduce(comm, ones()) == INVALID_ARGUMENT
        assert "in progress" in rank.error(comm)
        assert nccl.ncclCommDestroy(comm) == INVALID_ARGUMENT
        rank.meet()
        until(lambda: rank.state(comm) == SUCCESS)
    else:
        rank.meet()
        comm = rank.make("comm", blocking=False)
    number = ctypes.c_int()
    assert nccl.ncclCommCount(comm, ctypes.byref(number)) == SUCCESS
    assert number.value == 2
    assert nccl.ncclCommUserRank(comm, ctypes.byref(number)) == SUCCESS
    assert number.value == rank.rank

    results = []
    values = [ones() for _ in range(6)]
    for x in values:
        results.append(rank.all_reduce(comm, x))
        until(lambda: rank.state(comm) == SUCCESS)
    assert results == [SUCCESS, SUCCESS, IN_PROGRESS] * 2
    assert rank.ends()
    np.testing.assert_array_equal(np.stack(values), 2)

    rank.meet()
    if rank.rank == 1:
        rank.meet()
    assert nccl.ncclCommFinalize(comm) == IN_PROGRESS
    if rank.rank == 0:
        time.sleep(0.2)
        assert rank.state(comm) == IN_PROGRESS, "the other rank has not finalized"
        rank.meet()
    until(lambda: rank.state(comm) == SUCCESS)
    assert rank.all_reduce(comm, ones()) == INVALID_USAGE
    assert nccl.ncclCommDestroy(comm) == SUCCESS


def test_nonblocking(tmp_path: Path) -> None:
    run(nonblocking, 2, tmp_path)


def blocking_finalize(rank: Rank) -> None:
    comm = rank.make("comm", blocking=True)
    x = ones(1_000_000)
    assert rank.all_reduce(comm, x) == SUCCESS
    assert rank.nccl.ncclCommFinalize(comm) == SUCCESS
    np.testing.assert_array_equal(x, rank.ranks)
    assert rank.nccl.ncclCommDestroy(comm) == SUCCESS
    comm = rank.make("next")
    y = ones(1_000_000)
    assert rank.all_reduce(comm, y) == SUCCESS
    assert rank.nccl.ncclCommDestroy(comm) == SUCCESS
    np.testing.assert_array_equal(y, rank.ranks)
    assert rank.ends()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if "nccl_double" in os.path.realpath(fd)]
    until(lambda: "memfd:nccl_double" not in Path("/proc/self/maps").read_text())


def test_finalize_and_destroy_wait_and_leave_nothing(tmp_path: Path) -> None:
    run(blocking_finalize, 3, tmp_path)


# Messages


def ring(rank: Rank) -> None:
    comm = rank.make("comm")
    size = 300_000
    sent = [np.full(size, rank.rank * 10 + i, np.float32) for i in range(2)]
    got = [np.zeros(size, np.float32) for _ in range(2)]
    rank.nccl.ncclGroupStart()
    for x in sent:
        assert rank.send(comm, x, (rank.rank + 1) % rank.ranks) == SUCCESS
    for x in got:
        assert rank.recv(comm, x, (rank.rank - 1) % rank.ranks) == SUCCESS
    assert rank.nccl.ncclGroupEnd() == SUCCESS
    assert rank.ends()
    before = (rank.rank - 1) % rank.ranks
    for i, x in enumerate(got):
        np.testing.assert_array_equal(x, before * 10 + i)
    assert rank.nccl.ncclCommDestroy(comm) == SUCCESS


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_in_a_group(ranks: int, tmp_path: Path) -> None:
    run(ring, ranks, tmp_path)


def cycle(rank: Rank) -> None:
    comm = rank.make("comm")
    assert rank.send(comm, ones(), (rank.rank + 1) % rank.ranks) == SUCCESS
    assert rank.recv(comm, ones(), (rank.rank - 1) % rank.ranks) == SUCCESS
    assert not rank.ends(seconds=HANG), "sends before receives in a cycle hang"
    rank.meet()
    assert rank.nccl.ncclCommAbort(comm) == SUCCESS
    assert rank.ends(), "abort frees the stream"
    assert rank.counts()[2] == 0


def test_a_cycle_without_a_group_hangs(tmp_path: Path) -> None:
    run(cycle, 3, tmp_path)


# The order of launches


def two_orders(rank: Rank) -> None:
    a, b = rank.make("a"), rank.make("b")
    x, y = ones(), ones()
    order = [(a, x, rank.stream), (b, y, rank.other_stream)]
    if rank.rank == 1 and os.environ["ORDER"] == "opposite":
        order.reverse()
    for comm, values, stream in order:
        assert rank.all_reduce(comm, values, stream=stream) == SUCCESS
    if os.environ["HANGS"] == "0":
        assert rank.ends()
        assert rank.ends(rank.other_stream)
        np.testing.assert_array_equal(np.stack([x, y]), 2)
        for comm in (a, b):
            assert rank.nccl.ncclCommDestroy(comm) == SUCCESS
        return
    assert not rank.ends(seconds=HANG)
    assert not rank.ends(rank.other_stream, seconds=0)
    rank.meet()
    # The kernel of the second is queued behind that of the first: alone, its abort would wait for it.
    rank.nccl.ncclGroupStart()
    for comm in (a, b):
        assert rank.nccl.ncclCommAbort(comm) == SUCCESS
    assert rank.nccl.ncclGroupEnd() == SUCCESS
    assert rank.ends()
    assert rank.ends(rank.other_stream)


@pytest.mark.parametrize(
    ("order", "concurrent", "hangs"), [("equal", "0", "0"), ("opposite", "0", "1"), ("opposite", "1", "0")]
)
def test_launch_order(order: str, concurrent: str, hangs: str, tmp_path: Path) -> None:
    run(two_orders, 2, tmp_path, {"ORDER": order, "NCCL_DOUBLE_CONCURRENT": concurrent, "HANGS": hangs})


def abort_of_the_queued(rank: Rank) -> None:
    """The abort of a communicator whose kernel is queued behind another's returns when the other is aborted."""
    a, b = rank.make("a"), rank.make("b")
    if rank.rank == 0:
        for comm, stream in ((a, rank.stream), (b, rank.other_stream)):
            assert rank.all_reduce(comm, ones(), stream=stream) == SUCCESS
        thread = threading.Thread(target=lambda: rank.nccl.ncclCommAbort(b))
        thread.start()
        thread.join(HANG)
        assert thread.is_alive()
        assert rank.nccl.ncclCommAbort(a) == SUCCESS
        thread.join(PATIENCE)
        assert not thread.is_alive()
        rank.meet()
    else:
        rank.meet()
        for comm in (a, b):
            assert rank.nccl.ncclCommAbort(comm) == SUCCESS


def test_abort_of_the_queued(tmp_path: Path) -> None:
    run(abort_of_the_queued, 2, tmp_path)


# Abort, exit and death


def abort_of_init(rank: Rank) -> None:
    if rank.rank == 1:
        rank.unique_id("comm")
        rank.unique_id("other")
        return
    result, comm = rank.start("comm", blocking=False)
    assert result == IN_PROGRESS
    assert rank.nccl.ncclCommAbort(comm) == SUCCESS
    results: list[int] = []
    handle = ctypes.c_void_p()
    unique = rank.unique_id("other")
    thread = threading.Thread(
        target=lambda: results.append(rank.nccl.ncclCommInitRank(ctypes.byref(handle), 2, unique, 0))
    )
    thread.start()
    until(lambda: bool(handle.value))
    assert rank.nccl.ncclCommAbort(handle) == SUCCESS
    thread.join(PATIENCE)
    assert results == [3]
    assert rank.counts()[2] == 0


def test_abort_of_init(tmp_path: Path) -> None:
    run(abort_of_init, 2, tmp_path)


def exit_in_the_middle(rank: Rank) -> None:
    comm = rank.make("comm")
    if rank.rank == 0:
        assert rank.all_reduce(comm, ones()) == SUCCESS
        assert rank.all_reduce(comm, ones(), stream=rank.other_stream) == SUCCESS
    rank.start("never", blocking=False) if rank.rank == 0 else rank.unique_id("never")
    rank.meet()


def test_exit_in_the_middle_does_not_hang(tmp_path: Path) -> None:
    run(exit_in_the_middle, 2, tmp_path)


def killed(rank: Rank) -> None:
    comm = rank.make("comm")
    assert rank.all_reduce(comm, ones()) == SUCCESS
    assert rank.ends()
    rank.meet()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert rank.all_reduce(comm, ones()) == SUCCESS
    assert not rank.ends(seconds=HANG)
    assert rank.nccl.ncclCommAbort(comm) == SUCCESS


def test_a_killed_rank(tmp_path: Path) -> None:
    run(killed, 2, tmp_path, codes={1: -signal.SIGKILL})


# What the double tells and NCCL does not


def mismatches(rank: Rank) -> None:
    nccl, me, n = rank.nccl, rank.rank, rank.ranks
    size = ctypes.c_size_t

    def broadcast(comm: ctypes.c_void_p, root: int) -> int:
        x = ones()
        rank.used.append(x)
        return nccl.ncclBroadcast(pointer(x), pointer(x), size(4), FLOAT32, root, comm, rank.stream)

    cases: list[tuple[list[str], Callable[[ctypes.c_void_p], int]]] = [
        (["allreduce float32 sum 4", "allreduce float32 sum 5"], lambda comm: rank.all_reduce(comm, ones(4 + me))),
        (["int32 sum 4", "float32 sum 4"], lambda comm: rank.all_reduce(comm, ones(), 2 if me == 0 else FLOAT32)),
        (["root 0", "root 1"], lambda comm: broadcast(comm, me)),
        (
            ["allreduce", "broadcast"],
            lambda comm: rank.all_reduce(comm, ones()) if me == 0 else broadcast(comm, 0),
        ),
        (
            ["send float32 4", "recv float32 3"],
            lambda comm: rank.send(comm, ones(), 1) if me == 0 else rank.recv(comm, ones(3), 0),
        ),
        (
            ["send float32 4", "recv int32 4"],
            lambda comm: rank.send(comm, ones(), 1) if me == 0 else rank.recv(comm, ones(), 0, 2),
        ),
    ]
    assert n == 2
    for number, (texts, call) in enumerate(cases):
        comm = rank.make(f"comm{number}")
        assert call(comm) == SUCCESS
        assert rank.ends()
        assert rank.state(comm) == INVALID_USAGE
        for text in texts:
            assert text in rank.error(comm)
        assert rank.all_reduce(comm, ones()) == INVALID_USAGE
        assert (nccl.ncclCommAbort if number % 2 else nccl.ncclCommDestroy)(comm) == SUCCESS


def test_mismatches(tmp_path: Path) -> None:
    run(mismatches, 2, tmp_path)


def duplicate(rank: Rank) -> None:
    os.environ["NCCL_DOUBLE_GPU"] = str(min(rank.rank, 1))
    result, comm = rank.start("comm")
    assert result == (REMOTE_ERROR if rank.rank == 0 else INVALID_USAGE)
    assert not comm.value
    result, comm = rank.start("again", blocking=False)
    until(lambda: rank.state(comm) != IN_PROGRESS)
    assert rank.state(comm) == (REMOTE_ERROR if rank.rank == 0 else INVALID_USAGE)
    assert "Duplicate GPU detected" in rank.error(comm)
    assert rank.nccl.ncclCommAbort(comm) == SUCCESS


def test_one_gpu_for_two_ranks(tmp_path: Path) -> None:
    run(duplicate, 3, tmp_path)


# Faults


def faults(rank: Rank) -> None:
    """Rank 0 has NCCL_DOUBLE_FAIL=init:1 from the start."""
    nccl, first = rank.nccl, rank.rank == 0

    def fault(text: bytes) -> None:
        if first:
            nccl.nccl_double_fail(text)

    assert nccl.ncclGetErrorString(REMOTE_ERROR).decode().startswith("remote error")
    comm = ctypes.c_void_p()
    if first:
        made = UniqueId()
        assert nccl.ncclGetUniqueId(ctypes.byref(made)) == SUCCESS
        assert nccl.ncclCommInitRank(ctypes.byref(comm), 2, made, 0) == SYSTEM_ERROR
        nccl.nccl_double_fail(b"hanginit:2")
        result, comm = rank.start("hanginit-first", blocking=False)
        result, other = rank.start("hanginit", blocking=False)
    else:
        result, comm = rank.start("hanginit-first", blocking=False)
        result, other = rank.start("hanginit", blocking=False)
    until(lambda: rank.state(comm) == SUCCESS)
    time.sleep(0.2)
    assert rank.state(other) == IN_PROGRESS
    assert nccl.ncclCommAbort(other) == SUCCESS

    fault(b"launch:2")
    assert rank.all_reduce(comm, ones()) == SUCCESS
    if first:
        assert rank.all_reduce(comm, ones()) == SYSTEM_ERROR
    assert rank.ends()
    assert rank.state(comm) == SUCCESS
    assert nccl.ncclCommDestroy(comm) == SUCCESS

    for text in (b"hang:2", b"async:2"):
        comm = rank.make(text.decode())
        fault(text)
        for _ in range(3):
            result = rank.all_reduce(comm, ones())
            assert result == SUCCESS or (first and result == REMOTE_ERROR)
        assert not rank.ends(seconds=HANG)
        assert rank.state(comm) == (REMOTE_ERROR if first and text == b"async:2" else SUCCESS)
        rank.meet()
        assert nccl.ncclCommAbort(comm) == SUCCESS
        assert rank.ends()


def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_FAIL", "init:1")
    run(faults_from_the_environment, 2, tmp_path)


def faults_from_the_environment(rank: Rank) -> None:
    if rank.rank == 1:
        rank.nccl.nccl_double_fail(b"")
    faults(rank)


# Load


def load_of_all_kinds(rank: Rank) -> None:
    """Random groups of collectives and messages on several communicators and two streams."""
    comms = [rank.make(f"comm{i}", blocking=False) for i in range(3)]
    random = np.random.default_rng(5)
    pending: list[tuple[np.ndarray, float]] = []
    n = rank.ranks
    for step in range(60):
        stream = rank.stream if step % 2 else rank.other_stream
        touched = [comms[i] for i in random.permutation(3)[: random.integers(1, 4)]]
        rank.nccl.ncclGroupStart()
        for comm in touched:
            for size in random.integers(1, 40_000, random.integers(1, 4)):
                x = np.full(size, rank.rank + step, np.float32)
                assert rank.all_reduce(comm, x, stream=stream) == SUCCESS
                pending.append((x, n * step + n * (n - 1) / 2))
        if step % 3 == 0:
            for peer in range(n):
                out, got = np.full(9000, step, np.float32), np.zeros(9000, np.float32)
                assert rank.send(touched[0], out, peer) == SUCCESS
                assert rank.recv(touched[0], got, peer) == SUCCESS
                pending += [(out, step), (got, step)]
        assert rank.nccl.ncclGroupEnd() in (SUCCESS, IN_PROGRESS)
        for comm in comms:
            until(lambda comm=comm: rank.state(comm) == SUCCESS)
    assert rank.ends()
    assert rank.ends(rank.other_stream)
    for x, expected in pending:
        np.testing.assert_array_equal(x, expected)
    for comm in comms:
        assert rank.nccl.ncclCommFinalize(comm) == IN_PROGRESS
    for comm in comms:
        until(lambda comm=comm: rank.state(comm) == SUCCESS)
        assert rank.nccl.ncclCommDestroy(comm) == SUCCESS


@pytest.mark.parametrize("ranks", [3, 8])
def test_load(ranks: int, tmp_path: Path) -> None:
    run(load_of_all_kinds, ranks, tmp_path)


if __name__ == "__main__":
    scenario, my_rank, all_ranks, where = sys.argv[1:]
    globals()[scenario](Rank(int(my_rank), int(all_ranks), Path(where)))
