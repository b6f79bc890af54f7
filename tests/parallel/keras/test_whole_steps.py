"""A step that fails on the way changes nothing, whichever gradients have arrived."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd

OPTIMIZERS = {
    "counts": lambda: keras.optimizers.Nadam(0.1, weight_decay=0.1),
    "averages": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=1
    ),
    "passes": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, weight_decay=0.1, gradient_accumulation_steps=2
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), 1.0, dynamic_growth_steps=1
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_failed_step_changes_nothing(kind, run, several_ranks, rank):
    """The gradients of the last variable arrive, and those of the first do not."""
    optimizer = keras_hvd.DistributedOptimizer(OPTIMIZERS[kind](), groups=3)
    # Too large to arrive with the others.
    of_other_shapes = keras.Variable(np.ones(1_000_000 + rank, "float32"), name="a")
    alike = [keras.Variable(np.ones(3 + i), name=name) for i, name in enumerate("bc")]
    table = keras.Variable(np.ones([4, 2], "float32"), name="table")
    variables = [of_other_shapes, *alike, table]
    optimizer.build(variables)

    @run
    def step():
        slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 3]), [4, 2])
        optimizer.apply([*(each + 1 for each in variables[:-1]), slices], variables)

    if kind == "passes":
        step()
    held = [*variables, *optimizer.variables]
    before = [each.numpy() for each in held]
    with pytest.raises((tf.errors.OpError, keras_hvd.exceptions.MismatchError)):
        step()
    changed = [
        each.path
        for each, value in zip(held, before, strict=True)
        if not np.array_equal(each, value)
    ]
    assert not changed
