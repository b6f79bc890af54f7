"""Collectives in graphs: their names, their order, and refusals."""

import inspect
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_collective import ARGUMENTS, OF_ONE_TENSOR, call, takes

import keras_hvd
from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.job import native


@pytest.fixture(autouse=True)
def initialized():
    keras_hvd.init()


def operations(graph):
    """All operations of a graph and of the functions that it calls."""
    yield from graph.get_operations()
    for definition in graph.as_graph_def().library.function:
        yield from graph._get_function(definition.signature.name).graph.get_operations()


def collectives(function, *args):
    return collectives_in(function.get_concrete_function(*args).graph)


def collectives_in(graph):
    return [op for op in operations(graph) if "tensor_name" in op.node_def.attr]


def names(function, *args):
    return sorted(
        op.get_attr("tensor_name").decode() for op in collectives(function, *args)
    )


def test_autograph_leaves_the_code_alone():
    """It would rewrite all of it for each `tf.function`, which takes seconds."""
    callers = []

    class Compression(keras_hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            callers.append(sys._getframe(1).f_code.co_filename)
            return tensor, None

    @tf.function
    def reduce():
        return keras_hvd.allreduce(1.0, compression=Compression)

    reduce()
    assert set(callers) == {inspect.getsourcefile(keras_hvd.allreduce)}


@pytest.mark.parametrize("name", ["", "w\0of this layer"])
def test_names_that_the_engine_could_not_tell_apart(name):
    with pytest.raises(ValueError, match="name must not"):
        keras_hvd.allreduce(1.0, name=name)


def make_step():
    @tf.function
    def step(x):
        y = keras_hvd.allreduce(x) + keras_hvd.allreduce(x * 2)
        z = keras_hvd.allgather(x)
        y = tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: keras_hvd.broadcast(y, 0),
            lambda: keras_hvd.allreduce(y),
        )
        for _ in tf.range(3):
            y = keras_hvd.allreduce(y)
        return y, z, keras_hvd.allreduce(y, name="by the user: w/0")

    return step


def test_names_are_unique_and_say_where():
    assert names(make_step(), tf.ones([2])) == [
        "by the user: w/0",
        "step/allgather",
        "step/allreduce",
        "step/allreduce_1",
        "step/cond_false/cond/allreduce",
        "step/cond_true/cond/broadcast",
        "step/while_body/while/allreduce",
    ]


def test_names_do_not_depend_on_what_was_traced_before():
    """TensorFlow numbers branches by a counter, which may differ between ranks."""
    first = names(make_step(), tf.ones([2]))
    step = make_step()
    step.get_concrete_function(tf.ones([7]))
    assert names(step, tf.ones([2])) == first


class Reducing(keras.layers.Layer):
    def call(self, x):
        return keras_hvd.allreduce(x)


class Scaling(keras.layers.Layer):
    def call(self, x):
        with tf.name_scope("Scaling"):
            return x * 2


def in_branch(x, logs):
    if logs:
        tf.cond(x[0] > 0, lambda: tf.print("log"), tf.no_op)
    return tf.cond(x[0] > 0, lambda: keras_hvd.allreduce(x), lambda: x)


def in_branch_of_branch(x, logs):
    return tf.cond(x[0] > 0, lambda: in_branch(x, logs), lambda: x)


def in_case(x, logs):
    if logs:
        tf.case([(x[0] > 1, lambda: x)], default=lambda: x)
    pairs = [(x[0] > i, lambda: keras_hvd.allreduce(x)) for i in range(2)]
    return tf.case(pairs, default=lambda: x)


def in_switch(x, logs):
    if logs:
        tf.switch_case(tf.size(x), [lambda: x, lambda: x])
    return tf.switch_case(tf.size(x), [lambda: x, lambda: keras_hvd.allreduce(x)])


def in_loop(x, logs):
    if logs:
        tf.while_loop(lambda i: i < 2, lambda i: [i + 1], [0])
    body = lambda i, y: (i + 1, keras_hvd.allreduce(y))  # noqa: E731
    return tf.while_loop(lambda i, y: i < 2, body, (0, x))[1]


def in_map(x, logs):
    if logs:
        tf.map_fn(lambda y: y * 2, x)
    return tf.map_fn(keras_hvd.allreduce, x)


def in_scope(x, logs):
    if logs:
        with tf.name_scope("stage"):
            tf.print("log")
    with tf.name_scope("stage"):
        return keras_hvd.allreduce(x)


def among_nodes_of_its_name(x, logs):
    if logs:
        tf.identity(x, name="allreduce")
    return keras_hvd.allreduce(x)


def in_function(x, logs):
    @tf.function
    def log(x):
        tf.print("log", x)

    if logs:
        log(x)

    @tf.function
    def inner(x):
        return in_branch(x, logs)

    return inner(x)


def in_recomputed(x, logs):
    return tf.recompute_grad(lambda x: in_branch(x, logs))(x)


def in_layers(x, logs):
    if logs:
        keras.Sequential([Reducing(), Scaling()])
    model = keras.Sequential([Scaling(), Reducing(), Reducing(), Scaling()])
    return model(x[:, None])[:, 0]


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        *(in_branch, in_branch_of_branch, in_case, in_switch, in_loop, in_map),
        *(in_scope, among_nodes_of_its_name, in_function, in_recomputed, in_layers),
    ],
)
def test_names_do_not_depend_on_what_is_there_without_collectives(made, differentiated):
    """A rank that also logs, say, has the names of the others."""

    def of_rank(logs):
        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = made(x * x, logs)
            return tape.gradient(y, x) if differentiated else y

        # A loop's body may be there twice, once as it was before its gradient.
        return {*names(step, tf.ones([2]))}

    alone = of_rank(False)
    assert alone
    assert of_rank(True) == alone
    assert any("gradient" in name for name in alone) == differentiated


def test_scopes_that_the_user_has_numbered_keep_their_numbers():
    """Ranks may come to them in any order."""

    def of_order(*numbers):
        @tf.function(autograph=False)
        def step(x):
            for number in numbers:
                with tf.name_scope(f"stage_{number}"):
                    x = keras_hvd.allreduce(x)
            return x

        return names(step, 1.0)

    expected = ["step/stage_1/allreduce", "step/stage_2/allreduce"]
    assert of_order(1, 2) == of_order(2, 1) == expected


def test_names_inside_name_scopes():
    @tf.function
    def scoped(x):
        with tf.name_scope("outer"):
            return keras_hvd.allreduce(x), keras_hvd.allreduce(x)

    assert names(scoped, 1.0) == [
        "scoped/outer/allreduce",
        "scoped/outer/allreduce_1",
    ]


def test_gradients_are_named_after_the_op_and_never_alike():
    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = keras_hvd.allreduce(x, name="forward")
        return tape.gradient(y, x), tape.gradient(y, x)

    forward, *gradients = names(step, tf.ones([2]))
    assert forward == "forward"
    assert len(set(gradients)) == 2
    assert all("forward/gradient" in name for name in gradients)


def test_eager_names_are_fixed():
    assert submission.name_of("allreduce", None).tensor == "unnamed_allreduce"
    assert submission.name_of("allreduce", None).tensor == "unnamed_allreduce"


def many_collectives():
    @tf.function
    def step(x):
        return [[call(function, x + i) for function in OF_ONE_TENSOR] for i in range(5)]

    return step.get_concrete_function(tf.ones([2])).graph


def chained(graph):
    """Pairs of collectives of which one runs after the other."""
    found = []
    for op in graph.get_operations():
        if not op.type.startswith("KerasHvd"):
            continue
        ahead, seen = [op], set()
        while ahead:
            current = ahead.pop()
            for before in (*current.control_inputs, *(i.op for i in current.inputs)):
                if before.name not in seen:
                    seen.add(before.name)
                    ahead.append(before)
                    if before.type.startswith("KerasHvd"):
                        found.append((before.name, op.name))
    return found


def test_no_collective_of_a_graph_waits_for_another():
    assert chained(many_collectives()) == []


def test_left_alone_tensorflow_would_chain_them(monkeypatch):
    monkeypatch.setattr(submission, "run_independently", lambda op: None)
    assert len(chained(many_collectives())) >= 14


def test_every_collective_runs_before_its_function_returns():
    graph = many_collectives()
    ran = {op.name for op in graph.control_outputs}
    made = {op.name for op in graph.get_operations() if op.type.startswith("KerasHvd")}
    assert len(made) == 5 * len(OF_ONE_TENSOR)
    assert made <= ran


def test_barriers_keep_their_order():
    @tf.function
    def step():
        keras_hvd.barrier()
        keras_hvd.barrier()

    first, second = collectives(step)
    assert list(second.control_inputs) == [first]


def test_what_follows_may_run_collectives_itself():
    @tf.function
    def step(x):
        y = keras_hvd.allreduce(x)
        inner = lambda value: keras_hvd.allreduce(value, name="inner") + 1  # noqa: E731
        return tf.py_function(inner, [y], tf.float32)

    for _ in range(20):
        np.testing.assert_array_equal(step(tf.ones([3])), np.full(3, 2))


def test_thousands_of_ops_in_one_function():
    @tf.function
    def step(x):
        return tf.add_n([keras_hvd.allreduce(x, name=f"many/{i}") for i in range(2500)])

    np.testing.assert_array_equal(step(tf.ones([1])), [2500])


def test_a_tensorflow_whose_xla_lacks_what_is_needed(monkeypatch):
    info = native.ops_info(tf.__version__) | {"xla": False}
    monkeypatch.setattr(native, "ops_info", lambda tensorflow: info)

    @tf.function(jit_compile=True)
    def step(x):
        return keras_hvd.allreduce(x, name="w")

    with pytest.raises(NotImplementedError, match="'w' would be compiled by XLA"):
        step(tf.ones([2]))
    np.testing.assert_array_equal(keras_hvd.allreduce(tf.ones([2])), [1, 1])


@pytest.mark.parametrize("name, error", [("", ValueError), (7, TypeError)])
def test_a_name_that_is_none(name, error):
    with pytest.raises(error, match="allreduce: name must"):
        keras_hvd.allreduce(1.0, name=name)


def test_slices_without_a_shape_are_refused_where_they_become_dense():
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    with pytest.raises(ValueError, match="dense_shape"):
        keras_hvd.broadcast(slices, 0)


def test_a_name_may_leave_out_the_name_scopes():
    """`grouped_reducescatter` cannot; nor can Horovod's."""
    names = []
    functions = [each for each in ARGUMENTS if takes(each, "ignore_name_scope")]
    assert set(functions) >= set(OF_ONE_TENSOR)

    @tf.function(autograph=False)
    def step(x):
        for _ in range(2):
            with tf.name_scope("layer"):
                for ignore in (False, True):
                    for function in functions:
                        y = call(function, x, ignore_name_scope=ignore)
                        y = tf.nest.flatten(y)[0]
                        *_, last = collectives_in(y.graph)
                        names.append(last.get_attr("tensor_name").decode())
        return y

    np.testing.assert_array_equal(step(tf.ones([2])), [1, 1])
    assert names == [
        f"step/{scope}{function}{number}"
        for number in ("", "_1")
        for scope in ("layer/", "")
        for function in functions
    ]
