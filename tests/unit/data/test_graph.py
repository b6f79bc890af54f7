"""A dataset's graph: read, changed, and a dataset again."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from keras_hvd.data import graph as graph_module
from keras_hvd.data.graph import DatasetGraph


def rebuilt(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return DatasetGraph(dataset, "shard").build()


def numbers(dataset: tf.data.Dataset) -> list[int]:
    return [int(element) for element in dataset]


def test_versions_of_an_op_are_one_kind():
    dataset = (
        tf.data.Dataset.range(8)
        .map(lambda x: x, num_parallel_calls=2)
        .map(lambda x: x)
        .filter(lambda x: True)
        .interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2)
        .cache()
        .shuffle(3)
        .batch(2, num_parallel_calls=2)
        .prefetch(1)
    )
    graph = DatasetGraph(dataset, "shard")
    assert [graph.kind(name) for name in graph.chain()] == [
        "RangeDataset",
        "MapDataset",
        "MapDataset",
        "FilterDataset",
        "InterleaveDataset",
        "CacheDataset",
        "ShuffleDataset",
        "BatchDataset",
        "PrefetchDataset",
    ]


def test_python_functions_outlive_the_original():
    def make() -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([1, 2, 3]), output_signature=tf.TensorSpec([], tf.int64)
        )
        return rebuilt(
            dataset.map(lambda x: tf.numpy_function(lambda y: 2 * y, [x], tf.int64))
        )

    dataset = rebuilt(make())
    gc.collect()
    assert numbers(dataset) == [2, 4, 6]


def test_tables_and_variables_of_one_name_are_not_mixed_up():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], [5, 6]), -1
    )
    variables = [tf.Variable(10, name="same"), tf.Variable(20, name="same")]
    dataset = tf.data.Dataset.range(2, output_type=tf.int32)
    mapped = [
        rebuilt(dataset.map(lambda x, v=v: table.lookup(x) + v)) for v in variables
    ]
    both = rebuilt(dataset.map(lambda x: x * variables[0] + variables[1]))
    assert [numbers(each) for each in mapped] == [[15, 16], [25, 26]]
    assert numbers(both) == [20, 30]


def test_state_is_not_shared_with_the_original():
    dataset = tf.data.Dataset.range(100).cache().shuffle(100, seed=3)
    first = numbers(dataset)
    other = rebuilt(dataset)
    assert numbers(other) == first
    assert numbers(other) != first


def test_a_digest_is_of_data_and_ops():
    def digest(dataset: tf.data.Dataset) -> int:
        graph = DatasetGraph(dataset, "shard")
        return graph.digest(graph.chain()[-1])

    def of(values: list[int]) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(np.array(values))

    assert digest(of([1, 2]).map(lambda x: x)) == digest(of([1, 2]).map(lambda x: x))
    assert digest(of([1, 2])) != digest(of([2, 1]))
    assert digest(of([1, 2])) != digest(of([1, 2]).take(1))
    assert digest(of([1, 2]).take(1)) != digest(of([1, 2]).take(2))
    assert digest(of([1, 2]).shuffle(2, seed=1)) == digest(of([1, 2]).shuffle(2))


def test_a_shard_of_arrays_is_a_slice_of_them():
    arrays = {
        "number": np.arange(7),
        "text": np.array([b"a", b"b", b"c", b"d", b"e", b"f", b"g"]),
        "half": np.arange(14, dtype=np.float16).reshape(7, 2),
        "flag": np.arange(7) % 2 == 0,
    }
    for values in (arrays, tf.ragged.constant([[1], [], [2, 3], [4], [], [5], [6]])):
        dataset = tf.data.Dataset.from_tensor_slices(values)
        graph = DatasetGraph(dataset, "shard")
        graph.add_shard(graph.chain()[0], 3, 1)
        expected = [str(element) for element in dataset.shard(3, 1)]
        assert [str(element) for element in graph.build()] == expected


def test_fewer_rows_than_shards():
    graph = DatasetGraph(tf.data.Dataset.from_tensor_slices([[1, 2]]), "shard")
    graph.add_shard(graph.chain()[0], 3, 1)
    assert list(graph.build()) == []


def test_too_large_arrays_are_refused(monkeypatch):
    monkeypatch.setattr(graph_module, "LARGEST", 79)
    with pytest.raises(ValueError, match="slices of arrays.* has 80 bytes of arrays"):
        rebuilt(tf.data.Dataset.from_tensor_slices(np.arange(10)).batch(3))
