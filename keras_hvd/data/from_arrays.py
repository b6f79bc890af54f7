"""from_arrays: batches of rows, in an order that any number of ranks can go on with."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import job_values
from keras_hvd.data import plan
from keras_hvd.data.part import agreed_rows
from keras_hvd.data.place import place_in
from keras_hvd.data.position import Position
from keras_hvd.data.rows import Rows
from keras_hvd.job import basics
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of


def from_arrays(
    *data: Any,
    batch_size: int = 32,
    shuffle: bool = True,
    seed: int = 0,
    position: Position | None = None,
    process_set: ProcessSet = global_process_set,
) -> tf.data.Dataset:
    """Batches of the rows of arrays: each row once in an epoch, on one rank.

    Every iteration of the dataset is an epoch with its own order of all rows, which
    depends only on the seed and the epoch's number. In each step the ranks share the
    next rows of it, so the rest of an epoch is the same on any number of ranks. The
    last step has fewer rows, and ranks' shares of it differ by one at most. If fewer
    rows than ranks are left, several ranks have the same one.

    Every rank calls it with all rows and the same arguments; they are compared as by
    `part`.

    Args:
        *data: data with rows: NumPy arrays, tensors, DataFrames of one type; or lists,
            tuples and dicts of them. All have the same number of rows. None stays None.
        batch_size: the number of rows of each rank in a step.
        shuffle: whether an epoch has an order of its own; else it is that of the rows.
        seed: of the orders, from 0 to 2**32 - 1.
        position: follows the place in the data, to save it and to continue from it.
        process_set: the ranks that share the rows; by default all of them.

    Returns:
        A `tf.data.Dataset` of this rank's batches. Do not shard or batch it again.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: there is no data, or `batch_size` or `seed` is not a whole number, or
            `position` not a Position.
        ValueError: the ranks' data or arguments differ; something has no rows, or
            another number of them; a number is out of range; the process set is not
            part of the job, or does not contain this rank.

    Example:

    >>> import keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> x, y = np.arange(5), np.arange(5) ** 2
    >>> batches = keras_hvd.data.from_arrays(x, y, batch_size=2)
    >>> [len(x) for x, y in batches]
    [2, 2, 1]
    >>> sorted(int(number) for x, y in batches for number in x)
    [0, 1, 2, 3, 4]
    """
    if not data:
        raise TypeError("from_arrays takes data: keras_hvd.data.from_arrays(x, y)")
    size, rank = place_in(process_set, "from_arrays")
    batch_size = _within(1, 2**31, "batch_size", batch_size)
    seed = _within(0, 2**32, "seed", seed)
    if not isinstance(position, (Position, type(None))):
        raise TypeError(f"from_arrays: position must be a Position; got {position!r}")
    settings = {"batch_size": batch_size, "shuffle": bool(shuffle), "seed": seed}
    count = agreed_rows("from_arrays", data, settings, process_set)
    if not count:
        raise ValueError("from_arrays: the data have no rows")
    rows = Rows(count, seed, bool(shuffle), batch_size, rank, size)
    if position is not None:
        position.attach(rows, process_set)
    numbers = _numbers(rows, position, number_of(process_set, "from_arrays"))
    dataset = _batches(numbers.batch(batch_size), data[0] if len(data) == 1 else data)
    if position is None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(rows.steps()))
    options = tf.data.Options()
    options.deterministic = True
    # They would copy the arrays, as a part of the dataset's graph.
    options.experimental_optimization.apply_default_optimizations = False
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)


def _within(least: int, end: int, argument: str, value: Any) -> int:
    value = basics.whole_number("from_arrays", argument, value)
    if not least <= value < end:
        raise ValueError(
            f"from_arrays: {argument}={value} must be at least {least}, and below {end}"
        )
    return value


def _numbers(
    rows: Rows, position: Position | None, number_of_set: int
) -> tf.data.Dataset:
    """The numbers of this rank's rows, in the order of each epoch."""
    epochs = itertools.count()

    def begin() -> tuple[np.int64, np.ndarray]:
        """An iteration's number and rows; runs when it begins."""
        iteration, epoch, part = 0, 0, rows.share()
        if position is None:
            epoch = next(epochs)
        else:
            iteration, epoch, part, _ = position.begin()
        mine = rows.order(epoch)[rows.places(part)]
        if position is not None:
            position.record(iteration, np.zeros(len(mine), np.int64))
        return np.int64(iteration), mine

    def end(iteration: np.ndarray) -> np.int64:
        if position is not None:
            position.end(int(iteration))
        return np.int64(0)

    def of_epoch(_: tf.Tensor) -> tf.data.Dataset:
        checks = job_values.require_as_traced(
            "size",
            "rank",
            process_set=number_of_set,
            dataset="keras_hvd.data.from_arrays",
        )
        with tf.control_dependencies(checks):
            iteration, mine = tf.numpy_function(begin, [], [tf.int64, tf.int64])
        mine.set_shape([None])
        numbers = tf.data.Dataset.from_tensor_slices(mine)

        def ended(_: tf.Tensor) -> tf.data.Dataset:
            none = tf.numpy_function(end, [iteration], tf.int64)
            return numbers.take(tf.reshape(none, []))

        return numbers.concatenate(tf.data.Dataset.range(1).flat_map(ended))

    # The name tells `shard` that this is already the rank's part.
    return tf.data.Dataset.range(1).flat_map(of_epoch, name=plan.DEALT)


def _batches(numbers: tf.data.Dataset, data: Any) -> tf.data.Dataset:
    """The rows of each batch of numbers."""
    # tf.data would make one tensor of a list.
    data = keras.tree.lists_to_tuples(data)
    leaves = tuple(
        _tensor(each) for each in keras.tree.flatten(data) if each is not None
    )

    def taken(numbers: tf.Tensor, leaves: tuple[Any, ...]) -> Any:
        found = iter([tf.gather(each, numbers) for each in leaves])
        return keras.tree.map_structure(
            lambda each: None if each is None else next(found), data
        )

    # Not captured by the function, whose graph would have all of them as constants.
    held = tf.data.Dataset.from_tensors(leaves).repeat()
    zipped = tf.data.Dataset.zip((numbers, held))
    return zipped.map(taken, num_parallel_calls=tf.data.AUTOTUNE)


def _tensor(leaf: Any) -> Any:
    """A leaf in the host's memory."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf
    with tf.device("CPU"):
        array = leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf
        return tf.convert_to_tensor(array)
