"""Whole models, optimizers and objects from one rank to the others, or from all to all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multicomm._groups import CommunicatorId, GroupLike, backend_for


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    root_rank: int,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> None:
    """Gives every member the root's parameters, in place, as one unit.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or another mapping or iterable of names and
            tensors; the same names, shapes and dtypes on all members. A None is skipped.
        root_rank: a *global* rank.

    Raises:
        TypeError: a value is no tensor.
        torch.distributed.DistBackendError: the members' parameters do not fit together.
    """
    named = sorted(dict(params).items())
    for name, value in named:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"broadcast_parameters: {name!r} is {type(value).__name__}, not a tensor: use broadcast_object()"
            )
    _broadcast([(name, value) for name, value in named if value is not None], root_rank, group, communicator_id)


def _broadcast(
    named: list[tuple[str, Tensor]], root_rank: int, group: GroupLike, communicator_id: CommunicatorId
) -> None:
    """In place."""
    backend = backend_for(group, communicator_id)
    is_root = backend._global_ranks[backend.rank()] == root_rank
    # The root only reads, so also what lies in memory with overlaps (an expanded tensor).
    values = [value.detach().contiguous() if is_root else value.detach() for _, value in named]
    if values:
        backend.verb_broadcast(values, root_rank, "broadcast", True, True).wait()


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Any:
    """The root's object, on every member; it is pickled. Trust the root: unpickling runs what it has sent.

    Args:
        obj: anything that can be pickled; looked at on the root only.
        root_rank: a *global* rank.

    Returns:
        on the root the object itself, elsewhere a copy.
    """
    backend = backend_for(group, communicator_id)
    is_root = backend._global_ranks[backend.rank()] == root_rank
    content = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    backend.verb_broadcast([length], root_rank, f"{name}.length" if name else None, False, True).wait()
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    backend.verb_broadcast([content], root_rank, name, False, True).wait()
    return obj if is_root else pickle.loads(content.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, group: GroupLike = None, communicator_id: CommunicatorId = None
) -> list[Any]:
    """The objects of all members, in the group's rank order; pickled, see broadcast_object(). None of those that have
    joined."""
    backend = backend_for(group, communicator_id)
    gathered: Tensor = backend.verb_all_gather([_pickled(obj)], name, False).wait()
    stream = io.BytesIO(gathered.numpy().tobytes())
    objects = []
    while stream.tell() < gathered.numel():  # a pickle knows its own end
        objects.append(pickle.load(stream))
    return objects


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


@dataclass(frozen=True)
class _Place:
    """What stands for a tensor in the structure that is sent ahead."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device_type: str

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


def _without_tensors(state: Any, tensors: list[Tensor]) -> Any:
    """The structure with a _Place for each tensor, which is appended to `tensors`."""
    if isinstance(state, Tensor):
        tensors.append(state)
        return _Place(len(tensors) - 1, state.shape, state.dtype, state.device.type)
    if isinstance(state, dict):
        return {key: _without_tensors(value, tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(value, tensors) for value in state)
    return state


def _with_tensors(state: Any, tensors: dict[int, Tensor]) -> Any:
    """The structure with new tensors, which are added to `tensors` by number."""
    if isinstance(state, _Place):
        return tensors.setdefault(state.number, state.empty())
    if isinstance(state, dict):
        return {key: _with_tensors(value, tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_tensors(value, tensors) for value in state)
    return state


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> None:
    """Gives every member the root's optimizer state: learning rates and other options, moments, step counts.

    The other members' optimizers need have no state yet; their parameters must be those of the root, in its order.

    Args:
        root_rank: a *global* rank.
    """
    backend = backend_for(group, communicator_id)
    is_root = backend._global_ranks[backend.rank()] == root_rank
    tensors: list[Tensor] = []
    structure = _without_tensors(optimizer.state_dict(), tensors) if is_root else None
    structure = broadcast_object(structure, root_rank, None, group, communicator_id)
    if is_root:
        return _broadcast([("", tensor) for tensor in tensors], root_rank, group, communicator_id)
    received: dict[int, Tensor] = {}
    state = _with_tensors(structure, received)
    _broadcast([("", received[number]) for number in sorted(received)], root_rank, group, communicator_id)
    return optimizer.load_state_dict(state)  # type: ignore[no-any-return]


__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
