"""Iterators of tf.data that nothing needs any more keep no step waiting."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow import freed_iterators

FOLDER = str(Path(__file__).parent)


class Slow:
    """A dataset of two numbers, whose iterators take long to be freed."""

    def __init__(self) -> None:
        self.may_end, self.has_ended = threading.Event(), threading.Event()

    def dataset(self) -> tf.data.Dataset:
        def numbers():
            try:
                yield 1.0
                yield 2.0
            finally:
                if self.may_end.wait(60):
                    self.has_ended.set()

        spec = tf.TensorSpec((), tf.float32)
        dataset = tf.data.Dataset.from_generator(numbers, output_signature=spec)
        # Nothing is read ahead, so the generator has not ended before.
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)


@pytest.fixture
def slow() -> Slow:
    freed_iterators.install()
    return Slow()


def test_who_drops_an_iterator_does_not_wait_for_its_end(slow):
    iterator = iter(slow.dataset())
    assert next(iterator) == 1.0
    del iterator
    assert not slow.has_ended.is_set()
    slow.may_end.set()
    assert slow.has_ended.wait(60)


def test_few_wait_to_be_freed(slow):
    first = iter(slow.dataset())
    next(first)
    del first
    for _ in range(3 * freed_iterators._MOST_WAITING):
        iter(tf.data.Dataset.range(1))
    assert freed_iterators._dropped.qsize() == freed_iterators._MOST_WAITING
    slow.may_end.set()
    assert slow.has_ended.wait(60)


def test_an_iterator_that_is_in_use_stays(slow):
    slow.may_end.set()
    iterator = iter(slow.dataset())
    iter(slow.dataset())
    assert [float(each) for each in iterator] == [1.0, 2.0]


def test_a_child_that_is_forked_frees_iterators_too(slow):
    child = os.fork()
    if child == 0:
        freed_iterators._dropped.put(None)
        names = [each.name for each in threading.enumerate()]
        os._exit(names.count(freed_iterators._NAME))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


AT_THE_END = """
import atexit, threading
import tensorflow as tf
from keras_hvd.backends.tensorflow import freed_iterators
from test_freed_iterators import Slow

slow = Slow()

def tell():
    names = [each.name for each in threading.enumerate()]
    print(slow.has_ended.is_set(), freed_iterators._NAME in names)

atexit.register(tell)  # The last to run.
freed_iterators.install()
iterator = iter(slow.dataset())
next(iterator)
del iterator
threading.Timer(0.5, slow.may_end.set).start()
"""


def test_the_interpreter_ends_when_all_are_freed():
    """A thread that is within TensorFlow then would make it abort."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([FOLDER, *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "True False\n"), ended.stderr


def test_a_distributed_optimizer_frees_those_of_fit_so():
    keras_hvd.init()
    keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
    freed = iter(tf.data.Dataset.from_tensors(np.ones(1)))
    assert type(freed).__del__ is freed_iterators._hand_over
