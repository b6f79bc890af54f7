"""keras_hvd's own agreements stay on the CPU; the user's tensors do not.

Without a GPU: a traced function knows where its ops are to run. TensorFlow refuses a
device that is missing, if it may not choose another one.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.callbacks import stopping
from keras_hvd.callbacks.metrics import results_over_ranks
from keras_hvd.strategy.variables import of_first_rank

GPU = "/device:GPU:0"


@pytest.fixture
def exact_placement():
    """Eager ops run where they are asked to, or not at all."""
    chooses = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    yield
    tf.config.set_soft_device_placement(chooses)


def devices(function, *arguments) -> dict[str, str | None]:
    """The devices of a function's collectives, by name; None: where it is called."""
    graph = function.get_concrete_function(*arguments).graph
    return {
        op.get_attr("tensor_name").decode(): tf.DeviceSpec.from_string(
            op.device
        ).device_type
        for each in [graph, *_graphs_of(graph)]
        for op in each.get_operations()
        if op.type.startswith("KerasHvd") and "tensor_name" in op.node_def.attr
    }


def _graphs_of(graph):
    """The graphs of a function's branches and of the functions that it calls."""
    for op in graph.get_operations():
        for attribute in op.node_def.attr.values():
            for name in (attribute.func.name, *(f.name for f in attribute.list.func)):
                if name in graph._functions:
                    inner = graph._functions[name].graph
                    yield inner
                    yield from _graphs_of(inner)


def one(found: dict[str, str | None], part: str) -> str | None:
    """The device of the only collective of this name."""
    [device] = [device for name, device in found.items() if part in name]
    return device


@pytest.mark.usefixtures("exact_placement")
def test_of_users_tensors_are_where_they_are(several_ranks):
    if tf.config.list_logical_devices("GPU"):
        pytest.skip("there is a GPU, on which it runs")
    refuses = pytest.raises(tf.errors.InvalidArgumentError, match="GPU:0")
    with refuses, tf.device(GPU):
        keras_hvd.allreduce(1.0)


@pytest.mark.usefixtures("exact_placement")
def test_stopping_is_agreed_on_between_cpus(rank, size):
    with tf.device(GPU):
        any_rank = stopping.AnyRank("placed")
        assert any_rank(rank == size - 1)
        assert not any_rank(False)


@pytest.mark.usefixtures("exact_placement")
def test_results_of_metrics_are_computed_on_cpus(rank, size):
    with tf.device("/CPU:0"):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
        model.compile(loss="mae", metrics=["mse"])
        x = np.full((2, 1), rank + 1.0)
        model.evaluate(x, 0 * x, verbose=0)
    with tf.device(GPU):
        results = results_over_ranks(model)
    assert results["mse"] == pytest.approx(np.mean(np.arange(1, size + 1) ** 2))


def test_numbers_of_variables_are_compared_between_cpus(several_ranks):
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)
    def broadcast():
        keras_hvd.broadcast_variables([variable], 0)

    found = devices(broadcast)
    assert one(found, "one_element_per_variable") == "CPU"
    assert len(found) == 2
    assert [*found.values()].count(None) == 1


def test_whether_gradients_are_finite_is_agreed_on_between_cpus(several_ranks):
    inner = keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step(gradient):
        optimizer.apply([gradient], [variable])

    found = devices(step, tf.TensorSpec([2]))
    assert one(found, "finite") == "CPU"
    assert one(found, "gradients") is None


def test_a_strategys_step_has_its_numbers_on_cpus(several_ranks, monkeypatch):
    strategy = keras_hvd.Strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)

    @tf.function(autograph=False)
    def train(*data):
        return strategy.run(model.train_step, args=(data,))

    # Where its replica would compute, were there one.
    monkeypatch.setattr(strategy.extended, "_device", GPU)
    found = devices(train, tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    assert one(found, "loss/rows") == "CPU"
    for of_the_batch in ("loss/value", "gradients", "metrics"):
        assert one(found, of_the_batch) == "GPU"


def test_a_strategys_iterators_agree_on_cpus(several_ranks):
    strategy = keras_hvd.Strategy()
    # Of unknown length, so that it is agreed on in each step.
    dataset = tf.data.Dataset.range(4 * keras_hvd.size()).filter(lambda x: x >= 0)
    dataset = strategy.experimental_distribute_dataset(dataset.batch(keras_hvd.size()))

    @tf.function(autograph=False)
    def step(iterator):
        return iterator.get_next_as_optional().has_value()

    found = devices(step, iter(dataset))
    assert one(found, "next element") == "CPU"


def test_strings_of_the_first_rank_travel_between_cpus(several_ranks):
    @tf.function(autograph=False)
    def words():
        return of_first_rank(["a", "bc"], "words", keras_hvd.global_process_set)

    assert {*devices(words).values()} == {"CPU"}
