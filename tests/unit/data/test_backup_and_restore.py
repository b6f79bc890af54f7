"""BackupAndRestore on one process."""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.callbacks import BackupAndRestore
from keras_hvd.data import Position, from_files

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


@pytest.fixture(autouse=True, scope="module")
def initialized():
    keras_hvd.init()


@pytest.fixture
def data(tmp_path):
    """A dataset of 40 samples in batches of 4, and its position."""
    for file in range(2):
        (tmp_path / f"{file}.txt").write_text("1\n2\n3\n4\n" * 5)
    position = Position()
    lines = from_files(str(tmp_path / "*.txt"), "text", position=position)
    numbers = lines.map(lambda line: [tf.strings.to_number(line)])
    return numbers.map(lambda x: (x, x)).batch(4), position


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    return model


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


def test_without_a_position_it_goes_on_at_an_epoch(model, tmp_path, capsys):
    backup = str(tmp_path / "backup")
    x = np.ones((8, 1), np.float32)

    def fit(model, *others):
        return model.fit(
            x, x, epochs=5, verbose=0, callbacks=[BackupAndRestore(backup), *others]
        )

    with contextlib.suppress(InterruptedError):
        fit(model, Interrupt())
    again = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    again.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    assert capsys.readouterr().out == ""
    history = fit(again)
    assert capsys.readouterr().out == f"Resumed at epoch 3 from {backup}/\n"
    assert history.epoch == [2, 3, 4]
    assert int(again.optimizer.iterations) == 5
    assert not (tmp_path / "backup").exists()


def test_it_says_that_nothing_is_left_to_train(model, tmp_path, capsys):
    x = np.ones((8, 1), np.float32)
    callback = BackupAndRestore(str(tmp_path), delete_checkpoint=False)
    for _ in range(2):
        model.fit(x, x, epochs=2, verbose=0, callbacks=[callback])
    said = f"Nothing is left to train: {tmp_path}/ was saved after epoch 2\n"
    assert capsys.readouterr().out == said


def test_what_was_restored_stays_whole_until_there_is_a_new_backup(model, tmp_path):
    """Also where the job that goes on dies while it writes its first one."""
    x = np.ones((8, 1), np.float32)
    written = []
    for epochs in (1, 2):
        callback = BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        model.fit(x, x, epochs=epochs, verbose=0, callbacks=[callback])
        file = json.loads((tmp_path / "training.json").read_text())["weights"]
        written.append((file, (tmp_path / file).read_bytes()))
    (first, weights), (second, _) = written
    assert first != second
    assert (tmp_path / first).read_bytes() == weights


def test_a_backup_that_cannot_be_read_is_an_error(model, tmp_path):
    backup = tmp_path / "backup"
    x = np.ones((8, 1), np.float32)
    callback = BackupAndRestore(str(backup), delete_checkpoint=False)
    model.fit(x, x, verbose=0, callbacks=[callback])
    (weights,) = backup.glob("*.h5")
    weights.write_text("no weights")
    with pytest.raises(ValueError, match="cannot restore from .*backup"):
        model.fit(x, x, verbose=0, callbacks=[callback])


def test_a_model_without_variables_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ValueError, match="has no variables yet: call model.build"):
        model.fit(
            np.ones((8, 1)), np.ones(8), callbacks=[BackupAndRestore(str(tmp_path))]
        )


def test_a_batch_size_that_is_not_the_datasets(model, data, tmp_path):
    dataset, position = data
    backup = str(tmp_path / "backup")
    with pytest.warns(UserWarning, match="20 samples of rank 0 had been read"):
        model.fit(dataset, verbose=0, callbacks=[BackupAndRestore(backup, position, 2)])


def test_arguments_that_make_no_sense():
    position = Position()
    for error, match, arguments in (
        (TypeError, "position must be a Position, got 'x'", {"position": "x"}),
        (TypeError, "batch_size", {"position": position}),
        (ValueError, "batch_size=0", {"position": position, "batch_size": 0}),
        (
            ValueError,
            "save_freq=0",
            {"position": position, "batch_size": 1, "save_freq": 0},
        ),
        (ValueError, "take a position", {"save_freq": 5}),
    ):
        with pytest.raises(error, match=match):
            BackupAndRestore("folder", **arguments)
