"""A rank whose TensorFlow has one thread to run ops in; others are held up.

In each step rank 0 has a collective and, beside it, an op that writes to a pipe in
FOLDER. Rank 1 begins only once it has read that: if the collective held the thread,
neither would ever go on.
"""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import keras_hvd

FOLDER = Path(sys.argv[1])
# Up to 64 KiB an op may drive the engine, and up to 16 KiB every rank reduces all.
COUNTS = {"8 B": 2, "16 KiB": 1 << 12, "64 KiB": 1 << 14, "1 MiB": 1 << 18}

COLLECTIVES = {
    "allreduce": keras_hvd.allreduce,
    "grouped_allreduce": lambda x, name: keras_hvd.grouped_allreduce([x, x], name=name),
    "allgather": keras_hvd.allgather,
    "reducescatter": keras_hvd.reducescatter,
    "alltoall": keras_hvd.alltoall,
    "broadcast": lambda x, name: keras_hvd.broadcast(x, root_rank=1, name=name),
}

numbers = itertools.count()


def main() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras_hvd.init()
    for kind, size in itertools.product(COLLECTIVES, COUNTS):
        values = tf.range(COUNTS[size], dtype=tf.float32) + keras_hvd.rank()
        collective = COLLECTIVES[kind]
        expected = collective(values, name=kind)
        for is_first in (True, False):
            result = held_up(
                step_with(collective, f"{kind} of {size}", is_first), values
            )
            tf.nest.map_structure(np.testing.assert_array_equal, result, expected)
    for columns in (1, 1 << 18):
        training(columns)
    print("went on", flush=True)


def step_with(collective: Callable, name: str, is_first: bool) -> Callable:
    """A step of the collective and the other op, one of them first in the thread."""

    def step(values, pipe):
        if is_first:
            result = collective(values, name=name)
        tf.io.write_file(pipe, "goes on")
        if not is_first:
            result = collective(values, name=name)
        return result

    return step


def training(columns: int) -> None:
    """Backprop goes on through the first layer while the last one's gradients wait."""
    weights = [tf.Variable(tf.fill([2, columns], float(n))) for n in range(1, 4)]

    def step(values, pipe):
        @tf.custom_gradient
        def first_layer(x):
            def gradient(upstream):
                tf.io.write_file(pipe, "goes on")
                return upstream

            return tf.identity(x), gradient

        with tf.GradientTape() as tape:
            x = first_layer(weights[0] * values)
            loss = tf.reduce_sum(x * weights[1] * weights[2])
        tape = keras_hvd.DistributedGradientTape(tape, groups=3)
        return tape.gradient(loss, weights)

    values = tf.constant(1.0 + keras_hvd.rank())
    # 1.5 is the mean of the ranks' factors, 1 and 2.
    for result, expected in zip(held_up(step, values), (6, 3, 2), strict=True):
        np.testing.assert_array_equal(result, np.full([2, columns], 1.5 * expected))

    step = tf.function(step, autograph=False)
    ended_on = threads_of_ends(lambda: step(values, os.devnull))
    assert ended_on == {"keras_hvd"}, ended_on


def threads_of_ends(step: Callable) -> set[str]:
    """The threads that end the collectives of many steps, TensorFlow's or the engine's.

    Where an op drives the engine it ends on its own.
    """
    step()
    folder = FOLDER / f"profile_{keras_hvd.rank()}_{next(numbers)}"
    with tf.profiler.experimental.Profile(str(folder)):
        for _ in range(50):
            step()
    space = xplane_pb2.XSpace()
    (file,) = folder.rglob("*.xplane.pb")
    space.ParseFromString(file.read_bytes())
    return {
        line.name.partition("/")[0]
        for plane in space.planes
        for line in plane.lines
        for event in line.events
        if plane.event_metadata[event.metadata_id].name.startswith("keras_hvd ended ")
    }


def held_up(step: Callable, values: tf.Tensor) -> tf.Tensor:
    """Runs the step on rank 1 once rank 0, which began before, has written."""
    pipe = FOLDER / str(next(numbers))
    if keras_hvd.rank() == 0:
        os.mkfifo(pipe)
    for _ in range(20):
        # The engine expects its peers at any moment from then on.
        keras_hvd.barrier()
    step = tf.function(step, autograph=False)
    if keras_hvd.rank() == 0:
        return step(values, str(pipe))
    assert pipe.read_text() == "goes on"
    return step(values, os.devnull)


if __name__ == "__main__":
    main()
