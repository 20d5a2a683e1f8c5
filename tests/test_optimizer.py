"""Pins the distributed optimizer and what goes with it: on the world and on subgroups a training is that of one process
on all members' data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import multicomm
import pytest
import torch
import torch.distributed as dist
from harness import Rank, needs_multicomm, on_ranks, raises, same
from harness.jobs import launch, say
from torch import nn

pytestmark = needs_multicomm("has the optimizer")

EXAMPLE = Path(__file__).parents[1] / "examples" / "horovod_script.py"
Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def network(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)).double()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).pow(2).mean()


def reference(
    ranks: tuple[int, ...], steps: int, make: Make = sgd, *, total: bool = False, passes: int = 1
) -> nn.Sequential:
    """Trained in one process on the data of all `ranks`."""
    model = network()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            losses = torch.stack([loss(model, rank, step * passes + one) for rank in ranks])
            (losses.sum() if total else losses.mean()).backward()
        optimizer.step()
    return model


def check_equal(model: nn.Module, want: nn.Module, what: str, tolerance: float = 1e-9) -> None:
    for (name, got), right in zip(model.named_parameters(), want.parameters(), strict=True):
        worst = (got - right).abs().max().item()
        assert worst <= tolerance, f"{what}: {name} is off by {worst}"


def train(me: Rank, model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, me.rank, step).backward()
        optimizer.step()


@pytest.mark.parametrize("make", [sgd, adam])
@on_ranks(3)
def test_a_training_is_that_of_one_process(me: Rank, make: Make) -> None:
    for group in me.joined("world", "pair", "unsorted"):
        model = network()
        optimizer = multicomm.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), group=group.handle
        )
        assert isinstance(optimizer, type(make(model.parameters())))
        train(me, model, optimizer, 4)
        check_equal(model, reference(group.ranks, 4, make), f"on {group.kind}")


@on_ranks(2)
def test_sum_and_predivision(me: Rank) -> None:
    everybody = tuple(range(me.world))
    for how, total in ({"op": multicomm.Sum}, True), ({"gradient_predivide_factor": 4.0}, False):
        model = network()
        train(me, model, multicomm.DistributedOptimizer(sgd(model.parameters()), **how), 3)
        check_equal(model, reference(everybody, 3, total=total), str(how))


@on_ranks(2)
def test_compression(me: Rank) -> None:
    for compression, tolerance in ((multicomm.Compression.fp16, 1e-3), (multicomm.Compression.bf16, 1e-2)):
        model = network()
        optimizer = multicomm.DistributedOptimizer(sgd(model.parameters()), compression=compression)
        loss(model, me.rank, 0).backward()
        optimizer.synchronize()
        want = network()
        torch.stack([loss(want, rank, 0) for rank in range(2)]).mean().backward()
        for got, right in zip(model.parameters(), want.parameters(), strict=True):
            assert got.grad.dtype == torch.float64
            assert torch.allclose(got.grad, right.grad, rtol=4 * tolerance, atol=tolerance)
            assert not torch.equal(got.grad, right.grad), "it was not compressed"
        with optimizer.skip_synchronize():
            optimizer.step()


@on_ranks(2)
def test_several_backward_passes_per_step(me: Rank) -> None:
    model = network()
    optimizer = multicomm.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=3
    )
    for step in range(2):
        optimizer.zero_grad()
        for one in range(3):
            loss(model, me.rank, 3 * step + one).backward()
        optimizer.step()
    check_equal(model, reference((0, 1), 2, passes=3), "3 passes")
    # Fewer than announced: step() reduces what there is.
    optimizer.zero_grad()
    loss(model, me.rank, 0).backward()
    optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    loss(model, me.rank, 1).backward()
    text = raises(
        lambda: loss(model, me.rank, 2).backward(), "one too many", AssertionError, "backward_passes_per_step"
    )
    assert "'" in text, "it names the parameter"
    optimizer.synchronize()
    same(multicomm.allreduce(torch.ones(1)), [1.0], "afterwards")


@on_ranks(2)
def test_synchronize_and_clip(me: Rank) -> None:
    model, want = network(), network()
    optimizer = multicomm.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(want.parameters())
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        loss(model, me.rank, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.stack([loss(want, rank, step) for rank in range(2)]).mean().backward()
        nn.utils.clip_grad_norm_(want.parameters(), 0.01)
        plain.step()
    check_equal(model, want, "clipped")
    optimizer.zero_grad()
    loss(model, me.rank, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


@on_ranks(2)
def test_zero_grad_at_the_wrong_time(me: Rank) -> None:
    model = network()
    optimizer = multicomm.DistributedOptimizer(sgd(model.parameters()))
    loss(model, me.rank, 0).backward()
    raises(optimizer.zero_grad, "between backward() and step()", AssertionError, "before step")
    optimizer.step()
    optimizer.zero_grad()
    train(me, model, optimizer, 2, first=1)
    check_equal(model, reference((0, 1), 3), "afterwards")


@on_ranks(2)
def test_parameters_without_a_gradient_on_one_rank(me: Rank) -> None:
    """They bring zeros."""
    used, rare = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(5))
    optimizer = multicomm.DistributedOptimizer(torch.optim.SGD([used, rare], lr=1.0), [("used", used), ("rare", rare)])
    ((rare.sum() if me.rank == 1 else 0) + used.sum()).backward()
    optimizer.synchronize()
    same(used.grad, [1.0, 1.0], "used")
    same(rare.grad, [0.5] * 5, "rare")


@on_ranks(2)
def test_a_closure(me: Rank) -> None:
    model = network()
    optimizer = multicomm.DistributedOptimizer(sgd(model.parameters()))
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            one = loss(model, me.rank, step)
            one.backward()
            return one

        assert isinstance(optimizer.step(closure), torch.Tensor)
    check_equal(model, reference((0, 1), 2), "by closures")


@on_ranks(2)
def test_sparse_gradients(me: Rank) -> None:
    for dense in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding(6, 2, sparse=True)
        optimizer = multicomm.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), op=multicomm.Sum, sparse_as_dense=dense
        )
        before = embedding.weight.detach().clone()
        embedding(torch.tensor([me.rank, 4])).sum().backward()
        optimizer.synchronize()
        assert embedding.weight.grad.is_sparse != dense
        with optimizer.skip_synchronize():
            optimizer.step()
        change = torch.zeros(6, 2)
        change[:2], change[4] = 1.0, 2.0
        same(embedding.weight, before - change, f"sparse_as_dense={dense}", close=True)


@on_ranks(2)
def test_schedulers_and_new_parameters(me: Rank) -> None:
    model = network()
    plain = sgd(model.parameters())
    torch.optim.lr_scheduler.StepLR(plain, 1)  # marks the plain optimizer's step()
    optimizer = multicomm.DistributedOptimizer(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(me, model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    more = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [more], "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0})
    optimizer.zero_grad()
    (more * float(me.rank)).sum().backward()
    optimizer.step()
    same(more, [-0.5] * 3, "the new parameter")


@on_ranks(2)
def test_wrong_arguments(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, named = sgd(model.parameters()), list(model.named_parameters())
    make = multicomm.DistributedOptimizer
    raises(
        lambda: make(optimizer, named[1:]), "one missing", ValueError, "lacks 1 of the optimizer's", r"0\.0 \[2, 2\]"
    )
    doubled = [("same", parameter) for _, parameter in named]
    raises(lambda: make(optimizer, doubled), "one name", ValueError, "several parameters of one name: same")
    raises(lambda: make(optimizer, model.parameters()), "no names", ValueError, "pairs of a name and a parameter")
    raises(
        lambda: make(optimizer, op=multicomm.Sum, gradient_predivide_factor=2.0), "no average", ValueError, "Average"
    )
    raises(lambda: make(optimizer, backward_passes_per_step=0), "no pass", ValueError, "at least one")
    raises(lambda: make(optimizer, group=0, communicator_id=0), "both", ValueError, "both given")
    same(multicomm.allreduce(torch.ones(1)), [1.0], "afterwards")


@on_ranks(2)
def test_gradients_that_do_not_fit_together(me: Rank) -> None:
    parameter = nn.Parameter(torch.ones(2 + me.rank))
    optimizer = multicomm.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("odd", parameter)])
    parameter.sum().backward()
    raises(optimizer.step, "another shape", dist.DistBackendError, "the ranks disagree", "gradient.odd")
    same(parameter, torch.ones(2 + me.rank), "no step was taken")
    optimizer.zero_grad()
    same(multicomm.allreduce(torch.ones(1)), [1.0], "afterwards")


@on_ranks(3)
def test_broadcast_parameters(me: Rank) -> None:
    for group in me.joined("world", "unsorted"):
        root = group.ranks[-1]
        model, want = network(seed=me.rank), network(seed=root)
        multicomm.broadcast_parameters(model.state_dict(), root, group=group.handle)
        check_equal(model, want, f"state_dict on {group.kind}", 0.0)
        model = network(seed=me.rank)
        multicomm.broadcast_parameters(model.named_parameters(), root, group=group.handle)
        check_equal(model, want, f"named_parameters on {group.kind}", 0.0)
    raises(
        lambda: multicomm.broadcast_parameters({"x": 3}, 0), "no tensor", TypeError, "'x' is int", "broadcast_object"
    )
    multicomm.broadcast_parameters({"nothing": None}, 0)


@pytest.mark.parametrize("make", [sgd, adam])
@on_ranks(3)
def test_broadcast_optimizer_state(me: Rank, make: Make) -> None:
    """A rank that joins a training goes on as its root does."""
    for group in me.joined("world", "unsorted"):
        root = group.ranks[-1]
        model = network()
        optimizer = make(model.parameters())
        if me.rank == root:
            for step in range(2):
                optimizer.zero_grad()
                loss(model, root, step).backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.003
        multicomm.broadcast_optimizer_state(optimizer, root, group=group.handle)
        state = optimizer.state_dict()
        copies = multicomm.allgather_object(copy.deepcopy(state), group=group.handle)
        for other in copies:
            assert other["param_groups"] == state["param_groups"] and other["param_groups"][0]["lr"] == 0.003
            assert other["state"].keys() == state["state"].keys() and state["state"]
            for place, values in state["state"].items():
                for name, value in values.items():
                    same(torch.as_tensor(other["state"][place][name]), torch.as_tensor(value), f"{name} of {place}")


@on_ranks(3)
def test_objects(me: Rank) -> None:
    for group in me.joined("world", "pair", "unsorted"):
        root = group.ranks[-1]
        mine = {"rank": me.rank, "data": list(range(1000 * me.rank)), "tensor": torch.full((2,), me.rank)}
        got = multicomm.broadcast_object(mine, root, group=group.handle)
        assert got["rank"] == root and got["data"] == list(range(1000 * root))
        same(got["tensor"], [root, root], "a tensor inside")
        everything = multicomm.allgather_object((me.rank, "x" * me.rank), group=group.handle)
        assert everything == [(rank, "x" * rank) for rank in group.ranks]
        assert multicomm.broadcast_object(None, root, name="nothing", group=group.handle) is None


@pytest.mark.parametrize("mpirun", [False, True], ids=["torchrun", "mpirun"])
def test_the_example(tmp_path: Path, mpirun: bool) -> None:
    launch(example, 2, tmp_path, mpirun=mpirun).check().says("accuracy", times=1)


def example() -> None:
    import runpy
    import sys

    sys.argv = [str(EXAMPLE), "--epochs", "3"]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    say("done")
