"""SyncBatchNormalization: as one process' BatchNormalization of all ranks' rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd


def forward_and_backward(layer, x, mask, weights):
    """Outputs, gradients of the inputs and of gamma and beta, of a weighted sum."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, mask=mask)
        loss = tf.reduce_sum(weights * tf.square(y))
    return [y, *tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])]


def check(run, xs, ws, masks, rank, axis=-1, tolerance=1e-5):
    """Compares rank r's rows, `xs[r]`, with the rows of all at once."""
    whole = keras.layers.BatchNormalization(axis=axis, name="whole")
    ours = keras_hvd.SyncBatchNormalization(axis=axis, name="ours")
    for layer in (whole, ours):
        layer.build((None, *xs[0].shape[1:]))
    mask = None if masks is None else np.concatenate(masks)
    y, dx, dgamma, dbeta = forward_and_backward(
        whole, tf.constant(np.concatenate(xs)), mask, np.concatenate(ws)
    )
    mine = None if masks is None else tf.constant(masks[rank])
    found = run(
        lambda: forward_and_backward(ours, tf.constant(xs[rank]), mine, ws[rank])
    )()
    start = sum(len(x) for x in xs[:rank])
    rows = slice(start, start + len(xs[rank]))
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(found[0], y[rows], **close)
    np.testing.assert_allclose(found[1], dx[rows], **close)
    # The gradients of gamma and beta are those of this rank's part of the loss.
    for mine, all_ranks in zip(found[2:], (dgamma, dbeta)):
        summed = keras_hvd.allreduce(mine, op=keras_hvd.Sum)
        np.testing.assert_allclose(summed, all_ranks, **close)
    for name in ("moving_mean", "moving_variance"):
        np.testing.assert_allclose(getattr(ours, name), getattr(whole, name), **close)


def rows_of(shapes, seed=0, offset=0.0):
    generator = np.random.default_rng(seed)
    return [
        (generator.standard_normal(shape) * (1 + i) + i + offset).astype("float32")
        for i, shape in enumerate(shapes)
    ]


def test_images(run, rank, size):
    shapes = [(2, 3, 3, 4)] * size
    check(run, rows_of(shapes), rows_of(shapes, 1), None, rank)


def test_channels_first(rank, size):
    shapes = [(2, 4, 3)] * size
    check(tf.function, rows_of(shapes), rows_of(shapes, 1), None, rank, axis=1)


@pytest.mark.parametrize("empty", [0, 1])
def test_batches_of_several_sizes(run, empty, rank, size):
    """One rank of several may even have no rows."""
    shapes = [(1 + i - (empty if size > 1 else 0), 3) for i in range(size)]
    shapes[-1] = (3, 3)
    check(run, rows_of(shapes), rows_of(shapes, 1), None, rank)


def test_masks(run, rank, size):
    """The last rank's rows are masked but for one step."""
    shapes = [(2, 5, 3)] * size
    xs, generator = rows_of(shapes), np.random.default_rng(3)
    masks = [generator.integers(0, 2, (2, 5)).astype(bool) for _ in range(size)]
    masks[-1][:] = False
    masks[-1][0, 0] = True
    ws = [w * mask[..., None] for w, mask in zip(rows_of(shapes, 1), masks)]
    check(run, xs, ws, masks, rank)


def test_no_cancellation(rank, size):
    """A mean that is large against the deviation; float32 has 24 bits."""
    shapes = [(50, 2)] * size
    xs = rows_of(shapes, offset=1e4)
    layer = keras_hvd.SyncBatchNormalization(momentum=0.0, name="layer")
    layer(xs[rank], training=True)
    expected = np.concatenate(xs).astype("float64").var(axis=0)
    np.testing.assert_allclose(layer.moving_variance, expected, rtol=1e-3)


def test_float16(rank, size, equal_on_all_ranks):
    xs = rows_of([(8, 3)] * size)
    layer = keras_hvd.SyncBatchNormalization(dtype="mixed_float16", name="layer")
    y = layer(xs[rank], training=True)
    everything = np.concatenate(xs)
    expected = (xs[rank] - everything.mean(0)) / np.sqrt(everything.var(0) + 1e-3)
    assert y.dtype == tf.float16
    np.testing.assert_allclose(y, expected, atol=1e-2)
    assert equal_on_all_ranks([layer.moving_mean.numpy()])


def test_channels_that_differ_are_an_error_on_every_rank(run, rank, several_ranks):
    layer = keras_hvd.SyncBatchNormalization(name="layer")
    x = tf.ones([2, 3 if rank == 0 else 4])
    layer.build(x.shape)
    with pytest.raises(tf.errors.FailedPreconditionError, match="layer/moments"):
        run(lambda: layer(x, training=True))()
    assert keras_hvd.allreduce(1, op=keras_hvd.Sum) == keras_hvd.size()


def test_without_training_it_is_alone(rank, several_ranks):
    layer = keras_hvd.SyncBatchNormalization(name="layer")
    layer.build((None, 3))
    if rank == 0:
        layer(np.ones((2, 3), "float32"), training=False)


@pytest.mark.parametrize(
    "xla", [False, pytest.param(True, marks=pytest.mark.needs_xla)]
)
def test_fit(xla, size, images, part_of_batches, difference, equal_on_all_ranks):
    """As trained by one process; one of the layers is used twice."""

    def train(layer, optimizer, x, y, batch, compiled):
        keras.utils.clear_session()
        keras.utils.set_random_seed(4)
        shared = layer(name="shared")
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(3, 5, strides=4, activation="tanh"),
                shared,
                keras.layers.Conv2D(3, 3, activation="tanh"),
                shared,
                keras.layers.Flatten(),
                keras.layers.Dense(4, activation="tanh"),
                layer(name="last"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=compiled)
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model.get_weights()

    x, y = (rows[: 40 * size] for rows in images)
    alone = train(
        keras.layers.BatchNormalization,
        keras.optimizers.SGD(0.1),
        x,
        y,
        8 * size,
        False,
    )
    mine = [part_of_batches(rows, 8) for rows in (x, y)]
    weights = train(
        keras_hvd.SyncBatchNormalization,
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        *mine,
        8,
        xla,
    )
    assert difference(weights, alone) < 1e-4
    assert equal_on_all_ranks(weights)
