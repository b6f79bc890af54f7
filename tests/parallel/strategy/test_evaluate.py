"""`evaluate` under a strategy gives one process' loss and metrics, on every rank."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers


def compiled(xla: bool = False, **arguments: Any) -> keras.Model:
    """A model of two outputs, with metrics that means over ranks would get wrong."""
    inputs = keras.Input((14, 14, 1))
    hidden = layers.Dense(8, activation="tanh")(layers.Flatten()(inputs))
    model = keras.Model(
        inputs,
        {"digit": layers.Dense(10)(hidden), "odd": layers.Dense(1, "sigmoid")(hidden)},
    )
    model.compile(
        loss={
            "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "odd": "mse",
        },
        metrics={
            "digit": ["accuracy"],
            "odd": [
                keras.metrics.AUC(50),
                "precision",
                keras.metrics.TruePositives(),
            ],
        },
        weighted_metrics={"digit": ["sparse_categorical_accuracy"], "odd": ["mae"]},
        jit_compile=xla,
        **arguments,
    )
    return model


def targets(y: np.ndarray) -> dict[str, np.ndarray]:
    return {"digit": y, "odd": (y % 2)[:, None].astype("float32")}


def evaluate(x: np.ndarray, y: np.ndarray, xla: bool) -> dict[str, Any]:
    """With arrays and with a dataset, whose last batches have 40 rows and one."""
    model = compiled(xla, steps_per_execution=3)
    weights = {each: (1 + y % 3).astype("float32") for each in ("digit", "odd")}
    arrays = model.evaluate(
        x, targets(y), 64, verbose=0, sample_weight=weights, return_dict=True
    )
    data = tf.data.Dataset.from_tensor_slices((x[:97], targets(y[:97]))).batch(48)
    dataset = model.evaluate(data, verbose=0)
    some = model.evaluate(data, verbose=0, steps=1)
    assert isinstance(arrays["loss"], float)
    return {"arrays": arrays, "dataset": dataset, "some": some}


@pytest.mark.parametrize(
    "xla", [False, pytest.param(True, marks=pytest.mark.needs_xla)]
)
def test_evaluate(xla, both_ways, require_equal, digits):
    require_equal(*both_ways(evaluate, "evaluate", *digits, xla))


def test_steps_log_all_ranks(strategy, digits, equal_on_all_ranks):
    """A callback's logs after a batch are over all ranks, too."""
    seen = []
    see = keras.callbacks.LambdaCallback()
    see.on_test_batch_end = lambda batch, logs: seen.append(list(logs.values()))
    with strategy.scope():
        model = compiled()
    x, y = digits
    model.evaluate(x[:97], targets(y[:97]), 48, verbose=0, callbacks=[see])
    assert len(seen) == 3
    assert equal_on_all_ranks([np.asarray(each) for each in seen])


def test_plain_read_is_no_collective(strategy, digits, counters):
    """A rank can read a metric's variables by itself, to save them."""
    with strategy.scope():
        model = compiled()
    x, y = digits
    model.evaluate(x[:40], targets(y[:40]), verbose=0)
    before = counters().batches
    values = [each.numpy() for metric in model.metrics for each in metric.variables]
    assert all(np.isfinite(each).all() for each in values)
    assert counters().batches == before


def test_results_after_evaluate(both_ways, require_equal, digits):
    """A result that a script asks for is over all ranks, as the logs are."""

    def run(x, y):
        model = compiled()
        logs = model.evaluate(x[:41], targets(y[:41]), verbose=0, return_dict=True)
        results = model.get_metrics_result()
        assert {name: float(each) for name, each in results.items()} == logs
        return {"results": {each.name: each.result() for each in model.metrics}}

    require_equal(*both_ways(run, "results", *digits))


def test_metric_of_ones_own(both_ways, require_equal, digits):
    """A metric made of sums, and a train_step and test_step that use it."""

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="share_of_sevens")
            self.sevens = self.add_weight(name="sevens", initializer="zeros")
            self.all = self.add_weight(name="all", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.sevens.assign_add(tf.reduce_sum(tf.cast(y_true == 7, "float32")))
            self.all.assign_add(tf.cast(tf.size(y_true), "float32"))

        def result(self):
            return self.sevens / self.all

    class Custom(keras.Model):
        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            loss = self.compute_loss(x, y, y_pred, training=False)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss, sample_weight=tf.shape(y)[0])
                else:
                    metric.update_state(y, y_pred)
            return {each.name: each.result() for each in self.metrics}

    def run(x, y):
        inputs = keras.Input((14, 14, 1))
        model = Custom(inputs, layers.Dense(10)(layers.Flatten()(inputs)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(loss=loss, metrics=[Largest()])
        return {"results": model.evaluate(x[:100], y[:100], 33, verbose=0)}

    require_equal(*both_ways(run, "own", *digits))


class Sevens(keras.metrics.Metric):
    """Its result is its variable itself."""

    def __init__(self):
        super().__init__(name="sevens")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.reduce_sum(tf.cast(y_true == 7, "float32")))

    def result(self):
        return self.count


class LogsItsMetrics(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        return {"scale": self.scale, **{m.name: m.result() for m in self.metrics}}


def count_sevens(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in (keras.Model, LogsItsMetrics):
        inputs = keras.Input((14, 14, 1))
        model = kind(inputs, layers.Dense(10)(layers.Flatten()(inputs)))
        model.scale = model.layers[-1].bias
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.0), loss, metrics=[Sevens()])
        history = model.fit(x[:100], y[:100], 33, verbose=0)
        found[kind.__name__] = {
            "fit": history.history,
            "train": model.train_on_batch(x[:21], y[:21], return_dict=True),
            "evaluate": model.evaluate(x[:41], y[:41], verbose=0, return_dict=True),
        }
    assert found["Model"]["evaluate"]["sevens"] == np.sum(y[:41] == 7)
    return found


def test_result_that_is_a_variable(both_ways, require_equal, digits):
    """A metric as in Keras' guides, and a weight that a step logs."""
    require_equal(*both_ways(count_sevens, "sevens", *digits))
