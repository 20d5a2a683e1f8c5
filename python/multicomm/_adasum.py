"""Where allreduce(op=Adasum) is dispatched to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from multicomm import _C


def adasum_async(
    backend: _C.ProcessGroupMulticomm,
    tensors: Sequence[Tensor],
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    *,
    grouped: bool,
    in_place: bool,
) -> NoReturn:
    """The adaptive sum of each tensor: a handle whose wait() returns the tensor or, where `grouped`, a list."""
    raise NotImplementedError("multicomm: op=Adasum is not available: use Average or Sum")
