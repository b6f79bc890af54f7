"""from_arrays: ranks share the rows of each step, and any number of them the rest.

Its datasets are those of tensorflow.data.
"""

from collections import Counter

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.callbacks import BackupAndRestore, BroadcastGlobalVariables
from keras_hvd.data import Position, from_arrays

COUNT, BATCH = 101, 4
NUMBERS = np.arange(COUNT)


@pytest.fixture(scope="module")
def fewer(size):
    """A process set of one rank less."""
    fewer = keras_hvd.add_process_set(range(max(1, size - 1)))
    yield fewer
    keras_hvd.remove_process_set(fewer)


def batches(dataset, position=None, steps=None):
    """The rows of each step, while the pipeline reads ahead."""
    seen = []
    for step, batch in enumerate(dataset.prefetch(5)):
        if step == steps:
            break
        seen.append(batch.numpy().tolist())
        if position is not None:
            position.advance(len(batch))
    return seen


def by_steps(mine, process_set=keras_hvd.global_process_set):
    """The rows of each step, of all ranks, which have made the same number of them."""
    of_ranks = keras_hvd.allgather_object(mine, process_set=process_set)
    return [sum(step, []) for step in zip(*of_ranks, strict=True)]


def test_all_ranks_have_each_row_once(size):
    dataset = from_arrays(NUMBERS, batch_size=BATCH)
    for _ in range(2):
        steps = by_steps(batches(dataset))
        assert len(steps) == int(dataset.cardinality()) == -(-COUNT // (BATCH * size))
        # The last rows may be fewer than ranks.
        seen = Counter(row for step in steps for row in {*step})
        assert seen == Counter(range(COUNT))
        for step in steps[:-1]:
            assert len(step) == BATCH * size


def test_steps_have_the_rows_of_one_process(size):
    """They follow the same order, whatever the number of ranks is."""
    whole = np.random.RandomState([0, 0]).permutation(COUNT).tolist()
    steps = by_steps(batches(from_arrays(NUMBERS, batch_size=BATCH)))
    for number, step in enumerate(steps):
        assert {*step} == {*whole[number * BATCH * size :][: BATCH * size]}


def test_other_numbers_of_ranks_go_on_with_the_rest(fewer):
    """Stopped twice in one epoch: all ranks, fewer, all again."""
    position = Position()
    dataset = from_arrays(NUMBERS, batch_size=BATCH, position=position)
    position.start_epoch(4)
    seen = by_steps(batches(dataset, position, 3))
    state = position.state()

    found = None
    if fewer.included():
        position = Position()
        position.restore(state)
        dataset = from_arrays(
            NUMBERS, batch_size=BATCH, position=position, process_set=fewer
        )
        found = by_steps(batches(dataset, position, 2), fewer), position.state()
    of_fewer, state = keras_hvd.broadcast_object(found, 0)
    seen += of_fewer

    position = Position()
    dataset = from_arrays(NUMBERS, batch_size=BATCH, position=position)
    position.restore(state)
    assert (position.epoch, position.is_inside_epoch) == (4, True)
    seen += by_steps(batches(dataset, position))
    assert Counter(row for step in seen for row in {*step}) == Counter(range(COUNT))

    position.end_epoch()
    rows = [row for step in by_steps(batches(dataset, position)) for row in {*step}]
    assert sorted(rows) == [*range(COUNT)]


def test_a_backup_goes_on_within_an_epoch(tmp_path):
    """`fit` ends in the middle of the second epoch, and another one goes on."""
    folder = str(keras_hvd.broadcast_object(tmp_path, 0))
    x, y = np.ones((COUNT, 2), "float32"), np.ones((COUNT, 1), "float32")
    steps = []

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            if len(steps) == at:
                raise InterruptedError

    def train():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        position = Position()
        dataset = from_arrays(x, y, batch_size=BATCH, position=position)
        backup = BackupAndRestore(folder, position, batch_size=BATCH, save_freq=1)
        callbacks = [BroadcastGlobalVariables(0), backup, Stops()]
        model.fit(dataset, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)

    whole = -(-COUNT // (BATCH * keras_hvd.size()))
    at = whole + 3
    with pytest.raises(InterruptedError):
        train()
    at = 0
    train()
    assert len(steps) == 3 * whole


def test_other_rows_are_an_error_on_every_rank(rank, size, raises_on_all_ranks):
    rows = NUMBERS.copy()
    if rank == size - 1:
        rows[[3, 4]] = rows[[4, 3]]
    with pytest.raises(ValueError) as error:
        from_arrays(rows)
    raises_on_all_ranks(
        error.value,
        f"from_arrays: rank {size - 1} holds other rows than rank 0",
        "leave out from_arrays()",
    )


def test_other_settings_are_an_error_on_every_rank(rank, raises_on_all_ranks):
    with pytest.raises(ValueError) as error:
        from_arrays(NUMBERS, seed=int(rank == 0))
    raises_on_all_ranks(error.value, "from_arrays: seed is 1 on rank 0")
