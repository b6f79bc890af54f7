"""keras_hvd.Strategy on one process: its parts, and its refusals."""

import inspect

import keras
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.strategy import keras_patches, keras_trainer


@pytest.fixture(autouse=True)
def joined():
    keras_hvd.init()


def test_it_needs_the_job():
    keras_hvd.shutdown()
    with pytest.raises(keras_hvd.ShutDownError, match=r"Strategy\(\)"):
        keras_hvd.Strategy()


@pytest.mark.parametrize(
    "arguments",
    [
        {"process_set": ["GPU:0", "GPU:1"]},
        {"device": ["GPU:0", "GPU:1"]},
        {"device": ("CPU:0",)},
    ],
)
def test_several_replicas_in_a_process_are_refused(arguments):
    with pytest.raises(NotImplementedError, match="several replicas in a process"):
        keras_hvd.Strategy(**arguments)


def test_devices_are_checked():
    with pytest.raises(TypeError, match="device must be a name"):
        keras_hvd.Strategy(device=3)
    with pytest.raises(ValueError, match="no device 'GPU:7'; it has /device:CPU:0"):
        keras_hvd.Strategy(device="GPU:7")
    devices = keras_hvd.Strategy(device="cpu:0").extended.worker_devices
    assert devices == ("/device:CPU:0",)


def test_parameter_servers_are_refused():
    cluster = tf.train.ClusterSpec({"worker": ["localhost:1"], "ps": ["localhost:2"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster)
    with pytest.raises(
        NotImplementedError,
        match="parameter servers and cluster resolvers are not supported",
    ):
        keras_hvd.Strategy(resolver)


def test_process_sets_are_checked():
    with pytest.raises(TypeError, match="Strategy: process_set must be"):
        keras_hvd.Strategy(process_set=1)
    with pytest.raises(ValueError, match="not part of the job"):
        keras_hvd.Strategy(process_set=keras_hvd.ProcessSet([0]))


def test_its_device():
    strategy = keras_hvd.Strategy(device="/device:CPU:0")
    assert strategy.extended.worker_devices == ("/device:CPU:0",)
    with strategy.scope():
        variable = tf.Variable(1.0)
    assert variable.device.endswith("/device:CPU:0")
    assert strategy.run(lambda: tf.identity(variable)).device == variable.device


def test_there_is_one_for_a_process_set_and_a_device():
    strategy = keras_hvd.Strategy()
    assert keras_hvd.Strategy(keras_hvd.global_process_set, "cpu:0") is strategy
    assert type(strategy) is keras_hvd.Strategy
    keras_hvd.shutdown()
    with pytest.raises(keras_hvd.ShutDownError):
        keras_hvd.Strategy()
    keras_hvd.init()
    assert keras_hvd.Strategy() is strategy
    with pytest.raises(ValueError, match="no device 'GPU:7'"):
        keras_hvd.Strategy(device="GPU:7")


def test_a_class_derived_from_it_makes_its_own():
    class Named(keras_hvd.Strategy):
        def __init__(self, name):
            super().__init__()
            self.name = name

    assert [Named("a").name, Named("b").name] == ["a", "b"]
    assert Named("a") is not Named("a")
    assert type(keras_hvd.Strategy()) is keras_hvd.Strategy


def test_it_shows_its_arguments():
    parameters = inspect.signature(keras_hvd.Strategy).parameters
    assert list(parameters) == ["process_set", "device"]


def test_tensorflow_may_set_it_for_good():
    strategy = keras_hvd.Strategy()
    tf.distribute.experimental_set_strategy(strategy)
    try:
        assert tf.distribute.get_strategy() is strategy
        assert tf.Variable(1.0)._distribute_strategy is strategy
    finally:
        tf.distribute.experimental_set_strategy(None)
    assert not tf.distribute.has_strategy()


def test_no_collectives_are_chained():
    strategy = keras_hvd.Strategy()

    @tf.function
    def step(x, y):
        def replica(x, y):
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", x), context.all_gather(y, axis=0)

        return strategy.run(replica, args=(x, y))

    graph = step.get_concrete_function(tf.ones([2]), tf.ones([3])).graph
    kinds = "KerasHvdAllreduce", "KerasHvdAllgather"
    collectives = [op for op in graph.get_operations() if op.type in kinds]
    assert len(collectives) == 2
    assert not any(op.control_inputs for op in collectives)


def test_variables_without_aggregation_are_plain():
    with keras_hvd.Strategy().scope():
        made = tf.Variable(1.0)
    assert type(made) is type(tf.Variable(1.0))


def test_a_dataset_shows_its_type():
    dataset = tf.data.Dataset.range(4).batch(2)
    distributed = keras_hvd.Strategy().experimental_distribute_dataset(dataset)
    assert isinstance(distributed, tf.distribute.DistributedDataset)
    iterator = iter(distributed)
    assert isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))
    assert iterator.element_spec == distributed.element_spec
    assert iterator._type_spec.value_type is type(iterator)


def test_methods_of_keras_keep_their_names_where_another_tool_has_replaced_them(
    monkeypatch,
):
    names = "evaluate", "predict", "test_on_batch", "predict_on_batch"
    asked = []
    monkeypatch.setattr(
        keras_trainer, "_strategy_of", lambda model, method: asked.append(method)
    )
    for _, name, replacement in keras_patches._noted:
        if name in names:
            replacement(lambda model: None, keras.Sequential())
    assert asked == [*names]
