"""The collectives of torch's tensors: results of NumPy, gradients of one process."""

import threading

import keras
import numpy as np
import pytest
import torch
from keras.src.backend.common.variables import AutocastScope

import keras_hvd
from keras_hvd.backends.torch.collectives import reductions

OPS = {
    "Sum": np.sum,
    "Average": np.mean,
    "Min": np.min,
    "Max": np.max,
    "Product": np.prod,
}
TYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"]


def numbers(rank, shape=(5, 3), dtype=torch.float64):
    random = np.random.default_rng(rank)
    return torch.from_numpy(random.integers(1, 9, shape)).to(dtype)


def of_all(size, *shape_and_type):
    return [numbers(rank, *shape_and_type) for rank in range(size)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", OPS)
def test_allreduce(op, dtype, rank, size):
    dtype = getattr(torch, dtype)
    given = numbers(rank, (5, 3), dtype)
    kept = given.clone()
    reduced = keras_hvd.allreduce(given, op=getattr(keras_hvd, op))
    every = np.stack([each.double().numpy() for each in of_all(size)])
    expected = torch.from_numpy(OPS[op](every, axis=0)).to(dtype)
    torch.testing.assert_close(reduced, expected)
    assert torch.equal(given, kept)


def test_what_becomes_a_tensor(rank, size):
    mean = (size - 1) / 2
    for given in (float(rank), np.float32(rank), [float(rank)], np.full(2, rank, "f4")):
        assert (keras_hvd.allreduce(given) == mean).all()
    assert keras_hvd.allreduce(keras.Variable(float(rank))).item() == mean
    pair = [torch.tensor(float(rank)), keras.Variable(float(rank))]
    assert keras_hvd.allreduce(pair).tolist() == [mean, mean]
    with torch.device("meta"):
        assert keras_hvd.allgather(numbers(rank)).shape == (5 * size, 3)
    # In another order than that of its rows.
    columns = numbers(rank, (2, 3)).T
    expected = sum(each.T for each in of_all(size, (2, 3)))
    assert torch.equal(keras_hvd.allreduce(columns, op=keras_hvd.Sum), expected)


def test_factors_and_compression(rank, size):
    factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
    reduced = keras_hvd.allreduce(numbers(rank), average=False, **factors)
    assert torch.equal(reduced, 2 * sum(of_all(size)))
    fp16 = keras_hvd.Compression.fp16
    reduced = keras_hvd.allreduce(numbers(rank), compression=fp16, op=keras_hvd.Sum)
    assert reduced.dtype == torch.float64
    assert torch.equal(reduced, sum(of_all(size)))


def test_grouped_allreduce(rank, size):
    group = [numbers(rank), numbers(rank, (7,), torch.int32), float(rank)]
    reduced = keras_hvd.grouped_allreduce(group, op=keras_hvd.Max)
    assert torch.equal(reduced[0], torch.stack(of_all(size)).amax(0))
    assert torch.equal(reduced[1], torch.stack(of_all(size, (7,), torch.int32)).amax(0))
    assert reduced[2].item() == size - 1
    assert keras_hvd.grouped_allreduce([]) == []


def test_allgather(rank, size):
    rows = [numbers(each, (2 * each + 1, 3)) for each in range(size)]
    assert torch.equal(keras_hvd.allgather(rows[rank]), torch.cat(rows))
    # None of the first rank.
    fewer = [each[:number] for number, each in enumerate(rows)]
    assert torch.equal(keras_hvd.allgather(fewer[rank]), torch.cat(fewer))
    assert keras_hvd.allgather(torch.zeros(3, 0)).shape == (3 * size, 0)
    ids = [torch.full((each + 1,), each, dtype=torch.int16) for each in range(size)]
    one, two = keras_hvd.grouped_allgather([rows[rank], ids[rank]], name="both")
    assert torch.equal(one, torch.cat(rows)) and torch.equal(two, torch.cat(ids))


def test_broadcast(rank, size):
    for root in range(size):
        assert torch.equal(keras_hvd.broadcast(numbers(rank), root), numbers(root))
    variable, tensor = keras.Variable(numbers(rank)), numbers(rank)
    values = keras_hvd.broadcast_([variable, tensor], root_rank=1)
    wanted = numbers(1)
    for each in (variable.value, tensor, *values):
        assert torch.equal(each.double(), wanted)
    assert values[1] is tensor


def test_a_variable_that_a_layer_casts_is_itself_set(rank, size):
    variable = keras.Variable(float(rank))
    with AutocastScope("float16"):
        keras_hvd.broadcast_(variable, root_rank=1)
    assert float(variable.value) == 1


def test_another_thread_without_a_name_is_an_error(rank, size):
    """It was there when the first one called: elsewhere it may have been quicker."""
    caught, has_called = [], threading.Event()

    def send():
        has_called.wait()
        with pytest.raises(keras_hvd.exceptions.MismatchError) as raised:
            keras_hvd.broadcast_(torch.zeros(1), 0)
        caught.append(str(raised.value))

    thread = threading.Thread(target=send)
    thread.start()
    keras_hvd.broadcast_(torch.zeros(1), 0)
    has_called.set()
    thread.join()
    assert "give each of the two a name" in caught[0]


def test_a_barrier_waits(rank, size, tmp_path_factory):
    folder = keras_hvd.broadcast_object(tmp_path_factory.mktemp("ranks"))
    (folder / str(rank)).touch()
    keras_hvd.barrier()
    assert len([*folder.iterdir()]) == size
    keras_hvd.barrier(name="all have looked")


def test_process_sets(rank, size):
    last = keras_hvd.add_process_set([size - 1])
    if rank == size - 1:
        assert keras_hvd.allreduce(3.0, process_set=last).item() == 3
        keras_hvd.barrier(last)
    keras_hvd.remove_process_set(last)


def grad_of(function, given):
    given = given.clone().requires_grad_()
    function(given).backward()
    return given.grad


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_gradients_of_allreduce(op, rank, size):
    """Each rank's loss weighs the results in its own way, and scales them."""

    def loss(given):
        reduced = keras_hvd.allreduce(
            given, op=getattr(keras_hvd, op), prescale_factor=2.0, name="in the loss"
        )
        return (reduced * weights[rank]).sum()

    weights = of_all(size)
    share = 1 if op == "Sum" else size
    expected = 2 * sum(weights) / share
    torch.testing.assert_close(grad_of(loss, numbers(rank)), expected)


def test_gradients_of_allgather_and_broadcast(rank, size):
    """As in Horovod: of the average of the ranks' gradients."""
    rows = [2 * each + 1 for each in range(size)]
    weights = of_all(size, (sum(rows), 3))

    def gathered(given):
        return (keras_hvd.allgather(given) * weights[rank]).sum()

    of_own_rows = (sum(weights) / size).split(rows)[rank]
    given = numbers(rank, (rows[rank], 3))
    torch.testing.assert_close(grad_of(gathered, given), of_own_rows)

    def sent(given):
        return (keras_hvd.broadcast(given, 1) * numbers(rank + 1)).sum()

    expected = (rank == 1) * sum(map(numbers, range(1, size + 1))) / size
    torch.testing.assert_close(grad_of(sent, numbers(rank)), expected)


def test_a_gradient_of_a_gradient(rank, size):
    given = numbers(rank).requires_grad_()
    sum_of_all = keras_hvd.allreduce(given, op=keras_hvd.Sum)
    [grad] = torch.autograd.grad((sum_of_all**3).sum(), given, create_graph=True)
    [second] = torch.autograd.grad(grad.sum(), given)
    # Each rank's loss has all ranks' numbers, and so has each gradient.
    torch.testing.assert_close(grad, 3 * size * sum_of_all**2)
    torch.testing.assert_close(second, 6 * size**2 * sum_of_all)


def test_a_gradient_of_a_broadcasts_gradient(rank, size):
    """As in a gradient penalty: every rank's second gradient has a collective."""
    given = numbers(rank).requires_grad_()
    [grad] = torch.autograd.grad(
        (keras_hvd.broadcast(given, 1) ** 2).sum(), given, create_graph=True
    )
    (grad**2).sum().backward()
    expected = 8 * numbers(1) / size if rank == 1 else torch.zeros(5, 3).double()
    torch.testing.assert_close(given.grad, expected)


def test_gradients_of_a_group_with_other_types(rank, size):
    given = numbers(rank).requires_grad_()
    kinds = (torch.bool, torch.int16, torch.int64)
    others = [torch.ones(rank, dtype=kind) for kind in kinds]
    joined, *_ = keras_hvd.grouped_allgather([given, *others])
    joined.sum().backward()
    assert (given.grad == 1).all()
    waves = (numbers(rank) * 1j).requires_grad_()
    keras_hvd.broadcast(waves, 0).imag.sum().backward()
    assert (waves.grad == (1j if rank == 0 else 0)).all()


def test_a_model_is_described_by_one_rank_alone(rank, size):
    class Centered(keras.layers.Layer):
        def call(self, inputs):
            means = keras_hvd.allreduce(keras.ops.mean(inputs, axis=0))
            rows = keras_hvd.allgather(inputs)
            return inputs - keras_hvd.broadcast(means, 0) + keras.ops.mean(rows)

    if rank == 0:
        inputs = keras.Input((3,))
        assert keras.Model(inputs, Centered()(inputs)).output_shape == (None, 3)
    assert keras_hvd.allreduce(1.0).item() == 1


def test_others_have_no_gradient(rank, size):
    reduced = keras_hvd.allreduce(numbers(rank).requires_grad_(), op=keras_hvd.Max)
    with pytest.raises(NotImplementedError, match="op=Max has no gradient"):
        reduced.sum().backward()


def test_bad_input(rank, size):
    all_ranks = keras_hvd.global_process_set
    bad = {
        "takes dense tensors": lambda: keras_hvd.allreduce(torch.eye(2).to_sparse()),
        "what torch can convert": lambda: keras_hvd.allreduce("text"),
        "complex64": lambda: keras_hvd.allreduce(torch.ones(2, dtype=torch.complex64)),
        "a scalar has none": lambda: keras_hvd.allgather(1.0),
        "do not support bool": lambda: keras_hvd.allreduce(True, op=keras_hvd.Sum),
        "op must be one of": lambda: keras_hvd.allreduce(1.0, op=17),
        "name must not be empty": lambda: keras_hvd.barrier(name=""),
        "differs between ranks": lambda: keras_hvd.allreduce(torch.ones(2 + rank)),
        "root_rank 9 is not in": lambda: keras_hvd.broadcast(1.0, 9),
        "device_dense has no effect": lambda: keras_hvd.allreduce(1.0, None, "loss"),
        "ignore_name_scope has no": lambda: keras_hvd.allgather([1], "n", all_ranks),
        "and tensors of torch; got 5": lambda: keras_hvd.broadcast_(5, 0),
    }
    for text, call in bad.items():
        with pytest.raises(Exception, match=text):
            call()
    assert keras_hvd.allreduce(1.0).item() == 1


def made(op=keras_hvd.Average):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    return model, keras_hvd.DistributedOptimizer(optimizer, op=op)


def test_gradients_that_a_step_has_summed_are_not_summed_again(rank, size):
    model, optimizer = made(keras_hvd.Sum)
    loss = model(numbers(rank).float()).square().sum()
    loss.backward()
    variables = model.trainable_variables
    grads = [v.value.grad for v in variables]
    grads = keras_hvd.grouped_allreduce(grads, op=keras_hvd.Sum)
    with pytest.raises(RuntimeError, match=f"summed twice, {size} times too large"):
        optimizer.apply(grads, variables)
    for each in grads:
        each.div_(size)
    with torch.no_grad():
        optimizer.apply(grads, variables)


def test_what_a_step_reduces_by_itself_counts(rank, size):
    """A plain optimizer, and gradients that the step's own code has averaged."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y, *_ = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x))
            loss.backward()
            variables = self.trainable_variables
            grads = keras_hvd.grouped_allreduce([v.value.grad for v in variables])
            with torch.no_grad():
                self.optimizer.apply(grads, variables)
            return {"loss": loss}

    model = Model([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    keras_hvd.broadcast_variables(model.variables, root_rank=0)
    with reductions.watching() as counts:
        model.train_on_batch(numbers(rank, (8, 3)), numbers(rank, (8, 2)))
    assert (counts.elements, counts.in_forward_pass) == (3 * 2 + 2, 0)
    one, *others = keras_hvd.allgather_object(model.get_weights())
    for other in others:
        assert all(map(np.array_equal, one, other))
    with reductions.watching() as counts:
        given = numbers(rank).requires_grad_()
        keras_hvd.allgather(keras_hvd.allreduce(given)).sum().backward()
    assert (counts.elements, counts.in_forward_pass) == (0, 15 + 15)
