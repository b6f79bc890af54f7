"""Allreduces with starts that return at once and one op that ends them, as on GPUs."""

import gc
import os
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import keras_hvd
from keras_hvd import Average, Sum
from keras_hvd.backends.tensorflow.collectives import gradients

# Buckets of several types and sizes, one without elements and one larger than the
# exchange memory.
BUCKETS = [
    [(tf.float32, (3, 5)), (tf.float32, ()), (tf.int32, (7,))],
    [(tf.float64, (0, 4))],
    [(tf.bfloat16, (1_100_003,)), (tf.float16, (2, 2))],
    [(tf.float32, (1_300_001,))],
]
NAMES = [f"started/{place}" for place in range(len(BUCKETS))]


@pytest.fixture
def given(values, rank):
    return [[values(*each, rank) for each in bucket] for bucket in BUCKETS]


@pytest.fixture(params=["eager", "graph"])
def run(request):
    if request.param == "eager":
        return lambda function: function
    return lambda function: tf.function(function, autograph=False)


def tensors_of(buckets):
    return [[tf.constant(array) for array in bucket] for bucket in buckets]


def flat(buckets):
    return [tensor.numpy() for bucket in buckets for tensor in bucket]


@pytest.mark.parametrize("op", [Sum, Average], ids=lambda op: op.name)
def test_equals_allreduces(op, run, given):
    reduce = run(lambda buckets: gradients.start_all(buckets, NAMES, op))
    for _ in range(3):
        buckets = tensors_of(given)
        results = flat(reduce(buckets))
        expected = flat(
            keras_hvd.grouped_allreduce(bucket, op=op) for bucket in tensors_of(given)
        )
        for result, other in zip(results, expected, strict=True):
            assert result.tobytes() == other.tobytes()
        # The inputs belong to the caller still.
        for tensor, array in zip(flat(buckets), flat(tensors_of(given)), strict=True):
            assert tensor.tobytes() == array.tobytes()


@pytest.mark.parametrize("group", ["start_all", "grouped_allreduce"])
def test_what_follows_stays_on_one_thread(group):
    """Behind an op that does not wait, and which TensorFlow leaves in the graph."""

    @tf.function
    def step(x):
        if group == "start_all":
            reduced = sum(gradients.start_all([[x, x], [x]], ["a", "b"], Sum), [])
        else:
            reduced = keras_hvd.grouped_allreduce([x, x, x], op=Sum)
        return [each + 1 for each in reduced]

    context.context().enable_graph_collection()
    try:
        step(tf.constant(1.0))
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_graph_collection()
    # Those of other functions may be there too.
    nodes = {node.name: node for node in graphs[-1].post_optimization_graph.node}
    additions = [node for node in nodes.values() if node.op == "AddV2"]
    names = [name.split(":")[0] for node in additions for name in node.input]
    sources = {nodes[name].op for name in names} - {"Const"}
    assert len(additions) == 3
    assert sources == {"KerasHvdWholeStep"}


def test_of_a_process_set(size, rank):
    if size == 1:
        pytest.skip("needs at least 2 ranks")
    ranks = [0, size - 1] if size > 2 else [1]
    members = keras_hvd.add_process_set(ranks)
    if members.included():
        handle = gradients.start(
            [tf.constant(float(rank))], "of_set", Sum, members.process_set_id
        )
        [result] = gradients.done([handle], [[tf.float32]])
        assert result.numpy() == sum(ranks)
    assert keras_hvd.remove_process_set(members)


def test_gradients_of_several_buckets(rank, size):
    """Each rank's gradients are those of all ranks' losses."""
    inputs = [tf.constant([1.0 + i, 2.0]) for i in range(3)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            buckets = [inputs[:1], inputs[1:]]
            flat = sum(gradients.start_all(buckets, ["of/0", "of/1"], Sum), [])
            factors = [(rank + 1.0) * 10**i for i in range(3)]
            loss = sum(f * tf.reduce_sum(x) for f, x in zip(factors, flat))
        return tape.gradient(loss, inputs)

    of_all = sum(range(1, size + 1))
    for i, gradient in enumerate(step()):
        np.testing.assert_array_equal(gradient, [of_all * 10**i] * 2)


def test_a_start_waits_for_nobody(rank):
    """Rank 0 starts, the others only once it has told them so."""
    if rank == 0:
        handle = gradients.start([tf.constant([1.0])], "waits_for_nobody", Sum)
    keras_hvd.barrier()
    if rank != 0:
        handle = gradients.start([tf.constant([1.0])], "waits_for_nobody", Sum)
    [result] = gradients.done([handle], [[tf.float32]])
    assert result.numpy() == [keras_hvd.size()]


def test_meets_an_allreduce_of_other_ranks(rank, size):
    """Whether a rank has a GPU may differ, its programs do not have to know."""
    if rank % 2 == 0:
        handle = gradients.start([tf.constant(1.0)], "meets", Sum)
        [result] = gradients.done([handle], [[tf.float32]])
    else:
        [result] = keras_hvd.grouped_allreduce([1.0], op=Sum, name="meets")
    assert result.numpy() == size


def test_first_error_wins_and_all_end(several_ranks, rank, run, raises_on_all_ranks):
    shapes = [(2,), (2 + rank,), (3 + rank,), (4,)]

    def reduce():
        buckets = [[tf.ones(shape)] for shape in shapes]
        return gradients.start_all(buckets, [f"wrong/{i}" for i in range(4)], Sum)

    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError) as error:
            run(reduce)()
        raises_on_all_ranks(error.value, "wrong/1", "differs")
    # Nothing of them is left.
    [[result]] = gradients.start_all([[tf.ones(())]], ["wrong/1"], Sum)
    assert result.numpy() == keras_hvd.size()


def test_a_refused_start_names_its_tensor():
    with pytest.raises(tf.errors.InvalidArgumentError, match="refused.*process set 99"):
        gradients.start([tf.ones(2)], "refused", Sum, process_set=99)


def test_without_done_nothing_is_lost(size):
    """Buffers stay until the engine has done with them, and are freed then."""
    for i in range(3):
        handle = gradients.start([tf.ones(1_000_003)], f"forgotten/{i}", Sum)
        del handle
        gc.collect()
    handle = gradients.start([tf.ones(3)], "remembered", Sum)
    [result] = gradients.done([handle], [[tf.float32]])
    np.testing.assert_array_equal(result, [size] * 3)


def test_without_done_in_a_function(size):
    """A start without a done is a collective all the same."""

    @tf.function
    def step():
        gradients.start([tf.ones(3)], "in_function", Sum)

    step()
    result = keras_hvd.allreduce(1.0, op=Sum, name="after")
    assert result.numpy() == size


def test_results_are_given_once():
    handle = gradients.start([tf.ones(1)], "once", Sum)
    gradients.done([handle], [[tf.float32]])
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="'once'.*has already run"
    ):
        gradients.done([handle], [[tf.float32]])


@pytest.mark.parametrize("dtypes", [[tf.int32], [], [tf.float32] * 2])
def test_results_have_the_types_of_the_starts(dtypes):
    handle = gradients.start([tf.ones(1)], f"types/{len(dtypes)}", Sum)
    expected = "types of its starts|more results|minimum"
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=expected):
        gradients.done([handle], [dtypes])


def test_a_handle_is_no_other_variant():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="is not a KerasHvdStart's"
    ):
        gradients.done(
            [
                tf.raw_ops.EmptyTensorList(
                    element_shape=tf.constant([], tf.int32),
                    max_num_elements=1,
                    element_dtype=tf.float32,
                )
            ],
            [[tf.float32]],
        )


def test_in_a_loop(size):
    """The same start again and again, each time after its done."""

    @tf.function
    def repeated():
        x = tf.ones(5)
        for _ in tf.range(4):
            [[x]] = gradients.start_all([[x]], ["loop"], Average)
            x.set_shape([5])
            x += 1.0
        return x

    np.testing.assert_array_equal(repeated(), [5.0] * 5)


def test_shapes_and_edges():
    """Shapes pass through the handles; starts depend on nothing but their tensors."""

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([4], tf.int64)]
    )
    def reduce(x, y):
        results = gradients.start_all([[x, y], [y + 1]], ["shapes/0", "shapes/1"], Sum)
        return [each for bucket in results for each in bucket]

    graph = reduce.get_concrete_function().graph
    assert [each.shape.as_list() for each in graph.outputs] == [[None, 3], [4], [4]]
    by_type = {}
    for op in graph.get_operations():
        by_type.setdefault(op.type, []).append(op)
    starts = by_type["KerasHvdStart"]
    assert not any(op.control_inputs for op in starts)
    [done] = by_type["KerasHvdDone"]
    assert [each.op for each in done.inputs] == starts
    assert not done.control_inputs
    reduce(tf.ones([2, 3]), tf.ones([4], tf.int64))


def test_ends_on_the_thread_of_the_op_that_waits():
    """Without another thread of ours in between, unless it takes long."""
    cores = len(os.sched_getaffinity(0))
    if not cores >= keras_hvd.local_size() == keras_hvd.size():
        pytest.skip("takes long between hosts, and where ranks share cores")

    @tf.function
    def reduce(x):
        return gradients.start_all([[x], [x]], ["driven/0", "driven/1"], Sum)

    x = tf.constant(1.0)
    calls = 200
    # Other processes may have the cores for seconds.
    for _ in range(300):
        before = switches_of("keras_hvd_done")
        for _ in range(calls):
            reduce(x)
        few = switches_of("keras_hvd_done") - before < calls / 2
        if keras_hvd.allreduce(int(few), op=Sum) == keras_hvd.size():
            return
    pytest.fail("each end was handed to another thread")


def switches_of(name: str) -> int:
    """How often the threads of this name have gone to sleep."""
    total = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            status = (task / "status").read_text()
            total += int(re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", status)[1])
    return total
