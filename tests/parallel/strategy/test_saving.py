"""A model saved under a strategy loads in a process that knows nothing of it."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

layers = keras.layers

READER = """
import sys
import keras, numpy as np, tensorflow as tf

folder = sys.argv[1]
x = np.load(f"{folder}/x.npy")
expected = np.load(f"{folder}/expected.npy")
model = keras.models.load_model(f"{folder}/model.keras")
assert type(model.optimizer) is keras.optimizers.Adam
assert int(model.optimizer.iterations) == 3
exported = tf.saved_model.load(f"{folder}/exported")
saved = tf.saved_model.load(f"{folder}/saved")
results = {
    "model.save": model.predict(x, verbose=0),
    "model.export": exported.serve(x),
    "saved_model": saved.predict(x),
}
model.fit(x, x[:, :2], verbose=0)
restored = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
restored.compile("adam", "mse")
restored.optimizer.build(restored.trainable_variables)
checkpoint = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer)
checkpoint.read(f"{folder}/checkpoint").assert_existing_objects_matched()
assert int(restored.optimizer.iterations) == 3
results["checkpoint"] = restored.predict(x, verbose=0)
for name, result in results.items():
    np.testing.assert_allclose(result, expected, 1e-6, err_msg=name)
assert "keras_hvd" not in sys.modules
print("all loaded")
"""


@pytest.fixture
def trained(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile("adam", "mse")
    x = np.random.default_rng(2).standard_normal((41, 3)).astype("float32")
    model.fit(x, x[:, :2], batch_size=16, shuffle=False, verbose=0)
    return model, x


def test_plain_process(trained, shared_path, rank):
    model, x = trained
    expected = model.predict(x, verbose=0)
    if rank == 0:
        # No collective is in it: the other ranks are not here.
        model.save(shared_path / "model.keras")
        model.export(str(shared_path / "exported"), verbose=False)
        module = tf.Module()
        module.model = model
        module.predict = tf.function(
            lambda x: model(x), input_signature=[tf.TensorSpec([None, 3])]
        )
        tf.saved_model.save(module, str(shared_path / "saved"))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.write(str(shared_path / "checkpoint"))
        np.save(shared_path / "x.npy", x)
        np.save(shared_path / "expected.npy", expected)
        done = subprocess.run(
            [sys.executable, "-c", READER, str(shared_path)],
            capture_output=True,
            text=True,
        )
        assert "all loaded" in done.stdout, done.stderr[-3000:]
    keras_hvd.barrier()


def test_loaded_under_the_strategy(
    trained, strategy, shared_path, rank, difference, equal_on_all_ranks
):
    """Training goes on from a file, with the optimizer's state."""
    model, x = trained
    if rank == 0:
        model.save(shared_path / "model.keras")
    keras_hvd.barrier()
    with strategy.scope():
        loaded = keras.models.load_model(shared_path / "model.keras")
    assert difference(loaded.get_weights(), model.get_weights()) == 0
    for each in (model, loaded):
        each.fit(x, x[:, :2], batch_size=16, shuffle=False, verbose=0)
    assert difference(loaded.get_weights(), model.get_weights()) < 1e-6
    assert equal_on_all_ranks(loaded.get_weights())
