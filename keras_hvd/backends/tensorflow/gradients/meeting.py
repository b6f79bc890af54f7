"""A job of `khvdrun --scaling` whose ranks only meet, where they would reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.backends.tensorflow.gradients import reduction
from keras_hvd.backends.tensorflow.gradients.repeated_rows import add_up_all
from keras_hvd.recording import recorder

_reduce = reduction.reduce


def install() -> None:
    """Has reductions of this job's gradients wait for all ranks, and no more.

    A later job of this process reduces them.
    """
    reduction.reduce = _meet  # type: ignore[assignment]  # it leaves out what it can


def _meet(
    how: GradientReduction,
    prefix: str,
    grads: Sequence[reduction.Gradient],
    *of_reduction: Any,
) -> list[reduction.Gradient]:
    """Waits for the other ranks when the gradients are there, and leaves these."""
    if recorder.scaling() != "meet":
        return _reduce(how, prefix, grads, *of_reduction)
    kept = [add_up_all(grad) for grad in grads]
    values = [
        each.values if isinstance(each, tf.IndexedSlices) else each for each in kept
    ]
    with submission.leaving_thread():
        with tf.control_dependencies(values):
            sent = tf.zeros([1])
        name = name_in_graph(f"{prefix}/meeting")
        [[met]] = reduction.reduce_buckets(how, [[sent]], [name], [""])
    # A session runs only what a result needs.
    with tf.control_dependencies([met]):
        return [tf.identity(each) for each in kept]
