"""from_arrays on one process: what it takes, and epochs in its order."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import keras_hvd
from keras_hvd.data import Position, from_arrays, shard

NUMBERS = np.arange(10)


@pytest.fixture(scope="module", autouse=True)
def joined():
    keras_hvd.init()


def of_pandas(kind, *arguments, **named):
    return getattr(pytest.importorskip("pandas"), kind)(*arguments, **named)


def epoch(dataset):
    return [int(number) for batch in dataset for number in batch]


@pytest.mark.parametrize(
    "make, number_of",
    [
        (lambda n: n, int),
        (tf.constant, int),
        (lambda n: of_pandas("Series", n, index=n[::-1]), int),
        (lambda n: of_pandas("DataFrame", {"a": n, "b": n}), lambda row: int(row[1])),
        (tf.ragged.range, lambda row: int(row.shape[0])),
        (lambda n: np.array([str(each) for each in n]), lambda row: int(row.numpy())),
    ],
    ids=["array", "tensor", "series", "frame", "ragged", "strings"],
)
def test_an_epoch_has_each_row_once(make, number_of):
    dataset = from_arrays(make(NUMBERS), batch_size=4)
    assert int(dataset.cardinality()) == 3
    for _ in range(2):
        batches = [[number_of(row) for row in batch] for batch in dataset]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(sum(batches, [])) == NUMBERS.tolist()


def test_rows_stay_together():
    data = {"a": NUMBERS, "b": [NUMBERS + 1, (NUMBERS * 2,)]}, NUMBERS**2, None
    for x, y, weight in from_arrays(*data):
        a, (b, (c,)) = x["a"], x["b"]
        assert sorted(a.numpy()) == NUMBERS.tolist()
        np.testing.assert_array_equal(b, a + 1)
        np.testing.assert_array_equal(c, a * 2)
        np.testing.assert_array_equal(y, a**2)
        assert weight is None


def test_the_order_comes_from_seed_and_epoch():
    dataset = from_arrays(NUMBERS, seed=3)
    epochs = [epoch(dataset) for _ in range(3)]
    assert len({*map(tuple, epochs)}) == 3
    position = Position()
    followed = from_arrays(NUMBERS, seed=3, position=position)
    for number in (2, 0):
        position.start_epoch(number)
        assert epoch(followed) == epochs[number]
    assert epoch(from_arrays(NUMBERS, seed=4)) != epochs[0]
    assert epoch(from_arrays(NUMBERS, shuffle=False)) == NUMBERS.tolist()


def test_a_position_goes_on_within_an_epoch():
    position = Position()
    dataset = from_arrays(NUMBERS, batch_size=2, position=position)
    whole = epoch(dataset)
    position.start_epoch(0)
    for number, _ in enumerate(dataset.prefetch(9)):
        position.advance(2)
        if number == 2:
            break
    saved = position.state()
    assert epoch(dataset) == whole[6:]
    again = Position()
    again.restore(saved)
    # Batches may be others.
    assert epoch(from_arrays(NUMBERS, batch_size=3, position=again)) == whole[6:]
    assert again.is_inside_epoch
    for other, differs in (
        ({"seed": 1}, "seed=0, now 1"),
        ({"shuffle": False}, "shuffle=True, now False"),
    ):
        again = Position()
        again.restore(saved)
        with pytest.raises(ValueError, match=differs):
            from_arrays(NUMBERS, position=again, **other)
    again = Position()
    again.restore(saved)
    with pytest.raises(ValueError, match="rows=10, now 9"):
        from_arrays(NUMBERS[:9], position=again)


def test_fit_trains_as_with_batches_of_that_order():
    x = np.random.default_rng(1).normal(size=(10, 2)).astype("float32")
    y = x.sum(axis=1)

    def model():
        keras.utils.set_random_seed(2)
        line = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        line.compile(keras.optimizers.Adam(0.1), "mse")
        return line

    ours, plain = model(), model()
    ours.fit(from_arrays(x, y, batch_size=4), epochs=3, verbose=0, shuffle=False)
    orders = from_arrays(NUMBERS, batch_size=4)
    for _ in range(3):
        for rows in orders:
            plain.train_on_batch(x[rows], y[rows])
    for found, expected in zip(ours.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_shard_leaves_it_as_it_is():
    dataset = from_arrays(NUMBERS)
    assert epoch(shard(dataset)) != epoch(dataset)
    assert sorted(epoch(shard(dataset))) == NUMBERS.tolist()


@pytest.mark.parametrize(
    "data, arguments, kind, said",
    [
        ((), {}, TypeError, "takes data"),
        ((NUMBERS, NUMBERS[1:]), {}, ValueError, "different numbers of rows"),
        ((3,), {}, ValueError, "has no rows"),
        ((NUMBERS[:0],), {}, ValueError, "the data have no rows"),
        ((NUMBERS,), {"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
        ((NUMBERS,), {"batch_size": 2.5}, TypeError, "batch_size"),
        ((NUMBERS,), {"seed": 2**32}, ValueError, "below 4294967296"),
        ((NUMBERS,), {"position": 3}, TypeError, "must be a Position; got 3"),
        ((scipy.sparse.eye(3).tocsr(),), {}, ValueError, "sparse"),
    ],
)
def test_what_it_refuses(data, arguments, kind, said):
    with pytest.raises(kind, match=said):
        from_arrays(*data, **arguments)
