"""Which variables a state keeps, and that it keeps copies of their values."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import elastic
from keras_hvd.backends.tensorflow import half_applied
from keras_hvd.job import native

X = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)


def made(optimizer=None) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )
    optimizer = optimizer or keras.optimizers.Adam(0.1)
    model.compile(keras_hvd.DistributedOptimizer(optimizer), "mse", metrics=["mae"])
    return model


def train(model: keras.Model) -> None:
    model.fit(X, X[:, :2], batch_size=4, shuffle=False, verbose=0)


def values(model: keras.Model) -> list[np.ndarray]:
    """All that decides how training goes on."""
    return [each.numpy() for each in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize("kind", [elastic.KerasState, elastic.TensorFlowKerasState])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1, use_ema=True),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
    ],
    ids=["slots and averages", "accumulated gradients", "loss scale"],
)
def test_a_model_trains_on_from_a_commit_as_it_did(kind, optimizer):
    model = made(optimizer())
    state = kind(model, epoch=0)
    train(model)
    state.commit()
    committed = values(model)
    train(model)
    trained = values(model)
    assert all(np.any(one != other) for one, other in zip(committed[:2], trained))
    state.restore()
    np.testing.assert_equal(values(model), committed)
    train(model)
    np.testing.assert_equal(values(model), trained)


def test_the_first_commit_is_what_is_there_at_first():
    model = made()
    state = elastic.KerasState(model)
    first = values(model)
    # The optimizer has the variables that it will have.
    assert len(first) == 7 + 2 + 2 * 4
    train(model)
    state.restore()
    np.testing.assert_equal(values(model), first)


def test_learning_rate_and_seeds_are_part_of_it():
    model = made()
    state = elastic.KerasState(model)
    seed = model.layers[1].seed_generator.state.numpy()
    model.optimizer.learning_rate = 0.5
    model.layers[1].seed_generator.state.assign(seed + 1)
    state.restore()
    assert float(model.optimizer.learning_rate) == np.float32(0.1)
    np.testing.assert_equal(model.layers[1].seed_generator.state.numpy(), seed)


def test_variables_of_tensorflow_in_layers_are_part_of_it():
    class Counts(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.steps = tf.Variable(1, trainable=False)

        def call(self, inputs):
            return inputs

    counts = Counts()
    model = keras.Sequential([keras.Input((3,)), counts, keras.layers.Dense(1)])
    state = elastic.KerasState(model, keras.optimizers.SGD())
    counts.steps.assign(5)
    state.restore()
    assert counts.steps.numpy() == 1


def test_metrics_are_not_part_of_it():
    """A rank that is new has not made them all yet."""
    model = made()
    before = len(elastic.KerasState(model).variables)
    train(model)
    assert len(elastic.KerasState(model).variables) == before


def test_plain_variables():
    variables = [tf.Variable([1.0, 2.0]), keras.Variable(3, dtype="int32")]
    state = elastic.TensorFlowState(variables, step=4)
    variables[0].assign_add([1.0, 1.0])
    variables[1].assign(5)
    state.step = 6
    state.restore()
    assert [each.numpy().tolist() for each in variables] == [[1.0, 2.0], 3]
    assert state.step == 4


def test_an_optimizer_of_its_own():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(momentum=0.9)
    state = elastic.KerasState(model, optimizer)
    assert state.optimizer is optimizer
    assert len(state.variables) == 2 + 2 + 2


def test_all_optimizers_of_a_model():
    model = made()
    model.other = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="one of several of .* no variables yet"):
        elastic.KerasState(model)
    model.optimizer.build(model.trainable_variables)
    model.other.build(model.trainable_variables[:1])
    state = elastic.KerasState(model)
    model.other.iterations.assign(3)
    state.restore()
    assert int(model.other.iterations) == 0


def test_what_is_missing_is_said():
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"KerasState: .*call model.build\(input_sh"):
        elastic.KerasState(unbuilt)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="is not compiled: give the optimizer too"):
        elastic.KerasState(model)
    with pytest.raises(ValueError, match="TensorFlowState needs the variables"):
        elastic.TensorFlowState(step=0)
    with pytest.raises(TypeError, match="session must be None.*got 'mine'"):
        elastic.TensorFlowState([tf.Variable(1.0)], "mine")


def test_a_commit_is_of_all_or_nothing():
    variable = tf.Variable(1.0)
    state = elastic.TensorFlowState([variable], rows=[])
    variable.assign(2.0)
    state.rows = (row for row in [])
    with pytest.raises(TypeError, match="generator"):
        state.commit()
    state.restore()
    assert (variable.numpy(), state.rows) == (1.0, [])


@contextlib.contextmanager
def failed() -> Iterator[None]:
    """The job of this process has failed; afterwards it is in another one."""
    engine = SimpleNamespace(khvd_failure=lambda: b"rank 1 died", khvd_size=lambda: 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "engine", lambda: engine)
        yield


@pytest.fixture
def nothing_noted():
    """This test notes the first failure of this process' job."""
    epoch, half_applied._failure.epoch = half_applied._failure.epoch, None
    yield
    half_applied.trust_all()
    half_applied._failure.epoch = epoch


def test_no_commit_after_a_failure():
    """A GPU's values may be garbage by then."""
    variable = tf.Variable(1.0)
    state = elastic.TensorFlowState([variable], step=1)
    variable.assign(2.0)
    state.step = 2
    with failed(), pytest.raises(keras_hvd.RankFailedError, match="rank 1 died"):
        state.commit()
    state.restore()
    assert (variable.numpy(), state.step) == (1.0, 1)


def test_what_was_restored_may_be_saved_to_files(nothing_noted, tmp_path):
    """It is whole, though it was there when a step failed; others may not be."""
    model, other = made(), made()
    state = elastic.KerasState(model)
    with failed():
        state.restore()
    model.save(tmp_path / "model.keras")
    with pytest.raises(keras_hvd.RankFailedError, match="rank 1 died"):
        other.save(tmp_path / "other.keras")


def test_the_optimizer_of_a_strategys_model_is_built():
    with keras_hvd.Strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    state = elastic.KerasState(model)
    before = values(model)
    train(model)
    state.restore()
    for found, expected in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_ranks_with_other_schedules_differ():
    """A schedule is in no variable: their weights would drift apart."""

    def parts(rate):
        return elastic.KerasState(made(keras.optimizers.Adam(rate)))._parts()

    schedules = [keras_hvd.warmup_schedule(0.1 * size, 9) for size in (3, 4)]
    assert parts(schedules[0]) != parts(schedules[1])
    # These are in a variable, which ranks get.
    assert parts(0.1) == parts(0.2)
