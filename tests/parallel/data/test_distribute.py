"""distribute: every sample once, in equally many batches of each rank's share."""

from collections import Counter

import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.data import distribute
from keras_hvd.job import cores


def test_each_sample_once_and_other_orders(files, numbers, read, read_by_all, size):
    samples = tf.data.TFRecordDataset(files).map(numbers).shuffle(10_000)
    dataset = distribute(samples, 40 * size, policy="data", mode="off")
    assert read_by_all(dataset) == Counter(range(10_000))
    assert read(dataset) != read(dataset)


@pytest.mark.parametrize("mode", ["drop", "repeat"])
def test_as_many_steps_of_files_of_all_sizes(mode, files, numbers, size):
    samples = tf.data.TFRecordDataset(files).map(numbers)
    dataset = distribute(samples, 25 * size, mode=mode)
    steps = keras_hvd.allgather_object([len(batch) for batch in dataset])
    assert len({len(each) for each in steps}) == 1
    assert int(dataset.cardinality()) == len(steps[0])
    assert all(25 in each for each in steps)


def test_batches_are_each_ranks_share(size):
    dataset = distribute(tf.data.Dataset.range(100 * size + 1), 10 * size)
    assert [len(batch) for batch in dataset.take(10)] == [10] * 10
    whole = tf.data.Dataset.range(105 * size)
    dataset = distribute(whole, 10 * size, drop_remainder=True)
    assert [len(batch) for batch in dataset] == [10] * 10
    assert dataset.element_spec.shape == [10]


def test_options(size):
    options = distribute(tf.data.Dataset.range(24), size).options()
    threads = options.threading.private_threadpool_size
    assert threads in (cores.available(), max(1, cores.available() // size))
    policy = options.experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF


def test_errors(size):
    samples = tf.data.Dataset.range(24)
    if size > 1:
        with pytest.raises(ValueError, match=f"a multiple of their number, {size}"):
            distribute(samples, size + 1)
    with pytest.raises(ValueError, match="a multiple of their number"):
        distribute(samples, 0)
    with pytest.raises(TypeError, match="batch_size must be a whole number"):
        distribute(samples, 2.5)
    with pytest.raises(ValueError, match="mode must be one of .* got 'pad'"):
        distribute(samples, size, mode="pad")
    with pytest.raises(ValueError, match="policy must be one of"):
        distribute(samples, size, policy="files")
    with pytest.raises(TypeError, match="takes a tf.data.Dataset"):
        distribute([1], size)
