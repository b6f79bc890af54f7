"""Numbered samples, in memory and in files, and what all ranks read of them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd


def numbers_in(dataset: tf.data.Dataset) -> list[int]:
    """The numbers that one pass over a dataset gives, in its order."""
    found = []
    for element in dataset.as_numpy_iterator():
        found.extend(np.ravel(element).tolist())
    return found


@pytest.fixture(scope="session")
def read() -> Callable[[tf.data.Dataset], list[int]]:
    """This rank's numbers, in their order."""
    return numbers_in


@pytest.fixture(scope="session")
def read_by_all() -> Callable[[tf.data.Dataset], Counter]:
    """How often each number is read, by all ranks together."""

    def read(dataset: tf.data.Dataset) -> Counter:
        of_ranks = keras_hvd.allgather_object(numbers_in(dataset))
        return Counter(number for numbers in of_ranks for number in numbers)

    return read


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Seven files of different sizes, with the numbers 0 to 9999 in their order."""
    folder = Path(keras_hvd.broadcast_object(str(tmp_path_factory.mktemp("numbers"))))
    paths = [str(folder / f"{number}.tfrecord") for number in range(7)]
    if keras_hvd.rank() == 0:
        ends = [0, 100, 1300, 2000, 5000, 5001, 7777, 10_000]
        for path, first, last in zip(paths, ends, ends[1:]):
            with tf.io.TFRecordWriter(path) as file:
                for number in range(first, last):
                    file.write(str(number).encode())
    keras_hvd.barrier()
    return paths


@pytest.fixture(scope="session")
def numbers() -> Callable[[tf.Tensor], tf.Tensor]:
    """What makes a number of a record."""
    return lambda record: tf.strings.to_number(record, tf.int64)
