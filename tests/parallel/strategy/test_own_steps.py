"""Steps of the user's own, and layers that Keras builds at other times, or never."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

layers = keras.layers

GENERATOR = np.random.default_rng(6)
X = GENERATOR.standard_normal((24, 6))
NOISE = GENERATOR.standard_normal((24, 3))
# Divides by 1, 2, 3 and 4 ranks: losses by hand are exact only so.
BATCH = 12


def dense(units: int, *shape: int) -> keras.Model:
    begin = [keras.Input(shape)] if shape else []
    return keras.Sequential([*begin, layers.Dense(4, "tanh"), layers.Dense(units)])


class Adversarial(keras.Model):
    """Two models that train against each other; it is never called itself."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def compile(self, generator_optimizer, discriminator_optimizer, loss):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.crossentropy = loss

    def train_step(self, data):
        real, noise = data
        with tf.GradientTape() as tape:
            rows = tf.concat([real, self.generator(noise)], 0)
            labels = tf.concat([tf.ones_like(real), tf.zeros_like(real)], 0)[:, :1]
            loss = self.crossentropy(labels, self.discriminator(rows))
        weights = self.discriminator.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.discriminator_optimizer.apply_gradients(zip(gradients, weights))
        with tf.GradientTape() as tape:
            guessed = self.discriminator(self.generator(noise))
            fooled = self.crossentropy(tf.ones_like(guessed), guessed)
        weights = self.generator.trainable_weights
        gradients = tape.gradient(fooled, weights)
        self.generator_optimizer.apply(gradients, weights)
        # The share of this rank, of which Keras' progress bar shows the mean.
        ranks = tf.distribute.get_strategy().num_replicas_in_sync
        return {"loss": loss * ranks, "fooled": fooled * ranks}


class Denoising(keras.Model):
    """Its data has four parts, and `call` takes two of them."""

    def __init__(self):
        super().__init__()
        self.network = dense(6)

    def call(self, rows, times):
        return self.network(tf.concat([rows, times], -1))

    def train_step(self, data):
        rows, times, noise, weights = data
        with tf.GradientTape() as tape:
            errors = self(rows + noise * times, times) - noise
            ranks = tf.distribute.get_strategy().num_replicas_in_sync
            loss = tf.reduce_mean(weights * errors**2) / ranks
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss * ranks}


class Regressing(keras.Model):
    """Could as well have Keras' own step."""

    def __init__(self):
        super().__init__()
        self.network = dense(3)

    def call(self, rows):
        return self.network(rows)

    def train_step(self, data):
        return super().train_step(data)


class WithUnusedLayer(keras.Model):
    """Never built as a whole, however long it trains."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = layers.Dense(3), layers.Dense(3)

    def call(self, inputs):
        return self.used(inputs)


def trained(model: keras.Model, *data: np.ndarray) -> dict:
    if tf.distribute.has_strategy():
        # All start from the first rank's values; the others would have drawn their own.
        keras.utils.set_random_seed(11 + keras_hvd.rank())
    rows = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
    logs = model.fit(rows, epochs=2, verbose=0).history
    return {"logs": logs, "weights": model.get_weights()}


def adversarial(*shapes: tuple[int, ...]):
    def run():
        model = Adversarial(dense(6, *shapes[0]), dense(1, *shapes[1]))
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return trained(model, X, NOISE)

    return run


def denoising():
    model = Denoising()
    model.compile(keras.optimizers.Adam(0.01))
    times = np.linspace(0, 1, 24)[:, None]
    return trained(model, X, times, X[::-1].copy(), times[::-1].copy())


def regressing():
    """Assignments of the optimizer's `build` count, as with Keras' own step."""
    model = Regressing()
    model.compile(optimizer := keras.optimizers.ScheduleFreeAdamW(0.01), "mse")
    if not tf.distribute.has_strategy():
        model(X[:1])
        optimizer.build(model.trainable_variables)
    return trained(model, X, NOISE)


def unused(**arguments):
    def run():
        model = WithUnusedLayer()
        model.compile(keras.optimizers.Adam(0.01), "mse", **arguments)
        return trained(model, X, NOISE)

    return run


CASES = {
    "adversarial": adversarial((3,), (6,)),
    "adversarial_without_shapes": adversarial((), ()),
    "denoising": denoising,
    "regressing": regressing,
    "unused": unused(),
    "unused_eagerly": unused(run_eagerly=True),
    "unused_compiled": unused(jit_compile=True),
}


@pytest.fixture
def in_float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.filterwarnings("ignore:.build..` was called")
@pytest.mark.parametrize("name", CASES)
def test_own_steps(name, in_float64, both_ways, require_equal):
    require_equal(*both_ways(CASES[name], f"own step {name}"), 1e-9)


@pytest.mark.parametrize("known", [True, False], ids=["rows", "unknown_rows"])
def test_stateful_layer_of_other_rows(
    known, strategy, size, several_ranks, raises_on_all_ranks
):
    """The error has the numbers that work; it comes before the first step if known."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input(batch_shape=(12, 2, 3)), layers.GRU(3, stateful=True)]
        )
        model.compile("sgd", "mse")
    data = X.reshape(24, 2, 3).astype("float32"), NOISE.astype("float32")
    rows = tf.data.Dataset.from_tensor_slices(data).batch(12, drop_remainder=known)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as error:
        model.fit(rows, verbose=0)
    of_rank = 12 // size
    remedy = (
        f"batch_shape=({of_rank}, ...) for batches of 12"
        if known
        else f"batch_shape=(batch_size / {size}, ...)"
    )
    raises_on_all_ranks(error.value, "gru", f"batches of {12 * size} rows", remedy)


class ByHand(keras.Sequential):
    """Does something to its gradients before an optimizer sums them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.outputs_of(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(self.done_to(gradients), self.trainable_weights)
        return {"loss": loss}

    def outputs_of(self, x):
        return self(x)

    def done_to(self, gradients):
        return gradients


def context() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


class Summing(ByHand):
    def done_to(self, gradients):
        return context().all_reduce("sum", gradients)


class Averaging(ByHand):
    """With the library's own function, one after another."""

    def done_to(self, gradients):
        return [keras_hvd.allreduce(each) for each in gradients]


class Clipping(Summing):
    def done_to(self, gradients):
        gradients = super().done_to(gradients)
        return tf.clip_by_global_norm(gradients, 1.0)[0]


class Scaling(Summing):
    def done_to(self, gradients):
        return [0.5 * tf.clip_by_norm(g, 1.0) for g in super().done_to(gradients)]


class InBranch(Summing):
    """As in a step that accumulates."""

    def done_to(self, gradients):
        reduce = super().done_to
        ready = tf.equal(self.optimizer.iterations % 2, 0)
        zeros = [tf.zeros_like(each) for each in gradients]
        return tf.cond(ready, lambda: reduce(gradients), lambda: zeros)


class Flat(Summing):
    def done_to(self, gradients):
        flat = tf.concat([tf.reshape(each, [-1]) for each in gradients], 0)
        [flat] = super().done_to([flat])
        parts = tf.split(flat, [each.shape.num_elements() for each in gradients])
        return [tf.reshape(p, g.shape) for p, g in zip(parts, gradients)]


class WithTape(ByHand):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        tape = keras_hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients = tf.clip_by_global_norm(gradients, 1.0)[0]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def by_hand(kind: type, **arguments) -> keras.Model:
    model = kind([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), **arguments)
    return model


@pytest.mark.parametrize(
    "kind", [Summing, Averaging, Clipping, Scaling, InBranch, Flat, WithTape]
)
def test_gradients_that_are_reduced_already(
    kind, strategy, several_ranks, raises_on_all_ranks
):
    with strategy.scope():
        model = by_hand(kind)
    with pytest.raises(RuntimeError) as error:
        model.fit(X, NOISE, batch_size=BATCH, verbose=0)
    raises_on_all_ranks(error.value, "twice")


@pytest.mark.parametrize("kind", [Summing, Averaging])
def test_gradients_that_are_reduced_already_eagerly(
    kind, strategy, several_ranks, raises_on_all_ranks
):
    with strategy.scope():
        model = by_hand(kind, run_eagerly=True)
    with pytest.raises(RuntimeError) as error:
        model.fit(X, NOISE, batch_size=BATCH, verbose=0)
    raises_on_all_ranks(error.value, "summed twice")


def test_summed_gradients_given_to_an_optimizer_that_sums(
    several_ranks, raises_on_all_ranks
):
    model = ByHandWithAllreduce([keras.Input((6,)), layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(keras_hvd.DistributedOptimizer(optimizer, op=keras_hvd.Sum))
    with pytest.raises(RuntimeError) as error:
        model.fit(X, NOISE, batch_size=BATCH, verbose=0)
    raises_on_all_ranks(error.value, "summed twice")


class ByHandWithAllreduce(ByHand):
    def done_to(self, gradients):
        gradients = keras_hvd.grouped_allreduce(gradients, op=keras_hvd.Sum)
        return tf.clip_by_global_norm(gradients, 1.0)[0]


class Contrasting(ByHand):
    """Its loss takes the other ranks' outputs, and their sum."""

    def outputs_of(self, x):
        outputs = self(x)
        gathered = context().all_gather(outputs, 0)
        total = context().all_reduce("sum", outputs)
        return outputs + 0.1 * tf.reduce_mean(gathered, 0) + 0.1 * total


class ClippingByAllNorms(ByHand):
    """Clips by a norm that all ranks have agreed on; the gradients stay its own."""

    def done_to(self, gradients):
        norm = context().all_reduce("sum", tf.linalg.global_norm(gradients))
        noise = context().all_reduce("mean", gradients)
        self.seen.assign(tf.linalg.global_norm(noise))
        return [each / tf.maximum(norm, 1.0) for each in gradients]

    def build(self, shape=None):
        super().build(shape)
        self.seen = tf.Variable(0.0, trainable=False)


class Correcting(ByHand):
    """Moves its own gradients towards the mean."""

    def done_to(self, gradients):
        means = context().all_reduce("mean", gradients)
        return [g + 0.1 * (mean - g) for g, mean in zip(gradients, means)]


class Centering(ByHand):
    """Takes the mean of all ranks' rows off, before the forward pass."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x - context().all_reduce("mean", x), y))


@pytest.mark.parametrize(
    "kind", [Contrasting, ClippingByAllNorms, Correcting, Centering]
)
def test_collectives_that_reduce_no_gradients(kind, strategy, several_ranks):
    with strategy.scope():
        model = by_hand(kind)
        before = model.get_weights()
    model.fit(X, NOISE, batch_size=BATCH, verbose=0)
    assert any(np.any(a != b) for a, b in zip(before, model.get_weights()))
