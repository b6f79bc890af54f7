"""Timing of a `tf.function`, and ops that stand in for a collective in one."""

from __future__ import annotations

import time
from collections.abc import Callable

import tensorflow as tf


def pass_through(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Hands tensors on, by ops that do nothing but may not be left out.

    `Print` with `first_n=0` hands its input on and prints nothing; TensorFlow takes it
    for an op with a state, as it does a collective, and neither folds nor prunes it. It
    has one tensor; `IdentityN` adds the others, as one op, like a grouped collective.

    Args:
        tensors: the inputs of a collective.

    Returns:
        The same tensors.
    """
    first = tf.raw_ops.Print(input=tensors[0], data=[], first_n=0)
    if len(tensors) == 1:
        return [first]
    return tf.raw_ops.IdentityN(input=[first, *tensors[1:]])


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Times calls, which on CPUs return when their work is done.

    Args:
        call: of a `tf.function`.
        repeats: the number of calls.

    Returns:
        The time of each, in seconds.
    """
    measured = []
    before = time.perf_counter()
    for _ in range(repeats):
        call()
        after = time.perf_counter()
        measured.append(after - before)
        before = after
    return measured
