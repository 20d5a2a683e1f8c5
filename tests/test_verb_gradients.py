"""Pins the gradients of the verbs against a plain computation in one process, on groups of 1 to 3 ranks."""

from __future__ import annotations

from collections.abc import Callable

import multicomm
import pytest
import torch
from harness import Group, Rank, needs_multicomm, on_ranks, raises, same

pytestmark = needs_multicomm("has the verbs")


def data_of(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).double()


def weights_of(rank: int, shape: torch.Size) -> torch.Tensor:
    """The gradient that comes into the result on a rank."""
    return data_of(100 + rank, *shape)


def own_rank(group: Group) -> int:
    return group.ranks[group.own]


def gradient(
    group: Group, data: torch.Tensor, verb: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The verb's result, and the gradient of this rank's input."""
    data = data.clone().requires_grad_()
    result = verb(2 * data)  # not a leaf
    assert result.requires_grad
    result.backward(weights_of(own_rank(group), result.shape))
    assert data.grad is not None
    return result.detach(), data.grad / 2


def incoming(group: Group, shape: torch.Size) -> list[torch.Tensor]:
    return [weights_of(rank, shape) for rank in group.ranks]


GROUPS = ("world", "pair", "unsorted", "single")


@pytest.mark.parametrize("op", ["Average", "Sum"])
@on_ranks(3)
def test_allreduce(me: Rank, op: str) -> None:
    for group in me.joined(*GROUPS):
        for shape in ((), (3,), (2, 3), (0,)):
            how = {"op": getattr(multicomm, op), "prescale_factor": 0.5, "group": group.handle}
            _, got = gradient(group, data_of(me.rank, *shape), lambda t, how=how: multicomm.allreduce(t, **how))
            total = torch.stack(incoming(group, torch.Size(shape))).sum(0) / 2
            same(got, total / group.size if op == "Average" else total, f"{op} on {group.kind}", close=True)


@on_ranks(3)
def test_allreduce_with_compression(me: Rank) -> None:
    data = torch.ones(3, requires_grad=True)
    multicomm.allreduce(data, op=multicomm.Sum, compression=multicomm.Compression.fp16).sum().backward()
    same(data.grad, [float(me.world)] * 3, "gradient")


@on_ranks(3)
def test_grouped_allreduce(me: Rank) -> None:
    one, two = torch.ones(2, requires_grad=True), torch.ones(3)
    first, second = multicomm.grouped_allreduce([one * me.rank, two], op=multicomm.Sum)
    (first.sum() * (me.rank + 1)).backward()
    total = me.world * (me.world + 1) // 2
    same(one.grad, [float(total * me.rank)] * 2, "gradient")
    same(second.detach(), [float(me.world)] * 3, "the other result")


@on_ranks(3)
def test_allgather(me: Rank) -> None:
    """The gradients' average, of the own rows."""
    for group in me.joined(*GROUPS):
        rows = [rank + 1 for rank in group.ranks]
        result, got = gradient(
            group, data_of(me.rank, me.rank + 1, 2), lambda t, g=group: multicomm.allgather(t, group=g.handle)
        )
        mean = torch.stack(incoming(group, result.shape)).mean(0)
        first = sum(rows[: group.own])
        same(got, mean[first : first + rows[group.own]], f"allgather on {group.kind}", close=True)
        _, got = gradient(group, data_of(me.rank), lambda t, g=group: multicomm.allgather(t, group=g.handle))
        mean = torch.stack(incoming(group, torch.Size([group.size]))).mean(0)
        same(got, mean[group.own], f"of a scalar on {group.kind}", close=True)


@on_ranks(3)
def test_grouped_allgather(me: Rank) -> None:
    inputs = [torch.ones(me.rank, 2, requires_grad=True), torch.ones(1, requires_grad=True)]
    one, two = multicomm.grouped_allgather(inputs)
    (one.sum() + 3 * two.sum() * (me.rank + 1)).backward()
    same(inputs[0].grad, torch.ones(me.rank, 2), "the first")
    same(inputs[1].grad, [3.0 * (me.world + 1) / 2], "the second", close=True)


@on_ranks(3)
def test_broadcast(me: Rank) -> None:
    """The gradients' average on the root, zero elsewhere."""
    for group in me.joined(*GROUPS):
        root = group.ranks[-1]
        result, got = gradient(
            group, data_of(me.rank, 3), lambda t, g=group, r=root: multicomm.broadcast(t, r, group=g.handle)
        )
        same(result, 2 * data_of(root, 3), "result")
        mean = torch.stack(incoming(group, result.shape)).mean(0)
        same(got, mean if me.rank == root else torch.zeros(3).double(), f"broadcast on {group.kind}", close=True)


@on_ranks(3)
def test_alltoall(me: Rank) -> None:
    """The rows' gradients come back to where the rows were."""
    for group in me.joined(*GROUPS):
        rows = {(a, b): (a + 2 * b) % 3 for a in range(group.size) for b in range(group.size)}
        splits = [rows[group.own, to] for to in range(group.size)]
        data = data_of(me.rank, sum(splits), 2)
        _, got = gradient(group, data, lambda t, s=splits, g=group: multicomm.alltoall(t, s, group=g.handle)[0])
        want = []
        for to, rank in enumerate(group.ranks):
            received = [rows[by, to] for by in range(group.size)]
            weights = weights_of(rank, torch.Size([sum(received), 2]))
            want.append(weights[sum(received[: group.own]) :][: rows[group.own, to]])
        same(got, torch.cat(want), f"alltoall on {group.kind}")


@pytest.mark.parametrize("op", ["Average", "Sum"])
@on_ranks(3)
def test_reducescatter(me: Rank, op: str) -> None:
    for group in me.joined(*GROUPS):
        how = {"op": getattr(multicomm, op), "group": group.handle}
        data = data_of(me.rank, group.size + 1, 2)  # one row over
        _, got = gradient(group, data, lambda t, how=how: multicomm.reducescatter(t, **how))
        parts = torch.empty(group.size + 1, 2).tensor_split(group.size)
        whole = torch.cat([weights_of(rank, part.shape) for rank, part in zip(group.ranks, parts, strict=True)])
        same(got, whole * group.size if op == "Sum" else whole, f"{op} on {group.kind}")


@on_ranks(3)
def test_what_has_no_gradient(me: Rank) -> None:
    data = torch.ones(2, requires_grad=True)
    raises(lambda: multicomm.reducescatter(data, op=multicomm.Max), "Max", NotImplementedError, "Average and Sum")
    with torch.no_grad():
        assert not multicomm.allreduce(data).requires_grad
    assert not multicomm.allreduce(torch.ones(2)).requires_grad
    assert not multicomm.synchronize(multicomm.allreduce_async(data)).requires_grad
    same(multicomm.allreduce(torch.ones(2), op=multicomm.Sum), [3.0, 3.0], "afterwards")
