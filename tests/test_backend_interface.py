"""Pins the parts of torch's backend interface that no collective shows: monitored barriers, groups made from groups,
completion hooks, durations, premultiplied sums.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Rank, needs_multicomm, on_ranks, raises, same
from harness.checks import check_sum
from harness.jobs import launch

pytestmark = needs_multicomm("has these only in part")


@on_ranks(1, 2, 3, 4)
def test_monitored_barrier_waits_for_all(me: Rank) -> None:
    for group in me.joined("world", "unsorted"):
        for round_ in range(3):
            late = group.ranks[round_ % group.size]
            if me.rank == late:
                for rank in group.ranks:
                    if rank != late:
                        me.await_signal(f"{group.kind} {round_} {rank}")
                me.signal(f"{group.kind} {round_} comes")
            else:
                me.signal(f"{group.kind} {round_} {me.rank}")
            group.handle.monitored_barrier(timedelta(seconds=20))
            me.await_signal(f"{group.kind} {round_} comes")


@on_ranks(3, 4)
def test_monitored_barrier_names_who_is_missing(me: Rank) -> None:
    group = dist.group.WORLD
    last = me.world - 1
    for wait_all, absent in ((False, [1, last]), (True, [1, last]), (True, [last])):
        step = f"{wait_all} {absent}"
        if me.rank not in absent:
            text = raises(
                lambda w=wait_all: group.monitored_barrier(timedelta(seconds=1.5), wait_all_ranks=w),
                f"monitored barrier, {step}",
                dist.DistBackendError,
            )
            assert f"rank {named(absent, wait_all)} did not come" in text, text
            me.signal(f"{step} {me.rank}")
        for rank in range(me.world):
            if rank not in absent:
                me.await_signal(f"{step} {rank}")
        if me.rank in absent:  # comes too late, and is told that it was missed
            text = raises(lambda: group.monitored_barrier(timedelta(seconds=10)), f"late, {step}")
            assert f"rank {named(absent, wait_all)} did not come" in text, text
        check_sum()
        group.monitored_barrier(timedelta(seconds=20))  # the group goes on


def named(absent: list[int], wait_all: bool) -> str:
    return ", ".join(map(str, absent if wait_all else absent[:1]))


@on_ranks(2)
def test_rank_0_is_missing_from_a_monitored_barrier(me: Rank) -> None:
    group = dist.group.WORLD
    if me.rank == 1:
        text = raises(lambda: group.monitored_barrier(timedelta(seconds=1)), "monitored barrier")
        assert "rank 0 did not answer" in text, text
        me.signal("gave up")
    else:
        me.await_signal("gave up")
        group.monitored_barrier(timedelta(seconds=10))  # the other's arrival was sent before it gave up
    check_sum()
    group.monitored_barrier(timedelta(seconds=20))


@on_ranks(2, 3, 4)
def test_split_of_a_group(me: Rank) -> None:
    world = dist.group.WORLD
    for step, ranks in enumerate(([0, me.world - 1], list(range(me.world)))):
        part = world.split_group(ranks, timeout=timedelta(seconds=20), group_name=f"part {step}")
        if me.rank not in ranks:
            assert part is None
            continue
        assert (part.rank(), part.size()) == (ranks.index(me.rank), len(ranks))
        data = torch.full((4,), me.rank + 1.0)
        part.allreduce([data]).wait()
        same(data, [sum(rank + 1.0 for rank in ranks)] * 4, f"all_reduce over {ranks}")
        part.shutdown()


@on_ranks(3, 4)
def test_shrinking_a_group(me: Rank) -> None:
    for flags in (dist.distributed_c10d.SHRINK_DEFAULT, dist.distributed_c10d.SHRINK_ABORT):
        group = dist.new_group(list(range(me.world)))
        check_sum(group)
        if me.rank == 1:
            dist.destroy_process_group(group)
            continue
        rest = dist.shrink_group([1], group=group, shrink_flags=flags)
        assert dist.get_process_group_ranks(rest) == [rank for rank in range(me.world) if rank != 1]
        data = torch.full((2,), me.rank + 1.0)
        rest.allreduce([data]).wait()
        same(data, [sum(range(1, me.world + 1)) - 2.0] * 2, "all_reduce over the rest")
        dist.destroy_process_group(rest)


@on_ranks(3)
def test_merging_groups(me: Rank) -> None:
    merged = dist.group.WORLD.merge_remote_group(dist.PrefixStore("merge", me.store), 3, timedelta(seconds=20))
    assert merged.size() == 3
    places = torch.zeros(3)
    places[merged.rank()] = me.rank + 1.0  # torch numbers the members as they come
    merged.allreduce([places]).wait()
    same(places.sort().values, [1.0, 2.0, 3.0], "the members of the merged group")
    merged.shutdown()


@on_ranks(2)
def test_completion_hook(me: Rank) -> None:
    group = dist.new_group([0, 1])
    seen: list[tuple[str, int, float]] = []
    threads = set()

    def hook(info: dist._WorkInfo) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.01)  # the wait below has to wait for this
        seen.append((info.op_type.name, info.seq, info.active_duration.total_seconds()))

    group._register_on_completion_hook(hook)
    dist.all_reduce(torch.ones(3), group=group)
    dist.broadcast(torch.ones(50_000), 0, group=group)
    group._wait_for_pending_works()
    assert [entry[:2] for entry in seen] == [("ALLREDUCE", 0), ("BROADCAST", 1)], seen
    assert all(0 < duration < 30 for _, _, duration in seen), seen
    assert threading.get_ident() not in threads
    raises(lambda: group._register_on_completion_hook(hook), "a second hook", RuntimeError)
    dist.all_reduce(torch.ones(3), group=group, async_op=True)
    dist.destroy_process_group(group)  # waits for the hook
    assert len(seen) == 3


@on_ranks(2)
def test_durations(me: Rank) -> None:
    group = dist.new_group([0, 1])
    before = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    before.wait()
    raises(before._get_duration, "a duration without timing", RuntimeError)
    group._enable_collectives_timing()
    if me.rank == 1:
        me.await_signal("the other waits")
        time.sleep(0.2)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    if me.rank == 0:
        me.signal("the other waits")
    work.wait()
    milliseconds = work._get_duration()
    assert (200 if me.rank == 0 else 0) <= milliseconds < 30_000, milliseconds
    dist.destroy_process_group(group)


FACTORS = {torch.float32: 0.5, torch.float64: -1.25, torch.float16: 0.5, torch.bfloat16: 2.0, torch.int32: 3}


@pytest.mark.parametrize("dtype", FACTORS, ids=str)
@on_ranks(1, 2, 3)
def test_premultiplied_sums(me: Rank, dtype: torch.dtype) -> None:
    base = FACTORS[dtype]
    for group, size, as_tensor in product(me.joined("world", "unsorted"), (3, 70_000), (False, True)):
        factors = [base * (rank + 1) for rank in group.ranks]  # each rank its own
        own = factors[group.own]
        factor = torch.tensor([own], dtype=torch.float64) if as_tensor else float(own)
        op = dist._make_nccl_premul_sum(factor)
        rows = [(torch.arange(size) % 5 + rank).to(dtype) for rank in group.ranks]
        want = torch.stack([row.double() * f for row, f in zip(rows, factors, strict=True)]).sum(0).to(dtype)
        mine = rows[group.own]
        data = mine.clone()
        dist.all_reduce(data, op=op, group=group.handle)
        same(data, want, f"all_reduce of {size} on {group.kind}")
        strided = torch.stack([mine, torch.full_like(mine, 9)], 1)
        dist.all_reduce(strided[:, 0], op=op, group=group.handle)
        same(strided[:, 0], want, "all_reduce of a column")
        same(strided[:, 1], torch.full_like(mine, 9), "the column beside it")
        data, before = mine.clone(), mine.clone()
        dist.reduce(data, group.ranks[0], op=op, group=group.handle)
        same(data, want if group.own == 0 else before, "reduce")
        share = torch.empty_like(mine)
        dist.reduce_scatter(share, [mine] * group.size, op=op, group=group.handle)
        same(share, want, "reduce_scatter")
        share.zero_()
        dist.reduce_scatter_tensor(share, torch.cat([mine] * group.size), op=op, group=group.handle)
        same(share, want, "reduce_scatter_tensor")
        same(mine, rows[group.own], "the inputs")


@on_ranks(2)
def test_premultiplied_sums_that_make_no_sense(me: Rank) -> None:
    half = dist._make_nccl_premul_sum(0.5)
    raises(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), op=half), "half of whole numbers", ValueError)
    raises(lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), op=half), "half of truth values", ValueError)
    # One rank scales and the other does not: an error on both, and the group goes on.
    text = raises(lambda: dist.all_reduce(torch.ones(3), op=half if me.rank == 0 else dist.ReduceOp.SUM), "a mixture")
    assert "PREMUL_SUM" in text and "(SUM)" in text, text
    check_sum()


def shrunk_world() -> None:
    dist.init_process_group(BACKEND)
    check_sum()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    dist.shrink_group([1])
    assert (dist.get_world_size(), dist.get_rank()) == (3, max(0, int(os.environ["RANK"]) - 1))
    check_sum()
    pair = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        check_sum(pair, 50_000)
    dist.destroy_process_group()
    print("went on")


def test_shrinking_the_world(tmp_path: Path) -> None:
    launch(shrunk_world, 4, tmp_path).check().says("went on", 3)


@on_ranks(2)
def test_options_errors_and_sequence_numbers(me: Rank) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=33))
    backend = group._get_backend(torch.device("cpu"))
    for options in (backend.options, copy.copy(backend.options), copy.deepcopy(backend.options)):
        assert options._timeout == timedelta(seconds=33)
    assert backend.supports_splitting and backend.supports_coalescing
    backend.perform_nocolor_split(torch.device("cpu"))
    backend._set_sequence_number_for_group()
    assert backend._get_sequence_number_for_group() == 0
    check_sum(group)
    check_sum(group)
    assert backend._get_sequence_number_for_group() == 2
    assert backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert work.get_future_result().wait() == 0
    backend._set_default_timeout(timedelta(seconds=1))
    if me.rank == 0:  # the new time-out holds from the next operation on
        raises(lambda: dist.all_reduce(torch.ones(2), group=group), "a missing peer", dist.DistBackendError, "time-out")
        assert backend.get_error() == torch._C._distributed_c10d.ErrorType.TIMEOUT
        me.signal("given up")
    else:
        me.await_signal("given up")
    backend.abort()
    raises(lambda: dist.all_reduce(torch.ones(2), group=group), "a call after abort()", dist.DistBackendError)
    backend.shutdown()
    check_sum()
