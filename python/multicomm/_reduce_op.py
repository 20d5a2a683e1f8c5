"""How reductions combine the ranks' tensors."""

from __future__ import annotations

import enum


class ReduceOp(enum.IntEnum):
    """How allreduce and reducescatter combine the ranks' tensors."""

    Average = 0
    """The sum divided by the number of ranks; of integers, rounded towards zero."""
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"]
