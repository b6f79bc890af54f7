"""SyncBatchNormalization on one process: a layer as any other."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_hvd


def make_model() -> keras.Model:
    keras.utils.clear_session()
    layers = [keras.Input((3,)), keras_hvd.SyncBatchNormalization(momentum=0.5)]
    return keras.Sequential(layers)


@pytest.mark.parametrize("name", ["fused", "renorm", "synchronized"])
def test_what_it_does_not_do(name):
    with pytest.raises(ValueError, match=f"does not support {name}=True"):
        keras_hvd.SyncBatchNormalization(**{name: True})
    keras_hvd.SyncBatchNormalization(**{name: False})


def test_what_is_no_process_set():
    keras_hvd.init()
    with pytest.raises(TypeError, match="process_set must be a keras_hvd.ProcessSet"):
        keras_hvd.SyncBatchNormalization(process_set=[0])
    with pytest.raises(ValueError, match="is not part of the job"):
        keras_hvd.SyncBatchNormalization(process_set=keras_hvd.ProcessSet([0]))


def test_saving_and_loading(tmp_path):
    keras_hvd.init()
    model = make_model()
    model(np.arange(6.0, dtype="float32").reshape(2, 3), training=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    [layer] = loaded.layers
    assert type(layer) is keras_hvd.SyncBatchNormalization
    assert layer.get_config() == model.layers[0].get_config()
    np.testing.assert_array_equal(layer.moving_mean, model.layers[0].moving_mean)


def test_one_rank_is_plain():
    keras_hvd.init()
    x = np.arange(6.0, dtype="float32").reshape(2, 3)
    plain = keras.layers.BatchNormalization()
    ours = keras_hvd.SyncBatchNormalization()
    np.testing.assert_array_equal(ours(x, training=True), plain(x, training=True))


def test_a_process_that_has_not_named_the_layer_loads_it(tmp_path):
    make_model().save(tmp_path / "model.keras")
    program = (
        "import sys, keras_hvd; keras_hvd.init(); "
        "print(type(keras_hvd.load_model(sys.argv[1]).layers[0]).__name__)"
    )
    printed = subprocess.check_output(
        [sys.executable, "-c", program, tmp_path / "model.keras"], text=True
    )
    assert printed.split() == ["SyncBatchNormalization"]
