"""Process sets given to init, and those of a job that is over."""

import subprocess
import sys

import pytest
import tensorflow as tf

import keras_hvd


def run(program):
    subprocess.run([sys.executable, "-c", program], check=True)


def test_before_init_the_global_set_is_of_no_job():
    run(
        """
import keras_hvd
whole = keras_hvd.global_process_set
assert whole.process_set_id == 0
assert whole.ranks is None
assert (whole.rank(), whole.size(), whole.included()) == (None, None, None)
for call in (
    lambda: keras_hvd.add_process_set([0]),
    lambda: keras_hvd.remove_process_set(whole),
    keras_hvd.join,
    keras_hvd.rank_op,
    keras_hvd.size_op,
):
    try:
        call()
    except keras_hvd.NotInitializedError:
        pass
    else:
        raise AssertionError(call)
"""
    )


@pytest.mark.parametrize("sets", [[3], "static", [[0]], keras_hvd.ProcessSet([0])])
def test_init_refuses_what_are_no_sets(sets):
    with pytest.raises(TypeError, match="'dynamic'|not iterable"):
        keras_hvd.init(process_sets=sets)


def test_init_refuses_a_set_given_twice():
    one = keras_hvd.ProcessSet([0])
    with pytest.raises(ValueError, match="process_sets has .* twice"):
        keras_hvd.init(process_sets=[one, keras_hvd.ProcessSet([0])])


@pytest.mark.parametrize("comm", [None, [], [0], (0,), range(1)])
def test_init_takes_all_ranks(comm):
    keras_hvd.init(comm)
    assert keras_hvd.size() == 1


@pytest.mark.parametrize(
    ("comm", "reason"),
    [
        ([1], r"has rank 1, but this process was started as rank 0 of 1"),
        ([0, 1], r"has rank 1, but this process"),
        ([-1], r"has rank -1, but this process"),
        ([0, 0], r"has rank 0 twice"),
    ],
)
def test_init_refuses_what_is_no_part(comm, reason):
    with pytest.raises(ValueError, match=reason):
        keras_hvd.init(comm)


@pytest.mark.parametrize("comm", [3, "0", [0.5], [None]])
def test_init_refuses_what_are_no_ranks(comm):
    with pytest.raises(TypeError, match="comm must be a list of ranks, an mpi4py"):
        keras_hvd.init(comm)


def test_init_again_adds_nothing():
    keras_hvd.init(process_sets="dynamic")
    keras_hvd.init(process_sets=[])
    with pytest.raises(ValueError, match="already initialized, without ProcessSet"):
        keras_hvd.init(process_sets=[keras_hvd.ProcessSet([0])])


def test_an_init_whose_sets_cannot_be_added_leaves_the_job():
    run(
        """
import keras_hvd
only = keras_hvd.ProcessSet([0])
try:
    keras_hvd.init(process_sets=[only])
except keras_hvd.MismatchError as error:
    assert "process set 0 already" in str(error), error
else:
    raise AssertionError("the set has the ranks of the global one")
assert not keras_hvd.is_initialized()
assert only.process_set_id is None
"""
    )


@pytest.mark.parametrize("rank", [-1, 2**31, 2**32])
def test_ranks_that_no_job_has_are_refused(rank):
    with pytest.raises(ValueError, match=f"negative or above 2147483647; .*{rank}"):
        keras_hvd.ProcessSet([0, rank])


def test_numbers_of_process_sets_are_not_cut_short():
    keras_hvd.init()
    with pytest.raises(tf.errors.OpError, match="4294967296"):
        keras_hvd.size_op(2**32)
