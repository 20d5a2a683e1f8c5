"""An optimizer whose step uses the gradients of a whole group."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from multicomm._compression import Compression, Compressor
from multicomm._gradients import GradientExchange, named_all
from multicomm._groups import CommunicatorId, GroupLike
from multicomm._reduce_op import Average


class _Distributed(torch.optim.Optimizer):  # type: ignore[misc]
    """What DistributedOptimizer() puts in front of the optimizer's own class."""

    _exchange: GradientExchange
    param_groups: list[dict[str, Any]]
    state: Any
    _skips: bool

    def synchronize(self) -> None:
        """Waits until all gradients are reduced, for those who look at them before step(): then use skip_synchronize().

        Raises:
            torch.distributed.DistBackendError: the members' gradients do not fit together, or the group has failed.
        """
        self._exchange.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context step() takes the gradients as they are, after a synchronize() of the caller's own."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes the next steps accumulate."""
        self._exchange.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits until all gradients are reduced, then takes the optimizer's own step."""
        if self._skips:
            result = super().step() if closure is None else super().step(closure)
        elif closure is None:
            if self._exchange.synchronized:
                warnings.warn(
                    "step() after synchronize() reduces the gradients once more: call it in "
                    "`with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
            result = super().step()
        else:

            def synchronized_closure() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            result = super().step(synchronized_closure)
        self._exchange.synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own, unless gradients are being reduced.

        Raises:
            AssertionError: it is called between backward() and step() or synchronize().
        """
        if self._exchange.under_way:
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(): the gradients are being "
                "reduced"
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own. What shares this one's options, such as a scheduler made before, goes on doing so."""
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        loaded_state = dict(self.state)
        state.clear()
        state.update(loaded_state)
        self.param_groups, self.state = groups, state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters' gradients are reduced too, named by their places."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        self._exchange.add(_trained(named_all(self.param_groups[number:], number)))


def _trained(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters with their names, in its order."""
    if named_parameters is None:
        return named_all(optimizer.param_groups)
    given = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in given):
        raise ValueError("named_parameters must be pairs of a name and a parameter: pass model.named_parameters()")
    doubled = sorted(name for name, times in Counter(name for name, _ in given).items() if times > 1)
    if doubled:
        raise ValueError(
            f"named_parameters has several parameters of one name: {', '.join(doubled)}. Put the names of their models "
            "before them"
        )
    names = {parameter: name for name, parameter in given}
    missing = [(place, p) for place, p in named_all(optimizer.param_groups) if p not in names]
    if missing:
        text = ", ".join(f"{place} {list(parameter.shape)}" for place, parameter in missing)
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters (by group and place: {text}): name "
            "all of them, or pass None"
        )
    return [(names[parameter], parameter) for _, parameter in named_all(optimizer.param_groups)]


def DistributedOptimizer(  # noqa: N802  (the name is Horovod's)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
    sparse_as_dense: bool = False,
) -> Any:
    """An optimizer of the same class and state that averages gradients over a group before each step.

    A gradient is reduced as soon as the backward pass has it, while that goes on. Use it in place of ``optimizer``,
    with which it shares state and parameters. A parameter that has no gradient on this rank brings zeros.

    All members make their optimizers of one group in the same order.

    Args:
        named_parameters: names for errors, and for matching gradients that ranks get in different orders; the same on
            all members. By default the parameters' places in the optimizer.
        compression: what gradients travel as: ``Compression.none``, ``fp16`` or ``bf16``.
        backward_passes_per_step: the gradients of so many backward passes are added up before they are reduced.
        op: ``Average``, ``Sum`` or another one of allreduce().
        gradient_predivide_factor: with ``Average``, gradients are divided by it before the sum, and multiplied by it
            afterwards.
        group, communicator_id: as of allreduce(): a process group, a communicator, or its index; by default the world.
        sparse_as_dense: sparse gradients become dense ones first.

    Returns:
        the optimizer, with the further methods synchronize(), skip_synchronize() and set_backward_passes_per_step().

    Raises:
        ValueError: ``named_parameters`` lacks parameters or has a name twice; a factor without ``Average``; fewer than
            one backward pass; or no such group.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}: at least one pass makes a step")
    exchange = GradientExchange(
        _trained(_named(optimizer, named_parameters)),
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        group,
        communicator_id,
        sparse_as_dense,
    )
    own = optimizer.__class__
    made: Any = object.__new__(type(own.__name__, (_Distributed, own), {}))
    # A scheduler that was made before may have put its own step(), which is the other instance's, among the attributes.
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    made.__dict__.update(_exchange=exchange, _skips=False)
    return made


__all__ = ["DistributedOptimizer"]
