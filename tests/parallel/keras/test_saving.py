"""A file that all ranks save to at once is whole, and of one rank."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

TIMES = 8


@pytest.fixture
def folder(tmp_path, rank) -> Path:
    """A folder that all ranks know."""
    return keras_hvd.broadcast_object(tmp_path, 0)


@pytest.fixture
def model(rank) -> keras.Model:
    """A model whose numbers all tell its rank."""
    made = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(300), keras.layers.Dense(64)]
    )
    made.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    for weight in made.weights:
        weight.assign(tf.fill(weight.shape, rank + 1.0))
    return made


def of_one_rank(weights: list[np.ndarray], size: int) -> bool:
    found = {float(value) for weight in weights for value in np.unique(weight)}
    return len(found) == 1 and found <= {*map(float, range(1, size + 1))}


def from_model(path: str) -> list[np.ndarray]:
    return keras.saving.load_model(path, compile=False).get_weights()


def from_weights(path: str) -> list[np.ndarray]:
    read = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(300), keras.layers.Dense(64)]
    )
    read.load_weights(path)
    return read.get_weights()


def from_checkpoint(path: str) -> list[np.ndarray]:
    read = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(300), keras.layers.Dense(64)]
    )
    tf.train.Checkpoint(model=read).read(path).expect_partial()
    return read.get_weights()


def from_saved_model(path: str) -> list[np.ndarray]:
    return [each.numpy() for each in tf.saved_model.load(path).variables]


SMALL = 80_000 / 1024**3

FILES = {
    "m.keras": (keras.Model.save, from_model),
    "m.h5": (keras.Model.save, from_model),
    "function.keras": (keras.saving.save_model, from_model),
    "m.weights.h5": (keras.Model.save_weights, from_weights),
}

SETS = {
    "m.weights.json": (
        lambda model, path: model.save_weights(path, max_shard_size=SMALL),
        from_weights,
    ),
    "folder": (
        lambda model, path: keras.saving.save_model(model, path, zipped=False),
        from_model,
    ),
    "exported": (
        lambda model, path: model.export(path, verbose=False),
        from_saved_model,
    ),
    "below/checkpoint": (
        lambda model, path: tf.train.Checkpoint(model=model).write(path),
        from_checkpoint,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_whole_at_any_time(model, folder, size, name):
    save, load = FILES[name]
    path = folder / name
    save(model, path)
    for _ in range(TIMES):
        # No rank waits for the others: they are writing meanwhile.
        assert of_one_rank(load(path), size)
        save(model, path)
    keras_hvd.barrier()
    assert [each.name for each in folder.iterdir()] == [name]


@pytest.mark.parametrize("name", SETS)
def test_files_that_belong_together_are_of_one_rank(model, folder, size, name):
    save, load = SETS[name]
    path = str(folder / name)
    for _ in range(2 if name == "exported" else TIMES):
        keras_hvd.barrier()
        save(model, path)
        keras_hvd.barrier()
        assert of_one_rank(load(path), size)
    keras_hvd.barrier()
    assert not [*folder.rglob(".*")]


def test_a_checkpoint_is_known_by_the_path_that_was_given(model, folder):
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model), str(folder), max_to_keep=2
    )
    for number in (1, 2, 3):
        assert manager.save() == str(folder / f"ckpt-{number}")
        keras_hvd.barrier()
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / "ckpt-3")
    kept = {each.name.split(".")[0] for each in folder.iterdir()}
    assert kept == {"checkpoint", "ckpt-2", "ckpt-3"}


def test_keras_callbacks_that_every_rank_has(model, folder):
    """Without a callback of keras_hvd nothing says that rank 0 alone writes."""
    seen = []

    def read(epoch, logs):
        if epoch < 3:  # The first rank to end deletes it.
            state = (folder / "backup" / "training_metadata.json").read_text()
            seen.append(json.loads(state)["epoch"])

    rows = np.ones((16, 64), "float32")
    model.fit(
        *(rows, rows),
        batch_size=2,
        epochs=4,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(folder / "last.keras", save_freq=1),
            keras.callbacks.BackupAndRestore(
                folder / "backup", save_freq=1, double_checkpoint=True
            ),
            keras.callbacks.LambdaCallback(on_epoch_end=read),
        ],
    )
    assert seen == [0, 1, 2]
    keras_hvd.barrier()
    assert [each.name for each in folder.iterdir()] == ["last.keras"]
    keras.saving.load_model(folder / "last.keras")
