"""The verbs as functions that autograd differentiates. Gradients are those that Horovod defines.

Each takes a list of tensors, of which there is one where the call is not `grouped`, and returns a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multicomm import _C
from multicomm._adasum import adasum_async
from multicomm._reduce_op import Adasum, Average, Sum

_Backend = _C.ProcessGroupMulticomm


def _call(
    verb: type[torch.autograd.Function], grouped: bool, arguments: tuple[Any, ...], tensors: list[Tensor]
) -> list[Tensor]:
    """The verb, on autograd's record only where there is something to differentiate: that costs more than the call."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(verb.apply(grouped, arguments, *tensors))
    run: Callable[..., list[Tensor]] = verb.run
    return run(tensors, grouped, *arguments)


def _results(handle: Any, grouped: bool) -> list[Tensor]:
    results = handle.wait()
    return results if grouped else [results]


def _of_gradient(name: str | None) -> str | None:
    return f"{name}.gradient" if name else None


def _rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


class _Verb(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def run(tensors: list[Tensor], grouped: bool, *arguments: Any) -> list[Tensor]:
        raise NotImplementedError

    @classmethod
    def _forward(
        cls, ctx: Any, grouped: bool, arguments: tuple[Any, ...], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.grouped, ctx.arguments = grouped, arguments
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(cls.run(list(tensors), grouped, *arguments))


class _AllReduce(_Verb):
    @staticmethod
    def run(tensors: list[Tensor], grouped: bool, *arguments: Any) -> list[Tensor]:
        op, name, before, after, backend = arguments
        if op == Adasum:
            return _results(
                adasum_async(backend, tensors, name, before, after, grouped=grouped, in_place=False), grouped
            )
        if grouped:
            return _results(backend.verb_grouped_all_reduce(tensors, op, before, after, name, False), True)
        return [backend.verb_all_reduce(tensors[0], op, before, after, name, False).wait()]

    @staticmethod
    def forward(ctx: Any, grouped: bool, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        return _AllReduce._forward(ctx, grouped, arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        op, name, *rest = ctx.arguments
        return None, None, *_call(_AllReduce, ctx.grouped, (op, _of_gradient(name), *rest), list(gradients))


class _Broadcast(_Verb):
    @staticmethod
    def run(tensors: list[Tensor], grouped: bool, *arguments: Any) -> list[Tensor]:
        root, name, backend = arguments
        return _results(backend.verb_broadcast(tensors, root, name, grouped, False), grouped)

    @staticmethod
    def forward(ctx: Any, grouped: bool, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        return _Broadcast._forward(ctx, grouped, arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        root, name, backend = ctx.arguments
        averages = allreduce(list(gradients), ctx.grouped, Average, _of_gradient(name), 1.0, 1.0, backend)
        is_root = backend._global_ranks[backend.rank()] == root
        return None, None, *(average if is_root else torch.zeros_like(average) for average in averages)


class _AllGather(_Verb):
    @staticmethod
    def run(tensors: list[Tensor], grouped: bool, *arguments: Any) -> list[Tensor]:
        name, backend = arguments
        return _results(backend.verb_all_gather(tensors, name, grouped), grouped)

    @staticmethod
    def forward(ctx: Any, grouped: bool, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        return _AllGather._forward(ctx, grouped, arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, backend = _of_gradient(ctx.arguments[0]), ctx.arguments[1]
        own = torch.tensor([[backend.rank(), *(_rows(shape) for shape in ctx.shapes)]])
        rows = backend.verb_all_gather([own], f"{name}.rows" if name else None, False)
        averages = allreduce(list(gradients), ctx.grouped, Average, name, 1.0, 1.0, backend)
        table = rows.wait()  # without those that have joined
        first = table[table[:, 0] < backend.rank(), 1:].sum(0).tolist()
        own_rows = zip(averages, first, ctx.shapes, strict=True)
        return None, None, *(average.narrow(0, at, _rows(shape)).reshape(shape) for average, at, shape in own_rows)


class _AllToAll(_Verb):
    @staticmethod
    def run(tensors: list[Tensor], grouped: bool, *arguments: Any) -> list[Tensor]:
        splits, name, backend = arguments
        return list(backend.verb_all_to_all(tensors[0], splits, name).wait())

    @staticmethod
    def forward(ctx: Any, grouped: bool, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        results = _AllToAll._forward(ctx, grouped, arguments, tensors)
        ctx.received = results[1].tolist()
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        _, name, backend = ctx.arguments
        back, _ = alltoall(gradients[0], ctx.received, _of_gradient(name), backend)
        return None, None, back


class _ReduceScatter(_Verb):
    @staticmethod
    def run(tensors: list[Tensor], grouped: bool, *arguments: Any) -> list[Tensor]:
        op, name, before, after, backend = arguments
        return _results(backend.verb_reduce_scatter(tensors, op, before, after, name, grouped), grouped)

    @staticmethod
    def forward(ctx: Any, grouped: bool, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        if arguments[0] not in (Average, Sum):
            raise NotImplementedError("multicomm: reducescatter has a gradient for Average and Sum only")
        return _ReduceScatter._forward(ctx, grouped, arguments, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        op, name, before, after, backend = ctx.arguments
        factor = before * after * (backend.size() if op == Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return None, None, *allgather(scaled, ctx.grouped, _of_gradient(name), backend)


def allreduce(
    tensors: list[Tensor], grouped: bool, op: int, name: str | None, before: float, after: float, backend: _Backend
) -> list[Tensor]:
    return _call(_AllReduce, grouped, (op, name, before, after, backend), tensors)


def broadcast(tensors: list[Tensor], grouped: bool, root: int, name: str | None, backend: _Backend) -> list[Tensor]:
    return _call(_Broadcast, grouped, (root, name, backend), tensors)


def allgather(tensors: list[Tensor], grouped: bool, name: str | None, backend: _Backend) -> list[Tensor]:
    return _call(_AllGather, grouped, (name, backend), tensors)


def alltoall(tensor: Tensor, splits: list[int], name: str | None, backend: _Backend) -> tuple[Tensor, Tensor]:
    output, received = _call(_AllToAll, False, (splits, name, backend), [tensor])
    return output, received


def reducescatter(
    tensors: list[Tensor], grouped: bool, op: int, name: str | None, before: float, after: float, backend: _Backend
) -> list[Tensor]:
    return _call(_ReduceScatter, grouped, (op, name, before, after, backend), tensors)
