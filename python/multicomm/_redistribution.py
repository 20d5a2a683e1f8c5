"""The verbs whose results have another shape than their inputs: allgather, alltoall, reducescatter.

What they have in common with the others is said in _verbs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multicomm import _autograd
from multicomm._compression import Compression, Compressor, compressed
from multicomm._groups import CommunicatorId, GroupLike, backend_for
from multicomm._reduce_op import Adasum, Average
from multicomm._verbs import Handle, listed


def allgather_async(
    tensor: Tensor, name: str | None = None, group: GroupLike = None, communicator_id: CommunicatorId = None
) -> Handle:
    """allgather() that does not wait, without gradient. On a device it waits for the other members' sizes."""
    return backend_for(group, communicator_id).verb_all_gather([tensor], name, False)


def allgather(
    tensor: Tensor, name: str | None = None, group: GroupLike = None, communicator_id: CommunicatorId = None
) -> Tensor:
    """Concatenates the tensors of all ranks along dimension 0, in the group's rank order. Differentiable.

    Args:
        tensor: of equal dtype and shape on all ranks, except that dimension 0 may differ. A scalar counts as one row.

    Returns:
        a new tensor, with as many rows as all ranks' together. Its gradient is this rank's rows of the gradients'
        average.
    """
    return _autograd.allgather([tensor], False, name, backend_for(group, communicator_id))[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, group: GroupLike = None, communicator_id: CommunicatorId = None
) -> Handle:
    """grouped_allgather() that does not wait, without gradient."""
    return backend_for(group, communicator_id).verb_all_gather(listed(tensors), name, True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, group: GroupLike = None, communicator_id: CommunicatorId = None
) -> list[Tensor]:
    """allgather() of several tensors, submitted as one unit; a list of new tensors. Differentiable."""
    return _autograd.allgather(listed(tensors), True, name, backend_for(group, communicator_id))


def _split_list(splits: Tensor | Sequence[int] | None) -> list[int]:
    if splits is None:
        return []
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex():
            raise ValueError(f"alltoall: splits are {splits.dtype} {list(splits.shape)}: pass one integer per rank")
        splits = splits.tolist()
    sizes = [int(rows) for rows in splits]
    if not sizes:
        raise ValueError("alltoall: splits are empty: pass one integer per rank, or None for equal parts")
    return sizes


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Handle:
    """alltoall() that does not wait, without gradient. On a device it waits for the other members' splits.

    synchronize() gives the pair (output, received splits), whether ``splits`` are given or not.
    """
    return backend_for(group, communicator_id).verb_all_to_all(tensor, _split_list(splits), name)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends rows of the tensor to each member, and gets rows from each. Differentiable.

    Args:
        tensor: at least one dimension; of equal dtype and shape on all ranks, except for dimension 0.
        splits: how many rows go to each member, in the group's rank order; by default equal parts. The ranks' splits
            need not fit together: each learns from the others what it gets.

    Returns:
        the received rows, in the order of the senders' ranks; with ``splits``, the pair of these and of an integer
        tensor of how many came from whom (of the dtype of ``splits`` where those are a tensor, else int32). The
        gradient goes back the way that the rows came.
    """
    output, received = _autograd.alltoall(tensor, _split_list(splits), name, backend_for(group, communicator_id))
    if splits is None:
        return output
    return output, received.to(splits.dtype if isinstance(splits, Tensor) else torch.int32)


def _without_adasum(op: int) -> int:
    if op == Adasum:
        raise NotImplementedError("multicomm: reducescatter has no Adasum: use Average or Sum")
    return op


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """reducescatter() that does not wait, without compression and gradient."""
    backend = backend_for(group, communicator_id)
    return backend.verb_reduce_scatter([tensor], _without_adasum(op), prescale_factor, postscale_factor, name, False)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combines the tensors of all ranks as allreduce() does, and gives each rank its share of the rows. Differentiable.

    Args:
        tensor: of equal shape and dtype on all ranks, with at least one dimension.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``; of the last three without gradient.
        compression, prescale_factor, postscale_factor: as of allreduce().

    Returns:
        a new tensor: an equal number of rows on each rank, in the group's rank order; where they do not come out even,
        one more on the first ranks. The gradient of Average is the allgather of the gradients; of Sum, that times the
        group's size.
    """
    arguments = _without_adasum(op), name, prescale_factor, postscale_factor, backend_for(group, communicator_id)
    return compressed(compression, [tensor], lambda sent: _autograd.reducescatter(sent, False, *arguments))[0]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """grouped_reducescatter() that does not wait, without compression and gradient."""
    backend = backend_for(group, communicator_id)
    return backend.verb_reduce_scatter(
        listed(tensors), _without_adasum(op), prescale_factor, postscale_factor, name, True
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    group: GroupLike = None,
    communicator_id: CommunicatorId = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """reducescatter() of several tensors, submitted as one unit; a list of new tensors. Differentiable."""
    arguments = _without_adasum(op), name, prescale_factor, postscale_factor, backend_for(group, communicator_id)
    return compressed(compression, listed(tensors), lambda sent: _autograd.reducescatter(sent, True, *arguments))


__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]
