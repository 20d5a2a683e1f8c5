"""Pins the verbs on tensors of devices: the matrix of results once more, beside a double of NCCL and through host
memory.
"""

from __future__ import annotations

from collections.abc import Callable

import multicomm
import pytest
import test_optimizer
import test_verb_gradients
import test_verbs
import torch
from harness import Rank, needs_multicomm, on_ranks, same
from harness.case import Case
from harness.decorate import again_on_ranks
from harness.planes import DEVICE

pytestmark = needs_multicomm("has no devices")

PLANES = ("nccl", "staged")


def again(test: Callable[..., None], *worlds: int) -> Callable[..., None]:
    return again_on_ranks(test, *worlds, planes=PLANES)


test_factors = again(test_verbs.test_factors, 3)
test_splits = again(test_verbs.test_splits_in_every_form, 3)
test_allgather_gradient = again(test_verb_gradients.test_allgather, 3)
test_alltoall_gradient = again(test_verb_gradients.test_alltoall, 3)


@pytest.mark.parametrize("verb", test_verbs.VERBS)
@on_ranks(3, planes=PLANES)
def test_results(me: Rank, verb: str) -> None:
    for group in me.joined("world", "pair"):
        for dtype in (torch.float32, torch.bfloat16) if group.kind == "world" else (torch.int64,):
            shapes = test_verbs.shapes_of(verb)[:6]
            test_verbs.check(verb, [Case(group, dtype, shape, salt=salt) for salt, shape in enumerate(shapes)])


@on_ranks(3, planes=PLANES)
def test_an_optimizer(me: Rank) -> None:
    model, group = test_optimizer.network(), me.groups["world"]
    optimizer = multicomm.DistributedOptimizer(test_optimizer.sgd(model.parameters()), group=group.handle)
    assert next(model.parameters()).device == DEVICE
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 6), float(me.rank + step), dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()
    for parameter in model.parameters():
        everywhere = multicomm.allgather(parameter.detach().flatten()).view(3, -1)
        same(everywhere[1:], everywhere[:1].expand(2, -1), "the ranks' parameters")
