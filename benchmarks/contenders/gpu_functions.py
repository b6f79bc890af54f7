"""keras_hvd's ranks in gpu_allreduce.py: allreduces in a `tf.function` on a GPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import rank
import tensorflow as tf
from workloads import WORKLOADS

import keras_hvd


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--device", required=True, help="of the tensors: GPU")
    parser.add_argument("--row", type=int, required=True, help="calls before a wait")
    options = parser.parse_args()
    keras_hvd.init()
    session = rank.Session(
        options.socket,
        keras_hvd.rank(),
        keras_hvd.size(),
        f"TensorFlow {tf.__version__}",
    )

    @functools.cache
    def prepared(variant: str, size: int) -> Callable[[], Sequence[tf.Tensor]]:
        with tf.device(f"{options.device}:0"):
            return prepare(variant, size)

    def measure(variant: str, size: int, repeats: int, warm_up: int) -> list[float]:
        call = prepared(variant, size)
        seconds(call, warm_up, options.row)
        return seconds(call, repeats, options.row)

    session.serve(measure)


def prepare(variant: str, size: int) -> Callable[[], Sequence[tf.Tensor]]:
    """A call of a function of one tensor of this size, or of ResNet-50's gradients."""
    what = {"allreduce": allreduce, "identity": identity}[variant.split("/")[0]]
    of_one = variant.endswith("/one")
    shapes = [[size // 4]] if of_one else WORKLOADS["resnet50"]
    tensors = list(map(tf.ones, shapes))
    name = f"{size} B" if of_one else "gradients"
    step = tf.function(lambda *tensors: what(tensors, name))
    for result in step(*tensors):
        expected = keras_hvd.size() if what is allreduce else 1
        tf.debugging.assert_equal(result, tf.constant(expected, tf.float32))
    return functools.partial(step, *tensors)


def allreduce(tensors: Sequence[tf.Tensor], name: str) -> Sequence[tf.Tensor]:
    """One tensor as it is, several as a group."""
    if len(tensors) == 1:
        return [keras_hvd.allreduce(tensors[0], op=keras_hvd.Sum, name=name)]
    return keras_hvd.grouped_allreduce(tensors, op=keras_hvd.Sum, name=name)


def identity(tensors: Sequence[tf.Tensor], name: str) -> Sequence[tf.Tensor]:
    """TensorFlow's own identity of the same tensors."""
    return list(map(tf.identity, tensors))


def seconds(call: Callable[[], object], repeats: int, in_a_row: int) -> list[float]:
    """The seconds of a call, in rows after which the device is waited for.

    Args:
        call: of a `tf.function`.
        repeats: how many rows.
        in_a_row: calls of a row.

    Returns:
        A mean for each row.
    """
    measured = []
    for _ in range(repeats):
        before = time.perf_counter()
        for _ in range(in_a_row):
            call()
        tf.test.experimental.sync_devices()
        measured.append((time.perf_counter() - before) / in_a_row)
    return measured


if __name__ == "__main__":
    main()
