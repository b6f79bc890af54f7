"""The cost of `distribute`: `khvdrun -np 2 python benchmarks/input_pipeline.py`.

Reads MNIST from TFRecord files, which it writes first, shuffled, parsed and batched:
with `keras_hvd.data.distribute`, and with the same pipeline over this rank's share of
the files, chosen by hand. Both in turns, all ranks at once. Prints the medians of both
in images a second of all ranks, and how they relate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from measurement import summary

import keras_hvd

WANTED_PERCENT = 95


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--mnist",
        type=Path,
        default=os.environ.get("KERAS_HVD_TEST_MNIST", ""),
        metavar="FILE",
        help="mnist.npz (default: $KERAS_HVD_TEST_MNIST; else scikit-learn's digits)",
    )
    parser.add_argument("--files", type=int, default=8, help="default: 8")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    parser.add_argument(
        "--steps", type=int, default=150, help="batches of a turn (default: 150)"
    )
    parser.add_argument("--batch", type=int, default=256, help="of all ranks together")
    options = parser.parse_args()
    keras_hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(keras_hvd.broadcast_object(folder)), options)
        measure(paths, options)
        keras_hvd.barrier()


def write(folder: Path, options: argparse.Namespace) -> list[str]:
    """The images and labels as files of records, written by rank 0."""
    paths = [str(folder / f"{number}.tfrecord") for number in range(options.files)]
    if keras_hvd.rank() == 0:
        images, labels = data(options.mnist)
        for number, path in enumerate(paths):
            part = slice(number, None, options.files)
            with tf.io.TFRecordWriter(path) as file:
                for image, label in zip(images[part], labels[part]):
                    file.write(record(image, label))
    keras_hvd.barrier()
    return paths


def data(mnist: Path) -> tuple[np.ndarray, np.ndarray]:
    """60,000 images of 28 x 28 bytes, and their labels."""
    if mnist.is_file():
        with np.load(mnist) as arrays:
            return arrays["x_train"], arrays["y_train"]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    rows = np.arange(60_000) % len(images)
    return images[rows], labels[rows]


def record(image: np.ndarray, label: int) -> bytes:
    """One image and its label, as TensorFlow's examples are written."""
    bytes_list = tf.train.BytesList(value=[image.tobytes()])
    int64_list = tf.train.Int64List(value=[label])
    features = {
        "image": tf.train.Feature(bytes_list=bytes_list),
        "label": tf.train.Feature(int64_list=int64_list),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString()


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The image, from 0 to 1, and the label of a record."""
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_single_example(serialized, features)
    image = tf.reshape(tf.io.decode_raw(example["image"], tf.uint8), [28, 28, 1])
    return tf.cast(image, tf.float32) / 255, example["label"]


def samples(paths: list[str]) -> tf.data.Dataset:
    """The pipeline up to the batch."""
    dataset = tf.data.TFRecordDataset(paths).shuffle(2048)
    return dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE)


def measure(paths: list[str], options: argparse.Namespace) -> None:
    """Takes turns, and prints the results."""
    rank, size = keras_hvd.rank(), keras_hvd.size()
    by_hand = samples(paths[rank::size]).batch(options.batch // size)
    datasets = {
        "distribute": keras_hvd.data.distribute(samples(paths), options.batch),
        "by hand": by_hand.prefetch(tf.data.AUTOTUNE),
    }
    speeds = {name: [] for name in datasets}
    for dataset in datasets.values():
        speed(dataset, options.steps)
    for number in range(options.rounds):
        # The first one of a round is the last one of the next.
        for name in list(datasets)[:: 1 if number % 2 else -1]:
            speeds[name].append(speed(datasets[name], options.steps))
    if rank != 0:
        return
    for name, values in speeds.items():
        print(f"{name}: {statistics.median(values):,.0f} images/s")
    ratios = summary([a / b for a, b in zip(*speeds.values())])
    print(
        f"distribute, against by hand: {ratios['median']:.1%} "
        f"({ratios['p10']:.1%}-{ratios['p90']:.1%}); wanted: {WANTED_PERCENT} %",
        flush=True,
    )


def speed(dataset: tf.data.Dataset, steps: int) -> float:
    """Images a second of all ranks in these steps, until the last rank has made them.

    A new iterator has nothing made ahead while others are measured. Its end does not
    count: TensorFlow's tuning may hold that up for more than a second.
    """
    keras_hvd.barrier()
    begin = time.perf_counter()
    batches = iter(dataset.repeat())
    images = sum(int(next(batches)[1].shape[0]) for _ in range(steps))
    seconds = time.perf_counter() - begin
    del batches
    of_ranks = keras_hvd.allgather_object((images, seconds))
    return sum(each[0] for each in of_ranks) / max(each[1] for each in of_ranks)


if __name__ == "__main__":
    main()
