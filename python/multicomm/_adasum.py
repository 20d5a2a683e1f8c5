"""The adaptive sum of gradients (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021).

Of two vectors it is ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: the sum where they are orthogonal, the mean where
they are parallel. Of more it is taken pairwise: neighbours by group rank, then neighbouring pairs, and so on; whoever
is left over goes on alone to the next level, so that a group of any size will do.

Whatever the tree, the result is a combination of the members' vectors whose coefficients depend on their scalar
products alone. So three collectives do it, which move as much as one all_reduce: each member gets one share of every
vector (all_to_all), the shares' scalar products are added up (all_reduce of a matrix per tensor, in float64), and the
combined shares are put together (all_gather). All members have the same bits. A stage begins when the one before it is
over, at different times on different ranks; the engine matches the stages by name.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from multicomm import _C
from multicomm._groups import GroupLike, backend_for

_Backend: TypeAlias = _C.ProcessGroupMulticomm
# Its value is the results: so streams that wait for it wait for them.
_Outcome: TypeAlias = torch.futures.Future[list[Tensor]]

_names_of_buckets = WeakTensorKeyDictionary()


def adasum_async(
    backend: _Backend,
    tensors: Sequence[Tensor],
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    *,
    grouped: bool,
    in_place: bool,
) -> _AdasumHandle:
    """The adaptive sum of each tensor: a handle whose wait() returns the tensor or, where `grouped`, a list.

    The factors scale the result, which is the same as scaling the tensors. The tensors are read at the call: nothing
    else may be in flight on them.

    Raises:
        ValueError: a tensor that is not of a real floating-point dtype, or is sparse.
    """
    tensors = list(tensors)
    for tensor in tensors:
        if not tensor.dtype.is_floating_point or tensor.layout != torch.strided:
            raise ValueError(
                f"rank {dist.get_rank()}: Adasum takes dense tensors of a floating-point dtype, not "
                f"{tensor.dtype} {tensor.layout}: use Sum"
            )
    call = name or _next_call(backend)
    outputs = [tensor if in_place else torch.empty_like(tensor) for tensor in tensors]
    alike: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        alike[tensor.dtype, tensor.device].append(place)
    parts = []
    for number, places in enumerate(alike.values()):
        vectors = [tensors[place].detach().reshape(-1) for place in places]
        results = [outputs[place] for place in places]
        parts.append(_Adasum(backend, f"{call}.{number}", vectors, results, prescale_factor * postscale_factor).begin())
    return _AdasumHandle(parts, outputs, grouped)


def adasum_of_bucket(
    group: GroupLike, buffer: Tensor, gradients: Sequence[Tensor], first_parameter: Tensor
) -> torch.futures.Future[Tensor]:
    """The adaptive sum of each of the gradients, which lie in the buffer; the future has the buffer."""
    backend = backend_for(group, None)
    # Buckets are first seen in one order on all ranks. A name that comes again costs less than a new one.
    name: str | None = _names_of_buckets.get(first_parameter)
    if name is None:
        name = _names_of_buckets[first_parameter] = _next_call(backend)
    vectors = [gradient.reshape(-1) for gradient in gradients]
    done = _Adasum(backend, name, vectors, vectors, 1.0).begin()
    whole: torch.futures.Future[Tensor] = torch.futures.Future(devices=_devices(buffer))

    def then(finished: _Outcome) -> None:
        try:
            finished.value()
        except Exception as error:  # noqa: BLE001  it belongs to whoever waits
            whole.set_exception(error)
        else:
            whole.set_result(buffer)

    done.add_done_callback(then)
    return whole


class _AdasumHandle:
    def __init__(self, parts: list[_Outcome], outputs: list[Tensor], grouped: bool) -> None:
        self._parts, self._outputs, self._grouped = parts, outputs, grouped

    def poll(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> Any:
        for part in self._parts:  # all of them, also after an error: they write into the caller's tensors
            ended = threading.Event()
            part.add_done_callback(lambda _, ended=ended: ended.set())
            ended.wait()  # unlike a future's own wait() it lets Ctrl-C through
        for part in self._parts:
            part.wait()
        return self._outputs if self._grouped else self._outputs[0]


@dataclass
class _Adasum:
    """One call: vectors of one dtype on one device, laid end to end and cut into one share per member."""

    backend: _Backend
    name: str
    vectors: list[Tensor]
    results: list[Tensor]
    factor: float

    def begin(self) -> _Outcome:
        first = self.vectors[0]
        self.done: _Outcome = torch.futures.Future(devices=_devices(first))
        self.inference = any(result.is_inference() for result in self.results)
        members = len(self.backend._global_ranks)
        total = sum(vector.numel() for vector in self.vectors)
        self.share = -(-total // members)
        flat = first.new_zeros(members * self.share)
        torch.cat(self.vectors, out=flat[:total])
        self.pieces = torch.empty_like(flat)
        self.rows = self.pieces.view(members, self.share)
        work = self.backend._named_all_to_all(self.pieces, flat, f"{self.name}:pieces")
        self._after(work, self._multiply, f"{self.name}:products")
        return self.done

    def _multiply(self) -> None:
        """The scalar products of all members' pieces, tensor by tensor."""
        members = len(self.backend._global_ranks)
        # In float64, since squares of half precision overflow soon.
        self.rows = self.rows.double()
        self.products = self.rows.new_zeros(len(self.vectors), members, members)
        for number, columns in self._columns():
            part = self.rows[:, columns]
            self.products[number] = part @ part.T
        work = self.backend._named_all_reduce(self.products, f"{self.name}:products")
        self._after(work, self._combine, f"{self.name}:sum")

    def _combine(self) -> None:
        share = self.rows.new_zeros(self.share)
        coefficients = _coefficients(self.products.cpu()).to(share.device)
        for number, columns in self._columns():
            share[columns] = coefficients[number] @ self.rows[:, columns]
        result = (share * self.factor).to(self.pieces.dtype)
        # The memory of the pieces has served its turn.
        self._after(self.backend._named_all_gather(self.pieces, result, f"{self.name}:sum"), self._finish, None)

    def _finish(self) -> None:
        begin = 0
        with torch.no_grad():
            for vector, result in zip(self.vectors, self.results, strict=True):
                result.copy_(self.pieces[begin : begin + vector.numel()].view(result.shape))
                begin += vector.numel()
        self.done.set_result(self.results)

    def _columns(self) -> list[tuple[int, slice]]:
        """Which columns of this member's share belong to which vector."""
        start = self.backend.rank() * self.share
        found, begin = [], 0
        for number, vector in enumerate(self.vectors):
            end = begin + vector.numel()
            low, high = max(begin, start) - start, min(end, start + self.share) - start
            if low < high:
                found.append((number, slice(low, high)))
            begin = end
        return found

    def _after(self, work: dist.Work, stage: Callable[[], None], stage_name: str | None) -> None:
        """Runs the stage, which begins with an operation of that name, when the work is done."""

        def then(finished: torch.futures.Future[Any]) -> None:
            try:
                finished.value()
            except Exception as error:  # noqa: BLE001  all members have it; it belongs to whoever waits
                self.done.set_exception(error)
                return
            try:
                with torch.inference_mode(self.inference):
                    self._use_on_this_stream()
                    stage()
            except Exception as error:  # noqa: BLE001  of this rank alone
                self.done.set_exception(error)  # first: whoever waits here has no other deadline
                if stage_name is not None:  # what does not fit tells the others, who would wait for the time-out
                    self.backend._named_all_reduce(torch.empty(0), stage_name)

        work.get_future().add_done_callback(then)

    def _use_on_this_stream(self) -> None:
        """Lets the allocator know: each stage runs on a stream of its own, behind the one before."""
        if self.pieces.is_cuda:
            stream = torch.cuda.current_stream(self.pieces.device)
            for tensor in (self.pieces, self.rows, *self.vectors):
                tensor.record_stream(stream)


def _coefficients(products: Tensor) -> Tensor:
    """By tensor and member, from the scalar products [tensors, members, members]."""
    tensors, members, _ = products.shape
    level = list(torch.eye(members, dtype=products.dtype).expand(tensors, -1, -1).unbind(1))
    while len(level) > 1:
        pairs = [_pair(products, a, b) for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0]


def _pair(products: Tensor, a: Tensor, b: Tensor) -> Tensor:
    def scalar(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("ti,tij,tj->t", x, products, y)

    def weight(own: Tensor) -> Tensor:
        # A vector of zeros has no direction: it changes nothing, and is not divided by.
        return torch.where(own > 0, 1 - both / (2 * own), torch.ones_like(own))

    both = scalar(a, b)
    return weight(scalar(a, a))[:, None] * a + weight(scalar(b, b))[:, None] * b


def _next_call(backend: _Backend) -> str:
    """A name for a call without one: members make such calls of a group in the same order."""
    return f"adasum:{backend._next_composed()}"


def _devices(tensor: Tensor) -> list[torch.device] | None:
    return None if tensor.is_cpu else [tensor.device]


__all__ = ["adasum_async", "adasum_of_bucket"]
