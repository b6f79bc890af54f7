"""The place where shard takes the ranks' parts out of a dataset."""

import pytest
import tensorflow as tf

from keras_hvd.data import shard
from keras_hvd.data.graph import DatasetGraph

FILES = [f"{number}.tfrecord" for number in range(3)]


def samples() -> tf.data.Dataset:
    return tf.data.Dataset.range(100)


def records(files: tf.data.Dataset | list[str] = FILES) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(files)


def cut(dataset: tf.data.Dataset, policy: str, size: int = 2) -> list[str]:
    """The kinds of the datasets before the place, its own last."""
    graph = DatasetGraph(dataset, "shard")
    place, _, _ = shard_module()._choose(graph, policy, size)
    before = graph.before(place.dataset)
    return [graph.kind(each).removesuffix("Dataset") for each in before]


def shard_module():
    import importlib

    return importlib.import_module(shard.__module__)


DATA = {
    "a source": (samples(), "Range"),
    "shuffle": (samples().shuffle(9).batch(2), "Range"),
    "map": (samples().map(lambda x: x).shuffle(9).batch(2), "Range"),
    "map after": (samples().shuffle(9).map(lambda x: x).batch(2), "Range"),
    "batch": (samples().map(lambda x: x).batch(2).map(lambda x: x), "Range"),
    "repeat": (samples().cache().repeat().shuffle(9).batch(2), "Range"),
    "take": (samples().take(9).map(lambda x: x).shuffle(9), "Range Take"),
    "map, take": (samples().map(lambda x: x).skip(1).take(9).batch(2), "Range"),
    "map, take, filter": (
        samples().map(lambda x: x).take(9).filter(lambda x: x > 1).batch(2),
        "Range Map Take Filter",
    ),
    "take after the batch": (samples().batch(2).take(9), "Range"),
    "shuffle, take": (samples().shuffle(9).take(9).batch(2), "Range Shuffle Take"),
    "repeat, take": (samples().repeat().take(9).batch(2), "Range Repeat Take"),
    "filter": (samples().filter(lambda x: x > 1).batch(2), "Range Filter"),
    "random filter": (
        samples()
        .map(lambda x: x)
        .filter(lambda x: tf.random.uniform([]) < 0.5)
        .batch(2),
        "Range",
    ),
    "enumerate": (samples().enumerate().shuffle(9), "Range Range Zip"),
    "padded": (samples().padded_batch(2), "Range"),
    "window": (
        samples().window(2, shift=1).flat_map(lambda x: x.batch(2)).shuffle(9).batch(2),
        "Range Window FlatMap",
    ),
    "shuffle, window": (samples().shuffle(9).window(2), "Range"),
    "sequences": (samples().batch(5).shuffle(9).batch(2), "Range Batch"),
    "shuffle, sequences": (samples().shuffle(9).batch(5).batch(2), "Range"),
    "unbatch": (samples().batch(5).unbatch().shuffle(9).batch(2), "Range"),
    "unbatch at random": (
        samples()
        .map(lambda x: tf.fill([tf.random.uniform([], 0, 9, tf.int32)], x))
        .unbatch()
        .batch(2),
        "Range",
    ),
    "snapshot": (samples().snapshot("snapshot").batch(2), "Range Range Zip"),
    "records": (records().shuffle(9).batch(2), "TensorSlice FlatMap"),
}


@pytest.mark.parametrize("kind", DATA)
def test_by_elements(kind):
    dataset, expected = DATA[kind]
    assert " ".join(cut(dataset, "data")) == expected


def listed() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(FILES)


FILE = {
    "names": (records(), "TensorSlice"),
    "parallel": (tf.data.TFRecordDataset(FILES, num_parallel_reads=2), "TensorSlice"),
    "lines": (tf.data.TextLineDataset(FILES).skip(0).batch(2), None),
    "shuffled": (
        listed().shuffle(9).interleave(tf.data.TextLineDataset),
        "TensorSlice",
    ),
    "repeated": (listed().repeat().interleave(records), "TensorSlice"),
    "taken": (
        listed().shuffle(9).take(2).interleave(records),
        "TensorSlice Shuffle Take",
    ),
    "counted": (records().take(5).batch(2), None),
    "windows": (records().window(2, shift=1).batch(2), None),
    "sequences": (records().batch(5).shuffle(9).batch(2), None),
    "counted after the batch": (records().batch(2).take(5), "TensorSlice"),
    "filtered": (records().filter(lambda x: True).shuffle(9).batch(2), "TensorSlice"),
    "no files": (samples(), None),
    "read by a map": (listed().map(tf.io.read_file).batch(2), None),
}


@pytest.mark.parametrize("kind", FILE)
def test_by_files(kind):
    dataset, expected = FILE[kind]
    if expected is None:
        with pytest.raises(shard_module()._Unsuitable):
            cut(dataset, "file")
        assert cut(dataset, "auto") == cut(dataset, "data")
    else:
        assert " ".join(cut(dataset, "file")) == expected
        assert cut(dataset, "auto") == cut(dataset, "file")


def test_fewer_files_than_ranks():
    assert cut(records(), "auto", size=3) == ["TensorSlice"]
    assert cut(records(), "auto", size=4) == ["TensorSlice", "FlatMap"]


def test_arguments():
    with pytest.raises(TypeError, match="shard takes a tf.data.Dataset; got a range"):
        shard(range(3))
    with pytest.raises(ValueError, match="policy must be one of .* got 'files'"):
        shard(samples(), "files")
