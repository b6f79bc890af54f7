"""`fit` under a strategy ends with one process' weights, logs and predictions."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

layers = keras.layers


def crossentropy(**arguments: Any) -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((14, 14, 1)),
            layers.Conv2D(4, 3, strides=2, activation="tanh", kernel_regularizer="l2"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def without_shape() -> keras.Model:
    """Built by its first data only."""
    return keras.Sequential(
        [layers.Flatten(), layers.Dense(8, activation="tanh"), layers.Dense(10)]
    )


def synchronized() -> keras.Model:
    return keras.Sequential(
        [
            layers.Flatten(),
            layers.Dense(8),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.Activation("tanh"),
            layers.Dense(10),
        ]
    )


def with_mask() -> keras.Model:
    """An output and a loss for each line of the image, but for those that are empty."""
    return keras.Sequential(
        [
            keras.Input((14, 14, 1)),
            layers.Reshape((14, 14)),
            layers.Masking(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(10),
        ]
    )


def with_embedding() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((14, 14, 1)),
            layers.Flatten(),
            layers.Rescaling(30),
            layers.Discretization(bin_boundaries=list(range(30))),
            layers.Embedding(31, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(10),
        ]
    )


class Subclassed(keras.Model):
    """Two inputs, two outputs, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.flatten = layers.Flatten()
        self.hidden = layers.Dense(8, activation="tanh")
        self.digit = layers.Dense(10)
        self.even = layers.Dense(1)

    def call(self, inputs):
        both = [self.flatten(inputs["left"]), self.flatten(inputs["right"])]
        hidden = self.hidden(tf.concat(both, -1))
        self.add_loss(0.1 * tf.reduce_mean(hidden**2))
        return {"digit": self.digit(hidden), "even": self.even(hidden)}


class Pairs(keras.utils.PyDataset):
    """Batches of two inputs and two outputs."""

    def __init__(self, x, y, batch):
        super().__init__()
        self.x, self.y, self.batch = x, y, batch

    def __len__(self):
        return -(-len(self.x) // self.batch)

    def __getitem__(self, i):
        rows = slice(i * self.batch, (i + 1) * self.batch)
        x, y = self.x[rows], self.y[rows]
        even = (y % 2)[:, None].astype("float32")
        return {"left": x[:, :, :7], "right": x[:, :, 7:]}, {"digit": y, "even": even}


def arrays(x, y, batch) -> dict[str, Any]:
    weights = (1 + np.arange(len(y)) % 3).astype("float32")
    return {"x": x, "y": y, "batch_size": batch, "sample_weight": weights}


def unweighted(x, y, batch) -> dict[str, Any]:
    return {"x": x, "y": y, "batch_size": batch}


def of_each_line(x, y, batch) -> dict[str, Any]:
    """Images that lack more lines the earlier they come in a batch."""
    lines = 3 + np.arange(len(x)) % batch * 10 // batch
    x = np.where((np.arange(14) < lines[:, None])[..., None, None], x, 0)
    return {"x": x, "y": np.repeat(y[:, None], 14, 1), "batch_size": batch}


def of_each_weighted_line(x, y, batch) -> dict[str, Any]:
    weights = (1 + np.arange(len(y)) % 3).astype("float32")
    weights = np.repeat(weights[:, None], 14, 1)
    return {**of_each_line(x, y, batch), "sample_weight": weights}


def dataset(x, y, batch) -> dict[str, Any]:
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(99, seed=3).batch(batch)
    return {"x": data, "class_weight": {each: 1.0 + each % 2 for each in range(10)}}


def distributed(x, y, batch) -> dict[str, Any]:
    """Datasets that the strategy has distributed, for training and validation."""
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    if tf.distribute.has_strategy():
        data = tf.distribute.get_strategy().experimental_distribute_dataset(data)
    weights = {each: 1.0 + each % 2 for each in range(10)}
    return {"x": data, "validation_data": data, "class_weight": weights}


def in_parts(x, y, batch) -> dict[str, Any]:
    """Each rank makes its rows of each batch, of a number that it does not know."""
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)

    def part(context):
        number, of = context.input_pipeline_id, context.num_input_pipelines
        some = data.map(lambda *batch: [each[number::of] for each in batch])
        return some.map(lambda x, y: (x, y)).filter(lambda *_: True)

    if tf.distribute.has_strategy():
        data = tf.distribute.get_strategy().distribute_datasets_from_function(part)
    return {"x": data, "validation_data": data}


def generator(x, y, batch) -> dict[str, Any]:
    """A generator that cannot be read twice; a lost batch would be missed."""

    def batches():
        for start in range(0, len(x), batch):
            yield x[start : start + batch], y[start : start + batch], None

    return {"x": batches(), "steps_per_epoch": len(x) // batch // 2}


def pairs(x, y, batch) -> dict[str, Any]:
    return {"x": Pairs(x, y, batch)}


def several_optimizers() -> keras.optimizers.Optimizer:
    by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    by_path[".*conv2d.*"] = keras.optimizers.Adam(0.003)
    return keras.optimizers.MultiOptimizer(by_path)


@dataclasses.dataclass
class Case:
    model: Callable[[], keras.Model] = convolutional
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1, momentum=0.9)
    loss: Any = dataclasses.field(default_factory=crossentropy)
    metrics: list[Any] | dict[str, Any] = dataclasses.field(
        default_factory=lambda: ["accuracy"]
    )
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: Callable[..., dict[str, Any]] = unweighted
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Odd, as the rest is: two ranks never have equally many rows of a batch.
    samples: int = 199
    batch: int = 47
    epochs: int = 1
    policy: str = "float32"
    tolerance: float = 1e-5


CASES = {
    "arrays": Case(
        samples=1000,
        batch=63,
        epochs=2,
        data=arrays,
        compiled={"weighted_metrics": ["sparse_categorical_crossentropy"]},
    ),
    "dataset": Case(
        without_shape,
        lambda: keras.optimizers.Adam(0.003, global_clipnorm=0.3),
        data=dataset,
        compiled={"steps_per_execution": 3},
    ),
    "distributed": Case(
        without_shape, data=distributed, compiled={"steps_per_execution": 2}
    ),
    "in_parts": Case(without_shape, data=in_parts, epochs=2),
    "generator": Case(without_shape, data=generator, epochs=2),
    "pairs": Case(
        Subclassed,
        "sgd",
        {"digit": crossentropy(), "even": "mse"},
        {"digit": ["accuracy"], "even": [keras.metrics.AUC(50, from_logits=True)]},
        {"run_eagerly": True, "loss_weights": {"digit": 1.0, "even": 0.5}},
        data=pairs,
    ),
    # The last batch has one row.
    "fewer_rows_than_ranks": Case(synchronized, samples=95),
    "masked": Case(with_mask, data=of_each_line),
    "weighted_mean": Case(
        loss=crossentropy(reduction="mean_with_sample_weight"), data=arrays
    ),
    "masked_weighted_mean": Case(
        with_mask,
        loss=crossentropy(reduction="mean_with_sample_weight"),
        data=of_each_weighted_line,
    ),
    "sum": Case(
        fit={"validation_split": 0.3},
        loss=crossentropy(reduction="sum"),
        optimizer=lambda: keras.optimizers.SGD(0.001),
    ),
    "a_value_for_each_row": Case(
        without_shape,
        loss=crossentropy(reduction=None),
        optimizer=lambda: keras.optimizers.SGD(0.001),
    ),
    "embedding": Case(with_embedding, lambda: keras.optimizers.SGD(1.0)),
    "accumulation": Case(
        without_shape,
        lambda: keras.optimizers.SGD(
            0.1,
            gradient_accumulation_steps=2,
            weight_decay=0.01,
            use_ema=True,
            ema_momentum=0.9,
            ema_overwrite_frequency=2,
        ),
    ),
    "several_optimizers": Case(optimizer=several_optimizers),
    "mixed_float16": Case(
        without_shape,
        lambda: keras.optimizers.SGD(0.1),
        policy="mixed_float16",
        tolerance=2e-3,
    ),
}


def train(case: Case, x: np.ndarray, y: np.ndarray, xla: bool) -> dict[str, Any]:
    keras.config.set_dtype_policy(case.policy)
    try:
        model = case.model()
        optimizer = case.optimizer if isinstance(case.optimizer, str) else None
        model.compile(
            optimizer or case.optimizer(),
            case.loss,
            metrics=case.metrics,
            jit_compile=xla,
            **case.compiled,
        )
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = x[: case.samples], y[: case.samples]
    history = model.fit(
        **case.data(x, y, case.batch), epochs=case.epochs, verbose=0, **case.fit
    )
    return {"logs": history.history, "weights": model.get_weights()}


COMPILED = ["arrays", "fewer_rows_than_ranks"]


@pytest.mark.parametrize("name", CASES)
def test_fit(name, both_ways, require_equal, digits):
    alone, here = both_ways(train, name, CASES[name], *digits, False)
    require_equal(alone, here, CASES[name].tolerance)


@pytest.mark.needs_xla
@pytest.mark.parametrize("name", COMPILED)
def test_fit_compiled_by_xla(name, both_ways, require_equal, digits):
    alone, here = both_ways(train, name, CASES[name], *digits, True)
    require_equal(alone, here, CASES[name].tolerance)


def test_can_fail(both_ways, require_equal, digits, monkeypatch, several_ranks):
    """Were gradients not summed, or rows not counted, the tests above would say so."""
    name = "weighted_mean"
    arguments = train, name, CASES[name], *digits, False
    alone, _ = both_ways(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(
            "keras_hvd.backends.tensorflow.gradients.reduction.reduce_buckets",
            lambda reduction, buckets, *others: buckets,
        )
        _, here = both_ways(*arguments)
        with pytest.raises(AssertionError):
            require_equal(alone, here)
    with monkeypatch.context() as patch:
        patch.setattr("keras_hvd.strategy.keras_losses._divisor", lambda *_: None)
        _, here = both_ways(*arguments)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(here["weights"][0], alone["weights"][0], 1e-5)


def test_unseeded_shuffles(strategy, several_ranks):
    """All ranks shuffle alike, and another way in each epoch, without any seed."""
    from tensorflow.python.eager import context

    seen = []

    class Noting(keras.Model):
        def train_step(self, data):
            rows = tf.distribute.get_replica_context().all_gather(data[0], 0)
            tf.py_function(lambda rows: seen.extend(rows.numpy().ravel()), [rows], [])
            return super().train_step(data)

    seed = context.global_seed()
    context.context()._set_global_seed(None)
    try:
        with strategy.scope():
            outputs = layers.Dense(1)(inputs := keras.Input((1,)))
            model = Noting(inputs, outputs)
            model.compile("sgd", "mse")
            x = np.arange(20.0)[:, None]
            model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    finally:
        context.context()._set_global_seed(seed)
    first, second = seen[:20], seen[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != sorted(first)


@pytest.mark.parametrize("reader", ["dataset", "other_rows", "other_length"])
def test_other_data(reader, strategy, rank, several_ranks, raises_on_all_ranks):
    """Ranks that read other data than the first are told so."""
    x = np.arange(40.0)[:, None]
    y = x.copy()
    expected = RuntimeError
    parts = ["first batch of rank", "not a part (keras_hvd.data.part"]
    parts += ["seed= of dataset.shuffle", "timeseries_dataset"]
    if reader == "dataset":
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=rank)
        arguments = {"x": data.batch(16)}
        parts.append("they differ in x and y (labels). Under")
    elif reader == "other_rows":
        arguments = {"x": x + rank, "y": y, "batch_size": 16}
    else:
        arguments = {"x": x[rank:], "y": y[rank:], "batch_size": 16}
        expected, parts = ValueError, ["rank 0 was given samples=40", "and rank"]
    with strategy.scope():
        model = keras.Sequential([layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(expected) as raised:
        model.fit(**arguments, verbose=0)
    raises_on_all_ranks(raised.value, *parts)


def test_class_weights_of_parts(strategy, raises_on_all_ranks):
    with strategy.scope():
        model = linear()
        model.compile("sgd", "mse")
    with strategy.scope(), pytest.raises(ValueError) as raised:
        model.fit(in_parts(np.ones((6, 1)), np.ones(6), 3)["x"], class_weight={1: 2})
    raises_on_all_ranks(raised.value, "class_weight", "(x, y, sample_weight)")


def test_python_random_is_agreed(strategy, rank, digits, several_ranks):
    """A PyDataset is shuffled alike, for any states of Python's generators."""
    import random

    state = random.getstate()
    random.seed(rank)
    try:
        with strategy.scope():
            model = Subclassed()
            model.compile("sgd", {"digit": crossentropy(), "even": "mse"})
        model.fit(**pairs(*digits, 200), epochs=2, verbose=0)
    finally:
        random.setstate(state)


@pytest.mark.parametrize("data", [unweighted, dataset, generator])
def test_iterators_are_freed(data, strategy, digits):
    """At once: TensorFlow may take a minute to free one that waits for the garbage."""
    with strategy.scope():
        model = without_shape()
        model.compile("sgd", crossentropy())
    arguments = data(*digits, 400)
    arguments.pop("steps_per_epoch", None)  # so that it is data that ends the epoch
    gc.disable()
    try:
        before = iterators()
        model.fit(**arguments, verbose=0)
        assert iterators() == before
    finally:
        gc.enable()


def iterators() -> int:
    return sum(isinstance(each, tf.data.Iterator) for each in gc.get_objects())


def linear() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), layers.Dense(1)])


def test_two_scopes(rank, size, shared_path, equal_on_all_ranks):
    """As in a script that makes a strategy wherever it needs one."""
    x = np.linspace(-1, 1, 30, dtype="float32")[:, None]
    with keras_hvd.Strategy().scope():
        first = linear()
        first.compile("sgd", "mse")
    with keras_hvd.Strategy().scope():
        second = keras.Sequential([first, layers.Dense(1)])
        second.compile("adam", "mse", metrics=["mae"])
        first.fit(x, x, verbose=0)
        second.fit(x, x, verbose=0)
    if rank == 0:
        second.save(shared_path / "second.keras")
    keras_hvd.barrier()
    with keras_hvd.Strategy().scope():
        loaded = keras.models.load_model(shared_path / "second.keras")
        evaluated = loaded.evaluate(x, x, verbose=0)
    assert evaluated == pytest.approx(second.evaluate(x, x, verbose=0))
    for model in first, second, loaded:
        model.fit(x, x, verbose=0)
        assert equal_on_all_ranks(model.get_weights())
    keras_hvd.Strategy().run(lambda: first.weights[0].value.assign(tf.zeros([1, 1])))
    assert keras_hvd.Strategy().num_replicas_in_sync == size


def test_optimizer_from_elsewhere(strategy, raises_on_all_ranks):
    optimizer = keras.optimizers.SGD()
    with strategy.scope():
        model = linear()
    with pytest.raises(RuntimeError) as raised:
        model.compile(optimizer, "mse")
    raises_on_all_ranks(raised.value, "'SGD'"[1:-1], "outside", "strategy.scope()")


def test_distributed_optimizer_inside(strategy, raises_on_all_ranks):
    with strategy.scope(), pytest.raises(RuntimeError) as raised:
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
    raises_on_all_ranks(raised.value, "Strategy", "reduce twice")
    distributed = keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
    with strategy.scope():
        model = linear()
        with pytest.raises(RuntimeError) as raised:
            model.compile(distributed, "mse")
    raises_on_all_ranks(raised.value, "DistributedOptimizer")


def test_model_from_elsewhere(strategy, raises_on_all_ranks):
    model = linear()
    with strategy.scope(), pytest.raises(RuntimeError) as raised:
        model.compile("sgd", "mse")
    raises_on_all_ranks(raised.value, "outside", "compile()", "strategy.scope()")
    model.compile("sgd", "mse")
    with strategy.scope(), pytest.raises(RuntimeError) as raised:
        model.fit(np.ones((4, 1)), np.ones(4), verbose=0)
    raises_on_all_ranks(raised.value, "outside", "fit()", "strategy.scope()")


def test_model_built_elsewhere(strategy, raises_on_all_ranks):
    """The error names the model, and has none of the numbers in its weights."""
    with strategy.scope():
        model = keras.Sequential([layers.Dense(30)], name="late")
        model.compile("adam", "mse")
    model.build((None, 20))
    for train in model.fit, model.train_on_batch:
        with pytest.raises(RuntimeError) as raised:
            train(np.ones((6, 20)), np.ones((6, 1)))
        raises_on_all_ranks(raised.value, "'late'", "strategy.scope()", "build")
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
        with pytest.raises(ValueError) as raised:
            optimizer.build(model.trainable_variables)
    raises_on_all_ranks(
        raised.value, "'late/dense/kernel:0' of shape (20, 30)", "scope"
    )
    assert "array(" not in str(raised.value)


def test_other_arguments(strategy, rank, several_ranks, raises_on_all_ranks):
    """With them the ranks would wait for each other in different collectives."""
    with strategy.scope():
        model = linear()
        with pytest.raises(ValueError) as raised:
            model.compile("sgd", "mse", metrics=["mae", "mse"] if rank else ["mae"])
        raises_on_all_ranks(
            raised.value,
            "compile",
            "metrics=['mae'], and rank 1 metrics=['mae', 'mse']",
        )
        model.compile("sgd", "mse", metrics=[keras.metrics.AUC(), "mae"])
    x, y = np.ones((4, 1)), np.ones(4)
    with pytest.raises(ValueError) as raised:
        model.fit(x, y, verbose=0, validation_data=None if rank else (x, y))
    raises_on_all_ranks(
        raised.value, "validation_data=True, and rank 1 validation_data=False"
    )


class MeanOfRagged(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        rows = [tf.reduce_mean(each, axis=1) for each in keras.tree.flatten(inputs)]
        return self.dense(tf.add_n(rows)[:, None])


class LastOfRagged(MeanOfRagged):
    """Uses attributes that only ragged tensors have."""

    def call(self, inputs):
        last = tf.gather(inputs.flat_values, inputs.row_splits[1:] - 1)
        return self.dense(last[:, None])


class SumOfSparse(MeanOfRagged):
    """Uses a function that takes sparse tensors only."""

    def call(self, inputs):
        ones = tf.ones([inputs.shape[1], 1])
        return self.dense(tf.sparse.sparse_dense_matmul(inputs, ones))


@pytest.mark.parametrize(
    ("model", "several"),
    [(MeanOfRagged, 1), (MeanOfRagged, 2), (LastOfRagged, 1), (SumOfSparse, 1)],
    ids=["one input", "two inputs", "only ragged", "only sparse"],
)
def test_ragged_and_sparse_inputs(model, several, both_ways, require_equal):
    def run():
        lengths = np.arange(20) % 5 + 1
        values = np.linspace(-1, 1, lengths.sum(), dtype="float32")
        rows = tf.RaggedTensor.from_row_lengths(values, lengths)
        if model is SumOfSparse:
            rows = rows.to_sparse()
        inputs = rows if several == 1 else (rows,) * several
        trained = model()
        trained.compile("adam", "mse", metrics=["mae"])
        data = tf.data.Dataset.from_tensor_slices((inputs, lengths / 5)).batch(8)
        history = trained.fit(data, epochs=2, verbose=0, validation_data=data)
        return {
            "logs": history.history,
            "evaluated": trained.evaluate(data, verbose=0),
            "predicted": trained.predict(data, verbose=0),
            "weights": trained.get_weights(),
        }

    require_equal(*both_ways(run, f"{model.__name__} {several}"))


def test_optimizer_that_does_not_clip(both_ways, require_equal, digits):
    """Its gradients are summed later, once."""

    class Unclipped(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            return grads

    case = Case(without_shape, lambda: Unclipped(0.1))
    require_equal(*both_ways(train, "unclipped", case, *digits, False))


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_optimizer_that_updates_in_parts(eagerly, both_ways, require_equal, digits):
    """The gradients of every part are summed."""

    class InParts(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            for each in ([0, 2], [1, 3]):
                super()._backend_apply_gradients(
                    [grads[i] for i in each], [trainable_variables[i] for i in each]
                )

    def run():
        model = keras.Sequential(
            [keras.Input((2,)), layers.Dense(3, "tanh"), layers.Dense(1)]
        )
        model.compile(InParts(0.1), "mse", run_eagerly=eagerly)
        x = np.linspace(-1, 1, 24).reshape(12, 2)
        model.fit(x, x.sum(1), batch_size=6, verbose=0, shuffle=False)
        return {"weights": model.get_weights()}

    require_equal(*both_ways(run, f"in parts {eagerly}"))


def test_optimizer_of_another_kind(strategy, several_ranks, raises_on_all_ranks):
    """An optimizer that would update without a sum is refused."""

    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            for grad, variable in zip(grads, trainable_variables):
                variable.assign_sub(grad)

    with strategy.scope():
        model = linear()
        model.compile(Own(), "mse", run_eagerly=True)
    with pytest.raises(RuntimeError) as raised:
        model.fit(np.ones((8, 1)), np.ones(8), verbose=0)
    raises_on_all_ranks(raised.value, "Own", "summed")


def test_dropout_differs_between_ranks(strategy, several_ranks):
    """And is repeated by the next run of the same seed."""

    def mask():
        keras.utils.clear_session()
        keras.utils.set_random_seed(4)
        with strategy.scope():
            dropout = layers.Dropout(0.5)
            model = keras.Sequential([keras.Input((64,)), dropout, layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 64)), np.ones(8), batch_size=8, verbose=0)
        return strategy.run(lambda: dropout(np.ones((1, 64)), training=True)).numpy()

    first = mask()
    of_ranks = keras_hvd.allgather_object(first.tobytes())
    assert len(set(of_ranks)) == len(of_ranks)
    np.testing.assert_array_equal(mask(), first)


def test_overflow_on_one_rank(strategy, size, equal_on_all_ranks):
    """All ranks skip the step in which the gradients of one are not finite."""
    with strategy.scope():
        model = linear()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
    before = model.get_weights()
    x = np.ones((4 * size, 1))
    x[-1] = np.inf
    model.fit(x, np.ones(4 * size), batch_size=4 * size, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    model.fit(x[:-1], np.ones(4 * size - 1), batch_size=64, verbose=0)
    assert (model.get_weights()[0] != before[0]).all()
    assert equal_on_all_ranks(model.get_weights())
