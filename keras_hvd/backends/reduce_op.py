"""The reductions, numbered as in the C API, and the arguments that choose one."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np


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


def chosen(function: str, average: Any, op: Any) -> ReduceOp:
    """The reduction that the arguments `average`, as in Horovod, and `op` ask for.

    Raises TypeError or ValueError if they ask for none, or say it twice.

    >>> chosen("allreduce", None, None), chosen("allreduce", False, None)
    (<ReduceOp.Average: 0>, <ReduceOp.Sum: 1>)
    """
    # A ReduceOp is a number. Average is 0, which would mean Sum if taken as a bool.
    if average is not None and not isinstance(average, (bool, np.bool_)):
        raise TypeError(
            f"{function}: average must be True or False, got {average!r}; give the "
            "reduction as op=, such as op=keras_hvd.Sum"
        )
    if average is not None and op is not None:
        raise ValueError(
            f"{function}: average={average} and op={op!r} are two ways to say the same;"
            " give op alone"
        )
    if average is not None:
        return Average if average else Sum
    if op is None:
        return Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"keras_hvd.{known.name}" for known in ReduceOp)
        raise ValueError(f"{function}: op must be one of {names}; got {op!r}") from None


def scales_of(function: str, prescale: Any, postscale: Any) -> tuple[float, float]:
    """The factors of a reduction, as numbers.

    Raises TypeError if one is not a number, or unknown before a graph runs. Raises
    ValueError if one is NaN, or too large for a float.

    Example:

    >>> scales_of("allreduce", 1, np.float32(0.5))
    (1.0, 0.5)
    """
    prescale = _scale(function, "prescale_factor", prescale)
    return prescale, _scale(function, "postscale_factor", postscale)


def _scale(function: str, argument: str, value: Any) -> float:
    try:
        # float() would accept a string, which is not a number.
        scale = None if isinstance(value, (str, bytes)) else float(value)
    except OverflowError:
        raise ValueError(
            f"{function}: {argument} must be a number of float64; got {value!r}"
        ) from None
    except (TypeError, ValueError):
        scale = None
    if scale is None:
        raise TypeError(f"{function}: {argument} must be a number; got {value!r}")
    if math.isnan(scale):
        raise ValueError(f"{function}: {argument} must be a number; got {value!r}")
    return scale
