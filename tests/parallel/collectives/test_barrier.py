"""barrier: no rank passes before all have come."""

import mmap
import os

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd


@pytest.fixture
def arrivals(tmp_path, rank, size):
    """Memory that the ranks share: how often each has come to a barrier."""
    path = keras_hvd.broadcast_object(str(tmp_path / "arrivals"))
    if rank == 0:
        with open(path, "wb") as file:
            file.write(bytes(8 * size))
    keras_hvd.barrier()
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 8 * size)
    yield np.frombuffer(memory, np.int64)
    keras_hvd.barrier()
    if rank == 0:
        os.remove(path)


def test_nobody_passes_before_all_have_come(arrivals, rank):
    for turn in range(1, 301):
        arrivals[rank] = turn
        keras_hvd.barrier()
        assert arrivals.min() >= turn


def test_it_keeps_its_place_among_the_side_effects_of_a_function(arrivals, rank):
    @tf.function
    def step(turn):
        tf.py_function(lambda t: arrivals.__setitem__(rank, int(t)), [turn], [])
        keras_hvd.barrier()
        return tf.py_function(lambda: arrivals.min(), [], tf.int64)

    for turn in range(1, 101):
        assert step(tf.constant(turn)) >= turn


def test_it_runs_in_a_function_that_returns_nothing(arrivals, rank):
    @tf.function
    def wait():
        keras_hvd.barrier(name="in a function")

    for turn in range(1, 101):
        arrivals[rank] = turn
        wait()
        assert arrivals.min() >= turn
