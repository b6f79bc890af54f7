"""A rank without rows changes nothing: one process' numbers, in float64, to 1e-9.

In all these trainings the last batch has a single row, which is the first rank's.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

layers = keras.layers

GENERATOR = np.random.default_rng(8)
X = GENERATOR.standard_normal((13, 4, 3))
Y = (X.sum((1, 2)) > 0).astype("float64")[:, None]
# Divides by 1, 2 and 3 ranks.
BATCH = 6


@pytest.fixture(scope="module", autouse=True)
def in_float64(both_ways, request, size) -> Iterator[None]:
    if BATCH % size:
        pytest.skip(f"{size} ranks do not share a batch equally")
    keras.config.set_floatx("float64")
    both_ways.prepare(
        {
            item.name: CASES[item.callspec.params["name"]]
            for item in request.session.items
            if item.function is test_no_rows
        }
    )
    yield
    keras.config.set_floatx("float32")


class Remembering(layers.Layer):
    """A layer whose `call` keeps values, in all ways to change a variable."""

    def build(self, shape):
        def weight(name, *shape, value=0.0, **arguments):
            start = keras.initializers.Constant(value)
            arguments |= {"initializer": start, "trainable": False, "name": name}
            return self.add_weight(shape=shape, **arguments)

        self.least = weight("least", value=9.0)
        self.seen = weight("seen")
        self.calls = weight("calls")
        self.mean = weight("mean", aggregation="mean")
        self.signs = weight("signs", 2)
        self.last = weight("last", 2)
        self.rows = keras.metrics.Sum(name="rows")
        self.average = keras.metrics.Mean(name="average")

    def call(self, inputs):
        count = tf.cast(tf.shape(inputs)[0], "float64")
        self.least.assign(tf.minimum(self.least, tf.reduce_min(inputs)))
        self.seen.value.assign_add(count)
        self.calls.assign_add(1.0)
        self.mean.assign(tf.reduce_mean(inputs))
        signs = tf.cast(inputs[:, 0, 0] > 0, tf.int32)
        ones = tf.ones_like(inputs[:, 0, 0])
        self.signs.value.scatter_add(tf.IndexedSlices(ones, signs))
        self.last.value[1].assign(tf.reduce_sum(tf.abs(inputs)))
        self.rows.update_state(ones)
        self.average.update_state(inputs)
        return inputs

    def kept(self) -> dict[str, Any]:
        """The values of all ranks together; of each rank, those that must be alike."""
        here = {
            name: getattr(self, name).numpy()
            for name in ("least", "seen", "calls", "mean", "signs", "last")
        }
        ranks = [here]
        if tf.distribute.has_strategy():
            ranks = keras_hvd.allgather_object(here)
        return {
            "least": min(each["least"] for each in ranks),
            "seen": sum(each["seen"] for each in ranks),
            "signs": sum(each["signs"] for each in ranks),
            "alike": [here["calls"], here["mean"]],
            # The rows of the last batch are the first rank's; others have kept theirs.
            "last": ranks[0]["last"],
            "counted": sum(each["calls"] for each in ranks) / len(ranks),
        }


def always_one(y_true, y_pred):
    """One number for a batch; it would be minus infinity for no rows."""
    return tf.reduce_max(tf.ones_like(y_pred))


def network(*others: keras.layers.Layer) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((None, 3)),
            Remembering(),
            *others,
            layers.GlobalMaxPooling1D(),
            layers.SpectralNormalization(layers.Dense(4), 2),
            layers.Dense(1, "sigmoid"),
        ]
    )


def trained(
    model: keras.Model,
    data: Any = (X, Y),
    optimizer: Any = None,
    loss: Any = "mse",
    only_fit: bool = False,
    **compiled: Any,
) -> dict[str, Any]:
    """Fit, evaluate and predict, with last batches of one row."""
    metrics = ["mae", keras.metrics.F1Score(threshold=0.5), always_one]
    compiled = {"metrics": metrics, **compiled}
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **compiled)
    others: dict[str, Any] = {"verbose": 0}
    if isinstance(data, tuple):
        others["batch_size"] = BATCH
    else:
        data = [data]
    logs = model.fit(*data, epochs=2, shuffle=False, **others).history
    remembering = next(
        each for each in model._flatten_layers() if isinstance(each, Remembering)
    )
    results = {
        "logs": logs,
        "weights": [each.numpy() for each in model.trainable_variables],
    }
    if not only_fit:
        results["evaluated"] = model.evaluate(*data, **others)
        results["predicted"] = model.predict(data[0], **others)
    return {**results, "kept": remembering.kept()}


def fit(**compiled: Any) -> Callable[[], dict[str, Any]]:
    return lambda: trained(network(), **compiled)


def several_steps() -> dict[str, Any]:
    return trained(
        network(),
        optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        steps_per_execution=2,
        only_fit=True,
    )


def synchronized() -> dict[str, Any]:
    kinds: list[Any] = [layers.BatchNormalization] * 2
    if tf.distribute.has_strategy():
        both = functools.partial(layers.BatchNormalization, synchronized=True)
        kinds = [both, keras_hvd.SyncBatchNormalization]
    model = network(*(each(momentum=0.5) for each in kinds))
    statistics = [
        each for each in model.non_trainable_variables if "moving" in each.path
    ]
    results = trained(model, only_fit=True)
    return {**results, "statistics": [each.numpy() for each in statistics]}


class OwnStep(keras.Model):
    """Its loss by hand is a sum, which adds up over ranks; it counts rows itself."""

    def __init__(self, gathers=True):
        super().__init__()
        self.gathers = gathers
        self.remembering = Remembering()
        self.dense = layers.Dense(1, "sigmoid")
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.own = keras.metrics.Mean(name="own")

    def call(self, inputs):
        return self.dense(tf.reduce_max(self.remembering(inputs), 1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x) - y)
            loss = tf.reduce_sum(errors) / BATCH
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        context = tf.distribute.get_replica_context()
        rows = tf.cast(tf.shape(x)[0], "float64")
        rows, total = context.all_reduce("SUM", [rows, tf.reduce_sum(errors)])
        self.total.assign_add(rows)
        self.own.update_state(errors)
        logs = {"error": context.all_reduce("MEAN", tf.reduce_mean(errors))}
        if self.gathers:
            everywhere = context.all_gather(x[:, 0, 0], 0)
            logs["gathered"] = tf.reduce_sum(everywhere)
        return {
            **logs,
            "own": self.own.result(),
            "rows": rows,
            "total": total,
        }


def own_step(gathers: bool = True, **compiled: Any) -> Callable[[], dict[str, Any]]:
    def run():
        model = OwnStep(gathers)
        results = trained(model, metrics=None, **compiled)
        return {**results, "total": model.total.numpy()}

    return run


def ctc() -> dict[str, Any]:
    """Raises for no rows."""
    model = keras.Sequential([keras.Input((4, 3)), Remembering(), layers.Dense(6)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.CTC())
    labels = np.array([[1, 2]] * 13)
    logs = model.fit(X, labels, BATCH, verbose=0, shuffle=False).history
    return {"logs": logs, "weights": model.layers[-1].get_weights()}


def batch_by_batch() -> dict[str, Any]:
    """One row, which a trace may know; and a loss for each of two outputs."""
    inputs = keras.Input((4, 3))
    kept = (layer := Remembering())(inputs)
    outputs = {name: layers.Dense(1)(layers.Flatten()(kept)) for name in "ab"}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), {"a": "mse", "b": "mae"})
    results = []
    for rows in slice(0, 6), slice(6, 7), slice(7, 8):
        y = {"a": Y[rows], "b": 1 - Y[rows]}
        weights = {"a": Y[rows, 0] + 1, "b": Y[rows, 0] + 2}
        results.append(model.train_on_batch(X[rows], y, weights, return_dict=True))
        results.append(model.test_on_batch(X[rows], y, return_dict=True))
        results.append(model.predict_on_batch(X[rows]))
    return {"results": results, "kept": layer.kept()}


def dataset(
    rows: Callable[[tf.Tensor], Any] = lambda x: x,
) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    return data.map(lambda x, y: (rows(x), y))


def ragged() -> dict[str, Any]:
    """Sequences of other lengths in each batch, which the model pads."""
    inputs = keras.Input((None, 3), ragged=True)
    dense = layers.Lambda(lambda x: x.to_tensor() if hasattr(x, "to_tensor") else x)
    model = keras.Model(inputs, network()(dense(inputs)))
    return trained(model, dataset(tf.RaggedTensor.from_tensor))


def strings() -> dict[str, Any]:
    inputs = {"word": keras.Input((4, 1), dtype="string"), "x": keras.Input((4, 3))}
    words = layers.StringLookup(vocabulary=["0", "1"], output_mode="int")
    number = layers.Lambda(lambda x: tf.cast(x, tf.float64))(words(inputs["word"]))
    both = layers.Concatenate()([inputs["x"][..., 1:], number])
    model = keras.Model(inputs, network()(both))

    def rows(x):
        positive = tf.cast(x[..., :1] > 0, tf.int32)
        return {"word": tf.strings.as_string(positive), "x": x}

    return trained(model, dataset(rows), only_fit=True)


def lengths() -> dict[str, Any]:
    """Sequences of unknown lengths, padded to the longest of their batch."""

    def sequences():
        for i, (x, y) in enumerate(zip(X, Y)):
            yield x[: 2 + i % 3], y

    kinds = (tf.TensorSpec((None, 3), "float64"), tf.TensorSpec((1,), "float64"))
    data = tf.data.Dataset.from_generator(sequences, output_signature=kinds)
    # A step that finds no more data would count in some metrics of plain Keras.
    data = data.apply(tf.data.experimental.assert_cardinality(len(X)))
    results = trained(network(), data.padded_batch(BATCH))
    return {**results, **by_hand(data.padded_batch(BATCH))}


def by_hand(data: tf.data.Dataset) -> dict[str, Any]:
    """A loop as tf.distribute documents it, where kept values are exact too."""
    strategy = tf.distribute.get_strategy()
    model = network()
    optimizer = keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x) - y)) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def train_step(x, y):
        return strategy.run(step, (x, y))

    losses = [
        strategy.reduce("SUM", train_step(*batch), None)
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    remembering = model.layers[0]
    counts = remembering.rows.variables + remembering.average.variables
    # A mean of the ranks' means, of which this one has kept its last.
    remembering.mean.value.assign(0.0)
    return {
        "losses": [float(each) for each in losses],
        "weights by hand": [each.numpy() for each in model.trainable_variables],
        "kept by hand": remembering.kept(),
        "counts": [float(strategy.reduce("SUM", each, None)) for each in counts],
    }


def unknown_rank() -> dict[str, Any]:
    """Data of which only the type is known in advance."""

    class Shaping(OwnStep):
        def train_step(self, data):
            x, y = data
            return super().train_step(
                (tf.ensure_shape(x, [None, 4, 3]), tf.ensure_shape(y, [None, 1]))
            )

    kinds = [tf.float64, tf.float64]
    data = dataset().map(lambda *batch: tf.py_function(lambda *b: b, batch, kinds))
    model = Shaping()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    logs = model.fit(data, epochs=2, verbose=0).history
    weights = [each.numpy() for each in model.trainable_variables]
    return {"logs": logs, "kept": model.remembering.kept(), "weights": weights}


def distributed(rows: Callable[[tf.Tensor], Any] = lambda x: x) -> Any:
    """A dataset whose parts the strategy makes."""
    strategy = tf.distribute.get_strategy()
    return strategy.experimental_distribute_dataset(dataset(rows))


def of_each_rank(rows: Callable[[Any], Any] = lambda x: x) -> Any:
    """A dataset whose parts the ranks make, the last one with no rows on some."""

    def parts(context):
        def own(x, y):
            ends = tf.shape(x)[0] * tf.range(context.num_input_pipelines + 1)
            # The first rank has one row more, as in a strategy's parts.
            ends = -(-ends // context.num_input_pipelines)
            place = context.input_pipeline_id
            part = slice(ends[place], ends[place + 1])
            return rows(x[part]), y[part]

        return dataset().map(own)

    return tf.distribute.get_strategy().distribute_datasets_from_function(parts)


def own_step_on(data: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def run():
        model = OwnStep()
        results = trained(model, data(), metrics=None)
        return {**results, "total": model.total.numpy()}

    return run


def ragged_on(data: Callable[[Any], Any]) -> Callable[[], dict[str, Any]]:
    def run():
        inputs = keras.Input((None, 3), ragged=True)
        dense = layers.Lambda(lambda x: x.to_tensor() if hasattr(x, "to_tensor") else x)
        model = keras.Model(inputs, network()(dense(inputs)))
        return trained(model, data(tf.RaggedTensor.from_tensor))

    return run


def sparse_of_each_rank() -> dict[str, Any]:
    """Labels are dense; the rows of a rank that has none are those of no row."""

    def flat(x):
        return tf.sparse.from_dense(tf.reshape(x, [-1, 12]))

    inputs = keras.Input((12,), sparse=True)
    rows = layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 4, 3)))
    dense = layers.Lambda(
        lambda x: tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
    )
    model = keras.Model(inputs, network()(rows(dense(inputs))))
    return trained(model, of_each_rank(flat))


class OwnCollectives(keras.Model):
    """A step with keras_hvd's own collectives, and weights that it changes by hand."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, "sigmoid")

    def call(self, inputs):
        return self.dense(tf.reduce_max(inputs, 1))

    def train_step(self, data):
        x, y = data
        is_alone = not tf.distribute.has_strategy()

        def reduced(value, op):
            return value if is_alone else keras_hvd.allreduce(value, op=op)

        with tf.GradientTape() as tape:
            errors = tf.square(self(x) - y)
            loss = tf.reduce_sum(errors) / BATCH
        if not is_alone:
            tape = keras_hvd.DistributedGradientTape(tape, op=keras_hvd.Sum)
        weights = self.trainable_variables
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.1 * gradient)
        sevens = tf.reduce_max(7 * tf.ones_like(y, tf.int32))
        gathered = scattered = tf.reshape(errors, [-1])
        if not is_alone:
            [gathered] = keras_hvd.grouped_allgather([gathered])
            of_ranks = tf.fill([keras_hvd.size()], tf.reduce_sum(errors))
            scattered = keras_hvd.reducescatter(of_ranks, op=keras_hvd.Sum)
        return {
            "sum": reduced(tf.reduce_sum(errors), keras_hvd.Sum),
            "mean": reduced(tf.reduce_mean(errors), keras_hvd.Average),
            "sevens": reduced(sevens, keras_hvd.Average),
            "least": reduced(tf.reduce_min(errors), keras_hvd.Min),
            "most": reduced(tf.reduce_max(-errors), keras_hvd.Max),
            "most_integer": reduced(-sevens, keras_hvd.Max),
            "product": reduced(tf.reduce_prod(1 + errors), keras_hvd.Product),
            "gathered": tf.reduce_sum(gathered),
            "scattered": tf.reduce_sum(scattered),
        }


def own_collectives(**compiled: Any) -> Callable[[], dict[str, Any]]:
    def run():
        model = OwnCollectives()
        model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
        logs = model.fit(of_each_rank(), epochs=2, verbose=0).history
        return {"logs": logs, "weights": model.get_weights()}

    return run


def normalization() -> keras.layers.Layer:
    """Over all rows, on one process or on several ranks."""
    several = {"synchronized": True} if tf.distribute.has_strategy() else {}
    return layers.BatchNormalization(momentum=0.5, **several)


def normalized(*inputs: Any) -> keras.Model:
    return keras.Sequential(
        [*inputs, layers.Dense(3), normalization(), layers.Dropout(0.0)]
    )


def with_statistics(model: keras.Model, **results: Any) -> dict[str, Any]:
    moving = [each for each in model.variables if "seed" not in each.path]
    return {**results, "weights": [each.numpy() for each in moving]}


def normalized_by_hand() -> dict[str, Any]:
    """A loop whose traces know their number of rows, but for those that have none."""
    strategy = tf.distribute.get_strategy()
    model = normalized(keras.Input((4, 3)), layers.Flatten())
    optimizer = keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            errors = tf.square(model(x, training=True) - y)
            loss = tf.reduce_sum(errors) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    train_step = tf.function(lambda *batch: strategy.run(step, batch))
    losses = [
        strategy.reduce("SUM", train_step(*batch), None).numpy()
        for batch in strategy.experimental_distribute_dataset(dataset())
    ]
    return with_statistics(model, losses=losses)


def normalized_batches() -> dict[str, Any]:
    """Batches of which one rank has seen several sizes, and another one."""
    model = normalized(keras.Input((4, 3)), layers.Flatten())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    rows = (7, 6, 5, 1, 7)
    losses = [model.train_on_batch(X[:each], Y[:each]) for each in rows]
    return with_statistics(model, losses=losses)


def normalized_under_mask() -> dict[str, Any]:
    model = normalized(keras.Input((4, 3)), layers.Masking())
    model.add(layers.LSTM(1))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = X * (np.arange(4) < 1 + np.arange(13)[:, None] % 4)[..., None]
    logs = model.fit(x, Y, BATCH, epochs=2, shuffle=False, verbose=0).history
    return with_statistics(model, logs=logs)


class Renaming(OwnStep):
    """Logs its metrics' results by names that they do not have."""

    def train_step(self, data):
        x, y = data[:2]
        super().train_step((x, y))
        self.score.update_state(y, self(x))
        return {"error": self.own.result(), "others": {"score": self.score.result()}}


def other_names(**compiled: Any) -> Callable[[], dict[str, Any]]:
    def run():
        model = Renaming()
        model.score = keras.metrics.F1Score(threshold=0.5)
        model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
        results = [
            model.fit(dataset(), verbose=0).history,
            model.train_on_batch(X[:5], Y[:5], return_dict=True),
        ]
        return {"results": results}

    return run


CASES = {
    "normalized_by_hand": normalized_by_hand,
    "normalized_batches": normalized_batches,
    "normalized_under_mask": normalized_under_mask,
    "other_names": other_names(),
    "other_names_eagerly": other_names(run_eagerly=True),
    "own_collectives": own_collectives(),
    "own_collectives_eagerly": own_collectives(run_eagerly=True),
    "distributed": lambda: trained(network(), distributed()),
    "distributed_eagerly": lambda: trained(network(), distributed(), run_eagerly=True),
    "of_each_rank": lambda: trained(network(), of_each_rank()),
    "of_each_rank_eagerly": lambda: trained(
        network(), of_each_rank(), run_eagerly=True
    ),
    "own_step_on_distributed": own_step_on(distributed),
    "own_step_of_each_rank": own_step_on(of_each_rank),
    "ragged_distributed": ragged_on(distributed),
    "ragged_of_each_rank": ragged_on(of_each_rank),
    "sparse_of_each_rank": sparse_of_each_rank,
    "graph": fit(),
    "eager": fit(run_eagerly=True),
    "several_steps": several_steps,
    "synchronized": synchronized,
    "own_step": own_step(),
    "own_step_eagerly": own_step(run_eagerly=True),
    "ctc": ctc,
    "batch_by_batch": batch_by_batch,
    "ragged": ragged,
    "strings": strings,
    "lengths": lengths,
    "unknown_rank": unknown_rank,
}


@pytest.mark.parametrize("name", CASES)
def test_no_rows(name, both_ways, require_equal, request):
    # TensorFlow computes CTC in float32.
    tolerance = 1e-6 if name == "ctc" else 1e-9
    require_equal(*both_ways(CASES[name], request.node.name), tolerance)


@pytest.mark.needs_xla
def test_compiled_by_xla(both_ways, require_equal):
    def compiled():
        # XLA gathers equally many rows only. One process need not wait for it.
        jit_compile = tf.distribute.has_strategy()
        return own_step(gathers=False, jit_compile=jit_compile)()

    require_equal(*both_ways(compiled, "no rows compiled"), 1e-9)
