"""Saved by rank 0, loaded by all, trained on."""

import pathlib
import tempfile

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = X[:, :2]


@pytest.fixture
def shared_folder(rank):
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield pathlib.Path(keras_hvd.broadcast_object(own))
        keras_hvd.barrier()


def test_training_goes_on(
    rank, make_linear, shared_folder, equal_on_all_ranks, difference
):
    """As if it had not been saved and loaded in between."""
    kept, path = BroadcastGlobalVariables(0), shared_folder / "model.keras"
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    model.fit(X + rank, Y, epochs=2, verbose=0, shuffle=False, callbacks=[kept])
    if rank == 0:
        model.save(path)
    keras_hvd.barrier()
    loaded = keras_hvd.load_model(path)
    for each in (model, loaded):
        each.fit(X + rank, Y, epochs=2, verbose=0, shuffle=False, callbacks=[kept])
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    assert difference(loaded.get_weights(), model.get_weights()) < 1e-6
    assert equal_on_all_ranks(loaded.get_weights())


def test_plainly_loaded_model_is_refused(
    rank, several_ranks, make_linear, shared_folder
):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    if rank == 0:
        model.save(shared_folder / "model.keras")
    keras_hvd.barrier()
    loaded = keras.models.load_model(shared_folder / "model.keras")
    with pytest.raises(RuntimeError, match="keras_hvd.load_model"):
        loaded.fit(X, Y, verbose=0, callbacks=[BroadcastGlobalVariables(0)])
