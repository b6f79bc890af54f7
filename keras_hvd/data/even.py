"""even: every rank makes the same number of steps, however the data is divided."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_hvd.data.graph import FOR_ONE_JOB, DatasetGraph, kinds
from keras_hvd.data.one_job import for_one_job
from keras_hvd.data.place import place_in
from keras_hvd.data.shard import check_dataset
from keras_hvd.job import basics, log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set

MODES = ("drop", "repeat", "pad")

# TensorFlow knows the cardinality after these if it knows the one before.
_DERIVED = {FOR_ONE_JOB} | kinds(
    "Batch Cache Map MapAndBatch Model Options PaddedBatch Prefetch PrivateThreadPool "
    "Repeat Shard Shuffle ShuffleAndRepeat Skip Take"
)


def even(
    dataset: tf.data.Dataset,
    mode: str = "drop",
    *,
    steps: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> tf.data.Dataset | tuple[tf.data.Dataset, int]:
    """Gives all ranks the same number of steps: of elements of their datasets.

    Every rank calls it with its part, already batched; one collective agrees on the
    number. If TensorFlow does not know the number of a dataset's elements, as with
    files of records, counting reads the data once: the files, without later maps and
    shuffles. `steps` avoids that. A dataset that later gives fewer elements than were
    counted raises an error then.

    Args:
        dataset: this rank's part.
        mode: "drop" takes the smallest number of all ranks; the others leave out the
            rest, with a shuffle a different rest in each epoch. "repeat" takes the
            largest number; the others start again. "pad" does too, and gives repeated
            rows a sample weight of 0. With "pad", elements `(x, y)` or `(x, y, w)`
            become `(x, y, w)`. `weighted_metrics` and losses with
            `reduction="mean_with_sample_weight"` ignore these rows; plain metrics and
            `sum_over_batch_size` count them, and a warning says so.
        steps: the number, if it is known or should be different; not with "pad".
        process_set: the ranks that make steps together; by default all of them.

    Returns:
        The dataset, with a known cardinality unless it is infinite. With "pad", a pair
        of the dataset and the number of rows of all ranks without padding.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `dataset` is not a `tf.data.Dataset`, or `steps` is not a whole
            number.
        ValueError: the mode does not exist; `steps` is not positive, or given with
            "pad"; the process set is not part of the job, or does not contain this
            rank; the ranks gave different modes or steps; a rank has no data; or, with
            "pad", the elements have another structure, or are infinitely many.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> dataset = tf.data.Dataset.range(10).filter(lambda x: x > 2).batch(4)
    >>> int(keras_hvd.data.even(dataset).cardinality())
    2
    """
    check_dataset("even", dataset)
    if mode not in MODES:
        raise ValueError(f"even: mode must be one of {MODES}; got {mode!r}")
    if steps is not None:
        steps = basics.whole_number("even", "steps", steps)
        if steps < 1 or mode == "pad":
            raise ValueError(
                f"even: steps must be positive, and is not given with mode='pad'; got "
                f"steps={steps} and mode={mode!r}"
            )
    place_in(process_set, "even")
    mine: dict[str, Any]
    mine = {"mode": mode, "steps": steps, "error": "", "count": steps, "rows": 0}
    try:
        _measure(dataset, mine)
    except (ValueError, tf.errors.OpError) as error:
        mine["error"] = str(error)
    of_ranks = allgather_object(mine, name="keras_hvd/even", process_set=process_set)
    _require_alike(of_ranks, process_set)
    counts = [each["count"] for each in of_ranks]
    if mode == "drop":
        evened = _with_steps(dataset, min(counts), mine["count"])
    elif mode == "repeat":
        evened = _repeated(dataset, max(counts), mine)
    else:
        evened = _padded(dataset, max(counts), mine["count"])
    if evened is not dataset:
        evened = for_one_job(evened, "even", process_set)
    if mode != "pad":
        return evened
    if len({*counts}) > 1 and process_set.rank() == 0:
        _warn_of_padding(counts)
    return evened, sum(each["rows"] for each in of_ranks)


def count_elements(dataset: tf.data.Dataset) -> float:
    """The number of elements in one pass over a dataset; `math.inf` if it is infinite.

    Reads as little as possible. Raises ValueError if TensorFlow cannot write down the
    graph of a dataset that has to be read.

    Example:

    >>> count_elements(tf.data.Dataset.range(5).filter(lambda x: x > 1).batch(2))
    2
    """
    known = int(dataset.cardinality())
    if known == tf.data.INFINITE_CARDINALITY:
        return math.inf
    if known >= 0:
        return known
    graph = DatasetGraph(dataset, "even")
    chain = graph.chain()
    place = len(chain) - 1
    while place > 0 and graph.kind(chain[place]) in _DERIVED:
        place -= 1
    name = chain[place]
    graph.add_cardinality(name, _length(graph.build_part(name)))
    known = int(graph.build().cardinality())
    return known if known >= 0 else _length(dataset)


def _length(dataset: tf.data.Dataset) -> int:
    return int(dataset.reduce(np.int64(0), lambda count, *_: count + 1))


def _measure(dataset: tf.data.Dataset, mine: dict[str, Any]) -> None:
    """Fills in this rank's counts."""
    if mine["mode"] == "pad":
        _require_rows(dataset.element_spec)
    if mine["steps"] is None:
        mine["count"] = count_elements(dataset)
    if mine["mode"] == "pad":
        if mine["count"] == math.inf:
            raise ValueError("the dataset is infinite, so nothing can be padded")
        rows = dataset.reduce(np.int64(0), lambda n, *batch: n + _rows_of(batch))
        mine["rows"] = int(rows)


def _require_rows(spec: Any) -> None:
    is_batch = isinstance(spec, tuple) and len(spec) in (2, 3)
    if is_batch and all(each.shape.rank != 0 for each in tf.nest.flatten(spec)):
        return
    raise ValueError(
        "mode='pad' takes batches (x, y) or (x, y, weights) of tensors with rows; got "
        f"elements of {spec}"
    )


def _rows_of(batch: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]


def _require_alike(of_ranks: list[dict[str, Any]], process_set: ProcessSet) -> None:
    """Raises, on every rank, if one rank failed or the ranks differ."""
    ranks = process_set.ranks
    first = of_ranks[0]
    for rank, each in zip(ranks, of_ranks):
        if each["error"]:
            raise ValueError(f"even: on rank {rank}: {each['error']}")
        for what in ("mode", "steps"):
            if each[what] != first[what]:
                raise ValueError(
                    f"even: {what} is {first[what]!r} on rank {ranks[0]}, and "
                    f"{each[what]!r} on rank {rank}: give all ranks the same"
                )
    empty = [rank for rank, each in zip(ranks, of_ranks) if each["count"] == 0]
    if empty:
        raise ValueError(
            f"even: the dataset of rank {', '.join(map(str, empty))} has no elements, "
            f"those of the ranks {ranks} have {[each['count'] for each in of_ranks]}. "
            "Batches may be too large for so many ranks (drop_remainder=True), or "
            "there are fewer files or elements than ranks"
        )


def _with_steps(
    dataset: tf.data.Dataset, steps: float, count: float
) -> tf.data.Dataset:
    """The dataset, cut off after `steps` elements, with that cardinality."""
    if steps == math.inf:
        return dataset
    known = int(dataset.cardinality())
    if known == steps == count:
        return dataset
    dataset = dataset.take(int(steps))
    return dataset.apply(tf.data.experimental.assert_cardinality(int(steps)))


def _repeated(
    dataset: tf.data.Dataset, steps: float, mine: dict[str, Any]
) -> tf.data.Dataset:
    is_short = mine["count"] < steps or mine["steps"] is not None
    if is_short and int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.repeat()
    return _with_steps(dataset, steps, mine["count"])


def _padded(dataset: tf.data.Dataset, steps: float, count: float) -> tf.data.Dataset:
    def weigh(weight: float) -> Any:
        def with_weights(x: Any, y: Any, weights: Any = None) -> Any:
            if weights is None:
                each = tf.constant(weight, keras.config.floatx())
                weights = tf.fill([_rows_of((x, y))], each)
                static = tf.nest.flatten((x, y))[0].shape[:1]
                return x, y, tf.ensure_shape(weights, static)
            return x, y, tf.nest.map_structure(scaled, weights)

        def scaled(weights: tf.Tensor) -> tf.Tensor:
            return weights * tf.cast(weight, weights.dtype)

        return with_weights

    padded = dataset.map(weigh(1.0))
    if count < steps:
        more = dataset.repeat().take(int(steps - count)).map(weigh(0.0))
        padded = padded.concatenate(more)
    return _with_steps(padded, steps, steps)


def _warn_of_padding(counts: list[int]) -> None:
    log.warn(
        f"even: the ranks have {', '.join(map(str, counts))} steps, and are padded to "
        f"{max(counts)} with rows of sample weight 0. weighted_metrics leave them out, "
        "and losses with reduction='mean_with_sample_weight'; metrics= and other "
        "losses (sum_over_batch_size, Keras' default) count every row",
        stacklevel=3,
    )
