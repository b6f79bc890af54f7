"""Position: training goes on within an epoch, each sample read exactly once."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.callbacks import BackupAndRestore, BroadcastGlobalVariables
from keras_hvd.data import Position, from_files

BATCH = 16


@pytest.fixture(scope="module")
def fewer(size):
    """A process set of one rank less."""
    process_set = keras_hvd.ProcessSet(range(max(1, size - 1)))
    if size == 1:
        yield keras_hvd.global_process_set
        return
    yield keras_hvd.add_process_set(process_set)
    keras_hvd.remove_process_set(process_set)


def numbers_in(folder, position, files="*.txt", **settings):
    dataset = from_files(
        str(folder / files), "text", position=position, shuffle=100, **settings
    )
    return dataset.map(
        lambda line: tf.strings.to_number(line, tf.int32),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def train(dataset, position, steps=None):
    """The samples of a training loop's steps, while the pipeline reads ahead."""
    seen = []
    for step, batch in enumerate(dataset.batch(BATCH).prefetch(5)):
        if step == steps:
            break
        seen += batch.numpy().tolist()
        position.advance(len(batch))
    return seen


def of_all_ranks(numbers):
    return [number for part in keras_hvd.allgather_object(numbers) for number in part]


@pytest.mark.parametrize("files", ["*.txt", "[23].txt"], ids=["many", "few"])
def test_going_on_with_other_numbers_of_ranks(folder, fewer, files, size):
    """Stopped twice in one epoch, at random steps: all ranks, fewer, all again."""
    random = np.random.RandomState(size)
    expected = list(range(10_000)) if files == "*.txt" else list(range(5500, 8700))
    steps = len(expected) // BATCH // size // 3

    position = Position()
    numbers = numbers_in(folder, position, files)
    position.start_epoch(4)
    seen = train(numbers, position, random.randint(1, steps))
    state = position.state()

    if fewer.included():
        position = Position()
        position.restore(state)
        numbers = numbers_in(folder, position, files, process_set=fewer)
        assert position.epoch == 4
        seen += train(numbers, position, random.randint(1, steps))
        state = position.state()
    state = keras_hvd.broadcast_object(state, 0)

    position = Position()
    numbers = numbers_in(folder, position, files)
    position.restore(state)
    seen += train(numbers, position)
    assert sorted(of_all_ranks(seen)) == expected

    position.end_epoch()
    assert position.epoch == 5
    assert sorted(of_all_ranks(train(numbers, position))) == expected


def test_the_same_ranks_go_on_with_the_same_rest(folder):
    """The samples after a restart are the rest of the epoch, in its order."""
    position = Position()
    numbers = numbers_in(folder, position, interleave=1)
    whole = train(numbers, position)
    position.start_epoch(0)
    begun = train(numbers, position, 20)
    assert begun == whole[: len(begun)]
    state = position.state()
    again = Position()
    again.restore(state)
    numbers = numbers_in(folder, again, interleave=1)
    assert position.state() == again.state() == state
    assert train(numbers, again) == whole[len(begun) :]


def test_an_iteration_begins_where_the_position_is(folder):
    position = Position()
    numbers = numbers_in(folder, position)
    peeked = next(iter(numbers)).numpy()
    first = train(numbers, position, 3)
    assert first[0] == peeked
    second = train(numbers, position)
    assert not set(first) & set(second)
    assert sorted(of_all_ranks(first + second)) == list(range(10_000))


@pytest.mark.usefixtures("several_ranks")
def test_ranks_in_different_epochs_are_an_error_on_all(folder, rank):
    position = Position()
    numbers_in(folder, position)
    position.start_epoch(int(rank == 1))
    with pytest.raises(keras_hvd.MismatchError, match="rank 0: 0, rank 1: 1"):
        position.state()


class Recording(keras.Model):
    """A linear model that notes its training samples."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.build((None, 1))
        self.seen = []

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(tf.cast(x, tf.float32) * 1e-4)

    def train_step(self, data):
        x, y = data
        done = tf.numpy_function(self.record, [x], tf.int64)
        with tf.control_dependencies([done]):
            return super().train_step((tf.identity(x), y))

    def record(self, x):
        self.seen += x.ravel().tolist()
        return np.int64(0)


class Interrupt(keras.callbacks.Callback):
    """Ends `fit` as a failure would, after a step of the second epoch."""

    every_rank = True

    def __init__(self, step):
        super().__init__()
        self.step, self.epoch = step, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.model.seen.append(None)

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, self.step):
            raise InterruptedError


@pytest.fixture
def fit(folder, tmp_path):
    """Trains a new model, from the backup if any; returns each epoch's samples."""
    backup = keras_hvd.broadcast_object(str(tmp_path / "backup"), 0)

    def run(step, epochs=3, **settings):
        position = Position()
        numbers = numbers_in(folder, position, "*.few", even=BATCH)
        numbers = numbers.map(lambda x: ([x], [tf.cast(x, tf.float32) * 1e-4]))
        model = Recording()
        model.compile(
            keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
            "mse",
            steps_per_execution=settings.pop("steps_per_execution", 1),
        )
        callbacks = [
            BroadcastGlobalVariables(0),
            BackupAndRestore(backup, position, BATCH, **settings),
            Interrupt(step),
        ]
        with contextlib.suppress(InterruptedError):
            model.fit(
                numbers.batch(BATCH), epochs=epochs, verbose=0, callbacks=callbacks
            )
        seen, model.seen = model.seen, []
        starts = [i for i, each in enumerate(seen) if each is None]
        return [
            seen[start + 1 : end] for start, end in zip(starts, [*starts[1:], None])
        ], model

    return run


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("at_once", [1, 5])
def test_fit_goes_on_within_an_epoch(fit, at_once, equal_on_all_ranks):
    (first, interrupted), _ = fit(
        step=14, save_freq=10, delete_checkpoint=False, steps_per_execution=at_once
    )
    saved = 10 * BATCH  # the steps after that have not been saved
    assert len(interrupted) == 15 * BATCH
    (rest, third), model = fit(step=None, save_freq=10, steps_per_execution=at_once)
    assert len(third) == len(first)
    everyones = of_all_ranks(interrupted[:saved] + rest)
    assert len(set(everyones)) == len(everyones)
    assert saved + len(rest) == len(first)
    assert equal_on_all_ranks(model.get_weights())
    trained = len(first) + saved + len(rest) + len(third)
    assert int(model.optimizer.iterations) == trained // BATCH


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_rank_0_says_where_fit_goes_on(fit, rank, capsys):
    """It counts the steps of an epoch in all jobs that have trained on it."""
    said = []
    for step in (12, 7, None):
        fit(step, save_freq=5, delete_checkpoint=False)
        said += capsys.readouterr().out.splitlines()
    where = [line.partition(" from ")[0] for line in said]
    assert where == (rank == 0) * [
        "Resumed at epoch 2, after step 10,",
        "Resumed at epoch 2, after step 15,",
    ]


def test_fit_that_does_not_see_the_end_of_epochs(folder, tmp_path):
    backup = keras_hvd.broadcast_object(str(tmp_path), 0)
    position = Position()
    numbers = numbers_in(folder, position, even=BATCH)
    numbers = numbers.map(lambda x: ([x], [tf.cast(x, tf.float32) * 1e-4]))
    model = Recording()
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    with pytest.raises(RuntimeError, match="leave out steps_per_epoch"):
        model.fit(
            numbers.batch(BATCH),
            epochs=2,
            steps_per_epoch=3,
            verbose=0,
            callbacks=[
                BroadcastGlobalVariables(0),
                BackupAndRestore(backup, position, BATCH),
            ],
        )
