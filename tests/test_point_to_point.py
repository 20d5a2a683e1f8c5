"""Pins sends and receives: matching by group, source and tag, batches without an order, many under way at
once, any source, and the errors of calls that cannot be right.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Group, Rank, needs_multicomm, on_ranks, raises, same, unless_gloo


def filled(value: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), float(value))


@on_ranks(2)
def test_receives_match_by_tag_and_not_by_order(me: Rank) -> None:
    tags = [1, 2, 30, 400, 5000]
    for size in (1, 100, 100_000):
        if me.rank == 0:
            works = [dist.isend(filled(tag, size), 1, tag=tag) for tag in tags]
        else:
            data = {tag: torch.empty(size) for tag in tags}
            works = [dist.irecv(data[tag], 0, tag=tag) for tag in reversed(tags)]
        for work in works:
            work.wait()
        if me.rank == 1:
            for tag in tags:
                same(data[tag], filled(tag, size), f"tag {tag}, {size} elements")


@on_ranks(2)
def test_messages_of_one_tag_keep_their_order(me: Rank) -> None:
    sizes = [1, 60_000, 3, 1, 20_000, 2]  # small ones must not overtake large ones
    if me.rank == 0:
        for work in [dist.isend(filled(k, size), 1, tag=3) for k, size in enumerate(sizes)]:
            work.wait()
        return
    data = [torch.empty(size) for size in sizes]
    for work in [dist.irecv(tensor, 0, tag=3) for tensor in data]:
        work.wait()
    for k, size in enumerate(sizes):
        same(data[k], filled(k, size), f"message {k}")


@on_ranks(2)
def test_groups_do_not_share_messages(me: Rank) -> None:
    groups = [me.groups[kind] for kind in ("world", "twin_a", "twin_b")]
    if me.rank == 0:
        for work in [dist.isend(filled(k), 1, group.handle, tag=9) for k, group in enumerate(groups)]:
            work.wait()
        return
    for k, group in reversed(list(enumerate(groups))):
        data = torch.empty(5)
        dist.recv(data, 0, group.handle, tag=9)
        same(data, filled(k), f"message of {group.kind}")


@on_ranks(2, 3)
def test_collectives_and_messages_do_not_disturb_each_other(me: Rank) -> None:
    group = me.groups["world"]
    for size in (4, 40_000):
        received, total = torch.empty(size), filled(me.rank, size)
        works = [dist.irecv(received, group.neighbour(-1)), dist.all_reduce(total, async_op=True)]
        same_again = filled(me.rank, size)
        dist.all_reduce(same_again)
        dist.barrier()
        works.append(dist.isend(filled(me.rank, size), group.neighbour(1)))
        for work in works:
            work.wait()
        same(received, filled(group.neighbour(-1), size), "message")
        same(total, filled(sum(group.ranks), size), "sum under way")
        same(same_again, filled(sum(group.ranks), size), "sum in between")


@on_ranks(3, 4)
def test_any_source(me: Rank) -> None:
    last = me.world - 1
    if me.rank != last:
        dist.send(filled(me.rank), last)
        return
    seen = []
    for _ in range(last):
        data = torch.empty(5)
        source = dist.recv(data)
        same(data, filled(source), f"message of rank {source}")
        seen.append(source)
    assert sorted(seen) == list(range(last)), f"sources {seen}"


def exchange(group: Group, me: Rank, size: int, salt: int) -> None:
    """Everybody sends to everybody, all sends first and the receives in another order."""
    peers = [rank for rank in group.ranks if rank != me.rank]
    data = {peer: torch.empty(size) for peer in peers}
    sent = {peer: filled(100 * salt + 10 * me.rank + peer, size) for peer in peers}
    operations = [dist.P2POp(dist.isend, sent[peer], peer, group.handle) for peer in peers]
    operations += [dist.P2POp(dist.irecv, data[peer], peer, group.handle) for peer in reversed(peers)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for peer in peers:
        same(data[peer], filled(100 * salt + 10 * peer + me.rank, size), f"batch {salt}, from {peer}")


@pytest.mark.parametrize("size", [0, 1, 300_000])
@on_ranks(2, 3, 4)
def test_batches_have_no_order(me: Rank, size: int) -> None:
    for salt in range(3):
        for group in me.joined("unsorted", "world", "twin"):
            exchange(group, me, size, salt)


@on_ranks(4)
def test_a_batch_between_some_of_the_members(me: Rank) -> None:
    group = me.groups["world"]
    data = torch.zeros(5)
    operations = {1: dist.P2POp(dist.isend, filled(8), 2), 2: dist.P2POp(dist.irecv, data, 1)}
    if me.rank in operations:
        for work in dist.batch_isend_irecv([operations[me.rank]]):
            work.wait()
    same(data, filled(8 if me.rank == 2 else 0), f"on {group.kind}")


@pytest.mark.parametrize(("count", "size"), [(400, 16), (60, 20_000)])
@on_ranks(2)
def test_many_sends_before_the_first_receive(me: Rank, count: int, size: int) -> None:
    group, peer = me.groups["twin_a"].handle, 1 - me.rank
    sent = [filled(1000 * me.rank + k, size) for k in range(count)]
    data = [torch.empty(size) for _ in range(count)]
    if me.rank == 1:
        me.await_signal("everything is posted")
    works = [dist.isend(tensor, peer, group) for tensor in sent]
    works += [dist.irecv(tensor, peer, group) for tensor in data]
    if me.rank == 0:
        me.signal("everything is posted")
    for work in works:
        work.wait()
    for k in range(count):
        same(data[k], filled(1000 * peer + k, size), f"message {k}")


@on_ranks(2)
def test_one_tensor_to_many_receives(me: Rank) -> None:
    """Reading one tensor several times at once is no conflict."""
    source = filled(me.rank, 50_000)
    data = [torch.empty(50_000) for _ in range(4)]
    peer = 1 - me.rank
    works = [dist.isend(source, peer) for _ in data] + [dist.irecv(tensor, peer) for tensor in data]
    for work in works:
        work.wait()
    for tensor in data:
        same(tensor, filled(peer, 50_000), "copy")


@unless_gloo("crashes")
@on_ranks(3, 4)
def test_messages_while_the_others_are_in_a_collective(me: Rank) -> None:
    for size in (3, 100_000):
        if me.rank >= 2:
            me.signal(f"{me.rank} waits in the barrier {size}")
            dist.barrier()  # which cannot end before the messages below have
            continue
        for rank in range(2, me.world):
            me.await_signal(f"{rank} waits in the barrier {size}")
        for turn in range(10):
            data = filled(me.rank + turn, size)
            if me.rank == 0:
                dist.send(data, 1)
                dist.recv(data, 1)
                same(data, filled(2 * turn, size), f"answer {turn}")
            else:
                got = torch.empty(size)
                dist.recv(got, 0)
                dist.send(got + turn, 0)
        dist.barrier()


@on_ranks(2, 3)
def test_large_messages_that_cross(me: Rank) -> None:
    """Every rank sends to all before it receives: nobody's buffers hold that much."""
    size = 3_000_000
    sends = [dist.isend(filled(10 * me.rank + peer, size), peer) for peer in range(me.world) if peer != me.rank]
    for peer in range(me.world):
        if peer != me.rank:
            data = torch.empty(size)
            dist.recv(data, peer)
            same(data, filled(10 * peer + me.rank, size), f"from {peer}")
    for send in sends:
        send.wait()


@on_ranks(1, 2)
def test_messages_to_oneself(me: Rank) -> None:
    """A batch that goes over all ranks, this one included, works."""
    for size in (3, 50_000):
        data = [torch.empty(size) for _ in range(me.world)]
        sent = [filled(10 * me.rank + peer, size) for peer in range(me.world)]
        operations = [dist.P2POp(dist.isend, sent[peer], peer) for peer in range(me.world)]
        operations += [dist.P2POp(dist.irecv, data[peer], peer) for peer in range(me.world)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for peer in range(me.world):
            same(data[peer], filled(10 * peer + me.rank, size), f"message from {peer}")


@unless_gloo("crashes")
@on_ranks(2, 3)
def test_calls_that_cannot_be_right_raise_at_once(me: Rank) -> None:
    refused = (ValueError, RuntimeError, TypeError)
    for call in (dist.send, dist.isend, dist.recv, dist.irecv):
        raises(lambda c=call: c(torch.ones(1), me.world + 3), f"{call.__name__} outside the world", refused)
    raises(lambda: dist.send(torch.ones(1), me.rank), "a send to oneself that waits for its receive", refused)
    if me.world == 3:
        pair = me.groups["pair"]
        if pair.own >= 0:
            raises(lambda: dist.send(torch.ones(1), 0, pair.handle), "send outside the group", refused)
            raises(lambda: dist.recv(torch.ones(1), 0, pair.handle), "recv outside the group", refused)
    dist.barrier()


@needs_multicomm("the size of a message is not checked")
@on_ranks(2)
def test_a_message_of_another_size_is_an_error(me: Rank) -> None:
    for sent, expected in ((4, 6), (6, 4), (5000, 6000), (6000, 3), (3, 6000)):
        if me.rank == 0:
            dist.send(filled(1, sent), 1)
        else:
            data = filled(-1, expected)
            raises(
                lambda d=data: dist.recv(d, 0),
                f"{sent} elements into {expected}",
                RuntimeError,
                str(4 * sent),
                str(4 * expected),
                r"rank 1: group '0' \(ranks \[0, 1\]\): message \d+, recv from rank 0, tag 0",
            )
            same(data, filled(-1, expected), "the refused receive's tensor")
    # The messages behind it are not lost.
    if me.rank == 0:
        dist.send(filled(2), 1)
    else:
        data = torch.empty(5)
        dist.recv(data, 0)
        same(data, filled(2), "the next message")


@on_ranks(2, limit=90)
def test_more_messages_than_mpi_counts(me: Rank) -> None:
    """MPI numbers the messages between two ranks in 16 bits; what is posted before the first receive may be more."""
    count, peer = 70_000, 1 - me.rank
    sent = torch.arange(count).view(-1, 1) + me.rank * count
    received = torch.zeros_like(sent)
    works = [dist.isend(row, peer) for row in sent]
    works += [dist.irecv(row, peer) for row in received]
    for work in works:
        work.wait()
    assert torch.equal(received, torch.arange(count).view(-1, 1) + peer * count)
