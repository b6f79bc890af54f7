"""Arguments that DistributedOptimizer and its relatives refuse, and one rank's use."""

import copy
import inspect
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import Compression


@pytest.fixture(autouse=True)
def job():
    keras_hvd.init()
    keras.utils.clear_session()


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(1.0)


def optimizer(**arguments):
    return keras_hvd.DistributedOptimizer(sgd(), **arguments)


def partial_optimizer(**arguments):
    return keras_hvd.PartialDistributedOptimizer(sgd(), **arguments)


def tape(**arguments):
    return keras_hvd.DistributedGradientTape(tf.GradientTape(), **arguments)


def partial_tape(**arguments):
    return keras_hvd.PartialDistributedGradientTape(tf.GradientTape(), **arguments)


ALL = [optimizer, partial_optimizer, tape, partial_tape]
VARIABLE = tf.Variable([0.0], name="w")


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (
            {"op": keras_hvd.Max},
            ValueError,
            "keras_hvd.Average.*keras_hvd.Sum.*got op=",
        ),
        ({"compression": "fp16"}, TypeError, "Compression.fp16.*got 'fp16'"),
        (
            {"gradient_predivide_factor": 2.0, "op": keras_hvd.Sum},
            ValueError,
            "needs op=keras_hvd.Average; got 2.0 with op=Sum",
        ),
        ({"gradient_predivide_factor": -2.0}, ValueError, "must be positive; got -2"),
        ({"groups": 0}, ValueError, "positive number of groups.*got 0"),
        ({"groups": True}, ValueError, "got True"),
        ({"groups": "all"}, ValueError, "list of lists of variables; got 'all'"),
        ({"groups": [VARIABLE]}, ValueError, "list of lists of variables"),
        ({"groups": [["w"]]}, ValueError, "groups must hold variables; got str"),
        ({"groups": [[VARIABLE], [VARIABLE]]}, ValueError, "'w:0' is in groups more"),
        ({"process_set": [0]}, TypeError, r"process_set must be .*got \[0\]"),
        (
            {"process_set": keras_hvd.ProcessSet([0])},
            ValueError,
            "not part of the job",
        ),
    ],
)
def test_arguments_of_all(make, arguments, error, named):
    with pytest.raises(error, match=named):
        make(**arguments)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    "arguments",
    [
        {"op": None},
        {"device_dense": "/gpu:0", "device_sparse": "/gpu:0"},
        {"groups": 3},
        {"groups": []},
        {"groups": ((VARIABLE,),)},
        {"gradient_predivide_factor": 2},
        {"compression": Compression.bf16, "sparse_as_dense": True},
        {"process_set": keras_hvd.global_process_set},
    ],
)
def test_arguments_that_are_taken(make, arguments):
    make(**arguments)


@pytest.mark.parametrize("make", ALL)
def test_num_groups_is_the_old_name_of_groups(make):
    with pytest.warns(DeprecationWarning, match="num_groups is called groups") as seen:
        make(num_groups=2)
    assert seen[0].filename == __file__ or make not in (optimizer, tape)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial_optimizer, "PartialDistributedOptimizer"),
        (partial_tape, "PartialDistributedGradientTape"),
    ],
)
def test_local_layers(make, name):
    layer = keras.layers.Dense(1)
    for layers in (None, [], layer, [layer], (layer,)):
        make(local_layers=layers)
    for wrong in ("dense", [layer, "dense"], 3):
        with pytest.raises(ValueError, match=f"{name}: local_layers must be Keras"):
            make(local_layers=wrong)


def test_names_and_order_of_arguments():
    """Scripts of Horovod give some of them by position."""
    tapes = "gradtape device_dense device_sparse compression sparse_as_dense op "
    tapes += "gradient_predivide_factor num_groups groups process_set"
    for function, names in {
        keras_hvd.DistributedGradientTape: f"{tapes} scale_local_gradients",
        keras_hvd.PartialDistributedGradientTape: (
            f"{tapes} local_layers scale_local_gradients"
        ),
    }.items():
        assert list(inspect.signature(function).parameters) == names.split()
    parameters = inspect.signature(keras_hvd.DistributedOptimizer).parameters.values()
    by_position = [
        each.name for each in parameters if each.kind is not each.KEYWORD_ONLY
    ]
    assert by_position == ["optimizer", "name"]


@pytest.mark.parametrize("passes", [0, -1])
def test_passes_that_make_no_sense(passes):
    with pytest.raises(ValueError, match=f"at least 1; got {passes}"):
        optimizer(backward_passes_per_step=passes)
    with pytest.raises(TypeError):
        optimizer(backward_passes_per_step=1.5)


def test_adasum_decides_on_the_scale_itself():
    with pytest.raises(ValueError, match="does not go with op=keras_hvd.Adasum"):
        optimizer(op=keras_hvd.Adasum, average_aggregated_gradients=True)


def test_passes_and_accumulation_steps_are_the_same_thing():
    accumulating = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2.*step=3"):
        keras_hvd.DistributedOptimizer(accumulating, backward_passes_per_step=3)
    keras_hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2)
    assert accumulating.gradient_accumulation_steps == 2


@pytest.mark.parametrize(("averages", "expected"), [(False, -3.0), (True, -1.5)])
def test_passes_on_one_rank(averages, expected):
    variable = keras.Variable([0.0])
    ours = optimizer(backward_passes_per_step=2, average_aggregated_gradients=averages)
    ours.apply([tf.constant([1.0])], [variable])
    np.testing.assert_array_equal(variable, [0.0])
    ours.apply([tf.constant([2.0])], [variable])
    np.testing.assert_array_equal(variable, [expected])


def test_again_with_other_arguments():
    ours = optimizer(compression=Compression.fp16, backward_passes_per_step=2)
    arguments = {"compression": Compression.fp16, "backward_passes_per_step": 2}
    assert keras_hvd.DistributedOptimizer(ours, **arguments) is ours
    for changed, named in {
        "compression": "compression=FP16Compressor and compression=NoneCompressor",
        "backward_passes_per_step": "per_step=2 and backward_passes_per_step=1",
    }.items():
        others = {key: value for key, value in arguments.items() if key != changed}
        with pytest.raises(ValueError, match=named):
            keras_hvd.DistributedOptimizer(ours, **others)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_have_the_same_arguments(copied):
    arguments = {
        "name": "mine",
        "compression": Compression.bf16,
        "groups": [[VARIABLE]],
        "backward_passes_per_step": 2,
        "scale_local_gradients": False,
    }
    again = copied(optimizer(**arguments))
    assert keras_hvd.DistributedOptimizer(again, **arguments) is again


def test_what_is_no_variable_cannot_be_local():
    for register in (optimizer().register_local_var, tape().register_local_source):
        with pytest.raises(TypeError, match="must be a variable; got 3"):
            register(3)
        # It has an `assign` too.
        with pytest.raises(TypeError, match="must be a variable; got <keras"):
            register(keras.optimizers.SGD())


def test_what_is_no_tape():
    with pytest.raises(TypeError, match=r"tf.GradientTape; got builtins.int"):
        keras_hvd.DistributedGradientTape(3)
    with pytest.raises(TypeError, match="distributed already"):
        keras_hvd.DistributedGradientTape(tape())


def test_tape_shares_what_was_recorded():
    """Whichever of the two is begun and ended, and also in nested structures."""
    w = tf.Variable(3.0)
    plain = tf.GradientTape(persistent=True)
    ours = keras_hvd.DistributedGradientTape(plain)
    assert isinstance(ours, tf.GradientTape)
    with ours:
        y = w**2
    with plain:
        z = 2 * w
    for each in (plain, ours):
        assert float(each.gradient(z, w)) == 2.0
    assert ours.watched_variables() == (w,)
    with keras_hvd.DistributedGradientTape(tf.GradientTape()) as begun:
        y = w**2
    found = begun.gradient(y, {"w": w, "other": [tf.Variable(1.0)]})
    assert float(found["w"]) == 6.0
    assert found["other"] == [None]


@pytest.mark.parametrize("method", ["jacobian", "batch_jacobian"])
def test_jacobians_are_no_gradients(method):
    with pytest.raises(NotImplementedError, match=f"has no {method}()"):
        getattr(tape(), method)(tf.ones([1, 1]), tf.ones([1, 1]))


def train(ours, variables) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(ours, "mse")
    x, y = np.ones((6, 3), "float32"), np.ones((6, 2), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    return model


ARGUMENTS = [
    {"op": keras_hvd.Sum, "compression": Compression.fp16},
    {"groups": 2, "gradient_predivide_factor": 2.0, "name": "mine"},
    {"backward_passes_per_step": 2},
    {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    {"sparse_as_dense": True, "scale_local_gradients": False},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_saving_and_loading(arguments, tmp_path):
    """By Keras alone and by keras_hvd, with the optimizer's state."""
    ours = keras_hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.1, use_ema=True), **arguments
    )
    model = train(ours, None)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    loaded = keras_hvd.load_model(tmp_path / "model.keras", **arguments)
    for each in (plain, loaded):
        assert int(each.optimizer.iterations) == int(ours.iterations)
        for one, other in zip(each.optimizer.variables, ours.variables, strict=True):
            np.testing.assert_array_equal(one, other)
        each.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0)
    assert keras_hvd.DistributedOptimizer(loaded.optimizer, **arguments)


class Scaled(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs


def test_custom_objects_and_files_that_are_none(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Scaled()])
    model.compile(optimizer(), "mse")
    model.save(tmp_path / "model.keras")
    given = {"custom_objects": {"Scaled": Scaled}, "safe_mode": True}
    loaded = keras_hvd.load_model(tmp_path / "model.keras", **given)
    assert isinstance(loaded.layers[-1], Scaled)
    with pytest.raises(TypeError, match="Scaled"):
        keras_hvd.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="missing.keras"):
        keras_hvd.load_model(tmp_path / "missing.keras")


def test_legacy_optimizers_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match="legacy_opts=True"):
        keras_hvd.load_model(tmp_path / "model.keras", legacy_opts=True)
