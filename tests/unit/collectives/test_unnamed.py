"""Eager collectives without names: from one thread, or one after the other's end."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import keras_hvd
from keras_hvd.job.unnamed import Turns


@pytest.fixture
def turns():
    return Turns()


@pytest.fixture
def worker():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        yield executor


def take(turns, name="unnamed_allreduce", process_set=0):
    with turns.take(name, process_set):
        pass


def test_a_thread_that_was_started_afterwards(turns):
    take(turns)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(take, turns).result()
        executor.submit(take, turns).result()


def test_the_main_thread_after_the_end_of_another(turns):
    with ThreadPoolExecutor(1) as executor:
        executor.submit(take, turns).result()
    take(turns)


def test_the_main_thread_during_the_life_of_another(turns, worker):
    worker.submit(take, turns).result()
    with pytest.raises(keras_hvd.MismatchError, match="unnamed_allreduce.*MainThread"):
        take(turns)


def test_a_thread_that_was_there_before(turns, worker):
    take(turns)
    with pytest.raises(keras_hvd.MismatchError, match="give each of the two a name"):
        worker.submit(take, turns).result()


def test_two_threads_one_of_which_has_ended(turns, worker):
    with ThreadPoolExecutor(1) as executor:
        executor.submit(take, turns).result()
    with pytest.raises(keras_hvd.MismatchError):
        worker.submit(take, turns).result()


def test_a_thread_that_was_started_meanwhile(turns):
    with turns.take("unnamed_allreduce"), ThreadPoolExecutor(1) as executor:
        during = executor.submit(take, turns)
        assert isinstance(during.exception(), keras_hvd.MismatchError)
        executor.submit(take, turns, "unnamed_allgather").result()
        executor.submit(take, turns, process_set=1).result()


def test_the_first_goes_on_after_an_error(turns, worker):
    take(turns)
    assert isinstance(worker.submit(take, turns).exception(), keras_hvd.MismatchError)
    take(turns)


def test_a_thread_of_python_function(turns):
    """TensorFlow runs it on a thread of its own, which Python did not start."""
    tf = pytest.importorskip("tensorflow")

    @tf.function
    def step():
        tf.py_function(lambda: take(turns), [], [])
        return tf.constant(0)

    for _ in range(2):
        take(turns)
        step()
    assert threading.current_thread() is threading.main_thread()
