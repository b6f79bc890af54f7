"""allreduce and grouped_allreduce, against NumPy."""

import ctypes
import os
import random
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from element_types import FLOAT8, FLOATS, INTEGERS, NUMBERS

import keras_hvd
from keras_hvd import Average, Max, Min, Product, Sum
from keras_hvd.job import native

OPS = [Average, Sum, Min, Max, Product]
SHAPES = [(), (0,), (1,), (3,), (7, 5), (2, 0, 3), (1023,), (65_537,)]

each_number = pytest.mark.parametrize("dtype", NUMBERS, ids=lambda d: d.name)
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def reduced(inputs, op, prescale=1.0, postscale=1.0):
    """The result of the ranks' `inputs`: each host's first, then the hosts', in pairs.

    An 8- or 16-bit float is rounded when it leaves a host, and hosts are taken in their
    order. An average has been divided by then, so that it fits.
    """
    hosts = inputs_of_hosts(inputs)
    dtype = inputs[0].dtype
    averages_integers = op == Average and np.issubdtype(dtype, np.integer)
    scales_integers = np.issubdtype(dtype, np.integer) and prescale * postscale != 1
    pairs = np.issubdtype(dtype, np.floating) and dtype.itemsize >= 4
    at_once = len(hosts) == 1 or (len(hosts) == len(inputs) and not pairs)
    if at_once or averages_integers or scales_integers:
        return reduced_at_once(inputs, op, prescale, postscale)
    early = late = 1.0
    if op == Average:
        op = Sum
        early, late = (1.0, 1.0 / len(inputs))
        if dtype.itemsize < 4:
            early, late = late, early
    of_hosts = [reduced_at_once(here, op, prescale, early) for here in hosts]
    if pairs:
        return reduced_in_pairs(of_hosts, op, late * postscale)
    return reduced_at_once(of_hosts, op, postscale=late * postscale)


def reduced_in_pairs(inputs, op, postscale=1.0):
    """The first inputs, a power of two of them, and the others; each likewise."""
    if len(inputs) > 1:
        first = 1 << ((len(inputs) - 1).bit_length() - 1)
        halves = inputs[:first], inputs[first:]
        inputs = [reduced_in_pairs(half, op) for half in halves]
    return reduced_at_once(inputs, op, postscale=postscale)


def inputs_of_hosts(inputs):
    """Divides all ranks' inputs by their hosts, which tests/on_hosts.py tells."""
    counts = os.environ.get("KERAS_HVD_TEST_HOSTS", str(len(inputs))).split()
    ends = np.cumsum([int(count) for count in counts])
    return [inputs[end - int(count) : end] for count, end in zip(counts, ends)]


def reduced_at_once(inputs, op, prescale=1.0, postscale=1.0):
    """The result of `inputs`, taken in their order.

    8- and 16-bit floats are combined in float32 and scaled integers in float64;
    integers are rounded towards zero, and scaled ones end at their type's limits.
    """
    dtype = inputs[0].dtype
    integers = np.issubdtype(dtype, np.integer)
    scaled = (prescale, postscale) != (1.0, 1.0)
    if op == Average and integers and not scaled:
        # Python's own integers, which hold any sum.
        total = sum(np.asarray(array, object) for array in inputs)
        mean = np.sign(total) * (np.abs(total) // len(inputs))
        return np.asarray(mean, object).astype(dtype)
    if integers:
        work = np.float64 if scaled else dtype
    else:
        work = np.float32 if dtype.itemsize < 4 else dtype
    combine = {Min: smaller, Max: larger, Product: np.multiply}.get(op, np.add)
    if op == Average:
        postscale /= len(inputs)
    with np.errstate(over="ignore"):
        inputs = [array.astype(work) * np.array(prescale, work) for array in inputs]
        if integers and scaled:
            inputs = [np.trunc(array) for array in inputs]
        result = inputs[0]
        for array in inputs[1:]:
            result = combine(result, array)
        result = np.asarray(result * np.array(postscale, work))
    if integers and scaled:
        result = result.clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
    return result.astype(dtype)


# A NaN of any rank is one of the result. Of equal numbers, as zeros of both signs are,
# the first one stays. With NumPy's own functions that depends on the processor.
def smaller(first, second):
    return np.where((second < first) | (second != second), second, first)


def larger(first, second):
    return np.where((first < second) | (second != second), second, first)


def assert_same(result, expected):
    """Not a bit may differ."""
    assert result.dtype.as_numpy_dtype == expected.dtype
    assert result.shape == expected.shape
    np.testing.assert_array_equal(
        np.frombuffer(result.numpy().tobytes(), np.uint8),
        np.frombuffer(expected.tobytes(), np.uint8),
    )


@each_op
@each_number
def test_equals_numpy(dtype, op, values, rank, size):
    for shape in SHAPES:
        inputs = [values(dtype, shape, peer) for peer in range(size)]
        assert_same(keras_hvd.allreduce(inputs[rank], op=op), reduced(inputs, op))


@each_number
def test_larger_than_the_exchange_memory(dtype, values, rank, size):
    inputs = [values(dtype, (1_500_007,), peer) for peer in range(size)]
    assert_same(keras_hvd.allreduce(inputs[rank], op=Sum), reduced(inputs, Sum))


@each_op
@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda d: d.name)
def test_all_pairs_of_float8(dtype, op, rank, size):
    """Every number beside every other one, NaNs and infinities too."""
    codes = np.indices((256, 256), np.uint8).reshape(2, -1)
    inputs = [codes[peer % 2].view(dtype.as_numpy_dtype) for peer in range(size)]
    result = keras_hvd.allreduce(inputs[rank], op=op)
    with np.errstate(invalid="ignore"):
        expected = reduced(inputs, op)
    # As numbers, among which the sign of zero and the bits of a NaN do not count.
    np.testing.assert_array_equal(
        result.numpy().astype(np.float32), expected.astype(np.float32)
    )


def test_bool_takes_and_and_or(values, rank, size):
    for shape in SHAPES:
        inputs = [values(tf.bool, shape, peer) for peer in range(size)]
        every, any_ = np.logical_and.reduce(inputs), np.logical_or.reduce(inputs)
        assert_same(keras_hvd.allreduce(inputs[rank], op=Min), every)
        assert_same(keras_hvd.allreduce(inputs[rank], op=Product), every)
        assert_same(keras_hvd.allreduce(inputs[rank], op=Max), any_)


@pytest.mark.parametrize("op", [Sum, Average], ids=lambda op: op.name)
def test_bool_has_no_sum(op, size):
    with pytest.raises(tf.errors.InvalidArgumentError, match="bool"):
        keras_hvd.allreduce([True], op=op, name="sum of bool")
    assert keras_hvd.allreduce(1, op=Sum) == size


@each_op
@each_float
def test_scales(dtype, op, values, rank, size):
    inputs = [values(dtype, (1001,), peer) for peer in range(size)]
    result = keras_hvd.allreduce(
        inputs[rank], op=op, prescale_factor=0.5, postscale_factor=1 / 3
    )
    assert_same(result, reduced(inputs, op, 0.5, 1 / 3))


@each_op
@pytest.mark.parametrize("dtype", [tf.int8, tf.int32, tf.int64], ids=lambda d: d.name)
def test_scaled_integers_are_rounded_towards_zero(dtype, op, rank, size):
    inputs = [np.arange(-4, 4).astype(dtype.as_numpy_dtype) + p for p in range(size)]
    result = keras_hvd.allreduce(
        inputs[rank], op=op, prescale_factor=0.5, postscale_factor=0.75
    )
    assert_same(result, reduced(inputs, op, 0.5, 0.75))


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
def test_integers_take_no_infinite_scale(run, dtype, rank, size):
    """Wrong on one rank alone, which the others do not even notice."""
    x = tf.constant([0, 1], dtype)
    slices = tf.IndexedSlices(x[:, None], tf.constant([0, 1]))
    calls = [
        lambda **scale: keras_hvd.allreduce(x, **scale),
        lambda **scale: keras_hvd.allreduce(slices, op=Sum, **scale).values,
        lambda **scale: keras_hvd.grouped_allreduce([1.0, x], **scale),
        lambda **scale: keras_hvd.reducescatter(x, **scale),
        lambda **scale: keras_hvd.grouped_reducescatter([[1.0], x], **scale),
    ]
    for argument in ("prescale_factor", "postscale_factor") if rank == 0 else ():
        for call in calls:
            text = f"{argument} must be finite for {dtype.name} tensors; got -inf"
            with pytest.raises(ValueError, match=text):
                run(lambda call=call, argument=argument: call(**{argument: -np.inf}))()
    assert keras_hvd.allreduce(1, op=Sum) == size
    infinite = keras_hvd.allreduce([1.0, -1.0], op=Sum, prescale_factor=np.inf)
    np.testing.assert_array_equal(infinite, [np.inf, -np.inf])


def test_a_scale_keeps_the_precision_of_float64(size):
    result = keras_hvd.allreduce(
        np.float64(1), op=Sum, prescale_factor=1 / size, postscale_factor=0.1
    )
    assert abs(result.numpy() - 0.1) < 1e-16


def test_a_scale_of_zero_gives_zeros(rank):
    result = keras_hvd.allreduce(
        [1.0, rank], op=Sum, prescale_factor=0.0, postscale_factor=0.0
    )
    np.testing.assert_array_equal(result, [0.0, 0.0])


def test_average_is_the_default(rank, size):
    assert keras_hvd.allreduce(float(rank)) == (size - 1) / 2
    assert keras_hvd.grouped_allreduce([float(rank)])[0] == (size - 1) / 2


def test_every_kind_of_input(rank, size):
    total = sum(range(size))
    for given in (
        [float(rank)],
        np.array([rank], np.float32),
        tf.constant([float(rank)]),
        tf.Variable([float(rank)]),
        keras.Variable([float(rank)], dtype="float32"),
    ):
        np.testing.assert_array_equal(keras_hvd.allreduce(given, op=Sum), [total])


def test_average_is_the_old_name_of_op(rank, size):
    total = sum(range(size))
    assert keras_hvd.allreduce(float(rank), average=True) == total / size
    assert keras_hvd.allreduce(float(rank), False) == total
    assert keras_hvd.grouped_allreduce([float(rank)], average=False) == [total]
    assert keras_hvd.grouped_allreduce([float(rank)], np.True_) == [total / size]


@pytest.mark.parametrize("average", [*keras_hvd.ReduceOp, 0, 1, "Sum"], ids=str)
def test_an_operation_is_not_taken_for_average(average):
    for function, given in (
        (keras_hvd.allreduce, 1.0),
        (keras_hvd.grouped_allreduce, [1.0]),
    ):
        with pytest.raises(TypeError, match="average must be True or False, got .*op="):
            function(given, average)


def test_average_and_op_exclude_each_other():
    with pytest.raises(ValueError, match="average=True and op=.* give op alone"):
        keras_hvd.allreduce(1.0, average=True, op=Average)
    with pytest.raises(ValueError, match="average=False and op=.* give op alone"):
        keras_hvd.grouped_allreduce([1.0], average=False, op=Sum)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_compression(name, run, rank, size):
    compression = getattr(keras_hvd.Compression, name)

    @run
    def reduce(x):
        given = {"compression": compression, "op": Sum}
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = keras_hvd.allreduce(x, **given)
        slices = tf.IndexedSlices(x[None, :], tf.constant([0]))
        return (
            tape.gradient(total, x),
            keras_hvd.allreduce(3, **given),
            total,
            *keras_hvd.grouped_allreduce([x], **given),
            tf.reduce_sum(keras_hvd.allreduce(slices, **given).values, 0),
        )

    gradient, integer, *sums = reduce(tf.constant([rank + 0.5, 256.0]))
    expected = np.array([sum(range(size)) + size / 2, 256.0 * size], np.float32)
    for result in sums:
        assert result.dtype == tf.float32
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(gradient, [size, size])
    assert integer == 3 * size


class Sketch:
    """A user's compressor, which keeps every other element, and returns those twice."""

    @staticmethod
    def compress(tensor):
        return tensor[::2], tf.size(tensor)

    @staticmethod
    def decompress(tensor, context):
        return tf.repeat(tensor, 2)[:context]


def test_a_compressor_of_ones_own(size):
    x = tf.constant([1.0, 2.0, 3.0])
    for result in (
        keras_hvd.allreduce(x, compression=Sketch, op=Sum),
        *keras_hvd.grouped_allreduce([x], compression=Sketch(), op=Sum),
    ):
        np.testing.assert_array_equal(result, [size, size, 3 * size])


def test_the_input_keeps_its_value(size):
    given = tf.ones([1001])
    variable = tf.Variable(tf.ones([1001]))
    keras_hvd.allreduce(given, op=Sum)
    keras_hvd.allreduce(variable, op=Sum)
    np.testing.assert_array_equal(given, np.ones(1001))
    np.testing.assert_array_equal(variable, np.ones(1001))

    @tf.function
    def both(x):
        doubled = x * 2
        return keras_hvd.allreduce(doubled, op=Sum), doubled

    total, doubled = both(given)
    np.testing.assert_array_equal(total, np.full(1001, 2 * size))
    np.testing.assert_array_equal(doubled, np.full(1001, 2))


def test_in_a_function_of_unknown_shapes(values, rank, size):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def total(x):
        return keras_hvd.allreduce(x, op=Sum)

    for shape in SHAPES:
        inputs = [values(tf.float32, shape, peer) for peer in range(size)]
        assert_same(total(inputs[rank]), reduced(inputs, Sum))


def test_in_branches_and_loops_of_a_function(rank, size):
    @tf.function
    def program(x, upper):
        y = tf.cond(
            upper,
            lambda: keras_hvd.allreduce(x, op=Max),
            lambda: keras_hvd.allreduce(x, op=Min),
        )
        z = keras_hvd.allreduce(x, op=Sum)
        for _ in tf.range(5):
            x = keras_hvd.allreduce(x, op=Sum)
        return x, y, z

    start, total = float(rank), sum(range(size))
    x, y, z = program(tf.constant(start), tf.constant(True))
    assert (x.numpy(), y.numpy(), z.numpy()) == (total * size**4, size - 1, total)
    x, y, z = program(tf.constant(start), tf.constant(False))
    assert (x.numpy(), y.numpy(), z.numpy()) == (total * size**4, 0, total)


def test_a_result_that_nobody_uses_is_reduced_all_the_same(counters):
    @tf.function
    def unused():
        keras_hvd.allreduce(tf.ones([3]), op=Sum)

    unused()
    before = counters().tensors
    for _ in range(5):
        unused()
    assert counters().tensors == before + 5


def test_a_group_of_mixed_types_and_shapes(values, rank, size):
    kinds = [(dtype, shape) for dtype in NUMBERS for shape in SHAPES]
    inputs = [[values(*kind, peer) for kind in kinds] for peer in range(size)]
    expected = [reduced(each, Max) for each in zip(*inputs, strict=True)]
    for run in (keras_hvd.grouped_allreduce, tf.function(keras_hvd.grouped_allreduce)):
        results = run(inputs[rank], op=Max)
        for result, wanted in zip(results, expected, strict=True):
            assert_same(result, wanted)


def test_a_group_of_thousands(rank, size):
    group = [tf.fill([i % 7], float(i + rank)) for i in range(3000)]
    for i, result in enumerate(keras_hvd.grouped_allreduce(group, op=Sum)):
        expected = i * size + sum(range(size))
        np.testing.assert_array_equal(result, np.full(i % 7, expected))


def test_an_empty_group_is_an_empty_list():
    assert keras_hvd.grouped_allreduce([]) == []


@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize("op", [Sum, Average], ids=lambda op: op.name)
def test_gradient_is_the_same_reduction(op, run, rank, size):
    @run
    def gradient(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = keras_hvd.allreduce(x, op=op, prescale_factor=0.5, postscale_factor=4.0)
            loss = tf.reduce_sum(y * weights)
        return tape.gradient(loss, x)

    weights = [np.array([1.0, 10.0], np.float32) * (peer + 1) for peer in range(size)]
    result = gradient(tf.zeros([2]), tf.constant(weights[rank]))
    np.testing.assert_allclose(result, reduced(weights, op, 0.5, 4.0), rtol=1e-6)


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_gradient_of_a_group(run, rank, size):
    @run
    def gradients(x, y, number):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            first, _, second = keras_hvd.grouped_allreduce([x, number, y], op=Sum)
            # A tensor that a rank leaves out of its loss has a gradient of zero there.
            loss = tf.reduce_sum(first) * (rank + 1)
            if rank == 0:
                loss += tf.reduce_sum(tf.cast(second * second, tf.float32))
        return tape.gradient(loss, [x, y])

    given = (tf.ones([3]), tf.ones([2], tf.float64), tf.constant(7))
    first, second = gradients(*given)
    np.testing.assert_array_equal(first, np.full(3, sum(range(size + 1))))
    np.testing.assert_array_equal(second, np.full(2, 2.0 * size))


def test_a_gradient_can_be_taken_twice_and_of_itself(size):
    @tf.function
    def gradients(x):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = keras_hvd.allreduce(x, op=Sum)
                loss = tf.reduce_sum(y**3)
            first = inner.gradient(loss, x)
        return first, outer.gradient(loss, x), outer.gradient(first, x)

    first, again, second = gradients(tf.ones([2]))
    np.testing.assert_array_equal(first, np.full(2, 3 * size**3))
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(second, np.full(2, 6 * size**3))


@pytest.mark.parametrize("op", [Min, Max, Product], ids=lambda op: op.name)
def test_no_gradient_but_of_sums(op):
    x = tf.ones([2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = keras_hvd.allreduce(x, op=op, name="layer/w")
    with pytest.raises(LookupError, match=f"'layer/w' with op={op.name} has no grad"):
        tape.gradient(y, x)


@each_float
def test_equal_bits_on_all_ranks(dtype, values, rank, equal_on_all_ranks):
    group = [values(dtype, (n,), rank) for n in (1, 17, 4099, 300_001)]
    alone = [keras_hvd.allreduce(array).numpy() for array in group]
    together = [array.numpy() for array in keras_hvd.grouped_allreduce(group)]
    assert equal_on_all_ranks(alone)
    for one, other in zip(alone, together, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_graph_in_another_order_on_each_rank(values, rank, size):
    shapes = [(1 + i % 97,) for i in range(300)]
    inputs = [[values(tf.float32, s, peer) for s in shapes] for peer in range(size)]
    expected = [reduced(each, Average) for each in zip(*inputs, strict=True)]
    order = random.Random(rank).sample(range(300), 300)

    @tf.function
    def step(tensors):
        results = {}
        for i in order:
            results[i] = keras_hvd.allreduce(tensors[i], name=f"shuffled/{i}")
        return [results[i] for i in range(300)]

    tensors = [tf.constant(array) for array in inputs[rank]]
    for _ in range(20):
        for result, wanted in zip(step(tensors), expected, strict=True):
            assert_same(result, wanted)


def test_a_thousand_tensors_in_ever_other_orders(values, rank, size):
    """Each rank has orders of its own, twenty of them; the bits are always the same."""
    shapes = [(1 + i % 97,) for i in range(1000)]
    inputs = [[values(tf.float32, s, peer) for s in shapes] for peer in range(size)]
    expected = [reduced(each, Sum) for each in zip(*inputs, strict=True)]
    outputs = [np.empty(shape, np.float32) for shape in shapes]
    ended = threading.Semaphore(0)
    codes = []

    @native.Done
    def done(context, code, message):
        codes.append(code)
        ended.release()

    requests = [
        request(f"reordered/{i}", inputs[rank][i], outputs[i], done)
        for i in range(1000)
    ]
    for turn in range(20):
        for output in outputs:
            output.fill(np.nan)
        for i in random.Random(f"{rank} {turn}").sample(range(1000), 1000):
            assert native.engine().khvd_submit(ctypes.byref(requests[i])) == 0
        for _ in range(1000):
            ended.acquire()
        assert codes == [0] * 1000
        codes.clear()
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.tobytes() == wanted.tobytes()


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize(
    "given, texts",
    [
        (lambda odd: (tf.ones([3 if odd else 2, 5]), Sum), ("[2,5]", "[3,5]")),
        (lambda odd: (tf.ones([2] if odd else [2, 1]), Sum), ("[2]", "[2,1]")),
        (
            lambda odd: (tf.ones([2], tf.float64 if odd else tf.float32), Sum),
            ("float32", "float64"),
        ),
        (lambda odd: (tf.ones([2]), Max if odd else Min), ("Max", "Min")),
    ],
    ids=["shape", "dimensions", "dtype", "op"],
)
def test_a_mismatch_is_an_error_on_every_rank(given, texts, rank, size):
    tensor, op = given(odd=rank == size - 1)
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        keras_hvd.allreduce(tensor, op=op, name="mismatched")
    for text in ("mismatched", *texts):
        assert text in str(error.value)
    assert keras_hvd.allreduce(1, op=Sum, name="mismatched") == size


@pytest.mark.usefixtures("several_ranks")
def test_groups_that_differ_are_an_error_on_every_rank(rank, size):
    with pytest.raises(tf.errors.FailedPreconditionError, match="uneven groups"):
        keras_hvd.grouped_allreduce([1.0] * (1 + rank), name="uneven groups")
    assert keras_hvd.allreduce(1, op=Sum) == size


@pytest.mark.usefixtures("several_ranks")
def test_another_kind_of_the_same_name_is_an_error_on_every_rank(rank, size):
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        if rank == 0:
            keras_hvd.broadcast([1.0], 0, name="of two kinds")
        else:
            keras_hvd.allreduce([1.0], name="of two kinds")
    for text in ("of two kinds", "broadcast", "allreduce"):
        assert text in str(error.value)
    assert keras_hvd.allreduce(1, op=Sum) == size


@pytest.mark.usefixtures("several_ranks")
def test_a_mismatch_inside_a_function_leaves_the_rest_working(rank, size):
    @tf.function
    def step(x):
        bad = keras_hvd.allreduce(x, op=Sum, name="bad")
        return [keras_hvd.allreduce(tf.ones([2]), op=Sum) for _ in range(10)], bad

    with pytest.raises(tf.errors.FailedPreconditionError, match="bad"):
        step(tf.ones([2 + rank]))
    good, bad = step(tf.ones([2]))
    for result in (*good, bad):
        np.testing.assert_array_equal(result, [size, size])


@pytest.mark.usefixtures("several_ranks")
def test_a_name_that_another_op_has_under_way_is_an_error_on_every_rank(rank, size):
    """One rank comes late, so that the first request is still pending on the others."""
    ended = threading.Semaphore(0)
    results = {}

    def callback(which):
        def done(context, code, message):
            results[which] = (code, message.decode())
            ended.release()

        return native.Done(done)

    arrays = [np.ones(3, np.float32), np.empty(3, np.float32)]
    requests = [
        request("twice", *arrays, callback("first"), 1_000_001),
        request("twice", *arrays, callback("second"), 1_000_002),
    ]
    late = size - 1
    if rank == late:
        keras_hvd.barrier()
    for each in requests:
        assert native.engine().khvd_submit(ctypes.byref(each)) == 0
    if rank != late:
        keras_hvd.barrier()
    for _ in requests:
        assert ended.acquire(timeout=60)
    assert results["first"] == (0, "")
    code, message = results["second"]
    assert code == 7
    assert "'twice'" in message and "second op" in message
    assert keras_hvd.allreduce(1, op=Sum, name="twice") == size


def test_the_same_op_may_queue(rank, size):
    ended = threading.Semaphore(0)
    done = native.Done(lambda context, code, message: ended.release())
    outputs = [np.empty(5, np.float32) for _ in range(50)]
    requests = [
        request("queued", np.full(5, turn + rank, np.float32), output, done, 1_000_003)
        for turn, output in enumerate(outputs)
    ]
    for each in requests:
        assert native.engine().khvd_submit(ctypes.byref(each)) == 0
    for _ in requests:
        assert ended.acquire(timeout=60)
    for turn, output in enumerate(outputs):
        np.testing.assert_array_equal(
            output, np.full(5, turn * size + sum(range(size)))
        )


def test_unnamed_ones_of_two_threads_are_an_error_on_every_rank(rank, size):
    """Their order may differ between ranks; on rank 0 it is another than elsewhere."""
    started = threading.Barrier(2)
    first_has_ended = threading.Event()
    results = {}

    def run(thread):
        started.wait()
        is_first = (thread == "a") == (rank == 0)
        if not is_first:
            first_has_ended.wait()
        try:
            results[is_first] = keras_hvd.allreduce(1.0, op=Sum).numpy()
        except keras_hvd.MismatchError as error:
            results[is_first] = str(error)
        first_has_ended.set()

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[True] == size
    assert "give each of the two a name" in results[False]
    assert keras_hvd.allreduce(1.0, op=Sum).numpy() == size


one_function = tf.function(lambda x: keras_hvd.allreduce(x, op=Sum, name="calls"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: one_function(tf.constant(1)).numpy(),
        lambda: keras_hvd.allreduce(1, op=Sum, name="eager calls").numpy(),
        lambda: len(keras_hvd.allgather_object(1, name="calls of objects")),
    ],
    ids=["function", "eager", "objects"],
)
def test_the_same_call_in_two_threads_is_an_error(call, size, several_ranks):
    """The ranks may come to them in different orders, and would mix their tensors."""
    wrong = (tf.errors.FailedPreconditionError, keras_hvd.MismatchError)
    ends = []

    def run():
        try:
            ends.append(call())
        except wrong as error:
            ends.append("by another call of the same op" in str(error))

    # The scheduler decides whether they meet.
    while True not in ends:
        ends.clear()
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(end is True or end == size for end in ends)
        ends.extend(keras_hvd.allgather_object(True in ends))
    assert call() == size


def test_a_type_without_meaning_is_refused():
    with pytest.raises(TypeError, match="got string"):
        keras_hvd.allreduce(["text"])
    with pytest.raises(TypeError, match="got complex64"):
        keras_hvd.grouped_allreduce([1.0, tf.complex(1.0, 0.0)])
    with pytest.raises(ValueError, match="got 7"):
        keras_hvd.allreduce(1.0, op=7)


def request(name, array, output, done, submitter=1_000_000):
    """An allreduce of float32 by Sum, for the C API; keeps its arrays alive."""
    tensor = native.Tensor(
        dtype=6,
        rank=1,
        shape=(ctypes.c_int64 * 1)(array.size),
        input=array.ctypes.data,
        output=output.ctypes.data,
    )
    made = native.Request(
        struct_size=ctypes.sizeof(native.Request),
        kind=0,
        name=name.encode(),
        submitter=submitter,
        reduce_op=int(Sum),
        count=1,
        tensors=ctypes.pointer(tensor),
        done=done,
    )
    made.arrays = (array, output)
    return made


def test_what_rank_0_alone_logs_in_branches_and_loops_changes_no_names(rank, size):
    @tf.function
    def step(x, i):
        if rank == 0:
            if i % 2 == 0:
                tf.print("even", output_stream="file:///dev/null")
            for _ in tf.range(2):
                tf.print("again", output_stream="file:///dev/null")
        if i >= 0:
            x = keras_hvd.allreduce(x, op=Sum)
        for _ in tf.range(2):
            x = keras_hvd.allreduce(x, op=Average)
        return x

    expected = sum(range(1, size + 1))
    np.testing.assert_array_equal(step(tf.fill([3], rank + 1.0), 0), [expected] * 3)
