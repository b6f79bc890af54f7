"""SyncBatchNormalization on torch: as one process' BatchNormalization of all rows."""

import keras
import numpy as np
import pytest
import torch

import keras_hvd
from keras_hvd.backends.torch.moments import moments_over_ranks
from keras_hvd.exceptions import MismatchError


def forward_and_backward(layer, x, mask, weights):
    """Outputs, gradients of the inputs and of gamma and beta, of a weighted sum."""
    x = torch.tensor(x, requires_grad=True)
    y = layer(x, training=True, mask=mask)
    layer.zero_grad()
    (torch.tensor(weights) * y.square()).sum().backward()
    of_weights = (each.value.grad for each in (layer.gamma, layer.beta))
    return [each.detach().numpy() for each in (y, x.grad, *of_weights)]


def check(xs, ws, rank, masks=None, axis=-1):
    """Compares rank r's rows, `xs[r]`, with the rows of all at once."""
    whole = keras.layers.BatchNormalization(axis=axis, name="whole")
    ours = keras_hvd.SyncBatchNormalization(axis=axis, name="ours")
    for layer in (whole, ours):
        layer.build((None, *xs[0].shape[1:]))
    mask = None if masks is None else torch.tensor(np.concatenate(masks))
    y, dx, dgamma, dbeta = forward_and_backward(
        whole, np.concatenate(xs), mask, np.concatenate(ws)
    )
    mine = None if masks is None else torch.tensor(masks[rank])
    found = forward_and_backward(ours, xs[rank], mine, ws[rank])
    start = sum(len(x) for x in xs[:rank])
    rows = slice(start, start + len(xs[rank]))
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(found[0], y[rows], **close)
    np.testing.assert_allclose(found[1], dx[rows], **close)
    # The gradients of gamma and beta are those of this rank's part of the loss.
    for part, all_ranks in zip(found[2:], (dgamma, dbeta)):
        total = np.sum(keras_hvd.allgather_object(part), axis=0)
        np.testing.assert_allclose(total, all_ranks, **close)
    for name in ("moving_mean", "moving_variance"):
        one, other = (getattr(each, name).numpy() for each in (ours, whole))
        np.testing.assert_allclose(one, other, **close)


def rows_of(shapes, seed=0, offset=0.0):
    generator = np.random.default_rng(seed)
    return [
        (generator.standard_normal(shape) * (1 + i) + i + offset).astype("float32")
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 3, 4), -1), ((2, 4, 3), 1)])
def test_images(shape, axis, rank, size):
    check(rows_of([shape] * size), rows_of([shape] * size, 1), rank, axis=axis)


@pytest.mark.parametrize("empty", [0, 1])
def test_batches_of_several_sizes(empty, rank, size):
    """One rank may even have no rows."""
    shapes = [(1 + i - empty, 3) for i in range(size)]
    shapes[-1] = (3, 3)
    check(rows_of(shapes), rows_of(shapes, 1), rank)


def test_moments_and_their_gradients_in_float64(rank, size):
    """Keras' layer computes in float32 on torch."""
    xs = [each.astype("float64") for each in rows_of([(3 + i, 2) for i in range(size)])]
    whole = torch.tensor(np.concatenate(xs), requires_grad=True)
    mine = torch.tensor(xs[rank], requires_grad=True)
    expected = whole.mean(0), whole.var(0, correction=0)
    world = keras_hvd.global_process_set
    found = moments_over_ranks(mine, None, [0], "moments", world)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    # Each rank's loss has factors of its own; that of all is their sum.
    factors = [[1.0 + i, 2.0 - i] for i in range(size)]
    sum(f * each.sum() for f, each in zip(factors[rank], found)).backward()
    totals = np.sum(factors, axis=0)
    sum(f * each.sum() for f, each in zip(totals, expected)).backward()
    start = sum(len(x) for x in xs[:rank])
    part = whole.grad[start : start + len(xs[rank])]
    torch.testing.assert_close(mine.grad, part, rtol=0, atol=1e-9)


def test_masks(rank, size):
    """The last rank's rows are masked but for one step."""
    shapes = [(2, 5, 3)] * size
    generator = np.random.default_rng(3)
    masks = [generator.integers(0, 2, (2, 5)).astype(bool) for _ in range(size)]
    masks[-1][:] = False
    masks[-1][0, 0] = True
    ws = [w * mask[..., None] for w, mask in zip(rows_of(shapes, 1), masks)]
    check(rows_of(shapes), ws, rank, masks)


def test_no_cancellation(rank, size):
    """A mean that is large against the deviation; float32 has 24 bits."""
    xs = rows_of([(50, 2)] * size, offset=1e4)
    layer = keras_hvd.SyncBatchNormalization(momentum=0.0, name="layer")
    layer(xs[rank], training=True)
    expected = np.concatenate(xs).astype("float64").var(axis=0)
    np.testing.assert_allclose(layer.moving_variance.numpy(), expected, rtol=1e-3)


def test_channels_that_differ_are_an_error_on_every_rank(rank, size):
    layer = keras_hvd.SyncBatchNormalization(name="layer")
    x = torch.ones(2, 4 if rank else 3)
    layer.build(x.shape)
    with pytest.raises(MismatchError, match="layer/moments"):
        layer(x, training=True)


def test_without_training_it_is_alone(rank, size):
    layer = keras_hvd.SyncBatchNormalization(name="layer")
    layer.build((None, 3))
    if rank == 0:
        layer(np.ones((2, 3), "float32"), training=False)


def test_fit(rank, size):
    """As trained by one process; one of the layers is used twice."""
    rows, steps = 6 * size, 10
    random = np.random.default_rng(7)
    x = random.standard_normal((steps * rows, 9, 9, 1))
    y = random.standard_normal((steps * rows, 2))

    def trained(layer, optimizer, x, y):
        keras.utils.set_random_seed(4)
        shared = layer(name="shared")
        model = keras.Sequential(
            [
                keras.Input((9, 9, 1)),
                keras.layers.Conv2D(3, 3, strides=2, activation="tanh"),
                shared,
                keras.layers.Conv2D(3, 3, activation="tanh"),
                shared,
                keras.layers.Flatten(),
                keras.layers.Dense(4, activation="tanh"),
                layer(name="last"),
                keras.layers.Dense(2),
            ]
        )
        model.compile(optimizer, "mse")
        batch = len(x) // steps
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model.get_weights()

    alone = trained(keras.layers.BatchNormalization, keras.optimizers.SGD(0.1), x, y)
    mine = (each.reshape(steps, size, 6, *each.shape[1:])[:, rank] for each in (x, y))
    weights = trained(
        keras_hvd.SyncBatchNormalization,
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        *(each.reshape(steps * 6, *each.shape[2:]) for each in mine),
    )
    for one, other in zip(weights, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
