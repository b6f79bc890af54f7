"""Single batches and loops by hand under a strategy: the arrays are global."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers

compiled_or_not = pytest.mark.parametrize(
    "xla", [False, pytest.param(True, marks=pytest.mark.needs_xla)]
)


def crossentropy(**arguments: Any) -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def small() -> keras.Model:
    return keras.Sequential(
        [layers.Flatten(), layers.Dense(6, activation="tanh"), layers.Dense(10)]
    )


def batch_by_batch(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Batches of 19 rows and, at last, of one."""
    model = small()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, crossentropy(), metrics=["accuracy"])
    results = []
    for start in (0, 19, 38, 57):
        rows = slice(start, min(start + 19, 58))
        weights = {digit: 1.0 + digit % 2 for digit in range(10)}
        results.append(
            [
                model.train_on_batch(x[rows], y[rows], class_weight=weights),
                model.test_on_batch(x[rows], y[rows], return_dict=True),
                model.predict_on_batch(x[rows]),
            ]
        )
    return {"results": results, "weights": model.get_weights()}


def test_on_batch(both_ways, require_equal, digits):
    require_equal(*both_ways(batch_by_batch, "batches", *digits))


def words_batch_by_batch(dtype: Any) -> dict[str, Any]:
    words = layers.TextVectorization(vocabulary=["a", "b"], output_mode="count")
    begin = keras.Input((), dtype="string")
    model = keras.Model(begin, layers.Dense(1, kernel_initializer="ones")(words(begin)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    texts = np.array(["a b", "b", "a", "b a", "a a", "c b a"], dtype)
    y = np.arange(6.0)[:, None]
    results = [
        [
            float(model.train_on_batch(texts[:rows], y[:rows])),
            float(model.test_on_batch(texts[:rows], y[:rows])),
            model.predict_on_batch(texts[:rows]),
        ]
        for rows in (6, 5, 1)
    ]
    return {"results": results, "weights": model.get_weights()}


@pytest.mark.parametrize("dtype", [object, "U", "S"])
def test_strings_on_batch(dtype, both_ways, require_equal):
    require_equal(*both_ways(words_batch_by_batch, f"words {dtype}", dtype))


def test_other_lengths(strategy, rank, several_ranks, digits, raises_on_all_ranks):
    x, y = digits
    with strategy.scope():
        model = small()
        model.compile("sgd", crossentropy())
    with pytest.raises(ValueError) as raised:
        model.train_on_batch(x[: 20 + rank], y[: 20 + rank])
    raises_on_all_ranks(
        raised.value, "train_on_batch", "rank 0 was given rows=[20, 20]"
    )


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch"])
def test_other_labels(method, strategy, rank, several_ranks, raises_on_all_ranks):
    with strategy.scope():
        model = small()
        model.compile("sgd", crossentropy())
    x, y = np.ones((20, 14, 14, 1)), np.full(20, rank)
    with pytest.raises(ValueError) as raised:
        getattr(model, method)(x, y)
    raises_on_all_ranks(raised.value, method, "rank 0 was given checksum of y=")


def test_no_rows(strategy, several_ranks, raises_on_all_ranks):
    with strategy.scope():
        model = small()
        model.compile("sgd", crossentropy())
    with pytest.raises(ValueError) as raised:
        model.train_on_batch(1.0, 2.0)
    raises_on_all_ranks(raised.value, "train_on_batch", "takes arrays")


def by_hand(x: np.ndarray, y: np.ndarray, xla: bool) -> dict[str, Any]:
    """A loop by hand, as tf.distribute documents them."""
    strategy = tf.distribute.get_strategy()
    model = small()
    model.build((None, 14, 14, 1))
    optimizer = keras.optimizers.Adam(0.003, global_clipnorm=0.5)
    optimizer.build(model.trainable_variables)
    loss_of_each = crossentropy(reduction=None)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    of_right = keras.metrics.AUC(50)
    total = keras.metrics.Sum()
    data = tf.data.Dataset.from_tensor_slices((x[:96], y[:96])).batch(24)
    data = strategy.experimental_distribute_dataset(data)

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_sum(loss_of_each(y, logits)) / 24
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(y, logits)
        is_right = tf.equal(tf.argmax(logits, -1, y.dtype), y)
        of_right.update_state(is_right, tf.reduce_max(tf.nn.softmax(logits), -1))
        return loss

    @tf.function(jit_compile=xla)
    def train_step(x, y):
        return strategy.run(step, args=(x, y))

    losses = [strategy.reduce("SUM", train_step(*each), None) for each in data]
    for each in losses:
        total.update_state(each)  # outside of replicas: no rank's own value
    return {
        "losses": [float(each) for each in losses],
        "weights": model.get_weights(),
        "results": [each.result().numpy() for each in (accuracy, of_right, total)],
        "result_in_a_graph": tf.function(of_right.result)().numpy(),
    }


@compiled_or_not
def test_loop_by_hand(xla, both_ways, require_equal, digits):
    require_equal(*both_ways(by_hand, "by_hand", *digits, xla))


class Custom(keras.Model):
    """A `train_step` of its own, with the model's loss."""

    def __init__(self):
        super().__init__()
        self.flatten = layers.Flatten()
        self.dense = layers.Dense(10)
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    def call(self, x):
        return self.dense(self.flatten(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.mean_loss.update_state(loss)
        return {"mean_loss": self.mean_loss.result(), "last": loss}


def custom_step(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    model = Custom()
    model.compile(keras.optimizers.SGD(0.1), crossentropy())
    history = model.fit(x[:97], y[:97], batch_size=24, verbose=0)
    return {"logs": history.history, "weights": model.get_weights()}


def test_custom_train_step(both_ways, require_equal, digits):
    """Ragged batches are exact there as well."""
    require_equal(*both_ways(custom_step, "custom_step", *digits))


def test_moving_statistics(strategy, digits, equal_on_all_ranks, rank, size):
    """Averaged before results depend on them; a rank without rows leaves its own."""
    x, y = digits
    with strategy.scope():
        normalization = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([layers.Flatten(), normalization, layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.0), crossentropy())
    model.train_on_batch(x[:1], y[:1])
    mean = normalization.moving_mean.numpy()
    expected = x[0].ravel() / 2 if rank == 0 else np.zeros_like(mean)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    variance = normalization.moving_variance.numpy()
    np.testing.assert_allclose(variance, 0.5 if rank == 0 else 1.0)
    model.test_on_batch(x[:4], y[:4])
    mean = normalization.moving_mean.numpy()
    np.testing.assert_allclose(mean, x[0].ravel() / 2 / size, atol=1e-6)
    assert equal_on_all_ranks(model.get_weights())


@pytest.mark.parametrize("is_scalar", [False, True])
def test_scalar_loss_warns(is_scalar, strategy, size, several_ranks, recwarn):
    """A loss that is one number is added up over ranks, which is said once."""
    from keras_hvd.strategy import keras_losses

    def squares(y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2, axis=None if is_scalar else -1)

    keras_losses._warn_of_scalar.cache_clear()
    warnings.simplefilter("always")  # said once by itself, and not by Python's filter
    with strategy.scope():
        model = keras.Sequential([layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01), squares)
    x = np.arange(1.0, 2 * size + 1)[:, None]
    # A mean of the ranks' means, or their sum, for the loss, the weight and the bias.
    times = size if is_scalar else 1
    assert model.train_on_batch(x, np.zeros_like(x)) == pytest.approx(
        times * np.mean(x**2)
    )
    weight, bias = model.get_weights()
    assert weight.item() == pytest.approx(1 - 0.02 * times * np.mean(x**2))
    assert bias.item() == pytest.approx(-0.02 * times * np.mean(x))
    model.test_on_batch(x, np.zeros_like(x))
    # No rows have no mean.
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    expected = (weight.item() + bias.item()) ** 2
    assert model.test_on_batch(one, zero) == pytest.approx(expected, rel=1e-5)
    said = [str(each.message) for each in recwarn if "added up" in str(each.message)]
    assert len(said) == is_scalar
    assert all("axis= makes Dice" in each for each in said)
