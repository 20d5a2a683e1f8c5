"""Pins on tensors of devices what a matrix of results does not show: the tests of semantics, of messages and of ranks
that disagree, once more; mixtures with the CPU; calls that devices make wrong. The limits: test_device_operations.py.
"""

from __future__ import annotations

from collections.abc import Callable

import multicomm
import test_mismatch
import test_point_to_point
import test_semantics
import test_tensors
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same
from harness.decorate import again_on_ranks
from harness.planes import DEVICE

pytestmark = needs_multicomm("has no devices")

PLANES = ("nccl", "staged")


def again(test: Callable[..., None], *worlds: int) -> Callable[..., None]:
    return again_on_ranks(test, *worlds, planes=PLANES)


test_roots_by_global_and_by_group_rank = again(test_semantics.test_roots_by_global_and_by_group_rank, 2, 3)
test_reduce_leaves_the_other_ranks_alone = again(test_semantics.test_reduce_leaves_the_other_ranks_alone, 2, 3)
test_output_and_input_share_memory = again(test_semantics.test_output_and_input_share_memory, 2, 3)
test_all_to_all_single_in_place = again(test_semantics.test_all_to_all_single_in_place, 2, 3, 4)
test_expanded_inputs_are_read = again(test_semantics.test_expanded_inputs_are_read, 2)
test_expanded_tensors_never_harm = again(test_semantics.test_expanded_tensors_never_harm_their_neighbours, 2)
test_bitwise_reductions = again(test_semantics.test_bitwise_reductions, 2, 3)
test_scalars = again(test_semantics.test_scalars, 2)
test_coalescing = again(test_semantics.test_coalescing, 2, 3)
test_objects = again(test_semantics.test_objects, 2, 3)
test_a_barrier_waits_for_the_last_member = again(test_semantics.test_a_barrier_waits_for_the_last_member, 2, 3)
test_conjugated_and_negated_inputs = again(test_tensors.test_lazily_conjugated_and_negated_inputs, 2)
test_tensors_that_require_grad = again(test_tensors.test_tensors_that_require_grad, 2)
test_receives_match_by_tag = again(test_point_to_point.test_receives_match_by_tag_and_not_by_order, 2)
test_messages_of_one_tag = again(test_point_to_point.test_messages_of_one_tag_keep_their_order, 2)
test_groups_do_not_share_messages = again(test_point_to_point.test_groups_do_not_share_messages, 2)
test_collectives_and_messages = again(test_point_to_point.test_collectives_and_messages_do_not_disturb_each_other, 2, 3)
test_any_source = again(test_point_to_point.test_any_source, 3, 4)
test_batches_have_no_order = again(test_point_to_point.test_batches_have_no_order, 2, 3)
test_a_batch_between_some_of_the_members = again(test_point_to_point.test_a_batch_between_some_of_the_members, 4)
test_one_tensor_to_many_receives = again(test_point_to_point.test_one_tensor_to_many_receives, 2)
test_many_sends_before_the_first_receive = again(test_point_to_point.test_many_sends_before_the_first_receive, 2)
test_messages_during_a_collective = again(test_point_to_point.test_messages_while_the_others_are_in_a_collective, 3, 4)
test_every_member_is_told = again(test_mismatch.test_every_member_is_told, 2, 3)
test_each_rank_asks_for_something_else = again(test_mismatch.test_each_rank_asks_for_something_else, 3)
test_only_the_operation_that_disagrees = again(test_mismatch.test_only_the_operation_that_disagrees_fails, 2)
test_other_groups_are_not_affected = again(test_mismatch.test_other_groups_are_not_affected, 3, 4)
test_the_future_fails_too = again(test_mismatch.test_the_future_fails_too, 2)


def filled(value: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), float(value))


def on_cpu(value: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), float(value), device="cpu")


def check_sums(me: Rank, group: dist.ProcessGroup | None = None) -> None:
    """The group still sums, on the device and on the CPU."""
    for data in (filled(me.rank), on_cpu(me.rank)):
        dist.all_reduce(data, group=group)
        same(data, on_cpu(sum(range(me.world))), f"a sum afterwards on {data.device}")


@on_ranks(2, 3, 4, planes=PLANES)
def test_a_mixture_in_one_coalesced_call(me: Rank) -> None:
    """Collectives of all kinds and messages, in one block, in another order of messages on each side."""
    backend = dist.group.WORLD._get_backend(DEVICE)
    neighbour, before = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for size in (3, 5000):
        summed, largest, copied = filled(1, size), filled(me.rank, size), filled(me.rank, size)
        sent = [filled(10 * me.rank + tag, size) for tag in (1, 2)]
        received = [filled(0, size) for _ in sent]
        gathered, share = filled(0, me.world * size), filled(0, size)
        backend._start_coalescing()
        dist.all_reduce(summed)
        dist.isend(sent[0], neighbour, tag=1)
        dist.irecv(received[1], before, tag=2)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.broadcast(copied, me.world - 1)
        dist.irecv(received[0], before, tag=1)
        dist.isend(sent[1], neighbour, tag=2)
        dist.all_gather_into_tensor(gathered, filled(me.rank, size))
        dist.reduce_scatter_tensor(share, filled(2, me.world * size))
        work = backend._end_coalescing()
        del sent
        work.wait()
        same(summed, on_cpu(me.world, size), "all_reduce")
        same(largest, on_cpu(me.world - 1, size), "all_reduce(MAX)")
        same(copied, on_cpu(me.world - 1, size), "broadcast")
        for k, data in enumerate(received):
            same(data, on_cpu(10 * before + k + 1, size), f"message of tag {k + 1}")
        same(gathered.view(me.world, size)[:, 0], [float(rank) for rank in range(me.world)], "all_gather_into_tensor")
        same(share, on_cpu(2 * me.world, size), "reduce_scatter_tensor")


@on_ranks(2, 3, planes=PLANES)
def test_uneven_lists(me: Rank) -> None:
    for group in me.joined("world", "unsorted"):
        sizes = [3 * ((k + 1) % group.size) for k in range(group.size)]  # one is empty
        pieces = [filled(-1, size) for size in sizes]
        dist.all_gather(pieces, filled(me.rank, sizes[group.own]), group.handle)
        for k, rank in enumerate(group.ranks):
            same(pieces[k], on_cpu(rank, sizes[k]), f"all_gather of {sizes} on {group.kind}, from rank {rank}")
        share = filled(-1, sizes[group.own])
        whole = [filled(me.rank + k, size) for k, size in enumerate(sizes)]
        dist.reduce_scatter(share, whole, group=group.handle)
        want = sum(group.ranks) + group.size * group.own
        same(share, on_cpu(want, sizes[group.own]), f"reduce_scatter of {sizes} on {group.kind}")


@on_ranks(2, 3, planes=PLANES)
def test_cpu_and_device_take_turns(me: Rank) -> None:
    """On one group, without a wait in between."""
    calls = []
    for k in range(40):
        data = (filled if k % 2 else on_cpu)(me.rank + k, 1 + 50 * k)
        calls.append((k, data, dist.all_reduce(data, async_op=True)))
    received = [filled(0), on_cpu(0)]
    for k, data in enumerate(received):
        calls.append((-1, data, dist.irecv(data, (me.rank - 1) % me.world, tag=k)))
    messages = [dist.isend(make(me.rank), (me.rank + 1) % me.world, tag=k) for k, make in enumerate((filled, on_cpu))]
    me.random.shuffle(calls)
    for work in messages:
        work.wait()
    for k, data, work in calls:
        work.wait()
        want = sum(range(me.world)) + k * me.world if k >= 0 else (me.rank - 1) % me.world
        same(data, on_cpu(want, data.numel()), f"{k} on {data.device}")


@on_ranks(2, 3, planes=PLANES)
def test_one_rank_on_the_cpu(me: Rank) -> None:
    """Whoever has a tensor of the CPU where others have one of a device is told, as they are."""
    odd = me.rank == me.world - 1
    for size in (4, 50_000):
        data = (on_cpu if odd else filled)(5, size)
        text = raises(lambda d=data: dist.all_reduce(d), "CPU and device", dist.DistBackendError, "disagree")
        lines = [line for line in text.splitlines() if line.startswith("  rank")]
        assert len(lines) == 2 and lines[0] != lines[1], f"the error does not show who differs:\n{text}"
        same(data, on_cpu(5, size), "the tensor of the refused call")
        check_sums(me)


@on_ranks(2, planes=PLANES)
def test_messages_that_do_not_fit(me: Rank) -> None:
    """Both sides are told, since a device waits for the other; only a send from the CPU waits for nobody."""
    for sent, expected in ((4, 6), (6, 4), (50_000, 3), (3, 50_000), (0, 4)):
        data = filled(me.rank, sent if me.rank == 0 else expected)
        action = (lambda d=data: dist.send(d, 1)) if me.rank == 0 else (lambda d=data: dist.recv(d, 0))
        what = f"{sent} elements into {expected} on rank {me.rank}"
        raises(action, what, dist.DistBackendError, str(4 * sent), str(4 * expected), r"message \d+")
        same(data, on_cpu(me.rank, data.numel()), f"the tensor after {what}")
        check_sums(me)
    for device in (0, 1):  # whose tensor is on the device
        data = (filled if me.rank == device else on_cpu)(me.rank)
        action = (lambda d=data: dist.send(d, 1)) if me.rank == 0 else (lambda d=data: dist.recv(d, 0))
        what = f"a message between CPU and device, on rank {me.rank}"
        if device == 1 and me.rank == 0:
            action()  # a small message of the CPU is gone before anybody knows where it goes
        else:
            raises(action, what, dist.DistBackendError, "on the CPU.*device|CPU tensor.*device|device.*CPU")
        same(data, on_cpu(me.rank), "the tensor of the refused message")
        check_sums(me)
    data = filled(me.rank)
    if me.rank == 0:
        dist.send(data, 1)
    else:
        dist.recv(data, 0)
        same(data, on_cpu(0), "the next message")


@on_ranks(2, planes=PLANES)
def test_wrong_calls_raise_at_once(me: Rank) -> None:
    """On one rank alone: what a rank can see by itself never reaches the others."""
    other = torch.device("sim", (torch.device(DEVICE).index + 1) % torch.sim.device_count())
    backend = dist.group.WORLD._get_backend(DEVICE)
    check_sums(me)  # from here on the group's device is known
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "two devices": (
            lambda: dist.all_gather([filled(0), filled(0).to(other)], filled(0)),
            f"on {DEVICE} and on {other}|on {other} and on {DEVICE}",
        ),
        "CPU and device": (lambda: dist.all_gather_into_tensor(on_cpu(0, 10), filled(0)), "on cpu and on|and on cpu"),
        "a second device of a group": (lambda: dist.all_reduce(filled(0).to(other)), f"on {other}: the first"),
        "a message to oneself": (lambda: backend.send([filled(0)], me.rank, 0), "nothing to itself"),
        "a message from oneself": (lambda: backend.recv([filled(0)], me.rank, 0), "nothing to itself"),
    }
    if me.rank == 1:
        for what, (call, words) in calls.items():
            raises(call, what, ValueError, words)
    check_sums(me)


@on_ranks(2, planes=("nccl_only",))
def test_what_nccl_lacks_is_refused_where_it_is_asked_for(me: Rank) -> None:
    whole = torch.ones(4, dtype=torch.int32)
    if me.rank == 0:
        raises(lambda: dist.all_reduce(whole, dist.ReduceOp.BAND), "BAND", NotImplementedError, "NCCL has no BAND")
        short = whole.to(torch.int16)
        raises(lambda: dist.all_reduce(short), "int16", NotImplementedError, "NCCL has no SUM of Short")
    check_sums(me)
    shared = dist.new_group([0, 1])
    data = torch.ones(3, device="sim:0")
    for _ in range(2):
        raises(
            lambda: dist.all_reduce(data, group=shared), "a shared device", dist.DistBackendError, "share one device"
        )
    dist.destroy_process_group(shared)
    check_sums(me)


@on_ranks(2, 3, planes=("staged_only",))
def test_staged_on_devices_of_their_own(me: Rank) -> None:
    check_sums(me)
    data = torch.full((6,), 7 - me.rank, dtype=torch.int16)
    dist.all_reduce(data, dist.ReduceOp.BOR)
    same(data, torch.full((6,), 7, dtype=torch.int16), "BOR")


def check_what_the_others_do(me: Rank, group: dist.ProcessGroup, active: list[int], joined: int) -> None:
    """On a group of which `joined` has joined, in whatever way tensors of devices come together."""
    total, own = float(sum(active)), active.index(me.rank)
    calls = {
        "sum": (dist.ReduceOp.SUM, total),
        "mean": (dist.ReduceOp.AVG, total / len(active)),
        "least": (dist.ReduceOp.MIN, float(min(active))),
        "product": (dist.ReduceOp.PRODUCT, float(torch.tensor(active).prod())),
    }
    for size in (1, 5, 3000):
        for what, (op, want) in calls.items():
            several = [filled(me.rank, size) for _ in range(3)]
            for work in [dist.all_reduce(data, op=op, group=group, async_op=True) for data in several]:
                work.wait()
            for data in several:
                same(data, on_cpu(want, size), f"{what} of {size}, {joined} has joined")
        half = filled(me.rank, size).to(torch.float16)
        dist.all_reduce(half, op=dist.ReduceOp.AVG, group=group)
        same(half, on_cpu(total / len(active), size).to(torch.float16), f"mean of halves, {size}")
        whole = torch.full((size,), 7 + me.rank)
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=group)
        same(whole, torch.full((size,), (7 * len(active) + int(total)) // len(active), device="cpu"), "integers")
        data = filled(me.rank, size)
        dist.broadcast(data, active[-1], group=group)
        same(data, on_cpu(active[-1], size), f"broadcast of {size}")
        data = filled(me.rank, size)
        dist.reduce(data, active[0], group=group)
        same(data, on_cpu(total if own == 0 else me.rank, size), f"reduce of {size}")
        part = filled(0, size)
        dist.reduce_scatter_tensor(part, filled(me.rank, size * me.world), group=group)
        same(part, on_cpu(total, size), f"reduce_scatter of {size}")
    names = list(range(20)) if own == 0 else list(reversed(range(20)))
    for _ in range(2):
        handles = {
            n: multicomm.allreduce_async(filled(me.rank + n), name=str(n), op=multicomm.Average, group=group)
            for n in names
        }
        for n, handle in handles.items():
            same(multicomm.synchronize(handle), on_cpu(total / len(active) + n), f"named {n}")
    raises(
        lambda: dist.broadcast(filled(1), joined, group=group), "root", dist.DistBackendError, f"{joined}: has joined"
    )
    pieces = [filled(0) for _ in range(me.world)]
    raises(lambda: dist.all_gather(pieces, filled(1), group=group), "places", dist.DistBackendError, "has joined")


@on_ranks(2, 3, planes=PLANES)
def test_what_joined_ranks_take_part_in(me: Rank) -> None:
    """Also where the group's first tensors on a device come when one has joined."""
    for joined in range(me.world):
        group = dist.new_group()
        if me.rank == joined:
            last = multicomm.join(group)
        else:
            check_what_the_others_do(me, group, [r for r in range(me.world) if r != joined], joined)
            last = multicomm.join(group)
        assert last != joined
        check_sums(me, group)
        dist.destroy_process_group(group)
