"""broadcast_object and allgather_object."""

import numpy as np
import pytest

import keras_hvd


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: rank,
        lambda rank: None,
        lambda rank: {"rank": rank, "text": "ü" * (1000 * rank)},
        lambda rank: [1.5] * rank,
        lambda rank: np.full(1_000_003, rank),
    ],
    ids=["number", "none", "dict", "list", "large array"],
)
def test_every_root_and_every_rank(make, rank, size):
    gathered = keras_hvd.allgather_object(make(rank))
    assert len(gathered) == size
    for root in range(size):
        sent = keras_hvd.broadcast_object(make(rank), root)
        np.testing.assert_equal(sent, make(root))
        np.testing.assert_equal(gathered[root], make(root))


def test_only_the_root_has_to_be_picklable(rank):
    given = "fine" if rank == 0 else lambda: None
    assert keras_hvd.broadcast_object(given) == "fine"


def test_names_keep_calls_apart(rank):
    assert keras_hvd.broadcast_object(rank, name="one") == 0
    assert keras_hvd.allgather_object(rank, name="one")[0] == 0


def test_a_root_that_does_not_exist(size):
    with pytest.raises(keras_hvd.MismatchError, match="1000"):
        keras_hvd.broadcast_object("x", root_rank=1000)
    assert keras_hvd.allgather_object(1) == [1] * size


@pytest.mark.usefixtures("several_ranks")
def test_roots_that_differ_are_an_error_on_every_rank(rank, size):
    with pytest.raises(keras_hvd.MismatchError, match="root"):
        keras_hvd.broadcast_object("x", root_rank=min(rank, 1))
    assert keras_hvd.allgather_object(1) == [1] * size
