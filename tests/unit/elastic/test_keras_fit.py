"""What elastic.fit takes, and how callbacks go on after a failure."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import elastic
from keras_hvd.data import from_arrays, from_files
from keras_hvd.exceptions import RankFailedError

ROWS = np.ones((8, 1)), np.zeros((8, 1))


@pytest.fixture
def model():
    keras_hvd.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


class Counts(keras.callbacks.Callback):
    """Has attributes of all kinds; epoch 2 fails the first time."""

    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails
        self.began = []
        self.epochs, self.by_name, self.best = [], {"of": [0]}, np.zeros(2)
        self.compare = np.less
        self.object = object()
        self.unknown = lambda: 1

    def on_train_begin(self, logs=None):
        self.began.append(1)

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        self.by_name["of"].append(epoch)
        self.best += 1
        if epoch == 2 and self.fails:
            CallCount.failures += 1
            if CallCount.failures == 1:
                raise RankFailedError("rank 1 has left the job")


class CallCount:
    failures = 0


@pytest.fixture(autouse=True)
def no_failures(monkeypatch):
    monkeypatch.setattr(CallCount, "failures", 0)


def test_callbacks_go_back_to_the_begin_of_the_epoch(model, job):
    counts = Counts(fails=True)
    kept = counts.object, counts.unknown
    history = elastic.fit(model, lambda: ROWS, epochs=4, verbose=0, callbacks=[counts])
    assert job.renewals == 1
    assert CallCount.failures == 2
    assert history.epoch == counts.epochs == [0, 1, 2, 3]
    assert len(history.history["loss"]) == 4
    assert counts.by_name == {"of": [0, 0, 1, 2, 3]}
    assert counts.best.tolist() == [4, 4]
    assert counts.began == [1]
    assert (counts.object, counts.unknown) == kept
    # It can begin again.
    elastic.fit(model, lambda: ROWS, verbose=0, callbacks=[counts])
    assert counts.began == [1, 1]


def test_a_callback_of_functions_has_them_afterwards(model, job):
    began = []
    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: began.append(1)
    )
    own = callback.on_train_begin
    counts = Counts(fails=True)
    elastic.fit(
        model, lambda: ROWS, epochs=3, verbose=0, callbacks=[callback, [counts]]
    )
    assert began == [1]
    assert callback.on_train_begin is own


@pytest.mark.parametrize(
    "data",
    [ROWS, (*ROWS, np.ones(8)), tf.data.Dataset.from_tensors(ROWS)],
    ids=["rows", "weights", "dataset"],
)
def test_data_that_it_takes(model, data):
    history = elastic.fit(
        model, lambda: data, make_validation_data=lambda: ROWS, verbose=0
    )
    assert len(history.history["val_loss"]) == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"make_data": ROWS}, "make_data must be a function .* got tuple"),
        ({"make_validation_data": ROWS}, "make_validation_data must be a function"),
        ({"x": ROWS[0]}, "takes no x: return it from make_data"),
        ({"validation_data": ROWS}, "return it from make_validation_data"),
    ],
)
def test_data_that_it_refuses(model, arguments, said):
    with pytest.raises(TypeError, match=said):
        elastic.fit(**{"model": model, "make_data": lambda: ROWS, **arguments})


def test_data_of_four_parts_or_none_are_refused(model):
    with pytest.raises(ValueError, match="got a tuple of 4"):
        elastic.fit(model, lambda: (*ROWS, *ROWS))
    with pytest.raises(ValueError, match="must return .*; got None"):
        elastic.fit(model, lambda: None)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_generator_of_the_job_before_is_refused(model, job, is_new):
    """What that job has read of it would be missing."""
    kept = (ROWS for _ in range(12))
    arguments = {"steps_per_epoch": 4, "epochs": 3, "verbose": 0}
    arguments["callbacks"] = [Counts(fails=True)]
    if is_new:
        elastic.fit(model, lambda: (ROWS for _ in range(12)), **arguments)
        return
    with pytest.raises(ValueError, match="make_data returned the generator that"):
        elastic.fit(model, lambda: kept, **arguments)


def test_a_model_without_variables_is_refused():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="^elastic.fit: model .* no variables yet"):
        elastic.fit(model, lambda: ROWS)


class Fails(keras.callbacks.Callback):
    """Batch 5 of epoch 1 fails the first time, and what then is batch 1 the second."""

    def __init__(self):
        super().__init__()
        self.hooks, self.batches = [], []
        # It does not go back to a commit.
        self.begun = SimpleNamespace(epochs=[])

    def on_epoch_begin(self, epoch, logs=None):
        self.hooks.append(epoch)
        self.begun.epochs.append(epoch)
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.hooks.append([epoch])

    def on_train_batch_begin(self, batch, logs=None):
        at = {0: 6, 1: 2}.get(CallCount.failures)
        if (self.epoch, batch) == (1, at):
            CallCount.failures += 1
            raise RankFailedError("rank 1 has left the job")

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append([self.epoch, batch])


def undisturbed(train, job):
    """What a training that fails leaves, and one that does not."""
    for failures in (0, 9):
        CallCount.failures = failures
        keras.utils.set_random_seed(3)
        yield train()
    assert job.renewals == 2


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_the_rest_of_an_epoch_is_as_if_nothing_had_happened(job, steps_per_execution):
    """Also an average of weights, which Keras takes over when a `fit` ends."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(45, 2)), rng.normal(size=45)

    def train():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(
            keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1, use_ema=True)),
            "mse",
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
        )
        fails = Fails()
        history = elastic.fit(
            model,
            lambda position: from_arrays(x, y, batch_size=5, position=position),
            make_validation_data=lambda: (x, y),
            epochs=3,
            batches_per_commit=2,
            verbose=0,
            callbacks=[fails],
        )
        return history, model.get_weights(), fails

    failed, expected = undisturbed(train, job)
    assert failed[0].epoch == expected[0].epoch == [0, 1, 2]
    assert {*expected[0].history} == {"loss", "mae", "val_loss", "val_mae"}
    for name, values in expected[0].history.items():
        np.testing.assert_allclose(failed[0].history[name], values, rtol=1e-6)
    for found, weights in zip(failed[1], expected[1], strict=True):
        np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert failed[2].hooks == [0, [0], 1, [1], 2, [2]] == expected[2].hooks
    assert failed[2].begun.epochs == [0, 1, 2]
    # All batches of the epoch, in three pieces.
    of_epoch = [batch for epoch, batch in failed[2].batches if epoch == 1]
    whole = [batch for epoch, batch in expected[2].batches if epoch == 1]
    step = steps_per_execution
    assert of_epoch == [*whole[: 6 // step], *whole[: 2 // step], *whole[: -8 // step]]


def test_a_rest_of_less_than_a_batch_ends_the_epoch(job, model, tmp_path):
    """As more ranks may have it; here batches are larger instead."""
    (tmp_path / "lines").write_text("1\n" * 16)
    sizes = iter([2, 7])

    def make_data(position):
        size = next(sizes)
        lines = from_files(
            str(tmp_path / "lines"), "text", even=size, position=position
        )
        rows = lines.map(lambda line: tf.strings.to_number([line]))
        return rows.map(lambda row: (row, row)).batch(size)

    fails = Fails()
    CallCount.failures = 0
    history = elastic.fit(
        *(model, make_data),
        epochs=3,
        batches_per_commit=3,
        verbose=0,
        callbacks=[fails],
    )
    assert job.renewals == 1
    assert history.epoch == [0, 1, 2]
    assert fails.hooks == [0, [0], 1, [1], 2, [2]]
    assert fails.batches == [
        *([0, batch] for batch in range(8)),
        *([1, batch] for batch in range(6)),
        *([2, batch] for batch in range(2)),
    ]


def test_samples_are_counted_once(job, model, tmp_path):
    """Not in each job: that takes as long as reading all files."""
    (tmp_path / "lines").write_text("1\n" * 16)
    opened = []

    def reader(path):
        def open_(_):
            told = tf.numpy_function(lambda p: opened.append(p) or p, [path], tf.string)
            return tf.data.TextLineDataset(told)

        return tf.data.Dataset.range(1).flat_map(open_)

    def make_data(position):
        lines = from_files(str(tmp_path / "lines"), reader, even=2, position=position)
        rows = lines.map(lambda line: tf.strings.to_number([line]))
        return rows.map(lambda row: (row, row)).batch(2)

    CallCount.failures = 0
    arguments = {"epochs": 2, "batches_per_commit": 3, "verbose": 0}
    elastic.fit(model, make_data, callbacks=[Fails()], **arguments)
    assert job.renewals == 1
    # To count, for epoch 0, for epoch 1, and for its rest.
    assert len(opened) == 4


@pytest.mark.parametrize(
    "arguments, kind, said",
    [
        ({"batches_per_commit": 0}, ValueError, "must be at least 1"),
        ({"batches_per_commit": "2"}, TypeError, "batches_per_commit"),
        ({"steps_per_epoch": 3}, ValueError, "takes no steps_per_epoch"),
        ({"make_data": lambda _: ROWS}, RuntimeError, "give the position to .* first"),
        (
            {"make_data": lambda position: (from_arrays(*ROWS, position=position), 1)},
            TypeError,
            "got a tuple",
        ),
    ],
)
def test_what_commits_within_epochs_do_not_take(model, arguments, kind, said):
    with pytest.raises(kind, match=said):
        elastic.fit(
            **{
                "model": model,
                "make_data": lambda position: from_arrays(*ROWS, position=position),
                "batches_per_commit": 2,
                **arguments,
            }
        )


@pytest.mark.parametrize(
    "even, batch, said",
    [(None, 2, "needs even="), (4, 2, "give each batch the 4 samples")],
)
def test_files_give_whole_batches(model, tmp_path, even, batch, said):
    (tmp_path / "lines").write_text("1\n" * 12)

    def make_data(position):
        lines = from_files(
            str(tmp_path / "lines"), "text", even=even, position=position
        )
        rows = lines.map(lambda line: tf.strings.to_number([line]))
        return rows.map(lambda row: (row, row)).batch(batch)

    with pytest.raises((RuntimeError, tf.errors.InvalidArgumentError), match=said):
        elastic.fit(model, make_data, batches_per_commit=2, verbose=0)
