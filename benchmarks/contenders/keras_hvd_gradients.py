"""keras_hvd's ranks in gradients.py: groups in `tf.function`, and at the C API."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import c_api
import functions
import rank
import tensorflow as tf
from workloads import WORKLOADS, total_bytes

import keras_hvd
from keras_hvd import version


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--timed-calls", required=True, help="timed_calls.c, compiled")
    options = parser.parse_args()
    keras_hvd.init()
    session = rank.Session(
        options.socket,
        keras_hvd.rank(),
        keras_hvd.size(),
        f"keras_hvd {version.__version__}, TensorFlow {tf.__version__}",
    )
    prepare = {
        "c_api": functools.partial(c_api_call, options.timed_calls),
        "c_api_group": functools.partial(c_api_group_call, options.timed_calls),
        "grouped": functools.partial(function_call, grouped, 1.0),
        "pass_through": functools.partial(function_call, pass_through, 1.0),
        "computed_grouped": functools.partial(function_call, grouped, 2.0),
        "computed_pass_through": functools.partial(function_call, pass_through, 2.0),
    }
    prepared: dict[str, Callable[[int], list[float]]] = {}

    def measure(variant: str, size: int, repeats: int, warm_up: int) -> list[float]:
        workload, what = variant.split("/")
        if variant not in prepared:
            prepared[variant] = prepare[what](workload)
        prepared[variant](warm_up)
        return prepared[variant](repeats)

    session.serve(measure)


def c_api_call(timed_calls: str, workload: str) -> Callable[[int], list[float]]:
    """A call with the workload's bytes in one tensor."""
    array = rank.buffer(total_bytes(WORKLOADS[workload]))
    return c_api.Allreduce(timed_calls, f"{workload}/one", [array]).seconds


def c_api_group_call(timed_calls: str, workload: str) -> Callable[[int], list[float]]:
    """A call with the workload's tensors as one request."""
    arrays = [rank.buffer(4 * math.prod(shape)) for shape in WORKLOADS[workload]]
    return c_api.Allreduce(timed_calls, f"{workload}/group", arrays).seconds


def grouped(tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    return keras_hvd.grouped_allreduce(tensors, op=keras_hvd.Sum, name=name)


def pass_through(tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    return functions.pass_through(tensors)


def function_call(
    what: Callable[[Sequence[tf.Tensor], str], list[tf.Tensor]],
    factor: float,
    workload: str,
) -> Callable[[int], list[float]]:
    """A call of a function that gets the tensors, or computes them: times a factor."""

    @tf.function
    def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
        if factor != 1:
            tensors = [factor * tensor for tensor in tensors]
        return what(tensors, f"{workload}/{factor}")

    given = [tf.ones(shape) for shape in WORKLOADS[workload]]
    ranks = keras_hvd.size() if what is grouped else 1
    for result in step(*given):
        tf.debugging.assert_equal(result, factor * ranks)
    return functools.partial(functions.seconds, lambda: step(*given))


if __name__ == "__main__":
    main()
