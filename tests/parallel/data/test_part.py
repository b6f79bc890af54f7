"""part: disjoint rows of data that all ranks hold, and an error if they do not."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from sklearn.model_selection import train_test_split

import keras_hvd
from keras_hvd.data import part

ROWS = 23
NUMBERS = np.arange(ROWS)
WORDS = [f"word {number}" for number in NUMBERS]


def of_pandas(kind: str, *arguments, **named):
    return getattr(pytest.importorskip("pandas"), kind)(*arguments, **named)


# Each with its numbers; not all of them are memory that lies together.
KINDS = {
    "array": (lambda n: np.stack([n, n], 1).astype("float32"), lambda d: d[:, 0]),
    "columns": (lambda n: np.asfortranarray(np.stack([n, n], 1)), lambda d: d[:, 1]),
    "every second": (lambda n: np.repeat(n, 2)[::2], lambda d: d),
    "bfloat16": (lambda n: tf.cast(n, tf.bfloat16).numpy(), lambda d: d.astype(int)),
    "tensor": (lambda n: tf.constant(n), lambda d: d.numpy()),
    "ragged": (
        lambda n: tf.RaggedTensor.from_row_lengths(np.repeat(n, n), n),
        lambda d: d.row_lengths().numpy(),
    ),
    "objects": (
        lambda n: np.array([WORDS[each] for each in n], object),
        lambda d: [WORDS.index(each) for each in d],
    ),
    "strings": (
        lambda n: tf.constant([WORDS[each] for each in n]),
        lambda d: [WORDS.index(each.decode()) for each in d.numpy()],
    ),
    "frame": (
        lambda n: of_pandas(
            "DataFrame", {"a": n, "b": [WORDS[each] for each in n]}, index=n
        ),
        lambda d: d["b"].map(WORDS.index).to_numpy(),
    ),
    "series": (
        lambda n: of_pandas("Series", n, index=n[::-1]),
        lambda d: d.to_numpy(),
    ),
    "sparse": (
        lambda n: scipy.sparse.csc_matrix(n[:, None]),
        lambda d: d.toarray()[:, 0],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_one_ranks(kind, size):
    make, numbers_in = KINDS[kind]
    data = make(NUMBERS)
    equal, all_of_them = part(data), part(data, drop_remainder=False)
    assert type(equal) is type(all_of_them)
    for mine, expected in (
        (equal, NUMBERS[: ROWS // size * size]),
        (all_of_them, NUMBERS),
    ):
        of_ranks = keras_hvd.allgather_object([int(n) for n in numbers_in(mine)])
        assert sorted(sum(of_ranks, [])) == list(expected)
        if mine is equal:
            assert len({len(each) for each in of_ranks}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_is_an_error_on_every_rank(kind, rank, size, raises_on_all_ranks):
    make, _ = KINDS[kind]
    order = NUMBERS.copy()
    if rank == size - 1:
        order[[3, 4]] = order[[4, 3]]
    with pytest.raises(ValueError) as error:
        part(NUMBERS, make(order))
    raises_on_all_ranks(
        error.value,
        f"rank {size - 1} holds other rows than rank 0",
        "argument 1",
        "split and shuffle with one seed on all ranks",
    )


def test_a_split_without_a_seed_leaks_no_rows(rank, raises_on_all_ranks):
    np.random.seed(rank)
    train, _ = train_test_split(NUMBERS)
    with pytest.raises(ValueError) as error:
        part(train)
    raises_on_all_ranks(error.value, "random_state=0")
    train, validation = train_test_split(NUMBERS, random_state=0)
    trained = np.concatenate(keras_hvd.allgather_object(part(train)))
    assert not {*trained} & {*validation}


def test_structures_as_keras_takes_them(rank, size):
    x = {"image": np.ones((ROWS, 2)), "words": [NUMBERS, None]}
    mine, y, weights = part(x, NUMBERS, None)
    assert mine["image"].shape == (ROWS // size, 2)
    np.testing.assert_array_equal(mine["words"][0], y)
    assert mine["words"][1] is weights is None
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(mine["image"], y, verbose=0)


def test_strings_are_the_same_wherever_they_are_in_memory(rank):
    """Their pickles would differ: of one object twice, or of two that are equal."""
    word = "".join(["equal ", "words"])
    other = word if rank == 0 else "".join(["equal ", "words"])
    part(np.array([word, other, (1, word), [2.5, None]], object))


def test_a_process_set(rank, size):
    if size < 3:
        pytest.skip("takes 3 ranks")
    pair = keras_hvd.add_process_set([0, 2])
    if rank in (0, 2):
        assert part(NUMBERS, process_set=pair)[0] == rank // 2
    keras_hvd.remove_process_set(pair)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((np.ones(6), np.ones(5)), "different numbers of rows"),
        ((np.ones(1),), "too few for"),
        ((3.0,), "a float, which has no rows"),
        (([1, 2, 3],), "argument 0.0 is a int, which has no rows"),
        ((tf.sparse.from_dense([[1, 0], [0, 1]]),), "SparseTensor, which has no rows"),
    ],
)
def test_what_has_no_rows_for_all(data, said, raises_on_all_ranks):
    with pytest.raises(ValueError) as error:
        part(*data)
    raises_on_all_ranks(error.value, said)


def test_one_rank_with_other_data(rank, raises_on_all_ranks):
    """The others do not wait for it."""
    with pytest.raises(ValueError) as error:
        part(NUMBERS if rank else None)
    raises_on_all_ranks(error.value, "on rank 0: ValueError", "none")
    with pytest.raises(ValueError) as error:
        part(NUMBERS[rank:])
    raises_on_all_ranks(error.value, f"rows is {ROWS} on rank 0, and {ROWS - 1}")
