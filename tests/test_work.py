"""Pins what a caller may do with the Work of a call: wait, wait with a limit, ask, chain, share between threads, or
drop it; and when the tensors are let go.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import Rank, on_ranks, raises, same, unless_gloo
from harness.calls import OPERATIONS, start
from harness.case import Case
from torch.profiler import ProfilerActivity, profile

SIZES = (4, 100_000)  # rides in the agreement, has a batch of its own


def filled(value: float, size: int) -> torch.Tensor:
    return torch.full((size,), float(value))


def eventually(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Waits for something that no call announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds} s: {what}"
        gc.collect()
        time.sleep(0.005)


def total(me: Rank) -> float:
    return float(sum(range(1, me.world + 1)))


@pytest.mark.parametrize("size", SIZES)
@on_ranks(1, 2, 3)
def test_a_finished_work_says_so(me: Rank, size: int) -> None:
    data = filled(me.rank + 1, size)
    work = dist.all_reduce(data, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.wait() is True, "a second wait"
    assert [t.data_ptr() for t in work.result()] == [data.data_ptr()]
    same(data, filled(total(me), size), "all_reduce")


@pytest.mark.parametrize("size", SIZES)
@on_ranks(2, 3)
def test_a_work_finishes_without_being_waited_for(me: Rank, size: int) -> None:
    data = filled(me.rank + 1, size)
    work = dist.all_reduce(data, async_op=True)
    eventually(work.is_completed, "all_reduce completes by itself")
    same(data, filled(total(me), size), "all_reduce")


@pytest.mark.parametrize("size", SIZES)
@on_ranks(2, 3)
def test_a_wait_with_a_limit_gives_up_the_waiter_only(me: Rank, size: int) -> None:
    data = filled(me.rank + 1, size)
    late = me.world - 1
    if me.rank == late:
        for rank in range(late):
            me.await_signal(f"{rank} gave up waiting")
    work = dist.all_reduce(data, async_op=True)
    if me.rank != late:
        assert not work.is_completed()
        begin = time.monotonic()
        raises(lambda: work.wait(timedelta(seconds=0.2)), "wait(0.2 s) for a rank that has not come", RuntimeError)
        waited = time.monotonic() - begin
        assert 0.15 < waited < 5, f"wait(0.2 s) took {waited:.2f} s"
        if me.backend == "multicomm":
            assert not work.is_completed(), "the operation goes on"
        me.signal(f"{me.rank} gave up waiting")
    if me.backend == "multicomm":  # Gloo gives the operation up, on this rank alone
        work.wait()
        same(data, filled(total(me), size), "all_reduce")
        dist.barrier()


def with_future(operation: str) -> object:
    lacking = ("all_to_all_uneven", "send_recv", "reduce_scatter", "reduce_scatter_tensor")
    return pytest.param(operation, marks=[unless_gloo("has no future here")] if operation in lacking else [])


@unless_gloo("does not look for signals while it waits")
@on_ranks(2)
def test_signals_interrupt_a_wait(me: Rank) -> None:
    """Ctrl-C works, and leaves the operation as it was."""

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("planned")

    if me.rank == 1:
        me.await_signal("interrupted")
    data = filled(1, 4)
    work = dist.all_reduce(data, async_op=True)
    if me.rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        raises(work.wait, "wait", InterruptedError, "planned")
        signal.signal(signal.SIGALRM, before)
        me.signal("interrupted")
    work.wait()
    same(data, filled(2, 4), "all_reduce")


@pytest.mark.parametrize("operation", [with_future(operation) for operation in OPERATIONS])
@on_ranks(2)
def test_futures_hold_a_list_of_tensors(me: Rank, operation: str) -> None:
    case = Case(me.groups["world"], shape=(40,), asynchronous=True)
    call = start(operation, case)
    for work in call.works:
        value = work.get_future().wait()
        while isinstance(value, list) and value and isinstance(value[0], list):
            value = value[0]
        assert isinstance(value, list), f"{operation}: a future of {type(value)}"
        assert all(isinstance(tensor, torch.Tensor) for tensor in value), f"{operation}: {value}"
    call.finish()


@pytest.mark.parametrize("size", SIZES)
@on_ranks(1, 2, 3)
def test_chained_futures(me: Rank, size: int) -> None:
    order = []

    def double(future: torch.futures.Future) -> torch.Tensor:
        order.append("double")
        return future.value()[0] * 2

    def add_one(future: torch.futures.Future) -> torch.Tensor:
        order.append("add one")
        return future.value() + 1

    data = filled(me.rank + 1, size)
    work = dist.all_reduce(data, async_op=True)
    chained = work.get_future().then(double).then(add_one)
    same(chained.wait(), filled(2 * total(me) + 1, size), "chain")
    assert order == ["double", "add one"], f"ran as {order}"
    late = work.get_future().then(double)  # asked for after completion
    same(late.wait(), filled(2 * total(me), size), "a callback added to a finished future")


@on_ranks(2, 3)
def test_callbacks_may_call_collectives(me: Rank) -> None:
    for size in SIZES:

        def again(future: torch.futures.Future) -> dist.Work:
            return dist.all_reduce(future.value()[0], async_op=True)

        data = filled(1, size)
        second = dist.all_reduce(data, async_op=True).get_future().then(again).wait()
        second.wait()
        same(data, filled(me.world**2, size), f"all_reduce of {size} in a callback of an all_reduce")


@on_ranks(2)
def test_an_error_in_a_callback_stays_in_its_future(me: Rank) -> None:
    def fail(future: torch.futures.Future) -> None:
        raise ArithmeticError("planned")

    data = filled(me.rank + 1, 4)
    work = dist.all_reduce(data, async_op=True)
    raises(lambda: work.get_future().then(fail).wait(), "the chained future", Exception, "planned")
    work.wait()
    assert work.is_success()
    same(data, filled(3, 4), "all_reduce")
    dist.barrier()


@pytest.mark.parametrize("size", SIZES)
@on_ranks(2, 3)
def test_dropped_works_still_happen_and_let_go(me: Rank, size: int) -> None:
    kept = [filled(k, size) for k in range(20)]
    for tensor in kept:
        dist.all_reduce(tensor, async_op=True)
    references = []
    for k in range(20):
        tensor = filled(k, size)
        references.append(weakref.ref(tensor))
        dist.all_reduce(tensor, async_op=True)
        del tensor
        _overwritten = [filled(-1, size) for _ in range(3)]  # would reuse memory that was let go too early
    dist.barrier()
    for k, tensor in enumerate(kept):
        want = filled(k * me.world, size)
        eventually(lambda t=tensor, w=want: torch.equal(t, w), f"dropped all_reduce {k}")
    eventually(lambda: all(reference() is None for reference in references), "the tensors are released")


@pytest.mark.parametrize("size", SIZES)
@on_ranks(2)
def test_a_finished_work_lets_go_of_its_tensors(me: Rank, size: int) -> None:
    """The Work and its future may be dropped in either order."""
    for future_first in (True, False):
        data = filled(1, size)
        reference = weakref.ref(data)
        work = dist.all_reduce(data, async_op=True)
        future = work.get_future()
        future.wait()
        work.wait()
        del data
        if future_first:
            del future
            del work
        else:
            del work
            del future
        eventually(lambda r=reference: r() is None, "the tensor is released")


@on_ranks(2, 3)
def test_several_threads_wait_for_one_work(me: Rank) -> None:
    late = me.world - 1
    for turn, size in enumerate(SIZES):
        data = filled(me.rank + 1, size)
        if me.rank == late:
            for rank in range(late):
                me.await_signal(f"{rank} waits {turn}")
        work = dist.all_reduce(data, async_op=True)
        with ThreadPoolExecutor(4) as threads:
            waits = [threads.submit(work.wait) for _ in range(3)]
            waits.append(threads.submit(lambda w=work: w.get_future().wait() is not None))
            if me.rank != late:
                assert not any(wait.done() for wait in waits)
                me.signal(f"{me.rank} waits {turn}")
            assert all(wait.result(30) for wait in waits)
        same(data, filled(total(me), size), "all_reduce")


@on_ranks(2)
def test_python_runs_while_a_thread_waits(me: Rank) -> None:
    """A wait that held the GIL would stop the very thread that calls for the other rank."""
    if me.rank == 1:
        me.await_signal("rank 0 is alive while it waits")
        dist.barrier()
        return
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        dist.barrier()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waiting.wait(10)
    me.signal("rank 0 is alive while it waits")
    waiter.join(30)
    assert not waiter.is_alive()


@on_ranks(2)
def test_works_are_waited_for_in_any_order(me: Rank) -> None:
    case = Case(me.groups["world"], asynchronous=True)
    order = list(range(60))
    calls = [start("all_reduce", Case(case.group, shape=(1 + k * 50,), salt=k, asynchronous=True)) for k in order]
    me.random.shuffle(order)
    for k in order:
        calls[k].finish()


@on_ranks(2)
def test_the_profiler_sees_the_calls(me: Rank) -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(3, 7))
        dist.all_gather([torch.empty(5) for _ in range(2)], torch.ones(5), async_op=True).wait()
        dist.barrier()
    names = {event.key for event in profiler.key_averages()}
    for word in ("all_?reduce", "all_?gather", "barrier"):
        own = [name for name in names if name.startswith(f"{me.backend}:") and word.replace("_?", "_") in name]
        assert own, f"no event of the backend for {word}; events: {sorted(names)}"


@on_ranks(2)
def test_idle_and_waiting_ranks_leave_the_cores_alone(me: Rank) -> None:
    """Ranks that outnumber cores depend on it."""
    pause = threading.Event()

    def share(action: Callable[[], object]) -> float:
        cpu, begin = time.process_time(), time.monotonic()
        action()
        return (time.process_time() - cpu) / (time.monotonic() - begin)

    dist.barrier()
    me.meet("idle")
    pause.wait(0.3)
    idle = share(lambda: pause.wait(1.5))
    assert idle < 0.25, f"an idle rank used {idle:.0%} of a core"
    me.meet("waiting")
    if me.rank == 1:
        pause.wait(2)
        dist.barrier()
    else:
        waiting = share(dist.barrier)
        assert waiting < 0.6, f"a waiting rank used {waiting:.0%} of a core"
