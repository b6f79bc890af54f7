"""even: the same number of steps on all ranks, however much data each has."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.data import even


def batches_of(rank: int) -> int:
    """How many batches of two rows a rank has; of the last one, one row."""
    return 3 + 2 * rank


def part(rank: int) -> tf.data.Dataset:
    rows = 2 * batches_of(rank) - 1
    return tf.data.Dataset.range(100 * rank, 100 * rank + rows).batch(2)


def unknown(rank: int) -> tf.data.Dataset:
    """The same batches, whose number TensorFlow does not know."""
    rows = 2 * batches_of(rank) - 1
    wanted = tf.data.Dataset.range(200).filter(lambda x: x < rows)
    return wanted.map(lambda x: x + 100 * rank).shuffle(5).batch(2).prefetch(1)


PARTS = {"known": part, "unknown": unknown}


@pytest.mark.parametrize("kind", PARTS)
def test_drop(kind, rank, read):
    dataset = even(PARTS[kind](rank))
    assert int(dataset.cardinality()) == len(list(dataset)) == batches_of(0)
    assert set(read(dataset)) <= set(read(part(rank)))


@pytest.mark.parametrize("kind", PARTS)
def test_repeat(kind, rank, size, read):
    dataset = even(PARTS[kind](rank), "repeat")
    steps = batches_of(size - 1)
    for _ in range(2):
        assert len(list(dataset)) == steps
        assert set(read(dataset)) == set(read(part(rank)))
    assert int(dataset.cardinality()) == steps


@pytest.mark.parametrize("kind", PARTS)
def test_pad(kind, rank, size):
    def with_targets(x):
        return x, 2 * x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset, count = even(PARTS[kind](rank).map(with_targets), "pad")
    warned = [each for each in caught if "sample weight 0" in str(each.message)]
    assert len(warned) == (rank == 0 and size > 1)
    assert count == sum(2 * batches_of(peer) - 1 for peer in range(size))
    assert int(dataset.cardinality()) == batches_of(size - 1)
    batches = list(dataset.as_numpy_iterator())
    assert len(batches) == batches_of(size - 1)
    x, y, weights = (np.concatenate(parts) for parts in zip(*batches))
    assert sorted(x[weights == 1]) == [
        *range(100 * rank, 100 * rank + weights.sum().astype(int))
    ]
    np.testing.assert_array_equal(y, 2 * x)
    assert set(np.unique(weights)) <= {0.0, 1.0}
    assert weights.sum() == 2 * batches_of(rank) - 1


@pytest.mark.filterwarnings("ignore:even. the ranks have")
def test_weights_that_there_are_are_kept(rank):
    def weigh(x):
        return {"a": x}, (x, x), tf.cast(x, tf.float32)

    dataset, _ = even(part(rank).map(weigh), "pad")
    batches = list(dataset.as_numpy_iterator())
    x = np.concatenate([each[0]["a"] for each in batches[: batches_of(rank)]])
    weights = np.concatenate([each[2] for each in batches])
    np.testing.assert_array_equal(weights[: len(x)], x)
    assert (weights[len(x) :] == 0).all()


@pytest.mark.filterwarnings("ignore:even. the ranks have")
def test_padded_metrics_are_exact(rank, size):
    """The mean over the rows of all ranks, and nothing of the padding."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.compile(
        loss=keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
        weighted_metrics=["mae"],
    )

    def from_zero(x):
        x = tf.cast(x, tf.float32)[:, tf.newaxis]
        return x, tf.zeros_like(x)

    dataset, count = even(part(rank).map(from_zero), "pad")
    results = keras_hvd.evaluate(model, dataset, verbose=0, return_dict=True)
    rows = [np.arange(100 * r, 100 * r + 2 * batches_of(r) - 1) for r in range(size)]
    assert results["mae"] == pytest.approx(np.concatenate(rows).mean(), rel=1e-6)
    assert len(np.concatenate(rows)) == count


def test_a_given_number_is_not_counted(rank, read):
    def unreadable(x):
        tf.debugging.assert_less(x, np.int64(100 * rank + 4))
        return x

    dataset = part(rank).unbatch().map(unreadable).filter(lambda x: True).batch(2)
    assert len(read(even(dataset, steps=2))) == 4
    assert len(list(even(part(rank), "repeat", steps=9))) == 9


def test_fewer_than_counted_is_an_error(rank, size):
    dataset = even(unknown(rank), steps=batches_of(size))
    with pytest.raises(tf.errors.OpError, match="contain"):
        list(dataset)


def test_without_an_end(rank, size):
    dataset = part(rank).repeat()
    assert even(dataset) is dataset
    assert even(dataset, "repeat") is dataset
    mixed = dataset if rank == 0 else part(rank)
    finite = even(mixed)
    if size > 1:
        assert len(list(finite)) == batches_of(1)
    endless = even(mixed, "repeat")
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY


def test_errors_on_all_ranks(rank, size):
    last = size - 1
    empty = part(rank).take(0) if rank == last else part(rank)
    for mode in ("drop", "repeat"):
        with pytest.raises(ValueError, match=f"dataset of rank {last} has no elements"):
            even(empty, mode)
    targets = part(rank).map(lambda x: (x, x))
    with pytest.raises(ValueError, match=f"on rank {last}: mode='pad' takes batches"):
        even(part(rank) if rank == last else targets, "pad")
    with pytest.raises(ValueError, match="the dataset is infinite"):
        even(targets.repeat(), "pad")
    if size > 1:
        with pytest.raises(ValueError, match="mode is 'drop' on rank 0, and 'repeat'"):
            even(part(rank), "repeat" if rank else "drop")
    for wrong in ("more", None):
        with pytest.raises(ValueError, match="mode must be one of"):
            even(part(rank), wrong)
    with pytest.raises(TypeError, match="takes a tf.data.Dataset; got a list"):
        even([1, 2])
    with pytest.raises(ValueError, match="steps must be positive"):
        even(part(rank), steps=0)
    with pytest.raises(TypeError, match="steps must be a whole number"):
        even(part(rank), steps=1.5)
