"""DistributedOptimizer in one process: it stays the optimizer that it was."""

import copy
import pickle
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.optimizer.distributed_class import is_distributed
from keras_hvd.optimizer.nested_optimizers import inner_optimizers
from keras_hvd.optimizer.traced_steps import require_distributed

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = X[:, :2]


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.SGD):
    pass


class Unregistered(keras.optimizers.SGD):
    pass


def by_path() -> keras.optimizers.Optimizer:
    inner = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    inner[".*kernel"] = keras.optimizers.Adam(0.1)
    return keras.optimizers.MultiOptimizer(inner)


KINDS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1, clipnorm=1.0),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, use_ema=True),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.RMSprop(0.1, momentum=0.5), 8.0
    ),
    "MultiOptimizer": by_path,
    "Registered": lambda: Registered(0.1, momentum=0.9),
}


@pytest.fixture(autouse=True)
def job():
    keras_hvd.init()
    keras.utils.clear_session()


def make_model(optimizer) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, keras.losses.MeanSquaredError())
    return model


def train(optimizer) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(4)
    model = make_model(optimizer)
    model.fit(X, Y, batch_size=2, verbose=0, shuffle=False)
    return model


def values(optimizer) -> list[np.ndarray]:
    return [variable.numpy() for variable in optimizer.variables]


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_same_object_and_looks_the_same(kind):
    optimizer = KINDS[kind]()
    plain = type(optimizer)
    config = optimizer.get_config()
    assert keras_hvd.DistributedOptimizer(optimizer) is optimizer
    assert is_distributed(optimizer)
    assert isinstance(optimizer, plain)
    assert optimizer.__class__ is plain
    for attribute in ("__name__", "__module__", "__qualname__", "__doc__"):
        assert getattr(type(optimizer), attribute) == getattr(plain, attribute)
    assert optimizer.get_config() == config


@pytest.mark.parametrize("kind", KINDS)
def test_trains_alike_on_one_rank(kind):
    ours = train(keras_hvd.DistributedOptimizer(KINDS[kind]()))
    plain = train(KINDS[kind]())
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_state_is_kept():
    optimizer = train(KINDS["Adam"]()).optimizer
    before = values(optimizer)
    keras_hvd.DistributedOptimizer(optimizer)
    for one, other in zip(values(optimizer), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_twice_does_nothing(kind):
    optimizer = keras_hvd.DistributedOptimizer(KINDS[kind]())
    kinds = type(optimizer), [type(each) for each in inner_optimizers(optimizer) or ()]
    keras_hvd.DistributedOptimizer(optimizer)
    again = type(optimizer), [type(each) for each in inner_optimizers(optimizer) or ()]
    assert again == kinds


def test_twice_with_another_op():
    optimizer = keras_hvd.DistributedOptimizer(KINDS["SGD"]())
    with pytest.raises(ValueError, match="op=Average.*op=Sum"):
        keras_hvd.DistributedOptimizer(optimizer, op=keras_hvd.Sum)


def test_op_that_makes_no_sense():
    with pytest.raises(ValueError, match="keras_hvd.Average.*keras_hvd.Sum"):
        keras_hvd.DistributedOptimizer(KINDS["SGD"](), op=keras_hvd.Max)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_distributed(kind, copied):
    if copied == "pickle":

        def copied(optimizer):
            return pickle.loads(pickle.dumps(optimizer))

    optimizer = keras_hvd.DistributedOptimizer(KINDS[kind](), op=keras_hvd.Sum)
    copied = copied(optimizer)
    assert copied is not optimizer
    assert is_distributed(copied)
    assert type(copied) is type(optimizer)
    assert copied.get_config() == optimizer.get_config()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("adam", "keras.optimizers.get('adam')"),
        (keras.optimizers.Adam, "the class keras.src.optimizers.adam.Adam"),
        (tf.Module(), "tensorflow.python.module.module.Module"),
        (None, "NoneType"),
        (
            tf.compat.v1.train.AdamOptimizer(),
            "tf.compat.v1.train.AdamOptimizer. Reduce the gradients that its "
            "compute_gradients returns with keras_hvd.grouped_allreduce",
        ),
        (
            type("Adam", (), {"__module__": "tf_keras.src.optimizers.adam"})(),
            "tf_keras.src.optimizers.adam.Adam. tf_keras is Keras 2, and so is "
            "tf.keras with TF_USE_LEGACY_KERAS=1: write `import keras`",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused_by_name(wrong, named):
    with pytest.raises(TypeError) as error:
        keras_hvd.DistributedOptimizer(wrong)
    assert named in str(error.value)


def test_strategy_is_refused():
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        with pytest.raises(RuntimeError, match="OneDeviceStrategy"):
            keras_hvd.DistributedOptimizer(KINDS["SGD"]())
        created_inside = KINDS["SGD"]()
    with pytest.raises(RuntimeError, match="OneDeviceStrategy"):
        keras_hvd.DistributedOptimizer(created_inside)


def test_saved_models_load_without_keras_hvd(tmp_path):
    """In a process where keras_hvd cannot be imported, with the optimizers' state."""
    kinds = sorted({*KINDS} - {"Registered"})
    for kind in kinds:
        model = train(keras_hvd.DistributedOptimizer(KINDS[kind]()))
        model.save(tmp_path / f"{kind}.keras")
        np.savez(tmp_path / f"{kind}.npz", *values(model.optimizer))
    program = f"""
        import sys
        sys.modules["keras_hvd"] = None
        import keras, numpy as np
        for kind in {kinds}:
            model = keras.models.load_model(f"{tmp_path}/{{kind}}.keras")
            saved = np.load(f"{tmp_path}/{{kind}}.npz")
            loaded = [variable.numpy() for variable in model.optimizer.variables]
            for one, name in zip(loaded, saved, strict=True):
                np.testing.assert_array_equal(one, saved[name])
            assert type(model.optimizer).__name__ == kind
            model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_configuration_is_the_plain_ones(kind):
    plain = KINDS[kind]()
    config = keras.saving.serialize_keras_object(plain)
    distributed = keras_hvd.DistributedOptimizer(plain)
    assert keras.saving.serialize_keras_object(distributed) == config


@pytest.mark.parametrize("kind", KINDS)
def test_load_model_distributes_and_keeps_state(kind, tmp_path):
    model = train(KINDS[kind]())
    model.save(tmp_path / "model.keras")
    loaded = keras_hvd.load_model(tmp_path / "model.keras")
    assert is_distributed(loaded.optimizer)
    require_distributed(loaded)
    for one, other in zip(values(loaded.optimizer), values(model.optimizer)):
        np.testing.assert_array_equal(one, other)


def test_load_model_with_custom_optimizer(tmp_path):
    train(keras_hvd.DistributedOptimizer(Unregistered(0.1))).save(tmp_path / "m.keras")
    with pytest.raises(TypeError, match="Unregistered"):
        keras_hvd.load_model(tmp_path / "m.keras")
    loaded = keras_hvd.load_model(
        tmp_path / "m.keras", custom_optimizers=[Unregistered]
    )
    assert isinstance(loaded.optimizer, Unregistered)
    assert is_distributed(loaded.optimizer)


def test_load_model_without_compiling(tmp_path):
    train(KINDS["SGD"]()).save(tmp_path / "model.keras")
    loaded = keras_hvd.load_model(tmp_path / "model.keras", compile=False)
    assert not loaded.compiled


def test_compiled_for_mixed_precision_is_distributed():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(keras_hvd.DistributedOptimizer(KINDS["SGD"]()))
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    require_distributed(model)


def test_copies_by_keras_are_plain():
    """Keras copies models by their configuration; callbacks refuse the copy."""
    model = make_model(keras_hvd.DistributedOptimizer(KINDS["SGD"]()))
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    assert not is_distributed(clone.optimizer)
    with pytest.raises(RuntimeError, match="SGD 'sgd' is not distributed"):
        require_distributed(clone)


def test_before_init():
    program = """
        import keras, keras_hvd, tensorflow as tf
        optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        variable = keras.Variable([1.0])
        try:
            optimizer.apply([tf.constant([1.0])], [variable])
        except keras_hvd.NotInitializedError as error:
            assert "keras_hvd.init()" in str(error)
        else:
            raise SystemExit("trained without init")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
