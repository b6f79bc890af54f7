"""The reductions, numbered as in the C API."""

from __future__ import annotations

import enum


class ReduceOp(enum.IntEnum):
    """How an allreduce combines the ranks' elements.

    Example:

    >>> ReduceOp.Sum.name, ReduceOp(0) is Average
    ('Sum', True)
    """

    Average = 0
    Sum = 1
    Min = 2
    Max = 3
    Product = 4
    Adasum = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
Adasum = ReduceOp.Adasum
