"""Join: a rank runs out of data before the others."""

from __future__ import annotations

import ctypes

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.job import arrival, basics, native, script_end


def join() -> tf.Tensor:
    """Says that this rank has no more data, and waits until every rank has said so.

    Meanwhile this rank takes part in the others' allreduces over all ranks, with zeros.
    `Average` still divides by the number of all ranks. This works for `Sum` and
    `Average` of dense tensors only. Everything else that needs this rank raises an
    error on the waiting ranks: another `op`, another collective, or a process set that
    contains this rank.

    In a `tf.function` it joins each time that it runs: after the collectives before it
    in the function, and before those after it. If it is in a function that this one
    calls, loops and calls behind that one wait; for a collective, write
    `tf.control_dependencies`. XLA cannot compile it.

    Returns:
        The rank that joined last, the same on all ranks: an int32 scalar, which can be
        an index, a `root_rank`, or part of a text.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        RankFailedError: another rank died or left; in a graph, tf.errors.AbortedError.
        MismatchError: another thread of this rank is already in `join`; in a graph,
            tf.errors.FailedPreconditionError.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> int(keras_hvd.join())
    0
    """
    arrival.require_arrived("join")
    script_end.note_collective()
    if not tf.executing_eagerly():
        return _in_graph()
    last = ctypes.c_int32()
    basics.check(native.engine().khvd_join(ctypes.byref(last)))
    with tf.device("/CPU:0"):
        return tf.constant(last.value)


def _in_graph() -> tf.Tensor:
    if submission.is_compiled():
        raise NotImplementedError(
            "join cannot be compiled by XLA: call it outside of jit_compile=True"
        )
    with tf.control_dependencies(submission.effects_so_far()):
        last = native.ops().keras_hvd_join()
    submission.let_following_wait(last.op)
    return last


tf.no_gradient("KerasHvdJoin")
