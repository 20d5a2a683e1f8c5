"""What gradients travel as."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Compressor:
    """Makes a tensor smaller for the way; subclass it for a compression of your own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """What travels, and what decompress() is to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: object) -> Tensor:
        """The tensor as it was, of what came."""
        return tensor


def compressed(
    compression: type[Compressor], tensors: Sequence[Tensor], call: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """The results of a call to which the tensors travel compressed."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = call([tensor for tensor, _ in pairs])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def _to(dtype: torch.dtype, name: str) -> type[Compressor]:
    """Sends wider floating-point tensors as `dtype`, and leaves others alone."""

    class Narrowing(Compressor):
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, object]:
            if tensor.is_floating_point() and tensor.element_size() > dtype.itemsize:
                return tensor.to(dtype), tensor.dtype
            return tensor, None

        @staticmethod
        def decompress(tensor: Tensor, context: object) -> Tensor:
            return tensor.to(context) if isinstance(context, torch.dtype) else tensor

    Narrowing.__name__ = Narrowing.__qualname__ = name
    return Narrowing


class Compression:
    """The compressions to choose from."""

    none: type[Compressor] = Compressor
    """As it is."""
    fp16: type[Compressor] = _to(torch.float16, "fp16")
    """float16: 11 bits of precision, up to 65504. The ranks' values are added in float32."""
    bf16: type[Compressor] = _to(torch.bfloat16, "bf16")
    """bfloat16: 8 bits of precision, the range of float32. The ranks' values are added in float32."""


__all__ = ["Compression", "Compressor"]
