"""Collectives in programs compiled by XLA (`jit_compile=True`), run on the CPU."""

import contextlib
import pathlib
import re
import threading
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from element_types import REDUCED
from every_collective import OF_ONE_TENSOR, takes
from every_collective import call as call_of
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import keras_hvd
from keras_hvd.backends.tensorflow.collectives import gradients

pytestmark = pytest.mark.needs_xla

OPS = (
    keras_hvd.Average,
    keras_hvd.Sum,
    keras_hvd.Min,
    keras_hvd.Max,
    keras_hvd.Product,
)


def compiled(function: Callable) -> Callable:
    return tf.function(function, jit_compile=True, autograph=False)


def hlo(function: Callable, *args: tf.Tensor) -> str:
    """The program after XLA's last pass, as it runs."""
    return function.experimental_get_compiler_ir(*args)(stage="optimized_hlo")


# --- the collectives -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", REDUCED, ids=lambda dtype: dtype.name)
def test_same_bits_as_without_xla(dtype, values, rank):
    """One program for each type: each op alone, then a group and a broadcast."""
    ops = OPS[2:] if dtype == tf.bool else OPS
    x = tf.constant(values(dtype, (3, 5), rank), dtype)

    def step(x):
        reduced = [keras_hvd.allreduce(x, op=op) for op in ops]
        group = keras_hvd.grouped_allreduce([x, x[0], x[:0]], op=ops[-1])
        last = keras_hvd.size() - 1
        # TensorFlow tiles no float8.
        rows = tf.concat([x] * keras_hvd.size(), 0)
        scattered = [
            keras_hvd.reducescatter(rows[:-1], op=op)
            for op in ops
            if op in (keras_hvd.Average, keras_hvd.Sum)
        ]
        return [
            *reduced,
            *group,
            *scattered,
            keras_hvd.broadcast(x, last),
            *keras_hvd.grouped_allgather([x, x[0], x[:0]]),
            *(call_of(each, rows) for each in OF_ONE_TENSOR if not takes(each, "op")),
        ]

    expected = tf.function(step, autograph=False)(x)
    for got, wanted in zip(compiled(step)(x), expected, strict=True):
        assert got.shape == wanted.shape
        assert got.numpy().tobytes() == wanted.numpy().tobytes()


def test_scales(rank, size):
    @compiled
    def step(x):
        return keras_hvd.allreduce(
            x, op=keras_hvd.Sum, prescale_factor=0.5, postscale_factor=3.0
        )

    total = sum(range(size))
    np.testing.assert_array_equal(step(tf.fill([4], float(rank))), [1.5 * total] * 4)


def test_layout_of_operands_is_the_same_on_all_ranks(rank, size):
    """XLA may prefer columns; on rank 0 alone the tensor is computed transposed."""
    x = tf.reshape(tf.range(12.0), [3, 4])

    @compiled
    def step(x):
        y = tf.transpose(tf.matmul(tf.transpose(x), tf.eye(3))) if rank == 0 else x
        return keras_hvd.allreduce(y, op=keras_hvd.Sum)

    np.testing.assert_array_equal(step(x), x * size)


def test_types_that_travel_as_bytes():
    @compiled
    def step(x):
        return keras_hvd.broadcast(x, 0)

    seeds = np.array([1, 2**32 - 1], np.uint32)
    np.testing.assert_array_equal(step(tf.constant(seeds)), seeds)


def test_odd_names():
    name = 'grad "w"\\0 \n {é}'

    @compiled
    def step(x):
        return keras_hvd.allreduce(x, name=name)

    np.testing.assert_array_equal(step(tf.ones([2])), [1, 1])


def test_barrier(rank, several_ranks):
    """No rank passes it before rank 0, which is held up, is there."""
    arrived = threading.Event()

    @compiled
    def step():
        keras_hvd.barrier(name="compiled")
        return tf.constant(1)

    def run():
        step()
        arrived.set()

    if rank != 0:
        thread = threading.Thread(target=run)
        thread.start()
        # The second barrier would be early if the first did not hold.
        assert not arrived.wait(0.3)
        keras_hvd.barrier(name="let_rank_0_go")
        thread.join()
    else:
        keras_hvd.barrier(name="let_rank_0_go")
        run()
    assert arrived.is_set()


def test_gradients_of_collectives(rank, size):
    def losses(x):
        w = tf.cast(rank + 1, tf.float32)
        yield tf.reduce_sum(keras_hvd.allreduce(x, op=keras_hvd.Sum) * w)
        yield tf.reduce_sum(keras_hvd.allgather(x) * w)
        yield tf.reduce_sum(keras_hvd.broadcast(x, 0) * w)

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            results = list(losses(x))
        return [tape.gradient(loss, x) for loss in results]

    total = float(sum(range(1, size + 1)))
    x = tf.fill([2, 3], float(rank))
    expected = (total, total / size, total / size if rank == 0 else 0)
    for gradient, value in zip(compiled(step)(x), expected, strict=True):
        np.testing.assert_allclose(gradient, np.full([2, 3], value), rtol=1e-6)


def test_gradient_of_a_compiled_function_from_outside(rank, size):
    gather = compiled(lambda x: keras_hvd.allgather(x, name="outside"))
    x = tf.fill([2, 3], float(rank))
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(gather(x)) * (rank + 1)
    expected = np.full([2, 3], sum(range(1, size + 1)) / size)
    np.testing.assert_allclose(tape.gradient(loss, x), expected, rtol=1e-6)


# --- programs ------------------------------------------------------------------------


def test_while_loop(rank, size):
    @compiled
    def step(x):
        def body(i, total):
            return i + 1, total + keras_hvd.allreduce(x + total, op=keras_hvd.Sum)

        zeros = tf.zeros_like(x)
        return tf.while_loop(lambda i, _: i < 3, body, (0, zeros))[1]

    expected = np.zeros(2)
    total = np.full(2, float(sum(range(size))))
    for _ in range(3):
        expected = expected + total + size * expected
    np.testing.assert_array_equal(step(tf.fill([2], float(rank))), expected)


@pytest.mark.parametrize("taken", [True, False])
def test_branch(taken, size):
    @compiled
    def step(x, condition):
        return tf.cond(
            condition,
            lambda: keras_hvd.allreduce(x, op=keras_hvd.Sum, name="taken"),
            lambda: keras_hvd.broadcast(x, 0, name="not_taken") * 7.0,
        )

    result = step(tf.ones([2]), tf.constant(taken))
    np.testing.assert_array_equal(result, [size if taken else 7] * 2)


def test_function_in_a_function(size):
    inner = compiled(lambda x: keras_hvd.allreduce(x, op=keras_hvd.Sum, name="inner"))

    @tf.function
    def outer(x):
        return inner(x) + keras_hvd.allreduce(x, op=keras_hvd.Sum, name="outer")

    np.testing.assert_array_equal(outer(tf.ones([2])), [2 * size] * 2)


def test_compiled_functions_in_one_that_is_not(size):
    """Each holds a thread until it has ended, so that the ranks need one order.

    Without an order, as many calls as threads would hold all of them for others.
    """
    functions = [
        compiled(
            lambda x, i=i: keras_hvd.allreduce(x, op=keras_hvd.Sum, name=f"held/{i}")
        )
        for i in range(8)
    ]
    between = tf.function(lambda x: functions[2](x) + 1, autograph=False)

    @tf.function
    def step(x):
        results = [function(x + i) for i, function in enumerate(functions)]
        called = between(x)
        branch = tf.cond(x[0] > 0, lambda: functions[3](x), lambda: x)
        return [*results, called, branch]

    x = tf.ones([1024])
    calls = [
        op
        for op in step.get_concrete_function(x).graph.get_operations()
        if op.type in ("StatefulPartitionedCall", "If")
    ]
    assert len(calls) == 10
    for call, following in zip(calls, calls[1:], strict=False):
        assert call in following.control_inputs
    for _ in range(100):
        results = step(x)
    values = [size * (1 + i) for i in range(8)]
    for result, value in zip(results, [*values, size + 1, size], strict=True):
        np.testing.assert_array_equal(result, [value] * 1024)


def test_compiled_functions_without_collectives_run_at_once():

    @compiled
    def draw(x):
        return x + tf.random.uniform([2])

    @tf.function
    def step(x):
        return draw(x), draw(x)

    graph = step.get_concrete_function(tf.ones([2])).graph
    for call in graph.get_operations():
        if call.type == "StatefulPartitionedCall":
            assert call.control_inputs == []


def test_some_ranks_compile_and_some_do_not(rank, size):
    def step(x):
        return keras_hvd.allreduce(x, op=keras_hvd.Sum, name="mixed")

    function = compiled(step) if rank % 2 else step
    np.testing.assert_array_equal(function(tf.ones([2])), [size] * 2)


def test_one_program_in_two_threads(size):
    """A run that begins while one is under way is an error, on all ranks.

    No rank knows which of the two another rank began first.
    """

    @compiled
    def step(x):
        return keras_hvd.allreduce(x, op=keras_hvd.Sum, name="threads")

    ends = []

    def run():
        for _ in range(50):
            try:
                ends.append(step(tf.ones([2])).numpy().tolist())
            except tf.errors.FailedPreconditionError as error:
                ends.append("by another call of the same op" in str(error))

    # The scheduler decides which of them meet.
    seen_by = [False]
    while not all(seen_by):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(end in ([size] * 2, True) for end in ends)
        seen_by = keras_hvd.allgather_object([size] * 2 in ends and True in ends)


def test_two_functions_in_two_threads(size):
    functions = [
        compiled(
            lambda x, i=i: keras_hvd.allreduce(x, op=keras_hvd.Sum, name=f"two/{i}")
        )
        for i in range(2)
    ]
    results = [None, None]

    def run(i):
        for _ in range(50):
            results[i] = functions[i](tf.fill([2], float(i))).numpy()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        np.testing.assert_array_equal(results[i], [i * size] * 2)


def test_many_steps_of_independent_calls(size):
    """Calls that blocked a thread would be stuck at the second step."""

    @compiled
    def step(x):
        return [keras_hvd.allreduce(x + i, op=keras_hvd.Sum) for i in range(8)]

    x = tf.ones([1024])
    for _ in range(500):
        results = step(x)
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, [(1 + i) * size] * 1024)


def test_one_rank_compiles_again(rank, size):
    """Uneven batches: the last rank has another program for each number of rows."""

    @compiled
    def step(x):
        hidden = tf.tanh(x)
        mean = keras_hvd.allreduce(tf.reduce_mean(hidden, 0))
        spread = keras_hvd.allreduce(tf.reduce_max(hidden, 0), op=keras_hvd.Max)
        return mean + spread

    for rows in (4, 5, 6, 4):
        rows_here = rows if rank == size - 1 else 4
        result = step(tf.ones([rows_here, 3]))
        np.testing.assert_allclose(result, np.full(3, 2 * np.tanh(1)), rtol=1e-6)


@pytest.mark.parametrize("elements", [2, 100_000])
def test_programs_that_differ(elements, rank, size):
    """The order of the starts is the program's on all ranks.

    Ordered by TensorFlow alone, the other ranks would start the last three first, and
    XLA makes them wait for the ends of some before it starts the others.
    """

    @compiled
    def step(x):
        sums = []
        for i in range(6):
            differs = i >= 3 and rank > 0
            y = tf.minimum(x, 1.0, name=f"a{i}") if differs else x
            y = keras_hvd.allreduce(y, op=keras_hvd.Sum, name=f"differ/{i}")
            sums.append(tf.reduce_max(tf.sqrt(y)))
        return sums

    result = step(tf.ones([elements]))
    np.testing.assert_allclose(result, np.full(6, np.sqrt(size)), rtol=1e-6)


def test_collectives_run_though_nobody_wants_their_results(counters):
    @compiled
    def step(x):
        keras_hvd.allreduce(x)
        keras_hvd.allreduce(tf.zeros([3]), name="constant")
        keras_hvd.barrier()

        def body(i):
            keras_hvd.broadcast(x, 0)
            return (i + 1,)

        tf.while_loop(lambda i: i < 3, body, (0,))
        tf.cond(x[0] > 0, lambda: keras_hvd.allgather(x), lambda: x)
        return tf.constant(1)

    step(tf.ones([2]))
    before = counters().tensors
    step(tf.ones([2]))
    assert counters().tensors - before == 7


# --- memory and order ----------------------------------------------------------------


def test_nothing_is_copied():
    """A parameter is sent from where it is, and the result received where it goes."""

    @compiled
    def step(x):
        return keras_hvd.allreduce(x)

    program = hlo(step, tf.ones([1000]))
    assert "keras_hvd_start" in program and "keras_hvd_done" in program
    assert not re.search(r"f32\S* copy\(", program)


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "broadcast"])
def test_done_keeps_the_memory_that_start_was_given(collective):
    """Where XLA may have a tensor in columns, it could give each of the two a copy.

    It cannot with a list of the elements.
    """
    arguments = {"broadcast": [0]}.get(collective, [])

    @compiled
    def step(x):
        y = tf.matmul(x, x, transpose_b=True)
        return getattr(keras_hvd, collective)(tf.transpose(y), *arguments)

    program = hlo(step, tf.ones([48, 64]))
    calls = [line for line in program.splitlines() if " custom-call(" in line]
    calls = calls[-2:]  # behind the check of the job that an allgather has
    start, done = (line.partition("), custom_call_target")[0] for line in calls)
    assert start.split("%")[-1] == done.split("%")[-1]
    assert f", f32[{48 * 48}]{{0}}}}, " in calls[0]


def test_gradients_are_reduced_where_they_are():
    """Backprop's results are overwritten; tensors that are needed later are copied."""

    @compiled
    def step(x, w):
        grads = [[tf.matmul(x, w)], [tf.matmul(w, x)]]
        reduced = gradients.submit(grads, ["one", "two"], ["a", "b"], keras_hvd.Sum)
        return [each for bucket in reduced for each in bucket]

    x = tf.ones([32, 32])
    assert not re.search(r"f32\S* copy\(", hlo(step, x, x))

    @compiled
    def shared(x):
        grad = x * 2.0
        reduced = gradients.submit(
            [[grad, x], [grad]], ["three", "four"], ["c", "d"], keras_hvd.Sum
        )
        return [grad, x, *reduced[0], *reduced[1]]

    n = keras_hvd.size()
    for got, value in zip(shared(x), (2, 1, 2 * n, n, 2 * n), strict=True):
        np.testing.assert_array_equal(got, np.full([32, 32], value))


def test_program_for_a_gpu():
    """The program that XLA gets for a GPU, where it fixes one order of all calls.

    Without a GPU TensorFlow has no ops for one, so that only ours are in it.
    """

    @compiled
    def step():
        x = keras_hvd.rank_op()
        y = keras_hvd.allreduce(x, op=keras_hvd.Sum, name="first")
        gradients.submit([[x], [y]], ["one", "two"], ["a", "b"], keras_hvd.Sum)
        keras_hvd.barrier(name="last")

    program = step.experimental_get_compiler_ir()(stage="hlo", platform_name="GPU")
    calls = re.findall(
        r'custom_call_target="keras_hvd_(start|done)".* schedule=SCHEDULE_(\w+),'
        r".*submitter = (\d+) : i64",
        program,
    )
    # The first is the check that comes with the rank. It has no done.
    assert program.count("custom-call(") == len(calls) == 9
    assert {(kind, when) for kind, when, _ in calls} == {
        ("start", "EARLIEST"),
        ("done", "LATEST"),
    }
    starts, dones = (
        sorted(number for kind, _, number in calls if kind == each)
        for each in ("start", "done")
    )
    assert starts[1:] == dones == sorted(set(dones))


def profiled_collectives(folder: pathlib.Path) -> list[str]:
    """The collectives that TensorFlow's profiler saw, in the order of time."""
    space = xplane_pb2.XSpace()
    (file,) = folder.rglob("*.xplane.pb")
    space.ParseFromString(file.read_bytes())
    events = [
        (line.timestamp_ns * 1000 + event.offset_ps, name)
        for plane in space.planes
        for line in plane.lines
        for event in line.events
        if (name := plane.event_metadata[event.metadata_id].name).startswith(
            "keras_hvd "
        )
    ]
    return [name for _, name in sorted(events)]


@tf.custom_gradient
def gate(x):
    """On its way back the gradient waits here for the other ranks."""
    return tf.identity(x), lambda upstream: keras_hvd.allreduce(upstream, name="gate")


def test_gradients_travel_while_backprop_runs(rank, several_ranks, tmp_path):
    """In `fit`, all buckets but the last arrive before its gradient can be computed.

    The last bucket is the first layer's. On the way to its gradient rank 0's backprop
    passes a gate, which opens when the other ranks have all other buckets.
    """
    keras.utils.clear_session()
    width, rows = 1024, 8
    layers = [
        keras.layers.Dense(width, activation="tanh", use_bias=False) for _ in range(5)
    ]
    layers.insert(1, keras.layers.Lambda(gate))
    model = keras.Sequential([keras.Input((width,)), *layers])
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse", jit_compile=True)
    buckets = list(reversed(model.trainable_variables))  # of one variable each
    names = [f"{optimizer.name}/gradients/{i}" for i in range(len(buckets))]

    if rank != 0:
        for _ in range(2):
            for name, kernel in zip(names, buckets, strict=True):
                if name == names[-1]:
                    keras_hvd.allreduce(tf.zeros([rows, width]), name="gate")
                gradients.submit(
                    [[tf.zeros(kernel.shape)]],
                    [name],
                    ["dense/kernel"],
                    keras_hvd.Average,
                )
        return
    x = np.zeros((rows, width))
    model.fit(x, x, verbose=0)
    with tf.profiler.experimental.Profile(str(tmp_path)):
        model.fit(x, x, verbose=0)
    events = profiled_collectives(tmp_path)
    assert len(events) == 2 * (len(names) + 1)
    last = events.index(f"keras_hvd starts {names[-1]}")
    for name in names[:-1]:
        started = events.index(f"keras_hvd starts {name}")
        assert started < events.index(f"keras_hvd ended {name}") < last


# --- errors --------------------------------------------------------------------------


@contextlib.contextmanager
def raises(error: type[Exception], *parts: str):
    """All ranks get the error, with all that it has to say."""
    with pytest.raises(error) as raised:
        yield
    missing = [part for part in parts if part not in str(raised.value)]
    assert keras_hvd.allgather_object(missing) == [[]] * keras_hvd.size(), raised.value


def test_shapes_that_differ(rank, several_ranks):
    step = compiled(lambda x: keras_hvd.allreduce(x, name="shapes"))
    with raises(tf.errors.FailedPreconditionError, "shapes", "[3]", "[2]"):
        step(tf.ones([2 if rank == 0 else 3]))
    np.testing.assert_array_equal(step(tf.ones([2])), [1, 1])


def test_an_error_among_other_collectives(rank, size, several_ranks):
    """The others have ended, with their memory, before the error is raised."""

    @compiled
    def step(x, y):
        large = [keras_hvd.allreduce(y + i, op=keras_hvd.Sum) for i in range(6)]
        return keras_hvd.allreduce(x, name="among"), large

    y = tf.ones([1 << 16])
    for _ in range(5):
        with raises(tf.errors.FailedPreconditionError, "among"):
            step(tf.ones([2 if rank == 0 else 3]), y)
    _, large = step(tf.ones([2]), y)
    for i, each in enumerate(large):
        np.testing.assert_array_equal(each, np.full(1 << 16, size * (1 + i)))


def test_an_error_in_a_loop(rank, several_ranks):
    @compiled
    def step(x):
        def body(i, total):
            return i + 1, total + tf.reduce_sum(keras_hvd.allreduce(x, name="loop"))

        return tf.while_loop(lambda i, _: i < 3, body, (0, 0.0))[1]

    with raises(tf.errors.FailedPreconditionError, "loop"):
        step(tf.ones([2 if rank == 0 else 3]))


def test_rows_of_an_allgather_that_differ(rank, several_ranks):
    step = compiled(lambda x: keras_hvd.allgather(x, name="rows"))
    with raises(tf.errors.InvalidArgumentError, "'rows'", "fixed shapes", "rows"):
        step(tf.ones([2 if rank == 0 else 3, 2]))
    assert step(tf.ones([2, 2])).shape == (2 * keras_hvd.size(), 2)


def test_no_such_root(several_ranks):
    step = compiled(lambda x: keras_hvd.broadcast(x, 99, name="root"))
    with raises(tf.errors.InvalidArgumentError, "99"):
        step(tf.ones([2]))


def test_shapes_that_are_known_at_run_time_only():
    @compiled
    def step(x):
        return keras_hvd.allreduce(tf.where(x > 0))

    with pytest.raises(tf.errors.InvalidArgumentError, match="shape is known when"):
        step(tf.constant([1.0, -1.0]))
