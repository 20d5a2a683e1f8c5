"""Comparisons whose failure text says which element, of what, is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def same(got: torch.Tensor, want: torch.Tensor | list[Any], what: str, *, close: bool = False) -> None:
    """Asserts that `got` has the shape, dtype and values of `want`, on any device; `close` allows for rounding."""
    got = got.detach().cpu()
    want = torch.as_tensor(want, dtype=got.dtype, device="cpu") if isinstance(want, list) else want.detach().cpu()
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    if close and (got.is_floating_point() or got.is_complex()):
        wide = (lambda t: t) if got.is_complex() else torch.Tensor.double
        eps = torch.finfo(got.dtype).eps
        right = torch.isclose(wide(got), wide(want), rtol=4 * eps, atol=2 * eps, equal_nan=True)
    elif got.element_size() == 1 and got.is_floating_point():  # 8-bit floats know no comparison
        right = got.view(torch.uint8) == want.view(torch.uint8)
    else:
        right = (got == want) | ((got != got) & (want != want))
    if bool(right.all()):
        return
    wrong = (~right).nonzero()
    first = tuple(wrong[0].tolist())
    raise AssertionError(
        f"{what}: {len(wrong)} of {got.numel()} elements are wrong, the first at {list(first)}: "
        f"got {got[first].item()}, expected {want[first].item()}; "
        f"all: got {_head(got)}, expected {_head(want)}"
    )


def check_sum(group: dist.ProcessGroup | None = None, size: int = 3) -> None:
    """Asserts that a sum of ones over the group (the world, if None) comes out right."""
    data = torch.full((size,), 1.0)
    dist.all_reduce(data, group=group)
    same(data, torch.full((size,), float(dist.get_world_size(group))), "all_reduce")


def _head(tensor: torch.Tensor, count: int = 8) -> str:
    values = tensor.flatten()[:count].tolist()
    return f"{values}{' ...' if tensor.numel() > count else ''}"


def raises(
    action: Callable[[], Any],
    what: str,
    kind: type[Exception] | tuple[type[Exception], ...] = Exception,
    *patterns: str,
) -> str:
    """Asserts that `action` raises a `kind` whose text matches all `patterns`; returns the text."""
    try:
        action()
    except kind as error:
        text = str(error)
        for pattern in patterns:
            assert re.search(pattern, text), f"{what}: the error does not say /{pattern}/:\n{text}"
        return text
    raise AssertionError(f"{what}: no error")
