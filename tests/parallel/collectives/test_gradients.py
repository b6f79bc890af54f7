"""Gradients of every differentiable collective, against differences.

All ranks know all ranks' inputs, and so the sum of their losses. Its numerical
derivatives, times Horovod's factor, are each rank's gradients for its own input.
"""

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd import Average, Sum


@pytest.fixture(params=["all", "half"])
def process_set(request, size):
    """All ranks; then those of even and those of odd number, side by side."""
    if request.param == "all":
        yield keras_hvd.global_process_set
        return
    if size == 1:
        pytest.skip("needs at least 2 ranks")
    halves = [keras_hvd.add_process_set(range(i, size, 2)) for i in range(2)]
    yield halves[keras_hvd.rank() % 2]
    for each in halves:
        assert keras_hvd.remove_process_set(each)


def slices(x):
    return tf.IndexedSlices(x, tf.range(tf.size(x)), tf.size(x)[None])


def splits(place, members):
    """Splits of up to two rows for each member, at most all of the input's."""
    return [(place + getter) % 3 for getter in range(members)]


# Collectives of a vector `x` with two elements for each member of the set `s`.
EVEN = {
    "sum": lambda x, s: keras_hvd.allreduce(
        x, op=Sum, prescale_factor=0.5, postscale_factor=3.0, process_set=s
    ),
    "average": lambda x, s: keras_hvd.allreduce(x, prescale_factor=2.0, process_set=s),
    "group": lambda x, s: keras_hvd.grouped_allreduce(
        [x, 2 * x[:1], tf.constant(1), 5 * x[1:]], postscale_factor=4.0, process_set=s
    ),
    "slices": lambda x, s: (
        keras_hvd.allreduce(slices(x), prescale_factor=3.0, process_set=s).values
    ),
    "gather": lambda x, s: keras_hvd.allgather(x, process_set=s),
    "gathered_group": lambda x, s: keras_hvd.grouped_allgather(
        [x, tf.constant([1]), 3 * x[:1]], process_set=s
    ),
    "broadcast": lambda x, s: keras_hvd.broadcast(x, s.ranks[-1], process_set=s),
    "exchange": lambda x, s: keras_hvd.alltoall(x, process_set=s),
    "scatter_sum": lambda x, s: keras_hvd.reducescatter(
        x[:-1], op=Sum, prescale_factor=0.5, process_set=s
    ),
    "scatter_average": lambda x, s: keras_hvd.reducescatter(
        x, postscale_factor=3.0, process_set=s
    ),
    "scattered_group": lambda x, s: keras_hvd.grouped_reducescatter(
        [x[:-1], 3 * x[:1]], op=Average, process_set=s
    ),
}
UNEVEN = {
    "rows": lambda x, s: keras_hvd.allgather(x[: s.rank() + 1], process_set=s),
    "group_of_rows": lambda x, s: keras_hvd.grouped_allgather(
        [x[s.rank() :], 3 * x[: s.rank() + 1]], process_set=s
    ),
    "slices_of_rows": lambda x, s: (
        keras_hvd.allreduce(
            slices(x[: s.rank() + 1]), op=Sum, postscale_factor=2.0, process_set=s
        ).values
    ),
    "splits": lambda x, s: keras_hvd.alltoall(
        x[: sum(splits(s.rank(), s.size()))],
        splits(s.rank(), s.size()),
        process_set=s,
    )[0],
}

# Where one rank has no rows to give, or gets none.
EMPTY = {
    "no_rows": lambda x, s: keras_hvd.allgather(x[: s.rank()], process_set=s),
    "nothing_sent": lambda x, s: keras_hvd.alltoall(
        x[: s.size()] if s.rank() else x[:0],
        [1] * s.size() if s.rank() else [0] * s.size(),
        process_set=s,
    )[0],
    "nothing_scattered": lambda x, s: keras_hvd.reducescatter(x[:1], process_set=s),
}


# The power of the number of members by which Horovod multiplies gradients.
FACTORS = {
    "broadcast": -1,
    "gather": -1,
    "gathered_group": -1,
    "group_of_rows": -1,
    "rows": -1,
    "slices": -1,
    "slices_of_rows": -1,
    "scatter_average": 1,
    "scatter_sum": 1,
    "scattered_group": 1,
}


def loss(results, place):
    """Quadratic, as differences are exact for; a weight for each element and rank."""
    total = tf.constant(0.0, tf.float64)
    for result in tf.nest.flatten(results):
        if result.dtype == tf.float64:
            weights = tf.range(tf.size(result)) + place + 1
            total += tf.reduce_sum(tf.cast(weights, tf.float64) * result**2)
    return total


def linear_loss(results, place):
    """A loss whose gradient needs no result."""
    results = [each for each in tf.nest.flatten(results) if each.dtype == tf.float64]
    return (place + 1.0) * tf.add_n([tf.reduce_sum(result) for result in results])


def inputs_of(process_set):
    members = process_set.size()
    return np.linspace(-1, 2, 2 * members**2).reshape(members, 2 * members)


def expected(name, process_set):
    """By tf.test.compute_gradient; a mean of the losses, so times their number."""
    collective = (EVEN | UNEVEN)[name]

    def mean_loss(inputs):
        place = process_set.rank()
        own_loss = loss(collective(inputs[place], process_set), place)
        return keras_hvd.allreduce(own_loss, process_set=process_set)

    inputs = inputs_of(process_set)
    [by_tape], [numerical] = tf.test.compute_gradient(mean_loss, [tf.constant(inputs)])
    own = numerical.reshape(inputs.shape)[process_set.rank()] * process_set.size()
    own *= float(process_set.size()) ** FACTORS.get(name, 0)
    # This rank's tape has nothing for the others' inputs.
    np.testing.assert_allclose(by_tape.sum(), own.sum(), rtol=1e-6)
    return own


def gradient(collective, x, process_set, loss=loss):
    with tf.GradientTape() as tape:
        tape.watch(x)
        own_loss = loss(collective(x, process_set), process_set.rank())
    return tape.gradient(own_loss, x)


def symbolic_gradient(collective, x, process_set, loss=loss):
    results = collective(x, process_set)
    [result] = tf.gradients(loss(results, process_set.rank()), [x])
    return result


@pytest.mark.parametrize("name", [*EVEN, *UNEVEN])
def test_against_differences(name, process_set):
    collective = (EVEN | UNEVEN)[name]
    x = tf.constant(inputs_of(process_set)[process_set.rank()])
    own = expected(name, process_set)
    for run in (gradient, tf.function(gradient, autograph=False)):
        np.testing.assert_allclose(run(collective, x, process_set), own, rtol=1e-6)


@pytest.mark.needs_xla
@pytest.mark.parametrize("of_results", [loss, linear_loss])
def test_the_same_under_xla(of_results, process_set, counters):
    @tf.function(autograph=False, jit_compile=True)
    def gradients(x):
        return [
            gradient(collective, x, process_set, of_results)
            for collective in EVEN.values()
        ]

    x = tf.constant(inputs_of(process_set)[process_set.rank()])
    before = counters().tensors
    results = gradients(x)
    count = counters().tensors - before
    assert count >= len(EVEN)
    agree(count, process_set)
    for result, collective in zip(results, EVEN.values(), strict=True):
        eager = gradient(collective, x, process_set, of_results)
        np.testing.assert_allclose(result, eager, rtol=1e-9)


# No rank may leave out a collective that it does not need, since others wait for it.


def agree(of_rank, process_set):
    of_ranks = keras_hvd.allgather_object(of_rank, process_set=process_set)
    assert of_ranks == of_ranks[:1] * len(of_ranks)


def collectives_behind(tensor):
    """The collectives that a session runs for a tensor."""
    needed = tf.compat.v1.graph_util.extract_sub_graph(
        tensor.graph.as_graph_def(), [tensor.op.name]
    )
    ops = [node for node in needed.node if node.op.startswith("KerasHvd")]
    return sorted((node.op, node.attr["tensor_name"].s) for node in ops)


@pytest.mark.parametrize("of_results", [loss, linear_loss])
@pytest.mark.parametrize("name", [*EVEN, *UNEVEN, *EMPTY])
def test_all_ranks_run_the_same(name, of_results, several_ranks, counters):
    process_set = keras_hvd.global_process_set
    collective = (EVEN | UNEVEN | EMPTY)[name]
    x = inputs_of(process_set)[process_set.rank()]

    def in_session():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            result = symbolic_gradient(
                collective, tf.constant(x), process_set, of_results
            )
            behind = collectives_behind(result)
            assert behind
            agree(behind, process_set)
            before = counters().tensors
            value = session.run(result)
            return value, counters().tensors - before

    def in_function(gradient_of):
        function = tf.function(gradient_of, autograph=False)
        before = counters().tensors
        value = function(collective, tf.constant(x), process_set, of_results)
        return value, counters().tensors - before

    expected, _ = in_function(gradient)
    for value, count in (
        in_session(),
        in_function(gradient),
        in_function(symbolic_gradient),
    ):
        assert count > 0
        agree(count, process_set)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
