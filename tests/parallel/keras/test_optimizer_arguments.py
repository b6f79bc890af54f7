"""Each argument of DistributedOptimizer: N ranks train as one process on all the data.

The model has an Embedding, some rows of which a batch holds several times.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.tensorflow.compression import Compression

BATCH_OF_RANK = 2


def sgd(rate: float = 0.5, **arguments) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.5, **arguments)


@dataclasses.dataclass
class Case:
    arguments: dict[str, Any] | Callable[[keras.Model], dict[str, Any]]
    optimizer: Callable[[], keras.optimizers.Optimizer] = sgd
    # The optimizer with which one process makes the same steps, by the number of ranks.
    alone: Callable[[int], keras.optimizers.Optimizer] = lambda size: sgd()
    tolerance: float = 1e-5


def groups_of(model: keras.Model) -> dict[str, Any]:
    embedding, dense = model.layers[0], model.layers[-1]
    return {"groups": [[embedding.embeddings, dense.bias], [dense.kernel]]}


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, clipnorm=0.5)


CASES = {
    "defaults": Case({}),
    "adam": Case({}, adam, lambda size: adam()),
    "sum": Case({"op": keras_hvd.Sum}, alone=lambda size: sgd(0.5 * size)),
    "fp16": Case({"compression": Compression.fp16}, tolerance=2e-3),
    "bf16": Case({"compression": Compression.bf16}, tolerance=2e-2),
    "sparse_as_dense": Case({"sparse_as_dense": True}),
    "gradient_predivide_factor": Case(
        {"gradient_predivide_factor": 3.0, "sparse_as_dense": True}
    ),
    "groups": Case({"groups": 2}),
    "groups_of_variables": Case(groups_of),
    "num_groups": Case({"num_groups": 1, "sparse_as_dense": True}),
    "backward_passes_per_step": Case(
        {"backward_passes_per_step": 2},
        alone=lambda size: sgd(1.0, gradient_accumulation_steps=2),
    ),
    "average_aggregated_gradients": Case(
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        alone=lambda size: sgd(gradient_accumulation_steps=2),
    ),
    "without_meaning": Case(
        {
            "name": "mine",
            "use_locking": True,
            "device_dense": "/cpu:0",
            "device_sparse": "/cpu:0",
        }
    ),
}


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(5, 3, name="embedding"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, activation="tanh", name="dense"),
        ],
        name="model",
    )


@pytest.fixture(scope="module")
def tokens(size) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(8)
    rows = 4 * BATCH_OF_RANK * size
    x = generator.integers(0, 5, (rows, 4)).astype("int32")
    return x, generator.standard_normal((rows, 2)).astype("float32")


def train(model, optimizer, x, y, batch, mode):
    model.compile(optimizer, "mse", jit_compile=mode == "jit_compile")
    if mode in ("fit", "jit_compile"):
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return
    for start in range(0, len(x), batch):
        rows = slice(start, start + batch)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y[rows], y_pred=model(x[rows]))
        weights = model.trainable_weights
        gradients = tape.gradient(loss, weights)
        if mode == "dense":
            # Plain Keras does not add up the rows that sparse ones have several times.
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        model.optimizer.apply(gradients, weights)


def distribute(optimizer, arguments):
    if "num_groups" not in arguments:
        return keras_hvd.DistributedOptimizer(optimizer, **arguments)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        return keras_hvd.DistributedOptimizer(optimizer, **arguments)


def of_case(case: Case, model: keras.Model) -> keras.optimizers.Optimizer:
    given = case.arguments
    return distribute(case.optimizer(), given(model) if callable(given) else given)


# The cases in which Keras or XLA do something else around the reduction.
TRACED = ["adam", "fp16", "groups_of_variables", "backward_passes_per_step"]


@pytest.fixture(scope="module")
def reference(tokens, size):
    """The weights that one process trains, for each case."""
    trained = {}

    def of(name: str) -> list[np.ndarray]:
        if name not in trained:
            keras.utils.set_random_seed(6)
            model = make_model()
            optimizer = CASES[name].alone(size)
            train(model, optimizer, *tokens, BATCH_OF_RANK * size, "dense")
            trained[name] = model.get_weights()
            keras.utils.clear_session()
        return trained[name]

    return of


@pytest.mark.parametrize(
    ("mode", "name"),
    [("eager", name) for name in CASES]
    + [("fit", name) for name in TRACED]
    + [
        pytest.param("jit_compile", name, marks=pytest.mark.needs_xla)
        for name in TRACED
    ],
)
def test_weights(
    mode, name, tokens, reference, part_of_batches, difference, equal_on_all_ranks
):
    case = CASES[name]
    alone = reference(name)
    keras.utils.set_random_seed(6)
    model = make_model()
    before = model.get_weights()
    mine = [part_of_batches(rows, BATCH_OF_RANK) for rows in tokens]
    train(model, of_case(case, model), *mine, BATCH_OF_RANK, mode)
    weights = model.get_weights()
    assert difference(weights, alone) < case.tolerance
    assert difference(weights, before) > 5 * case.tolerance
    assert equal_on_all_ranks(weights)
    assert equal_on_all_ranks([each.numpy() for each in model.optimizer.variables])


def collectives_of(case: Case) -> list[tuple[str, list[tf.DType]]]:
    """The type of each collective in a step, and the types of its tensors."""
    model = make_model()
    optimizer = of_case(case, model)
    optimizer.build(model.trainable_variables)
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 0]), [5, 3])

    @tf.function
    def step():
        grads = [slices, tf.ones([3, 2]), tf.ones([2])]
        optimizer.apply(grads, model.trainable_variables)

    operations = step.get_concrete_function().graph.get_operations()
    return [
        (each.type, [tensor.dtype for tensor in each.inputs])
        for each in operations
        if each.type in ("KerasHvdAllreduce", "KerasHvdAllgather")
    ]


F, H = tf.float32, tf.float16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "defaults",
            [
                ("KerasHvdAllreduce", [F, F]),
                ("KerasHvdAllgather", [F, tf.int32]),
            ],
        ),
        (
            "fp16",
            [
                ("KerasHvdAllreduce", [H, H]),
                ("KerasHvdAllgather", [H, tf.int32]),
            ],
        ),
        ("sparse_as_dense", [("KerasHvdAllreduce", [F, F, F])]),
        ("num_groups", [("KerasHvdAllreduce", [F, F, F])]),
        (
            "groups",
            [
                ("KerasHvdAllreduce", [F]),
                ("KerasHvdAllreduce", [F]),
                ("KerasHvdAllgather", [F, tf.int32]),
            ],
        ),
    ],
)
def test_what_travels(name, expected, several_ranks):
    assert collectives_of(CASES[name]) == expected


def of_shapes(*shapes):
    return [
        keras.Variable(np.zeros(shape, "float32"), name=f"v{i}")
        for i, shape in enumerate(shapes)
    ]


# The last rank's arguments, and the number of its steps for one of the others.
DIFFERING = {
    "op": ({"op": keras_hvd.Sum}, 1),
    "compression": ({"compression": Compression.bf16}, 1),
    "sparse_as_dense": ({"sparse_as_dense": True}, 1),
    "gradient_predivide_factor": ({"gradient_predivide_factor": 4.0}, 1),
    "groups": ({"groups": 2}, 1),
    "backward_passes_per_step": ({"backward_passes_per_step": 2}, 2),
}


# In a graph the rank with two groups has both under way when the first one fails. It
# waits for the second, which no other rank has, until the others leave.
@pytest.mark.parametrize(
    ("run", "argument"),
    [pytest.param(lambda f: f, each, id=f"eager-{each}") for each in DIFFERING]
    + [
        pytest.param(tf.function, each, id=f"graph-{each}")
        for each in DIFFERING
        if each != "groups"
    ],
)
def test_an_argument_that_differs_is_an_error_on_every_rank(
    argument, run, several_ranks, rank, size
):
    """Before any weight has changed, and without ranks that wait for nothing."""
    given, steps = DIFFERING[argument] if rank == size - 1 else ({}, 1)
    variables = of_shapes((2, 1), (2,), (3,))
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **given)
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), [2, 1])
    gradients = [slices, tf.ones([2]), tf.ones([3])]
    optimizer.build(variables)

    @run
    def step():
        optimizer.apply(gradients, variables)

    for _ in range(steps - 1):
        step()
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="sgd/gradients/0' differs between ranks",
    ):
        step()
    assert not any(np.any(each) for each in variables)
    assert keras_hvd.allreduce(1, op=keras_hvd.Sum) == size


def test_passes_that_differ_in_how_they_add_up(several_ranks, rank):
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=rank == 0,
    )
    [variable] = of_shapes((2,))
    optimizer.apply([tf.ones([2])], [variable])
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="differs between ranks"
    ):
        optimizer.apply([tf.ones([2])], [variable])


@pytest.mark.parametrize(
    "mode",
    ["eager", "graph", pytest.param("jit_compile", marks=pytest.mark.needs_xla)],
)
def test_adasum(mode, rank, size):
    """Adasum of orthogonal gradients is their sum."""
    [variable] = of_shapes((size,))
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=keras_hvd.Adasum
    )
    optimizer.build([variable])

    def step():
        optimizer.apply([tf.one_hot(rank, size) * (rank + 1.0)], [variable])

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "jit_compile")
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match=f"power of 2, not {size}"):
            step()
        return
    step()
    np.testing.assert_allclose(variable, -np.arange(1.0, size + 1))


def test_adasum_of_slices(several_ranks):
    table, dense = of_shapes((2, 1), (2,))
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=keras_hvd.Adasum
    )
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), [2, 1])
    with pytest.raises(NotImplementedError, match="pass sparse_as_dense=True"):
        optimizer.apply([slices, tf.ones([2])], [table, dense])


@pytest.mark.parametrize("rows", [1, 0])
def test_slices_of_several_lengths(rows, rank, size):
    """Rank r has r slices of row 0, and `rows` of row 1."""
    indices = [0] * rank + [1] * rows
    slices = tf.IndexedSlices(
        tf.ones([len(indices), 2]), tf.constant(indices, tf.int32)
    )
    table = keras.Variable(np.zeros((3, 2), "float32"), name="table")
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([slices], [table])
    expected = [[-(size - 1) / 2] * 2, [-float(rows)] * 2, [0.0, 0.0]]
    np.testing.assert_allclose(table, expected, rtol=1e-6)


@pytest.mark.parametrize("built", [False, True])
def test_accumulation_of_an_optimizer_with_state(built, rank, size):
    """It begins with a whole round, and keeps its other state."""
    variable = keras.Variable([0.0], name="v")
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5, use_ema=True)
    for _ in range(3 if built else 0):
        optimizer.apply([tf.constant([2.0])], [variable])
    before = [each.numpy() for each in optimizer.variables]
    variable.assign([0.0])
    keras_hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    momentum = float(optimizer.momentums[0].numpy()[0]) if built else 0.0
    for value in (1.0, rank, 5.0):
        optimizer.apply([tf.constant([float(value)])], [variable])
    expected = 0.5 * momentum - (1.0 + (size - 1) / 2)
    np.testing.assert_allclose(variable, [expected], rtol=1e-6)
    names = [each.name for each in optimizer.variables]
    assert names == ["iteration", "learning_rate", "v_average"] + [
        "v_gradient_accumulator",
        "v_momentum",
    ]
    np.testing.assert_allclose(optimizer.variables[3], [5.0])
    if built:
        assert [len(before), int(optimizer.iterations)] == [4, 4]


def test_loss_scale_and_several_passes(rank, size):
    variable = keras.Variable([0.0], name="v")
    optimizer = keras_hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0),
        backward_passes_per_step=2,
    )
    for value in (float(rank), np.inf if rank == 0 else 1.0, 3.0):
        optimizer.apply([tf.constant([value])], [variable])
    np.testing.assert_allclose(variable, [-(size - 1) / 2 - 2 * 3.0], rtol=1e-6)
