"""Reduces gradients over a group while the backward pass goes on; what DistributedOptimizer is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multicomm._compression import Compressor
from multicomm._groups import CommunicatorId, GroupLike, backend_for
from multicomm._reduce_op import Average
from multicomm._verbs import Handle, allreduce_async_


class GradientExchange:
    """The gradients of some parameters, each reduced as soon as it is there.

    Used by one thread at a time: the one that runs the program, or autograd's while that waits for it.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        compression: type[Compressor],
        passes: int,
        op: int,
        predivide_factor: float,
        group: GroupLike,
        communicator_id: CommunicatorId,
        sparse_as_dense: bool,
    ) -> None:
        """`named`: parameters that require a gradient. The rest as of DistributedOptimizer."""
        self._backend = backend_for(group, communicator_id)  # raises where the group is wrong
        self._group, self._communicator_id = group, communicator_id
        self._compression, self._passes, self._op = compression, passes, op
        self._predivide_factor = predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._names: dict[Tensor, str] = {}
        self._sparse: set[Tensor] = set()  # have had sparse gradients
        self._number = self._backend._next_composed()  # all members make their exchanges of a group in one order
        self._passes_left: dict[Tensor, int] = {}
        self._under_way: dict[Tensor, tuple[Handle, Tensor, object]] = {}  # what travels, and for decompress()
        self.synchronized = False
        self.add(named)

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            self._names[parameter] = name
            self._passes_left[parameter] = self._passes
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def under_way(self) -> bool:
        """Whether gradients are being reduced, so that nobody may touch them."""
        return bool(self._under_way)

    def set_passes(self, passes: int) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}: at least one pass makes a step")
        if self._under_way:
            raise ValueError("backward_passes_per_step cannot change between backward() and step() or synchronize()")
        self._passes = passes
        for parameter in self._passes_left:
            self._passes_left[parameter] = passes

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter in self._under_way or self._passes_left[parameter] <= 0:
            raise AssertionError(
                f"the gradient of {self._names[parameter]!r} was computed in more than backward_passes_per_step = "
                f"{self._passes} backward passes before step() or synchronize(): raise backward_passes_per_step to "
                "accumulate gradients locally. After a backward pass that has failed, synchronize() on all members "
                "makes a new start"
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._start(parameter)

    def _start(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # other members may have one
            layout = torch.sparse_coo if parameter in self._sparse else torch.strided
            parameter.grad = torch.zeros_like(parameter, layout=layout)
        elif parameter.grad.is_sparse and self._sparse_as_dense:
            parameter.grad = parameter.grad.to_dense()
        gradient = parameter.grad
        if gradient.is_sparse:
            self._sparse.add(parameter)
        before = after = 1.0
        if self._op == Average:
            before, after = 1 / self._predivide_factor, self._predivide_factor
        context = None
        if not gradient.is_sparse:
            with torch.no_grad():
                gradient, context = self._compression.compress(gradient)
        handle = allreduce_async_(
            gradient, None, f"gradient.{self._names[parameter]}#{self._number}", self._op, before, after, self._group,
            self._communicator_id,
        )  # fmt: skip
        self._under_way[parameter] = handle, gradient, context

    def synchronize(self) -> None:
        """Starts what is missing and waits for all; every gradient is the group's afterwards, or an error is raised."""
        error: Exception | None = None
        try:
            for parameter in self._names:
                if parameter not in self._under_way:
                    self._start(parameter)
        except Exception as failure:  # what has been started is waited for all the same: it uses the gradients
            error = failure
        for parameter, (handle, gradient, context) in self._under_way.items():
            try:
                handle.wait()
                if gradient is not parameter.grad or context is not None:
                    with torch.no_grad():
                        result = self._compression.decompress(gradient, context)
                        parameter.grad = result if parameter.grad is None else parameter.grad.copy_(result)
            except Exception as failure:
                error = error or failure
        self._under_way.clear()
        self.set_passes(self._passes)
        if error is not None:
            raise error
        self.synchronized = True


def named_all(param_groups: list[dict[str, Any]], first_group: int = 0) -> list[tuple[str, Tensor]]:
    """Parameters under names that all ranks give alike, from their places in the optimizer."""
    return [
        (f"parameter.{first_group + group}.{place}", parameter)
        for group, content in enumerate(param_groups)
        for place, parameter in enumerate(content["params"])
    ]
