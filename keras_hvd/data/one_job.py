"""Makes a rank's part of a dataset fail in a job in which its place is another."""

from __future__ import annotations

import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import job_values
from keras_hvd.job.process_sets import ProcessSet, number_of

MARK = "keras_hvd_one_job"
"""The name that marks these datasets in graphs made from them."""


def for_one_job(
    dataset: tf.data.Dataset, function: str, process_set: ProcessSet
) -> tf.data.Dataset:
    """Returns the dataset, made to fail in a job in which the place is another.

    `function`, for the error, is the name of the function that has made the dataset.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> numbers = tf.data.Dataset.range(3)
    >>> checked = for_one_job(numbers, "shard", keras_hvd.global_process_set)
    >>> [int(each) for each in checked], int(checked.cardinality())
    ([0, 1, 2], 3)
    """
    number = number_of(process_set, function)

    def checked(_: tf.Tensor) -> tf.data.Dataset:
        job_values.require_as_traced(
            "size", "rank", process_set=number, dataset=f"keras_hvd.data.{function}"
        )
        return dataset.take(0)

    # In front of the dataset and not around it: TensorFlow does not optimize the inside
    # of functions.
    first = tf.data.Dataset.range(1).flat_map(checked)
    result = first.concatenate(dataset, name=MARK)
    known = dataset.cardinality()
    if known != tf.data.UNKNOWN_CARDINALITY:
        result = result.apply(tf.data.experimental.assert_cardinality(known))
    options = tf.data.Options()
    # The check has no state that a saved iterator would lose. TensorFlow warns of it.
    options.experimental_external_state_policy = (
        tf.data.experimental.ExternalStatePolicy.WARN
    )
    return result.with_options(options).with_options(dataset.options())
