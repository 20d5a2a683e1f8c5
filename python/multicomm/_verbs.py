"""Collectives without torch.distributed's Python in between, called as Horovod's users call them.

Each goes to the coordinator in one call of the extension. Common to all:

* ``group`` is a process group, an mpi4py communicator that was passed to init() or add_comm(), or its index;
  ``communicator_id`` is such an index too. One of them at most; the world if none.
* Operations with a ``name`` are matched by it within their group, in whatever order the ranks issue them; those without
  by their order. Members of a grouped operation named n are n.0, n.1, ...
* Tensors are dense, of any dtype that the operation has a meaning for, and of any layout, dimension and size; on the
  CPU or on one device per process.
* An asynchronous call returns a handle for poll() and synchronize(). Until that returns, the input must not be
  changed, and the result not be read.
* Errors: ``ValueError`` and ``TypeError`` for what this rank can see to be wrong, at once; and
  ``torch.distributed.DistBackendError``, from synchronize() or the synchronous call, on every member where the ranks'
  calls do not fit together. Neither changes a tensor, and the group can be used further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from multicomm import _autograd
from multicomm._adasum import adasum_async
from multicomm._compression import Compression, Compressor, compressed
from multicomm._groups import CommunicatorId, GroupLike, backend_for
from multicomm._reduce_op import Adasum, Average, Sum


class Handle(Protocol):
    """An asynchronous operation."""

    def poll(self) -> bool: ...
    def wait(self) -> Any: ...


def poll(handle: Handle) -> bool:
    """Whether synchronize() would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation and returns its result; may be called again.

    Returns:
        the tensor; of a grouped operation the list of tensors; of alltoall_async() the pair (output, received splits).
        Of tensors on a device: when the operation is launched there, with the current stream behind it.

    Raises:
        torch.distributed.DistBackendError: the ranks' calls do not fit together, or the group has failed.
    """
    try:
        wait = handle.wait
    except AttributeError:
        raise TypeError(
            f"synchronize() takes a handle, as an _async call returns it, not {type(handle).__name__}"
        ) from None
    return wait()


def reduce_op(average: bool | None, op: int | None) -> int:
    """The operation that Horovod's two arguments ask for."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("average and op are both given: pass op alone, average is its older form")
    return Average if average else Sum


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Handle:
    """allreduce_() that does not wait."""
    backend = backend_for(group, communicator_id)
    if op is None or average is not None:
        op = reduce_op(average, op)
    if op == Adasum:
        return adasum_async(backend, [tensor], name, prescale_factor, postscale_factor, grouped=False, in_place=True)
    return backend.verb_all_reduce(tensor, op, prescale_factor, postscale_factor, name, True)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Handle:
    """allreduce() that does not wait, without compression and gradient."""
    backend = backend_for(group, communicator_id)
    if op is None or average is not None:
        op = reduce_op(average, op)
    if op == Adasum:
        return adasum_async(backend, [tensor], name, prescale_factor, postscale_factor, grouped=False, in_place=False)
    return backend.verb_all_reduce(tensor, op, prescale_factor, postscale_factor, name, False)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Tensor:
    """allreduce() into the tensor itself, which it returns; without compression and gradient."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, group, communicator_id)
    return handle.wait()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Tensor:
    """Combines the tensors of all ranks, element by element. Differentiable.

    Args:
        tensor: of equal shape and dtype on all ranks. A sparse COO tensor on the CPU can be averaged and summed.
        average: the older form of ``op``: True for Average, False for Sum.
        compression: what the tensor travels as: ``Compression.none``, ``fp16`` or ``bf16``.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor, postscale_factor: the tensor is multiplied by them before, and the result after it. Of
            integer tensors, whole numbers.

    Returns:
        a new tensor with the result. Its gradient is the gradients' allreduce with the same arguments.
    """
    arguments = reduce_op(average, op), name, prescale_factor, postscale_factor, backend_for(group, communicator_id)
    return compressed(compression, [tensor], lambda sent: _autograd.allreduce(sent, False, *arguments))[0]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Handle:
    """grouped_allreduce_() that does not wait."""
    return _grouped_allreduce(
        tensors, reduce_op(average, op), name, prescale_factor, postscale_factor, group, communicator_id, True
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Handle:
    """grouped_allreduce() that does not wait, without compression and gradient."""
    return _grouped_allreduce(
        tensors, reduce_op(average, op), name, prescale_factor, postscale_factor, group, communicator_id, False
    )


def _grouped_allreduce(
    tensors: Sequence[Tensor],
    op: int,
    name: str | None,
    before: float,
    after: float,
    group: GroupLike,
    communicator_id: CommunicatorId,
    in_place: bool,
) -> Handle:
    backend = backend_for(group, communicator_id)
    if op == Adasum:
        return adasum_async(backend, tensors, name, before, after, grouped=True, in_place=in_place)
    return backend.verb_grouped_all_reduce(listed(tensors), op, before, after, name, in_place)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> list[Tensor]:
    """grouped_allreduce() into the tensors themselves, which it returns; without compression and gradient."""
    handle = _grouped_allreduce(
        tensors, reduce_op(average, op), name, prescale_factor, postscale_factor, group, communicator_id, True
    )
    return handle.wait()  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> list[Tensor]:
    """allreduce() of several tensors, submitted as one unit. Differentiable.

    Args:
        tensors: a list, of equal length on all ranks; they may differ in shape and dtype.

    Returns:
        a list of new tensors.
    """
    arguments = reduce_op(average, op), name, prescale_factor, postscale_factor, backend_for(group, communicator_id)
    return compressed(compression, listed(tensors), lambda sent: _autograd.allreduce(sent, True, *arguments))


def listed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a grouped operation as a list; a single tensor, which is a sequence of its rows, is refused."""
    if isinstance(tensors, Tensor):
        raise TypeError("a grouped operation takes a list of tensors, not a tensor")
    return list(tensors)


def barrier(group: GroupLike = None, communicator_id: CommunicatorId = None) -> None:
    """Returns when all members have called it."""
    backend_for(group, communicator_id).verb_barrier().wait()


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Handle:
    """broadcast_() that does not wait."""
    return backend_for(group, communicator_id).verb_broadcast([tensor], root_rank, name, False, True)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Handle:
    """broadcast() that does not wait, without gradient."""
    return backend_for(group, communicator_id).verb_broadcast([tensor], root_rank, name, False, False)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Tensor:
    """broadcast() into the tensor itself, which it returns; without gradient."""
    return broadcast_async_(tensor, root_rank, name, group, communicator_id).wait()


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Tensor:
    """The root's tensor, on every member. Differentiable.

    Args:
        tensor: of equal shape and dtype on all ranks.
        root_rank: whose tensor, by its *global* rank, also in a group.

    Returns:
        a new tensor. The gradient of the root's is the average of all ranks' gradients, the others' is zero.
    """
    return _autograd.broadcast([tensor], False, root_rank, name, backend_for(group, communicator_id))[0]


__all__ = [
    "Handle",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]
