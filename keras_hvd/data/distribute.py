"""distribute: a whole input pipeline, as each rank needs it."""

from __future__ import annotations

import os

import tensorflow as tf

from keras_hvd.data.even import even
from keras_hvd.data.one_job import for_one_job
from keras_hvd.data.place import place_in
from keras_hvd.data.shard import POLICIES, check_dataset, part_of
from keras_hvd.job import basics, cores
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set

MODES = ("drop", "repeat", "off")


def distribute(
    dataset: tf.data.Dataset,
    batch_size: int,
    *,
    policy: str = "auto",
    mode: str = "drop",
    steps: int | None = None,
    drop_remainder: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.data.Dataset:
    """Turns the input pipeline of one process into that of each rank.

    Each rank gets its part of the elements, taken before they are shuffled (`shard`),
    in batches of its share of the global batch, and as many batches as the other ranks
    (`even`). Private threads prepare them ahead, one for each core of this rank.
    TensorFlow's own sharding is turned off.

    Args:
        dataset: single elements, the same dataset on all ranks: read, mapped and
            shuffled as for one process, not batched.
        batch_size: number of elements that all ranks together take in a step.
        policy: as for `shard`.
        mode: "drop" or "repeat", as for `even`; with "off" the ranks' numbers of steps
            may differ.
        steps: as for `even`; saves counting the elements.
        drop_remainder: whether to leave out a smaller last batch.
        process_set: the ranks that train together; by default all of them.

    Returns:
        A dataset of batches of `batch_size / process_set.size()` elements.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `dataset` is not a `tf.data.Dataset`, or `batch_size` or `steps` is
            not a whole number.
        ValueError: `batch_size` is not a multiple of the number of ranks, the policy or
            mode does not exist, or `shard` or `even` raises it.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> samples = tf.data.Dataset.range(100).shuffle(100)
    >>> dataset = keras_hvd.data.distribute(samples, batch_size=20)
    >>> int(dataset.cardinality())
    5
    """
    check_dataset("distribute", dataset)
    if policy not in POLICIES:
        raise ValueError(
            f"distribute: policy must be one of {POLICIES}; got {policy!r}"
        )
    if mode not in MODES:
        raise ValueError(
            f"distribute: mode must be one of {MODES}; got {mode!r}. For 'pad' give "
            "the result of mode='off' to keras_hvd.data.even()"
        )
    batch_size = basics.whole_number("distribute", "batch_size", batch_size)
    size, _ = place_in(process_set, "distribute")
    if batch_size < 1 or batch_size % size:
        raise ValueError(
            "distribute: batch_size counts all ranks together and must be a multiple "
            f"of their number, {size}; got {batch_size}"
        )
    part = part_of(dataset, policy, process_set)
    part = part.batch(batch_size // size, drop_remainder=drop_remainder)
    if mode != "off":
        part = even(part, mode, steps=steps, process_set=process_set)
    # Once for a batch, and not for each element of `shard`.
    part = for_one_job(part, "distribute", process_set)
    return part.prefetch(tf.data.AUTOTUNE).with_options(_options(process_set))


def _options(process_set: ProcessSet) -> tf.data.Options:
    options = tf.data.Options()
    options.threading.private_threadpool_size = _threads(process_set)
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    return options


def _threads(process_set: ProcessSet) -> int:
    """The number of cores that this rank has for itself."""
    here, mine = os.uname().nodename, os.sched_getaffinity(0)
    of_ranks = allgather_object(
        (here, mine), name="keras_hvd/cores", process_set=process_set
    )
    sharing = sum(host == here and bool(mine & other) for host, other in of_ranks)
    return max(1, cores.available() // sharing)
