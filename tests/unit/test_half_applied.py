"""After a failure a variable is suspect until it has a value from elsewhere."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow import guarded_saving, half_applied
from keras_hvd.job import basics, native


@pytest.fixture
def model() -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    made.optimizer.build(made.trainable_variables)
    return made


@pytest.fixture(scope="module", autouse=True)
def joined():
    keras_hvd.init()


@pytest.fixture
def fail(monkeypatch):
    """Makes the job of this process fail, and the process join another one."""
    epoch = basics.epoch()

    def fail():
        with monkeypatch.context() as patched:
            engine = SimpleNamespace(khvd_failure=lambda: b"rank 1 died")
            patched.setattr(native, "engine", lambda: engine)
            half_applied.note_failure()

    half_applied._failure.epoch = None
    yield fail
    half_applied.trust_all()
    half_applied._failure.epoch = epoch


def suspect(model: keras.Model) -> list[str]:
    of_model = [*model.weights, *model.optimizer.variables]
    return [each.path for each in of_model if half_applied.is_suspect(each)]


def test_all_that_existed_are_suspect(model, fail):
    assert suspect(model) == []
    fail()
    assert len(suspect(model)) == 2 + len(model.optimizer.variables)
    new = keras.Variable(1.0)
    assert not half_applied.is_suspect(new)


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_a_file_has_everything(model, fail, tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    (model.save if suffix == ".keras" else model.save_weights)(path)
    fail()
    with pytest.raises(keras_hvd.RankFailedError, match="rank 1 died.*kernel"):
        model.save(tmp_path / "again.keras")
    model.load_weights(path)
    assert suspect(model) == []
    model.save(tmp_path / "again.keras")


def test_a_checkpoint_of_tensorflow(model, fail, tmp_path):
    checkpoint = tf.train.Checkpoint(model=model, step=tf.Variable(3))
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)
    path = manager.save()
    fail()
    with pytest.raises(keras_hvd.RankFailedError, match="rank 1 died"):
        manager.save()
    checkpoint.restore(path)
    assert suspect(model) == []
    manager.save()


def test_weights_are_not_all(model, fail):
    """An optimizer's slots may be half updated, too."""
    weights = model.get_weights()
    fail()
    model.set_weights(weights)
    assert suspect(model) == [each.path for each in model.optimizer.variables]
    for variable in model.optimizer.variables:
        variable.assign(variable.numpy())
    assert suspect(model) == []


def test_a_model_that_its_first_fit_has_built(fail):
    """TensorFlow makes variables of another class within a function."""
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    fail()
    assert len(suspect(model)) == 2 + len(model.optimizer.variables)
    for variable in (*model.weights, *model.optimizer.variables):
        variable.assign(variable.numpy())
    assert suspect(model) == []


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_training_on_makes_nothing_whole(model, fail, run_eagerly):
    before = {*suspect(model)}
    fail()
    all_of_them = suspect(model)
    model.run_eagerly = run_eagerly
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert before == set()
    assert suspect(model) == all_of_them


def test_the_user_may_say_that_they_are_whole(model, fail):
    fail()
    keras_hvd.allow_saving()
    assert suspect(model) == []


def test_not_while_the_job_has_failed(model, monkeypatch):
    failed = SimpleNamespace(khvd_failure=lambda: b"rank 1 died")
    monkeypatch.setattr(half_applied, "note_failure", lambda: None)
    monkeypatch.setattr(guarded_saving.native, "engine", lambda: failed)
    with pytest.raises(keras_hvd.RankFailedError, match="rank 1 died"):
        keras_hvd.allow_saving()


def test_what_a_rank_sends_is_as_whole_as_its_own(model):
    half_applied.receive(model.weights, [True, False])
    assert suspect(model) == [model.weights[0].path]
    half_applied.receive(model.weights, [False, False])
    assert suspect(model) == []
