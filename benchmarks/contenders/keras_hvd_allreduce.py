"""keras_hvd's ranks in allreduce.py: the C API, `tf.function`, and one without us."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import c_api
import functions
import rank
import tensorflow as tf

import keras_hvd
from keras_hvd import version


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--timed-calls", required=True, help="timed_calls.c, compiled")
    options = parser.parse_args()
    # Before keras_hvd and MPI look at their cores; khvdrun has bound its ranks itself.
    rank.bind(options.cores, int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
    keras_hvd.init()
    session = rank.Session(
        options.socket,
        keras_hvd.rank(),
        keras_hvd.size(),
        f"keras_hvd {version.__version__}, TensorFlow {tf.__version__}",
    )
    prepare = {
        "c_api": functools.partial(c_api_call, options.timed_calls),
        "tf_function": function_call,
        "pass_through": pass_through_call,
    }
    prepared: dict[str, Callable[[int], list[float]]] = {}
    prepared_for = 0

    def measure(variant: str, size: int, repeats: int, warm_up: int) -> list[float]:
        nonlocal prepared_for
        if size != prepared_for:
            prepared.clear()
            prepared_for = size
        if variant not in prepared:
            prepared[variant] = prepare[variant](size)
        prepared[variant](warm_up)
        return prepared[variant](repeats)

    session.serve(measure)


def c_api_call(timed_calls: str, size: int) -> Callable[[int], list[float]]:
    array = rank.buffer(size)
    allreduce = c_api.Allreduce(timed_calls, f"c_api/{size}", [array])
    rank.require_sum(
        array, lambda: allreduce.seconds(1), keras_hvd.rank(), keras_hvd.size()
    )
    return allreduce.seconds


def function_call(size: int) -> Callable[[int], list[float]]:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return keras_hvd.allreduce(x, op=keras_hvd.Sum, name=f"function/{size}")

    given = tf.ones([size // 4])
    tf.debugging.assert_equal(step(given), float(keras_hvd.size()))
    return functools.partial(functions.seconds, lambda: step(given))


def pass_through_call(size: int) -> Callable[[int], list[float]]:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return functions.pass_through([x])[0]

    given = tf.zeros([size // 4])
    return functools.partial(functions.seconds, lambda: step(given))


if __name__ == "__main__":
    main()
