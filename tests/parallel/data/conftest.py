"""Numbered samples, in memory and in files, and functions that read them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import keras_hvd

if TYPE_CHECKING:
    import tensorflow as tf

# The samples of each file in `folder`.
SAMPLES = (3100, 2400, 1900, 1300, 800, 400, 100)


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
    import tensorflow as tf

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
def samples() -> tuple[int, ...]:
    """How many samples the uneven files of `folder` have."""
    return SAMPLES


@pytest.fixture(scope="session")
def folder(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """Uneven files of 10,000 numbered samples, as `*.tfrecord` and as `*.txt`, and 8 of
    1,560 in all, `*.few`."""
    path = None
    if keras_hvd.rank() == 0:
        path = tmp_path_factory.mktemp("folder")
        write_into(path)
    path = keras_hvd.broadcast_object(path)
    yield path
    if not request.session.testsfailed:
        keras_hvd.barrier()  # the others have read it
    if keras_hvd.rank() == 0:
        shutil.rmtree(path)


def write_into(folder: Path) -> None:
    import tensorflow as tf

    numbers = iter(range(sum(SAMPLES)))
    for file, samples in enumerate(SAMPLES):
        lines = [f"{next(numbers):05}" for _ in range(samples)]
        (folder / f"{file}.txt").write_text("\n".join(lines))
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as records:
            for line in lines:
                records.write(line.encode())
    for file in range(8):
        lines = [str(1000 * file + i) for i in range(160 + 10 * file)]
        (folder / f"{file}.few").write_text("\n".join(lines))


@pytest.fixture(scope="session")
def numbers() -> Callable[[tf.Tensor], tf.Tensor]:
    """A function that turns a record into its number."""
    import tensorflow as tf

    return lambda record: tf.strings.to_number(record, tf.int64)
